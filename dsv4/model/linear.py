"""Linear layers and expert stacks, one class per weight format.

A checkpoint decides the format weight by weight, so the model asks its source for "a linear of this name and size" and
gets whichever of these fits. All tensors are buffers: inference only, static addresses. `fp32` serves the places whose
result the official code keeps in float32 (compressors, the indexer's head weights, the output head). With `norm` the input
goes through that RMSNorm first. `tensors` are the weight, its scale and its scale_2, as ops.project takes them.
"""

import torch
from torch import Tensor, nn

from dsv4 import ops
from dsv4.ops.rope import rms_norm


def normalised(x: Tensor, norm: Tensor | None, eps: float) -> Tensor:
    """RMSNorm of x [..., K] with weight `norm` float32 [K], rounded to x's dtype; x itself without one."""
    return x if norm is None else rms_norm(x, norm, eps).to(x.dtype)


class PlainLinear(nn.Module):
    """y = x W^T with W [N, K] in the activations' dtype; with groups, x is [T, G, K] and y [T, N] (see ops.fp8)."""

    def __init__(self, weight: Tensor, groups: int = 1):
        super().__init__()
        self.groups = groups
        self.register_buffer("weight", weight)

    @property
    def tensors(self) -> tuple[Tensor, None, None]:
        return self.weight, None, None

    def forward(self, x: Tensor, norm: Tensor | None = None, eps: float = 0.0) -> Tensor:
        x = normalised(x, norm, eps)
        if self.groups == 1:
            return nn.functional.linear(x, self.weight)
        return torch.einsum("tgk,gnk->tgn", x, self.weight.unflatten(0, (self.groups, -1))).flatten(1)

    def fp32(self, x: Tensor) -> Tensor:
        """The same with a float32 result, unrounded."""
        return ops.linear_fp32(x, self.weight)


class Fp8BlockLinear(nn.Module):
    """weight float8_e4m3fn [N, K], scale float32 [ceil(N/128), ceil(K/128)]."""

    def __init__(self, weight: Tensor, scale: Tensor, groups: int = 1):
        super().__init__()
        self.groups = groups
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, None]:
        return self.weight, self.scale, None

    def forward(self, x: Tensor, norm: Tensor | None = None, eps: float = 0.0) -> Tensor:
        return ops.linear_fp8_block(x, self.weight, self.scale, self.groups, norm, eps)

    def fp32(self, x: Tensor) -> Tensor:
        """The same with a float32 result, unrounded."""
        return self(x.float())


class Nvfp4Linear(nn.Module):
    """weight uint8 [N, K/2], scale float8_e4m3fn [N, K/16], scale_2 float32 [] or one a row [N]. `activation` as in
    ops.linear_nvfp4."""

    activation: str | None = None

    def __init__(self, weight: Tensor, scale: Tensor, scale_2: Tensor, groups: int = 1):
        super().__init__()
        self.groups = groups
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.register_buffer("scale_2", scale_2)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """None where the input is to be quantised too."""
        return (self.weight, self.scale, self.scale_2) if self.activation is None else None

    def forward(self, x: Tensor, norm: Tensor | None = None, eps: float = 0.0) -> Tensor:
        return ops.linear_nvfp4(x, self.weight, self.scale, self.scale_2, self.activation, self.groups, norm, eps)

    def fp32(self, x: Tensor) -> Tensor:
        """The same with a float32 result, unrounded."""
        return ops.linear_nvfp4(x, self.weight, self.scale, self.scale_2, self.activation, out_fp32=True)


class PlainExperts(nn.Module):
    """gate_up [E, 2I, H] (w1 then w3) and down [E, H, I] in the activations' dtype; `shared_last` as in ops.moe."""

    takes_shared = False  # whether forward can add an FP8-block shared expert that is not in the stack
    takes_router = False  # whether `routed` can pick the experts

    def __init__(self, gate_up: Tensor, down: Tensor, shared_last: bool = False):
        super().__init__()
        self.shared_last = shared_last
        self.register_buffer("gate_up", gate_up)
        self.register_buffer("down", down)

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor, limit: float) -> Tensor:
        return ops.moe(x, experts, weights, self.gate_up, self.down, limit, self.shared_last)


class Fp8Experts(nn.Module):
    """gate_up float8_e4m3fn [E, 2I, H] (w1 then w3) with scale float32 [E, 2 ceil(I/128), ceil(H/128)]; down
    float8_e4m3fn [E, H, I] with scale float32 [E, ceil(H/128), ceil(I/128)]; `shared_last` as in ops.moe_fp8."""

    takes_shared = takes_router = False

    def __init__(self, gate_up: Tensor, gate_up_scale: Tensor, down: Tensor, down_scale: Tensor, shared_last: bool = False):
        super().__init__()
        self.shared_last = shared_last
        self.register_buffer("gate_up", gate_up)
        self.register_buffer("gate_up_scale", gate_up_scale)
        self.register_buffer("down", down)
        self.register_buffer("down_scale", down_scale)

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor, limit: float) -> Tensor:
        stack = self.gate_up, self.gate_up_scale, self.down, self.down_scale
        return ops.moe_fp8(x, experts, weights, *stack, limit, self.shared_last)


class Nvfp4Experts(nn.Module):
    """gate_up uint8 [E, 2I, H/2] with scale [E, 2I, H/16] and scale_2 float32 [E, 2] (w1's, w3's); down uint8
    [E, H, I/2] with scale [E, H, I/16] and scale_2 float32 [E]. Scales are float8_e4m3fn; `shared_last` as in
    ops.moe_nvfp4. With `activation` "nvfp4" the inputs of both products are quantised too, by the slow
    ops.moe_nvfp4_w4a4."""

    activation: str | None = None

    def __init__(
        self,
        gate_up: Tensor,
        gate_up_scale: Tensor,
        gate_up_scale_2: Tensor,
        down: Tensor,
        down_scale: Tensor,
        down_scale_2: Tensor,
        shared_last: bool = False,
    ):
        super().__init__()
        self.shared_last = shared_last
        self.register_buffer("gate_up", gate_up)
        self.register_buffer("gate_up_scale", gate_up_scale)
        self.register_buffer("gate_up_scale_2", gate_up_scale_2)
        self.register_buffer("down", down)
        self.register_buffer("down_scale", down_scale)
        self.register_buffer("down_scale_2", down_scale_2)

    @property
    def takes_shared(self) -> bool:
        """Whether forward can add the shared expert: `shared` is its FP8-block gate_up, scale, down, scale."""
        return self.activation is None

    @property
    def takes_router(self) -> bool:
        """Whether `routed` can pick the experts."""
        return self.activation is None

    @property
    def _stack(self) -> tuple[Tensor, ...]:
        return (
            *(self.gate_up, self.gate_up_scale, self.gate_up_scale_2),
            *(self.down, self.down_scale, self.down_scale_2),
        )

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor, limit: float, *shared: Tensor) -> Tensor:
        if self.activation is not None:
            return ops.moe_nvfp4_w4a4(x, experts, weights, *self._stack, limit, self.shared_last)
        return ops.moe_nvfp4(x, experts, weights, *self._stack, limit, *shared, shared_last=self.shared_last)

    def routed(self, x: Tensor, router: tuple[Tensor, Tensor, Tensor, int, float], limit: float, *shared: Tensor) -> Tensor:
        """forward with the experts that ops.route_topk picks; `router` is what that takes beside x."""
        return ops.route_moe_nvfp4(x, *router, *self._stack, limit, *shared, shared_last=self.shared_last)


def quantise_activations(model: nn.Module, activation: str) -> None:
    """Let every NVFP4 linear and expert stack of a model quantise its inputs too: an emulation of W4A4 kernels, to study
    their numbers on any machine. Weights of other formats stay weight-only.

    ValueError for any other activation than "nvfp4", and for a model without NVFP4 weights.
    """
    if activation != "nvfp4":
        raise ValueError(f'activation must be None or "nvfp4", found {activation!r}')
    modules = [module for module in model.modules() if isinstance(module, (Nvfp4Linear, Nvfp4Experts))]
    if not modules:
        raise ValueError('activation="nvfp4" was asked for, but the checkpoint has no NVFP4 or MXFP4 weights')
    for module in modules:
        module.activation = activation

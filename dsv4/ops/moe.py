"""moe: the routed experts (paper section 2.1).

    h = silu(min(W1 x, limit)) * clamp(W3 x, -limit, limit)          gate is clamped above only, up on both sides
    y = sum over the picked experts of W2 (weight * h)
The routing weight enters h in float32 before the rounding to the activation dtype, as in the official code (transformers
multiplies after W2: equal in exact arithmetic). The sum is float32 and is returned unrounded, since the shared expert is
added to it before the one rounding. Expert -1 means none.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from dsv4.ops._register import op
from dsv4.ops.fp8 import BLOCK
from dsv4.ops.kernels.moe import Weights, run_experts
from dsv4.ops.nvfp4 import dequantize_nvfp4


def clamped_swiglu(gate_up: Tensor, limit: float) -> Tensor:
    """float32 [..., 2I] (gate, then up) -> float32 [..., I]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def _mixture(x: Tensor, experts: Tensor, weights: Tensor, limit: float, count: int, weight_of: Callable) -> Tensor:
    """The equations above. `weight_of(ids)` gives float32 (gate_up [n, 2I, H], down [n, H, I]) for expert ids [n].

    Few tokens take their experts' weights by id; many go through all experts in turn. Both are free of host syncs.
    """
    tokens, k = experts.shape
    y = x.new_zeros(x.shape, dtype=torch.float32)
    if tokens * k <= count:
        for token in range(tokens):
            gate_up, down = weight_of(experts[token].clamp(min=0))  # [k, 2I, H], [k, H, I]
            h = clamped_swiglu(gate_up @ x[token].float(), limit) * weights[token, :, None]
            h = torch.where(experts[token, :, None] >= 0, h, 0)  # not a product: an idle row may hold NaN
            y[token] = torch.einsum("khi,ki->h", down, h.to(x.dtype).float())
        return y
    for expert in range(count):
        gate_up, down = (w[0] for w in weight_of(torch.full((1,), expert, device=x.device)))
        share = torch.where(experts == expert, weights, 0).sum(-1, keepdim=True)
        h = torch.where(share != 0, clamped_swiglu(x.float() @ gate_up.T, limit) * share, 0)
        y += h.to(x.dtype).float() @ down.T
    return y


def _fake(x: Tensor, *_) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.float32)


def _moe_cuda(x: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, limit: float) -> Tensor:
    """bf16: the streaming kernels. float32 activations: the reference, which is the oracle's precision."""
    if x.dtype == torch.float32:
        return moe_ref(x, experts, weights, gate_up, down, limit)
    return run_experts("moe", x, experts, weights, Weights(gate_up), Weights(down), limit)


@op(
    "moe(Tensor x, Tensor experts, Tensor weights, Tensor gate_up, Tensor down, float limit) -> Tensor",
    fake=_fake,
    cuda=_moe_cuda,
)
def moe_ref(x: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, limit: float) -> Tensor:
    """Plain expert weights."""
    return _mixture(x, experts, weights, limit, down.shape[0], lambda ids: (gate_up[ids].float(), down[ids].float()))


def moe(x: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, limit: float) -> Tensor:
    """x [T, H] bf16 or float32; experts int32 [T, k]; weights float32 [T, k]; gate_up [E, 2I, H] (w1 then w3); down
    [E, H, I]. Returns float32 [T, H]."""
    return torch.ops.dsv4.moe(x, experts, weights, gate_up, down, limit)


def _moe_nvfp4_cuda(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    gate_up_scale_2: Tensor,
    down: Tensor,
    down_scale: Tensor,
    down_scale_2: Tensor,
    limit: float,
) -> Tensor:
    """bf16: the streaming kernels. float32 activations: the reference, which is the oracle's precision."""
    up, down = Weights(gate_up, gate_up_scale, gate_up_scale_2), Weights(down, down_scale, down_scale_2)
    if x.dtype == torch.float32:
        return moe_nvfp4_ref(x, experts, weights, *up, *down, limit)
    return run_experts("moe_nvfp4", x, experts, weights, up, down, limit)


@op(
    "moe_nvfp4(Tensor x, Tensor experts, Tensor weights, Tensor gate_up, Tensor gate_up_scale, Tensor gate_up_scale_2, "
    "Tensor down, Tensor down_scale, Tensor down_scale_2, float limit) -> Tensor",
    fake=_fake,
    cuda=_moe_nvfp4_cuda,
)
def moe_nvfp4_ref(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    gate_up_scale_2: Tensor,
    down: Tensor,
    down_scale: Tensor,
    down_scale_2: Tensor,
    limit: float,
) -> Tensor:
    """NVFP4 expert weights, dequantised to float32."""
    inter = gate_up.shape[1] // 2

    def weight_of(ids: Tensor) -> tuple[Tensor, Tensor]:
        global_scale = gate_up_scale_2[ids].repeat_interleave(inter, 1)[..., None]  # [n, 2I, 1]: w1's, then w3's
        return (
            dequantize_nvfp4(gate_up[ids], gate_up_scale[ids], global_scale),
            dequantize_nvfp4(down[ids], down_scale[ids], down_scale_2[ids][:, None, None]),
        )

    return _mixture(x, experts, weights, limit, down.shape[0], weight_of)


def moe_nvfp4(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    gate_up_scale_2: Tensor,
    down: Tensor,
    down_scale: Tensor,
    down_scale_2: Tensor,
    limit: float,
) -> Tensor:
    """x [T, H], experts int32 [T, k], weights float32 [T, k]; gate_up uint8 [E, 2I, H/2] (w1 then w3), its scale
    float8_e4m3fn [E, 2I, H/16] and scale_2 float32 [E, 2]; down uint8 [E, H, I/2], [E, H, I/16], float32 [E].
    Returns float32 [T, H]."""
    return torch.ops.dsv4.moe_nvfp4(
        x, experts, weights, gate_up, gate_up_scale, gate_up_scale_2, down, down_scale, down_scale_2, limit
    )


def _dequantize_stack(weight: Tensor, scale: Tensor) -> Tensor:
    """float8_e4m3fn [..., N, K] and float32 [..., ceil(N/128), ceil(K/128)] -> float32 [..., N, K]."""
    rows, columns = weight.shape[-2:]
    scale = scale.repeat_interleave(BLOCK, -2)[..., :rows, :].repeat_interleave(BLOCK, -1)[..., :columns]
    return weight.float() * scale


@op(
    "moe_fp8(Tensor x, Tensor experts, Tensor weights, Tensor gate_up, Tensor gate_up_scale, Tensor down, "
    "Tensor down_scale, float limit) -> Tensor",
    fake=_fake,
)
def moe_fp8_ref(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    limit: float,
) -> Tensor:
    """FP8-block expert weights, dequantised to float32. w1's last row of blocks may be shorter than 128 rows, and w3's
    first begins anew."""

    def weight_of(ids: Tensor) -> tuple[Tensor, Tensor]:
        both, scale = (tensor[ids].unflatten(1, (2, -1)) for tensor in (gate_up, gate_up_scale))
        return _dequantize_stack(both, scale).flatten(1, 2), _dequantize_stack(down[ids], down_scale[ids])

    return _mixture(x, experts, weights, limit, down.shape[0], weight_of)


def moe_fp8(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    limit: float,
) -> Tensor:
    """x [T, H], experts int32 [T, k], weights float32 [T, k]; gate_up float8_e4m3fn [E, 2I, H] (w1 then w3) and its
    scale float32 [E, 2 ceil(I/128), ceil(H/128)] (w1's blocks, then w3's); down [E, H, I] and [E, ceil(H/128),
    ceil(I/128)]. Returns float32 [T, H]. There is no CUDA kernel: the reference runs on every device."""
    return torch.ops.dsv4.moe_fp8(x, experts, weights, gate_up, gate_up_scale, down, down_scale, limit)

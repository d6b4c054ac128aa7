"""moe: the routed experts, and the shared one with them (paper section 2.1).

    h = silu(min(W1 x, limit)) * clamp(W3 x, -limit, limit)          gate is clamped above only, up on both sides
    y = sum over the picked experts of W2 (weight * h) + the shared expert's W2 h
The routing weight enters h in float32 before the rounding to the activation dtype, as in the official code (transformers
multiplies after W2: equal in exact arithmetic). Expert -1 means none.

The shared expert is either the last of the stack (`shared_last`; no routing names it then) or, beside NVFP4 experts, a
weight of its own in FP8 blocks. With it, every row gets its result, rounded to x's dtype as a linear of its own would give
it, and the sum of both is rounded to x's dtype; without it, the routed sum is returned unrounded in float32. MXFP4 experts
come as NVFP4 ones, to which they are cast exactly at load.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from dsv4.ops._register import op
from dsv4.ops.fp8 import BLOCK
from dsv4.ops.kernels.moe import Call, Shared, run_experts
from dsv4.ops.kernels.stream import Weight
from dsv4.ops.nvfp4 import dequantize_nvfp4


def clamped_swiglu(gate_up: Tensor, limit: float) -> Tensor:
    """float32 [..., 2I] (gate, then up) -> float32 [..., I]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def _routed(x: Tensor, experts: Tensor, weights: Tensor, limit: float, count: int, weight_of: Callable) -> Tensor:
    """The sum over the picked experts. `weight_of(ids)` gives float32 (gate_up [n, 2I, H], down [n, H, I]) for ids [n].

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


def _shared(x: Tensor, gate_up: Tensor, down: Tensor, limit: float) -> Tensor:
    """float32 [T, H] of the expert that all rows use, its weights [2I, H] and [H, I] in float32. Its result is rounded to
    x's dtype before it is added, as in the official code."""
    h = clamped_swiglu(x.float() @ gate_up.T, limit).to(x.dtype).float()
    return (h @ down.T).to(x.dtype).float()


def _mixture(
    x: Tensor, experts: Tensor, weights: Tensor, limit: float, count: int, weight_of: Callable, shared_last: bool
) -> Tensor:
    """The equations above over a stack of `count` experts, of which the last may be the shared one."""
    if not shared_last:
        return _routed(x, experts, weights, limit, count, weight_of)
    gate_up, down = (w[0] for w in weight_of(torch.full((1,), count - 1, device=x.device)))
    return (_routed(x, experts, weights, limit, count - 1, weight_of) + _shared(x, gate_up, down, limit)).to(x.dtype)


def _fake(x: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, limit, shared_last=False) -> Tensor:
    return x.new_empty(x.shape, dtype=x.dtype if shared_last else torch.float32)


def _moe_cuda(
    x: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, limit: float, shared_last: bool = False
) -> Tensor:
    """bf16: the streaming kernels. float32 activations: the reference, which is the oracle's precision."""
    if x.dtype == torch.float32:
        return moe_ref(x, experts, weights, gate_up, down, limit, shared_last)
    return run_experts("moe", x, experts, weights, Call.of(Weight(gate_up), Weight(down), limit, shared_last))


@op(
    "moe(Tensor x, Tensor experts, Tensor weights, Tensor gate_up, Tensor down, float limit, bool shared_last=False) "
    "-> Tensor",
    fake=_fake,
    cuda=_moe_cuda,
)
def moe_ref(
    x: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, limit: float, shared_last: bool = False
) -> Tensor:
    """Plain expert weights."""

    def weight_of(ids: Tensor) -> tuple[Tensor, Tensor]:
        return gate_up[ids].float(), down[ids].float()

    return _mixture(x, experts, weights, limit, down.shape[0], weight_of, shared_last)


def moe(
    x: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, limit: float, shared_last: bool = False
) -> Tensor:
    """x [T, H] bf16 or float32; experts int32 [T, k]; weights float32 [T, k]; gate_up [E, 2I, H] (w1 then w3); down
    [E, H, I]. Returns float32 [T, H]; with `shared_last`, where expert E - 1 is the shared one, [T, H] in x's dtype."""
    return torch.ops.dsv4.moe(x, experts, weights, gate_up, down, limit, shared_last)


def moe_nvfp4_fake(
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
    shared_gate_up: Tensor | None = None,
    shared_gate_up_scale: Tensor | None = None,
    shared_down: Tensor | None = None,
    shared_down_scale: Tensor | None = None,
    shared_last: bool = False,
) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.float32 if shared_gate_up is None and not shared_last else x.dtype)


def nvfp4_call(
    gate_up: Tensor,
    gate_up_scale: Tensor,
    gate_up_scale_2: Tensor,
    down: Tensor,
    down_scale: Tensor,
    down_scale_2: Tensor,
    limit: float,
    shared_gate_up: Tensor | None = None,
    shared_gate_up_scale: Tensor | None = None,
    shared_down: Tensor | None = None,
    shared_down_scale: Tensor | None = None,
    shared_last: bool = False,
) -> Call:
    """The same as the kernels' launchers take it. ValueError for half a shared expert, or for two."""
    shared = shared_gate_up, shared_gate_up_scale, shared_down, shared_down_scale
    _check_shared(shared, shared_last)
    up, down = Weight(gate_up, gate_up_scale, gate_up_scale_2), Weight(down, down_scale, down_scale_2)
    beside = None if shared_gate_up is None else Shared(Weight(*shared[:2]), Weight(*shared[2:]))
    return Call.of(up, down, limit, shared_last, beside)


def moe_nvfp4_cuda(x: Tensor, experts: Tensor, weights: Tensor, *stacks: Tensor | float | bool | None) -> Tensor:
    """bf16: the streaming kernels. float32 activations: the reference, which is the oracle's precision."""
    if x.dtype == torch.float32:
        return moe_nvfp4_ref(x, experts, weights, *stacks)
    return run_experts("moe_nvfp4", x, experts, weights, nvfp4_call(*stacks))


def _check_shared(shared: tuple[Tensor | None, ...], shared_last: bool) -> None:
    given = sum(tensor is not None for tensor in shared)
    if given not in (0, 4) or (given and shared_last):
        last = " beside shared_last, which says that it is in the stack" if shared_last else ", expected all or none"
        raise ValueError(f"moe_nvfp4: {given} of the 4 tensors of a shared expert{last}")


@op(
    "moe_nvfp4(Tensor x, Tensor experts, Tensor weights, Tensor gate_up, Tensor gate_up_scale, Tensor gate_up_scale_2, "
    "Tensor down, Tensor down_scale, Tensor down_scale_2, float limit, Tensor? shared_gate_up=None, "
    "Tensor? shared_gate_up_scale=None, Tensor? shared_down=None, Tensor? shared_down_scale=None, "
    "bool shared_last=False) -> Tensor",
    fake=moe_nvfp4_fake,
    cuda=moe_nvfp4_cuda,
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
    shared_gate_up: Tensor | None = None,
    shared_gate_up_scale: Tensor | None = None,
    shared_down: Tensor | None = None,
    shared_down_scale: Tensor | None = None,
    shared_last: bool = False,
) -> Tensor:
    """NVFP4 expert weights and FP8 ones of the shared expert, dequantised to float32."""
    _check_shared((shared_gate_up, shared_gate_up_scale, shared_down, shared_down_scale), shared_last)
    inter = gate_up.shape[1] // 2

    def weight_of(ids: Tensor) -> tuple[Tensor, Tensor]:
        global_scale = gate_up_scale_2[ids].repeat_interleave(inter, 1)[..., None]  # [n, 2I, 1]: w1's, then w3's
        return (
            dequantize_nvfp4(gate_up[ids], gate_up_scale[ids], global_scale),
            dequantize_nvfp4(down[ids], down_scale[ids], down_scale_2[ids][:, None, None]),
        )

    y = _mixture(x, experts, weights, limit, down.shape[0], weight_of, shared_last)
    if shared_gate_up is None:
        return y
    shared = _dequantize_gate_up(shared_gate_up, shared_gate_up_scale), _dequantize(shared_down, shared_down_scale)
    return (y + _shared(x, *shared, limit)).to(x.dtype)


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
    shared_gate_up: Tensor | None = None,
    shared_gate_up_scale: Tensor | None = None,
    shared_down: Tensor | None = None,
    shared_down_scale: Tensor | None = None,
    shared_last: bool = False,
) -> Tensor:
    """x [T, H], experts int32 [T, k], weights float32 [T, k]; gate_up uint8 [E, 2I, H/2] (w1 then w3), its scale
    float8_e4m3fn [E, 2I, H/16] and scale_2 float32 [E, 2]; down uint8 [E, H, I/2], [E, H, I/16], float32 [E].

    The shared expert: shared_gate_up float8_e4m3fn [2I, H] (w1 then w3), its scale float32 [2 ceil(I/128), ceil(H/128)]
    (w1's blocks, then w3's), shared_down [H, I] and [ceil(H/128), ceil(I/128)]; or `shared_last`, where it is expert
    E - 1. Returns [T, H] in x's dtype with a shared expert, in float32 without. ValueError for half a shared expert."""
    shared = shared_gate_up, shared_gate_up_scale, shared_down, shared_down_scale, shared_last
    return torch.ops.dsv4.moe_nvfp4(
        x, experts, weights, gate_up, gate_up_scale, gate_up_scale_2, down, down_scale, down_scale_2, limit, *shared
    )


def _dequantize(weight: Tensor, scale: Tensor) -> Tensor:
    """float8_e4m3fn [..., N, K] and float32 [..., ceil(N/128), ceil(K/128)] -> float32 [..., N, K]."""
    rows, columns = weight.shape[-2:]
    scale = scale.repeat_interleave(BLOCK, -2)[..., :rows, :].repeat_interleave(BLOCK, -1)[..., :columns]
    return weight.float() * scale


def _dequantize_gate_up(weight: Tensor, scale: Tensor) -> Tensor:
    """The same for w1 above w3 [..., 2I, H]: w1's last row of blocks may be shorter, and w3's first begins anew."""
    both, scales = (tensor.unflatten(-2, (2, -1)) for tensor in (weight, scale))
    return _dequantize(both, scales).flatten(-3, -2)


def _fp8_fake(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    limit: float,
    shared_last: bool = False,
) -> Tensor:
    return x.new_empty(x.shape, dtype=x.dtype if shared_last else torch.float32)


def _moe_fp8_cuda(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    limit: float,
    shared_last: bool = False,
) -> Tensor:
    """bf16: the streaming kernels. float32 activations: the reference, which is the oracle's precision."""
    up, down = Weight(gate_up, gate_up_scale), Weight(down, down_scale)
    if x.dtype == torch.float32:
        return moe_fp8_ref(x, experts, weights, *up[:2], *down[:2], limit, shared_last)
    return run_experts("moe_fp8", x, experts, weights, Call.of(up, down, limit, shared_last))


@op(
    "moe_fp8(Tensor x, Tensor experts, Tensor weights, Tensor gate_up, Tensor gate_up_scale, Tensor down, "
    "Tensor down_scale, float limit, bool shared_last=False) -> Tensor",
    fake=_fp8_fake,
    cuda=_moe_fp8_cuda,
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
    shared_last: bool = False,
) -> Tensor:
    """FP8-block expert weights, dequantised to float32."""

    def weight_of(ids: Tensor) -> tuple[Tensor, Tensor]:
        return _dequantize_gate_up(gate_up[ids], gate_up_scale[ids]), _dequantize(down[ids], down_scale[ids])

    return _mixture(x, experts, weights, limit, down.shape[0], weight_of, shared_last)


def moe_fp8(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    limit: float,
    shared_last: bool = False,
) -> Tensor:
    """x [T, H], experts int32 [T, k], weights float32 [T, k]; gate_up float8_e4m3fn [E, 2I, H] (w1 then w3) and its
    scale float32 [E, 2 ceil(I/128), ceil(H/128)] (w1's blocks, then w3's); down [E, H, I] and [E, ceil(H/128),
    ceil(I/128)]. Returns float32 [T, H]; with `shared_last`, where expert E - 1 is the shared one, x's dtype."""
    return torch.ops.dsv4.moe_fp8(x, experts, weights, gate_up, gate_up_scale, down, down_scale, limit, shared_last)

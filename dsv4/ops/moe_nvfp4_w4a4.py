"""moe_nvfp4_w4a4: the experts with NVFP4 weights and NVFP4 activations, emulated. A study option, off by default.

    h = silu(min(W1 q(x), limit)) * clamp(W3 q(x), -limit, limit)
    y = sum over the picked experts of W2 q(weight * h)
and that of the shared expert, where it is the stack's last (`shared_last`), added as in dsv4.ops.moe.
q quantises each row to NVFP4 and back (dsv4.ops.quantize_nvfp4), as fused W4A4 kernels do before either product; the rest
is dsv4.ops.moe. h is quantised from float32, unrounded, with the routing weight in it: that weight scales all of a row
and so changes its global scale only. There is no kernel. The weights of each picked expert are dequantised to float32 in
turn, without a host sync, so this serves to study accuracy and tells nothing of speed.
"""

import torch
from torch import Tensor

from dsv4.ops._register import op
from dsv4.ops.moe import clamped_swiglu
from dsv4.ops.nvfp4 import dequantize_nvfp4, through_nvfp4


def _fake(
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
    shared_last: bool = False,
) -> Tensor:
    return x.new_empty(x.shape, dtype=x.dtype if shared_last else torch.float32)


@op(
    "moe_nvfp4_w4a4(Tensor x, Tensor experts, Tensor weights, Tensor gate_up, Tensor gate_up_scale, "
    "Tensor gate_up_scale_2, Tensor down, Tensor down_scale, Tensor down_scale_2, float limit, bool shared_last=False) "
    "-> Tensor",
    fake=_fake,
)
def moe_nvfp4_w4a4_ref(
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
    shared_last: bool = False,
) -> Tensor:
    """The equations above. Few tokens go pick by pick, many through every expert in turn."""
    tokens, k = experts.shape
    count, inter = down.shape[0] - shared_last, gate_up.shape[1] // 2
    rows = through_nvfp4(x.float())
    y = torch.zeros_like(rows)

    def expert(index: Tensor, rows: Tensor, share: Tensor) -> Tensor:
        """One expert, its number in index [1], on rows [n, H] with weights [n, 1], which are 0 for rows not its own."""
        global_scale = gate_up_scale_2[index].repeat_interleave(inter, 1)[..., None]  # [1, 2I, 1]: w1's, then w3's
        [first] = dequantize_nvfp4(gate_up[index], gate_up_scale[index], global_scale)
        [second] = dequantize_nvfp4(down[index], down_scale[index], down_scale_2[index][:, None, None])
        h = torch.where(share != 0, clamped_swiglu(rows @ first.T, limit) * share, 0)  # an idle row may hold NaN
        return through_nvfp4(h) @ second.T

    if tokens * k <= count:
        shares = torch.where(experts >= 0, weights, 0)
        for token in range(tokens):
            one = slice(token, token + 1)
            for pick in range(k):
                y[one] += expert(experts[token, pick : pick + 1].clamp(min=0), rows[one], shares[one, pick : pick + 1])
    else:
        for number in range(count):
            share = torch.where(experts == number, weights, 0).sum(-1, keepdim=True)
            y += expert(torch.full((1,), number, device=x.device), rows, share)
    if not shared_last:
        return y
    shared = expert(torch.full((1,), count, device=x.device), rows, torch.ones_like(rows[:, :1]))
    return (y + shared.to(x.dtype).float()).to(x.dtype)


def moe_nvfp4_w4a4(
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
    shared_last: bool = False,
) -> Tensor:
    """As `moe_nvfp4` without an FP8 expert, with activations quantised too."""
    return torch.ops.dsv4.moe_nvfp4_w4a4(
        x, experts, weights, gate_up, gate_up_scale, gate_up_scale_2, down, down_scale, down_scale_2, limit, shared_last
    )

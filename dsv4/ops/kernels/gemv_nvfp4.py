"""Launches of gemv_nvfp4.cu: NVFP4 linears of one token."""

import torch
from torch import Tensor

from dsv4.ops.kernels.stream import ALONE, BESIDE, Weight, processors, ready

WARPS = 8
UNIT = 4  # rows that a warp multiplies at a time
STAGES = 6, 5, 4, 3
STAGE_BYTES = WARPS * UNIT * (512 + 64)


def activation_bytes(k: int, groups: int) -> int:
    """Of those that a block needs, which may be of two groups."""
    return 2 * k * min(groups, 2)


def stages(k: int, groups: int = 1) -> int | None:
    """Turns that a warp's ring holds beside activations of width `k`; None where there is no room for them."""
    return next((count for count in STAGES if count * STAGE_BYTES + activation_bytes(k, groups) <= BESIDE), None)


def defines(k: int, norm: bool, groups: int = 1) -> tuple[str, ...]:
    return (f"K={k}", f"STAGES={stages(k, groups)}", f"NORM={int(norm)}", f"WARPS={WARPS}", "KW=1", "NT=1", "TAIL=0")


def reads(rows: int, k: int, groups: int = 1) -> bool:
    """Whether the kernel can multiply a weight [rows, k] of so many groups."""
    return rows % (UNIT * groups) == 0 and k % 1024 == 0 and stages(k, groups) is not None


def split(first: int, second: int, blocks: int) -> int:
    """How many of the blocks work on `first` units, where the others work on `second`: the busiest has the fewest."""
    return min(range(1, blocks), key=lambda parts: max(first / parts, second / (blocks - parts)))


def run(
    x: Tensor,
    weight: Weight,
    y: Tensor,
    exact: Weight | None = None,
    z: Tensor | None = None,
    groups: int = 1,
    norm: Tensor | None = None,
    eps: float = 0.0,
) -> bool:
    """y [1, rows] = x [1, groups * k] W^T, bf16 or float32, and with a second weight (then there are no groups) float32 z.
    False, and nothing done, for sizes that the kernel does not read."""
    k, n, m = x.shape[-1] // groups, y.shape[1], 0 if z is None else z.shape[1]
    if not n or not reads(n, k, groups) or not reads(m, k):
        return False
    blocks = processors(x.device.index)
    if m:
        parts = split(n // UNIT, m // UNIT, blocks)
    else:
        parts = blocks = min(n // UNIT, max(blocks, groups))
    shared = stages(k, groups) * STAGE_BYTES + activation_bytes(k, groups)
    if groups > 1 or m:  # the kernels before these have few blocks; before the others comes one of these
        shared = max(shared, ALONE)
    launch = ready("gemv_nvfp4.cu", "gemv_nvfp4", *defines(k, norm is not None, groups))
    launch(
        blocks, WARPS * 32, x, norm, *weight, y, n, weight.scale_2.dim(), y.dtype == torch.float32,
        *(exact or (None, None, None)), z, m, exact.scale_2.dim() if exact else 0, parts, groups, eps,
        shared=shared, pdl=True,
    )  # fmt: skip
    return True

"""Launches of gemv_nvfp4.cu: NVFP4 linears of one token."""

import math

import torch
from torch import Tensor

from dsv4.ops.kernels.stream import ALONE, BESIDE, Weight, ceil, processors, ready
from dsv4.ops.kernels.stream import defines as defines_of

WARPS = 8
UNIT, PIECE = 8, 512  # rows and values of a row that a warp multiplies at a time
STAGES = 3  # steps of a warp's ring; more take bandwidth from the kernel before
RING_BYTES = STAGES * WARPS * UNIT * (PIECE // 2 + PIECE // 16)
MOST_UNITS = 128  # of a block, over the warps that split K: their sums stay until the end


def split_k(k: int) -> int:
    """Warps of a block that split rows of `k` values."""
    return math.gcd(k // PIECE, WARPS)


def shared_bytes(k: int, units: int, groups: int = 1) -> int:
    """A block's: the ring, sums and row scales of its units, activations of two groups at most."""
    return RING_BYTES + units * (split_k(k) * 128 + UNIT * 4) + min(groups, 2) * k * 2


def defines(k: int, norm: bool) -> tuple[str, ...]:
    return defines_of(K=k, KW=split_k(k), STAGES=STAGES, NORM=int(norm), WARPS=WARPS, NT=1, TAIL=0)


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
    if not n or n % (UNIT * groups) or m % UNIT or k % PIECE:
        return False
    blocks = max(processors(x.device.index), groups, ceil((n + m) // UNIT * split_k(k), MOST_UNITS))
    if m:
        parts = split(n // UNIT, m // UNIT, blocks)
    else:
        parts = blocks = min(n // UNIT, blocks)
    units = max(ceil(n // UNIT, parts), ceil(m // UNIT, max(1, blocks - parts)))
    shared = shared_bytes(k, units, groups)
    if shared > BESIDE:
        return False
    if groups > 1 or m:  # the kernels before these have few blocks; before the others comes one of these
        shared = max(shared, ALONE)
    early = groups == 1 and not m and norm is None  # hyper-connections come next, which ask for little
    launch = ready("gemv_nvfp4.cu", "gemv_nvfp4", *defines(k, norm is not None))
    launch(
        blocks, WARPS * 32, x, norm, *weight, y, n, weight.scale_2.dim(), y.dtype == torch.float32,
        *(exact or (None, None, None)), z, m, exact.scale_2.dim() if exact else 0, parts, groups, units, early, eps,
        shared=shared, pdl=True,
    )  # fmt: skip
    return True

"""Linears that read the same input, as one weight: a decode step then streams them in one launch instead of one each."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dsv4 import ops
from dsv4.model.linear import Fp8BlockLinear, Nvfp4Linear, PlainLinear
from dsv4.ops.fp8 import BLOCK


def merge(linears: Sequence[nn.Module]) -> nn.Module:
    """One module whose output is the outputs of `linears` side by side.

    Neighbours of one format become one weight: plain ones always; FP8-block ones if all but the last end at a block of
    rows; NVFP4 ones with one scale_2 a row.
    """
    parts = [_merge_alike(list(alike)) for _, alike in itertools.groupby(linears, type)]
    return parts[0] if len(parts) == 1 else SideBySide(parts)


def _merge_alike(linears: list[nn.Module]) -> nn.Module:
    first = linears[0]
    if len(linears) == 1:
        return first
    assert all(linear.groups == 1 for linear in linears)
    weight = torch.cat([linear.weight for linear in linears])
    if isinstance(first, PlainLinear):
        return PlainLinear(weight)
    scale = torch.cat([linear.scale for linear in linears])
    if isinstance(first, Nvfp4Linear):
        rows = [linear.scale_2.expand(linear.weight.shape[0]) for linear in linears]
        return Nvfp4Linear(weight, scale, torch.cat(rows))
    if isinstance(first, Fp8BlockLinear) and all(linear.weight.shape[0] % BLOCK == 0 for linear in linears[:-1]):
        return Fp8BlockLinear(weight, scale)
    return SideBySide(linears)


class SideBySide(nn.Module):
    """Linears of different formats, one call each."""

    tensors = None

    def __init__(self, linears: Sequence[nn.Module]):
        super().__init__()
        self.linears = nn.ModuleList(linears)

    def forward(self, x: Tensor, norm: Tensor | None = None, eps: float = 0.0) -> Tensor:
        return torch.cat([linear(x, norm, eps) for linear in self.linears], -1)

    def fp32(self, x: Tensor) -> Tensor:
        """The same with a float32 result, unrounded."""
        return torch.cat([linear.fp32(x) for linear in self.linears], -1)


class InputProjection(nn.Module):
    """All that attention projects from the sublayer's input x [T, H]: `rounded` linears to the activations' dtype, and
    `exact` ones (there may be none) in float32, as the official code keeps them."""

    def __init__(self, rounded: Sequence[nn.Module], exact: Sequence[nn.Module]):
        super().__init__()
        self.rounded = merge(rounded)
        self.exact = merge(exact) if exact else None

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """-> (y [T, N],) or (y, z float32 [T, M])."""
        if self.exact is None:
            return (self.rounded(x),)
        rounded, exact = self.rounded.tensors, self.exact.tensors
        if rounded is None or exact is None:
            return self.rounded(x), self.exact.fp32(x)
        return ops.project(x, *rounded, *exact)

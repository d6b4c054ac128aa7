"""Shared by the tests of the small decode kernels: where they run, what they are compared with, poisoned memory."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import dsv4.ops  # noqa: F401  (registers the ops)
from dsv4.ops._register import registered

DEVICE = "cuda"
needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def call(name: str, *args):
    """The op as a user calls it: on CUDA tensors its kernel."""
    return getattr(torch.ops.dsv4, name)(*to_device(args))


def to_device(args) -> tuple:
    return tuple(a.to(DEVICE) if isinstance(a, Tensor) else a for a in args)


def reference(name: str, *args):
    """The op's reference, evaluated on the same inputs in float32."""
    widened = (a.float() if isinstance(a, Tensor) and a.dtype == torch.bfloat16 else a for a in to_device(args))
    return registered()[name].reference(*widened)


def poison(*tensors: Tensor) -> None:
    """Leave NaN in the memory that outputs like these will most likely get, and in some scratch around it."""
    held = [torch.full((t.numel(),), torch.nan, dtype=t.dtype, device=DEVICE) for t in tensors if t.is_floating_point()]
    held += [torch.full((2**size,), torch.nan, device=DEVICE) for size in range(4, 20)]
    del held


def assert_close(actual: Tensor, expected: Tensor, rtol: float, atol: float) -> None:
    """Compare in float64; atol counts in units of the largest expected value when that is above 1."""
    scale = max(1.0, expected.double().abs().max().item()) if expected.numel() else 1.0
    torch.testing.assert_close(actual.double(), expected.double(), rtol=rtol, atol=atol * scale, equal_nan=False)


def assert_replay_equals(
    run: Callable[[], tuple[Tensor, ...]],
    reset: Callable[[], None] = lambda: None,
    spoil: Callable[[tuple[Tensor, ...]], None] = lambda results: None,
) -> None:
    """What `run` returns when its capture is replayed three times has the bits of an eager run; before each replay `spoil`
    may change the captured results, and `reset` restores state."""
    reset()
    expected = [t.clone() for t in run()]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    for _ in range(3):
        spoil(results)
        reset()
        graph.replay()
        torch.cuda.synchronize()
        for result, wanted in zip(results, expected, strict=True):
            assert torch.equal(result.view(-1).view(torch.uint8), wanted.view(-1).view(torch.uint8))

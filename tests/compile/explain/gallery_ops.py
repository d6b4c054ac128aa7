"""Ops that are wrong in one way each, and the same ones right: for gallery.py.

Importing this registers them. The line of an op's call is what explain names, so nothing here carries a mark.
"""

import torch
from torch import Tensor

LIBRARY = torch.library.Library("gallery", "DEF")


def op(name: str, schema: str, real, fake=None, tags=()) -> None:
    """Register gallery::name with a CPU kernel, and with a fake if there is one."""
    LIBRARY.define(f"{name}{schema}", tags=tags)
    LIBRARY.impl(name, real, "CPU")
    if fake is not None:
        torch.library.register_fake(f"gallery::{name}", fake, lib=LIBRARY)


def empty_like(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def change(x: Tensor) -> Tensor:
    x.add_(1)
    return x * 2


def transposed(x: Tensor) -> Tensor:
    return x.t().contiguous().t() * 2  # keeps the strides of a transposed tensor


def times(x: Tensor, n: int = 2) -> Tensor:
    return x * n


def times_fake(x: Tensor, n: int = 2) -> Tensor:
    return torch.empty_like(x)


def times_fake_of_three(x: Tensor, n: int = 3) -> Tensor:
    return torch.empty_like(x)


op("double", "(Tensor x) -> Tensor", lambda x: x * 2, empty_like)
op("without_fake", "(Tensor x) -> Tensor", lambda x: x * 2)
op("fake_shape", "(Tensor x) -> Tensor", lambda x: x * 2, lambda x: x.new_empty(3))
op("fake_dtype", "(Tensor x) -> Tensor", lambda x: x.double(), empty_like)
op("right_dtype", "(Tensor x) -> Tensor", lambda x: x.double(), lambda x: torch.empty_like(x, dtype=torch.float64))
op("fake_strides", "(Tensor x) -> Tensor", transposed, empty_like)
op("right_strides", "(Tensor x) -> Tensor", transposed, lambda x: x.new_empty(x.shape[::-1]).t())
op("fake_reads", "(Tensor x) -> Tensor", lambda x: x * 2, lambda x: x.new_empty(int(x.sum())))
op("two_results", "(Tensor x) -> Tensor[]", lambda x: [x * 2, x * 3], lambda x: [torch.empty_like(x)])
op("right_results", "(Tensor x) -> Tensor[]", lambda x: [x * 2, x * 3], lambda x: [torch.empty_like(x) for _ in "12"])
op("changes", "(Tensor x) -> Tensor", change, empty_like)
op("says_it_changes", "(Tensor(a!) x) -> Tensor", change, empty_like)
op("returns_its_input", "(Tensor x) -> Tensor", lambda x: x, empty_like)
op("returns_a_copy", "(Tensor x) -> Tensor", lambda x: x.clone(), empty_like)
op("other_default", "(Tensor x, int n=2) -> Tensor", times, times_fake_of_three)
op("same_default", "(Tensor x, int n=2) -> Tensor", times, times_fake)
op("unsafe", "(Tensor x) -> Tensor", lambda x: x * 2, empty_like, tags=(torch.Tag.cudagraph_unsafe,))


@torch.library.custom_op("gallery::custom_without_fake", mutates_args=())
def custom_without_fake(x: Tensor) -> Tensor:
    return x * 2


@torch.library.custom_op("gallery::custom", mutates_args=())
def custom(x: Tensor) -> Tensor:
    return x * 2


@custom.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)

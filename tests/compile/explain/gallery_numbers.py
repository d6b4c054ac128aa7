"""Pairs of the gallery about ops (stage 1), about compiled numbers that are not the plain ones (6) and about what does not
compile at all (7)."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.compile.explain.gallery_case import case, square
from tests.compile.explain.gallery_ops import custom, custom_without_fake


def calling(name: str) -> Callable:
    def call(x: Tensor) -> Tensor:
        return getattr(torch.ops.gallery, name)(x)  # row

    return call


def with_custom(x: Tensor) -> Tensor:
    return custom(x) + 1


def with_custom_without_fake(x: Tensor) -> Tensor:
    return custom_without_fake(x) + 1  # row


def changes_undeclared(x: Tensor) -> Tensor:
    y = x.clone()
    torch.ops.gallery.changes(y)  # row
    return y


def changes_declared(x: Tensor) -> Tensor:
    y = x.clone()
    torch.ops.gallery.says_it_changes(y)
    return y


case(
    "missing fake",
    1,
    "op without a fake",
    calling("without_fake"),
    calling("double"),
    "register_fake('gallery::without_fake')",
)
case("custom_op without a fake", 1, "op without a fake", with_custom_without_fake, with_custom, "register_fake")
case("wrong fake", 1, "fake with the wrong shape", calling("fake_shape"), calling("double"), "shape must be (4,)")
case(
    "fake of the wrong dtype",
    1,
    "fake with the wrong dtype",
    calling("fake_dtype"),
    calling("right_dtype"),
    "torch.float64",
)
case(
    "fake of the wrong strides",
    1,
    "fake with the wrong strides",
    calling("fake_strides"),
    calling("right_strides"),
    "(1, 3)",
    square,
)
case("fake that reads values", 1, "fake that fails", calling("fake_reads"), calling("double"), "never at values")
case(
    "fake of one result for two",
    1,
    "fake with another number of results",
    calling("two_results"),
    calling("right_results"),
    "return what",
)
case("undeclared change", 1, "undeclared change of an argument", changes_undeclared, changes_declared, "Tensor(a!) x")
case(
    "undeclared alias",
    1,
    "undeclared alias of an argument",
    calling("returns_its_input"),
    calling("returns_a_copy"),
    "x.clone()",
)
case("other default in the fake", 1, "fake with another default", calling("other_default"), calling("same_default"), "n=2")
case(
    "graph-unsafe op",
    1,
    "op that is not safe in a CUDA graph",
    calling("unsafe"),
    calling("double"),
    "drop the tag",
    kind="skip",
)


def loses_a_change(x: Tensor) -> Tensor:  # row
    y = torch.ops.gallery.double(x)
    torch.ops.gallery.changes(y)  # nothing uses its result and it declares no change, so compiled code drops it
    return y


def keeps_the_change(x: Tensor) -> Tensor:
    y = torch.ops.gallery.double(x)
    torch.ops.gallery.says_it_changes(y)
    return y


class Losing(nn.Module):
    """A layer that loses a change, or does not."""

    def __init__(self, loses: bool):
        super().__init__()
        self.loses = loses

    def forward(self, x: Tensor) -> Tensor:  # row
        return loses_a_change(x) if self.loses else keeps_the_change(x)


def three(*loses: bool) -> nn.Sequential:
    return nn.Sequential(*map(Losing, loses))


case("change that gets lost", 6, "compiled differs from eager", loses_a_change, keeps_the_change, "undeclared")
case("change that gets lost in a layer", 6, "compiled differs from eager", three(False, True, False),
     three(False, False, False), "undeclared")  # fmt: skip
case("nothing above eager", 7, "aot_eager fails", with_custom_without_fake, calling("double"), "before this one")

"""The one way to add an op to the `dsv4::` namespace.

`op(schema, fake=...)` decorates the plain PyTorch reference of an op and registers, in one step, its schema, its fake
(the shape function that torch.compile traces) and the reference as its implementation, on CUDA unless `cuda` gives a
kernel. An op without a fake or without a reference cannot be written with it. `Library.define` is used and not
`custom_op` because it costs 2 us a call in eager mode instead of 21.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

_LIBRARY = torch.library.Library("dsv4", "DEF")
_OPS: dict[str, "Op"] = {}


@dataclass(frozen=True)
class Op:
    """What is known of one registered op: its schema text, its reference, its fake and its CUDA kernel, if it has one."""

    name: str
    schema: str
    reference: Callable
    fake: Callable
    cuda: Callable | None


def op(schema: str, *, fake: Callable, cuda: Callable | None = None) -> Callable[[Callable], Callable]:
    """Register `dsv4::NAME` from its schema, its fake and the decorated reference; returns the reference unchanged."""
    name = schema.split("(", 1)[0].strip()

    def register(reference: Callable) -> Callable:
        _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, reference, "CPU")
        _LIBRARY.impl(name, cuda or reference, "CUDA")
        torch.library.register_fake(f"dsv4::{name}", fake, lib=_LIBRARY)
        _OPS[name] = Op(name, schema, reference, fake, cuda)
        return reference

    return register


def registered() -> dict[str, Op]:
    """All ops of the `dsv4::` namespace by name."""
    return dict(_OPS)

"""What a pair of the gallery is, and the list that the pairs enter; see gallery.py."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """One pair. `broken` None: torch handles the construct, which `fixed` then uses."""

    name: str
    stage: int
    title: str  # of the row
    kind: str
    broken: Callable | None
    fixed: Callable
    inputs: Callable[[], Any]
    fixed_inputs: Callable[[], Any]
    hint: str  # a part of the row's hint, by which the twin is written


CASES: dict[str, Case] = {}
KINDS = {1: "op", 2: "break", 3: "recompile", 4: "skip", 6: "difference", 7: "error"}


def one() -> tuple[Tensor]:
    """The arguments of most: a float32 vector of 4."""
    return (torch.ones(4),)


def square() -> tuple[Tensor]:
    return (torch.arange(12.0).reshape(3, 4),)


def case(name, stage, title, broken, fixed, hint="", inputs=one, fixed_inputs=None, kind=None) -> None:
    """Add a pair."""
    CASES[name] = Case(name, stage, title, kind or KINDS[stage], broken, fixed, inputs, fixed_inputs or inputs, hint)

"""Callables that try to take explain down with them."""

import ctypes
import os
import sys

import torch
from torch import Tensor

CALLS = 0


def inputs() -> tuple[Tensor]:
    return (torch.ones(4),)


def prints(x: Tensor) -> Tensor:
    print("not JSON")
    sys.stdout.flush()
    os.write(1, b"nor this\n")
    return x


def asks(x: Tensor) -> Tensor:
    return x * float(input())  # asks


def exits(x: Tensor) -> Tensor:
    sys.exit("bye")  # exits


def crashes(x: Tensor) -> Tensor:
    ctypes.string_at(0)  # crashes


def hangs(x: Tensor) -> Tensor:
    while True:
        pass  # hangs


def dies_later(x: Tensor) -> Tensor:
    """Well by itself and in one stage; a stage that calls it twice more is the end of its process."""
    global CALLS
    CALLS += 1
    if CALLS > 2:
        os._exit(7)
    return x


def fine(x: Tensor) -> Tensor:
    return x * 2

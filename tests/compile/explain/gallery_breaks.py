"""Pairs of the gallery about graph breaks (stage 2)."""

import copy
import logging
import random
import threading
import zlib

import numpy
import torch
from torch import Tensor, nn

from tests.compile.explain.gallery_case import case


def prints(x: Tensor) -> Tensor:
    y = x + 1
    print("in the middle")  # row
    return y * 2


def does_not_print(x: Tensor) -> Tensor:
    y = x + 1
    return y * 2


def reads_a_value(x: Tensor) -> Tensor:
    n = x.sum().item()  # row
    return x * n


def keeps_the_value(x: Tensor) -> Tensor:
    n = x.sum()
    return x * n


def branches(x: Tensor) -> Tensor:
    if x.sum() > 0:  # row
        return x + 1
    return x - 1


def selects(x: Tensor) -> Tensor:
    return torch.where(x.sum() > 0, x + 1, x - 1)


def selects_rows(x: Tensor) -> Tensor:
    return x.nonzero() + 1  # row


def selects_at_most(x: Tensor) -> Tensor:
    return torch.nonzero_static(x, size=4) + 1


def masks(x: Tensor) -> Tensor:
    return x[x > 0].sum()  # row


def masks_in_place(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, 0).sum()


def tries(x: Tensor) -> Tensor:
    try:
        return x.view(3, -1)  # row
    except RuntimeError:
        return x + 1


def decides_by_shape(x: Tensor) -> Tensor:
    return x.view(3, -1) if x.shape[0] % 3 == 0 else x + 1


def branches_in_try(x: Tensor) -> Tensor:
    try:
        n = int(x.sum())  # row
    except OverflowError:
        n = 0
    return x * n


def saturates(x: Tensor) -> Tensor:
    return x * torch.nan_to_num(x.sum()).floor()


def calls_c(x: Tensor) -> Tensor:
    return x * zlib.crc32(b"prefix")  # row


PREFIX = zlib.crc32(b"prefix")


def called_before(x: Tensor) -> Tensor:
    return x * PREFIX


def calls_pybind(x: Tensor) -> Tensor:
    return x * torch._C._get_mkldnn_enabled() + torch._C._parallel_info().count("x")  # row


THREADS = torch._C._parallel_info().count("x")


def asked_before(x: Tensor) -> Tensor:
    return x * 1 + THREADS


def yields(x: Tensor):  # row
    yield x + 1
    yield x + 2


def stacks(x: Tensor) -> Tensor:
    return torch.stack([x + 1, x + 2])


def counting():
    k = 0
    while True:
        k += 1
        yield k


def asks_generator(x: Tensor, steps) -> Tensor:
    return x * next(steps)  # row


def takes_number(x: Tensor, step: Tensor) -> Tensor:
    return x * step


def copies(x: Tensor) -> Tensor:
    y = copy.deepcopy(x)  # row
    return y + 1


def clones(x: Tensor) -> Tensor:
    y = x.clone()
    return y + 1


def rolls_dice(x: Tensor) -> Tensor:
    return x + random.random()  # row


def rolls_in_torch(x: Tensor) -> Tensor:
    return x + torch.rand(())


def draws_in_numpy(x: Tensor) -> Tensor:
    noise = numpy.random.default_rng(0)  # row
    return x + 1 if noise is not None else x


def logs(x: Tensor) -> Tensor:
    LOG.warning("in the middle")  # row
    return x + 1


LOG = logging.getLogger("gallery")


def locks(x: Tensor) -> Tensor:
    with LOCK:  # row
        return x + 1


LOCK = threading.Lock()


@torch.compiler.disable
def kept_out(x: Tensor) -> Tensor:
    return x + 1


def calls_kept_out(x: Tensor) -> Tensor:
    return kept_out(x * 2) * 2  # row


def traces_all(x: Tensor) -> Tensor:
    return (x * 2 + 1) * 2


class Hooked(nn.Module):
    """A linear layer with a hook on its gradients."""

    def __init__(self, hook: bool):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        if hook:
            self.linear.register_full_backward_hook(lambda module, inputs, outputs: None)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + 1  # row


class Copying(nn.Module):
    """Copies a submodule at every call, or once."""

    def __init__(self, every_time: bool):
        super().__init__()
        self.every_time = every_time
        self.linear = nn.Linear(4, 4)
        self.twin = copy.deepcopy(self.linear)

    def forward(self, x: Tensor) -> Tensor:
        twin = self.twin
        if self.every_time:
            twin = copy.deepcopy(self.linear)  # row
        return twin(x)


class Attention(nn.Module):
    """Part of a layer; says what it does, or does not."""

    def __init__(self, verbose: bool):
        super().__init__()
        self.verbose = verbose
        self.proj = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.proj(x)
        if self.verbose:
            print("attention")  # row
        return y + x


class Layers(nn.Module):
    """Three layers that look alike."""

    def __init__(self, verbose: bool):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"attn": Attention(verbose)}) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer["attn"](x)
        return x


def iterates_over_sets(x: Tensor) -> Tensor:
    """Sets of numbers, strings and tensors: torch traces them all, and no form of iteration breaks a graph."""
    for k in {1, 2, 3}:
        x = x + k
    for word in {"a", "bc"}:
        x = x * len(word)
    for t in {x, x * 2}:
        x = x + t.sum()
    return x


def yields_inside(x: Tensor) -> Tensor:
    """A generator that is made and used up inside the function is traced."""
    return sum(x * k for k in range(3))


def hooks_a_tensor(x: Tensor) -> Tensor:
    """A hook on a tensor is traced, too; it is the one on a module that is not."""
    y = x * 2
    y.register_hook(lambda gradient: gradient * 2)
    return y + 1


case("print", 2, "print", prints, does_not_print, "Remove the print")
case("item", 2, "tensor value read on the host", reads_a_value, keeps_the_value, "Keep the value on the device")
case("data-dependent branch", 2, "branch on a tensor's value", branches, selects, "torch.where(condition, a, b)")
case("nonzero", 2, "result of data-dependent size", selects_rows, selects_at_most, "torch.nonzero_static(x, size=n)")
case("mask", 2, "result of data-dependent size", masks, masks_in_place, "torch.where(mask, x, 0)")
case("try around a tensor operation", 2, "compilation fails", tries, decides_by_shape, "if x.shape[0] % 3 == 0")
case(
    "value read inside try", 2, "tensor value read on the host", branches_in_try, saturates, "Keep the value on the device"
)
case("C extension", 2, "call into C", calls_c, called_before, "call it before")
case("pybind", 2, "call into C", calls_pybind, asked_before, "ts result in")
case("generator function", 2, "generator function", yields, stacks, "Return a tuple or a stacked tensor")
case("generator", 2, "generator from outside", asks_generator, takes_number, "Pass the next value as an argument",
     lambda: (torch.ones(4), counting()), lambda: (torch.ones(4), torch.tensor(1)))  # fmt: skip
case("deepcopy of a tensor", 2, "copy.deepcopy of a tensor", copies, clones, "x.clone()")
case("deepcopy in forward", 2, "copy.deepcopy of a tensor", Copying(True), Copying(False), "once, in __init__")
case("random number of Python", 2, "random number or clock of Python", rolls_dice, rolls_in_torch, "torch.rand")
case("NumPy generator", 2, "NumPy function", draws_in_numpy, rolls_in_torch, "Use the torch function")
case("logging", 2, "logging", logs, does_not_print, "Move the logging call out")
case("lock", 2, "context manager", locks, does_not_print, "outside of the compiled function")
case("torch.compiler.disable", 2, "call of a function that is kept out of compilation", calls_kept_out, traces_all,
     "Remove torch.compiler.disable")  # fmt: skip
case("backward hook of a module", 2, "backward hook of a module", Hooked(True), Hooked(False), "Remove the hook")
case("print in each layer", 2, "print", Layers(True), Layers(False), "Remove the print")
case("set iteration", 2, "", None, iterates_over_sets)
case("generator inside", 2, "", None, yields_inside)
case("tensor hook", 2, "", None, hooks_a_tensor, inputs=lambda: (torch.ones(4, requires_grad=True),))

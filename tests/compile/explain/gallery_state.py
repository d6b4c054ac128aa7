"""Pairs of the gallery about recompilations (stage 3), and about what keeps a call from being a CUDA graph (4), as far as
it shows without a device."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.compile.explain.gallery_case import case


class ListCache(nn.Module):
    """A cache that grows by a tensor a call."""

    def __init__(self):
        super().__init__()
        self.keys = []

    def forward(self, x: Tensor) -> Tensor:
        self.keys.append(x)  # row
        return torch.stack(self.keys).sum(0)


class GrowingCache(nn.Module):
    """A cache that is one tensor, longer at every call."""

    def __init__(self):
        super().__init__()
        self.keys = torch.zeros(1, 4)

    def forward(self, x: Tensor) -> Tensor:  # row
        self.keys = torch.cat([self.keys, x[None]])
        return self.keys.sum(0)


class StaticCache(nn.Module):
    """A cache of its largest size, written at a position on the device."""

    def __init__(self):
        super().__init__()
        self.register_buffer("keys", torch.zeros(64, 4))
        self.register_buffer("position", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.keys.index_copy_(0, self.position, x[None])
        self.position.add_(1)
        return self.keys.sum(0)


class Counter(nn.Module):
    """Counts its calls in Python."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1  # row
        return x * self.calls


class DeviceCounter(nn.Module):
    """Counts its calls in a tensor."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x * self.calls


def repeats(x: Tensor, n: int) -> Tensor:
    return x * n  # row


def repeats_tensor(x: Tensor, n: Tensor) -> Tensor:
    return x * n


STEP = 0
STEP_TENSOR = torch.zeros(())
SEEN: set[int] = set()


def counts_globally(x: Tensor) -> Tensor:
    global STEP
    STEP += 1  # row
    return x * STEP


def counts_in_a_tensor(x: Tensor) -> Tensor:
    STEP_TENSOR.add_(1)
    return x * STEP_TENSOR


def adds_to_a_set(x: Tensor) -> Tensor:
    SEEN.add(len(SEEN))  # row
    for k in SEEN:
        x = x + k
    return x


def doubles(x: Tensor) -> Tensor:  # row
    return x * 2


def of(*tensors: Tensor) -> Callable[[], list]:
    return lambda: [(tensor,) for tensor in tensors]


def padded(x: Tensor) -> Tensor:
    return nn.functional.pad(x, (0, 8 - x.shape[0]))


SIZES = [torch.ones(n) for n in (3, 5, 7)]
DTYPES = [torch.ones(4), torch.ones(4, dtype=torch.float64)]
LAYOUTS = [torch.ones(4, 4), torch.ones(4, 8)[:, ::2]]
RANKS = [torch.ones(4), torch.ones(1, 4)]

case("growing list", 3, "length of a list changed", ListCache(), StaticCache(), "index_copy_")
case("growing cache", 3, "size changed", GrowingCache(), StaticCache(), "Allocate it once at its largest size")
case("counter in a module", 3, "attribute changed", Counter(), DeviceCounter(), "a registered buffer, changed in place")
case("global state", 3, "global changed", counts_globally, counts_in_a_tensor, "Keep it in a tensor")
case("set that changes", 3, "global changed", adds_to_a_set, counts_in_a_tensor, "Keep it in a tensor")
case("Python int", 3, "Python int changed", repeats, repeats_tensor, "Pass it as a tensor",
     lambda: [(torch.ones(4), n) for n in (2, 3)], lambda: [(torch.ones(4), torch.tensor(n)) for n in (2, 3)])  # fmt: skip
case("other size", 3, "size changed", doubles, doubles, "pad to them", of(*SIZES), of(*map(padded, SIZES)))
case("other dtype", 3, "dtype changed", doubles, doubles, "x.to(dtype)", of(*DTYPES), of(*(t.float() for t in DTYPES)))
case(
    "other strides",
    3,
    "strides changed",
    doubles,
    doubles,
    "x.contiguous()",
    of(*LAYOUTS),
    of(*(t.contiguous() for t in LAYOUTS)),
)
case(
    "other rank",
    3,
    "number of dimensions changed",
    doubles,
    doubles,
    "flatten",
    of(*RANKS),
    of(*(t.flatten() for t in RANKS)),
)


def changes_argument(x: Tensor) -> Tensor:
    x.add_(1)  # row
    return x * 2


def leaves_argument(x: Tensor) -> Tensor:
    x = x + 1
    return x * 2


case("mutated input", 4, "argument changed in place", changes_argument, leaves_argument, "return a new tensor")

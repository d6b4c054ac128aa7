"""What the launches of all kernels share that stream weights through shared memory (stream.cuh)."""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.ops.kernels.build import Kernel, kernel
from dsv4.ops.kernels.limits import SHARED_BYTES, raised

BF16, FP8, FP4 = 0, 1, 2
STATIC_BYTES = 4096  # what a kernel may declare besides its dynamic shared memory
# Shared memory of which a multiprocessor has not room for two blocks, and what it has room for beside one of those. Blocks
# come while the kernel before still runs: where that has few, an idle multiprocessor would get two and be late with both.
ALONE, BESIDE = 114 * 1024, 110 * 1024


def ceil(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def defines(**values: int) -> tuple[str, ...]:
    """What a kernel is compiled with, by name."""
    return tuple(f"{name}={value}" for name, value in values.items())


@dataclass(frozen=True)
class Format:
    """One weight format: its number in stream.cuh, its name, bytes of a row of k values, values in 128 bytes."""

    number: int
    name: str

    def row_bytes(self, k: int) -> int:
        return (2 * k, k, k // 2)[self.number]

    @property
    def step_values(self) -> int:
        return (64, 128, 256)[self.number]

    def check(self, k: int, what: str) -> None:
        """ValueError unless rows of k values can be copied in pieces of 16 bytes, NVFP4 scales of 4."""
        multiple = (8, 16, 64)[self.number]
        if k <= 0 or k % multiple:
            raise ValueError(f"{what}: {self.name} weights need an input width divisible by {multiple}, found {k}")


FORMATS = (Format(BF16, "bf16"), Format(FP8, "FP8"), Format(FP4, "NVFP4"))


class Weight(NamedTuple):
    """A weight as the ops take it, or a stack of them: codes [..., N, width]; scales of their blocks, for NVFP4 in E4M3 and
    for FP8 in float32; the float32 scale_2 of NVFP4, one or one a row, in a stack one or two a matrix."""

    codes: Tensor
    scales: Tensor | None = None
    scale_2: Tensor | None = None

    @property
    def number(self) -> int:
        """That of its format."""
        return {torch.uint8: FP4, torch.float8_e4m3fn: FP8}.get(self.codes.dtype, BF16)

    @property
    def row_scales(self) -> bool:
        """Whether each row has a scale_2 of its own."""
        return self.scale_2 is not None and self.scale_2.dim() > 0


@functools.cache
def processors(device: int) -> int:
    """How many SMs the device has."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def steps_of(form: Format, k: int, ranks: int = 1) -> int:
    """Steps of 128 bytes of a row, of the share that one of `ranks` blocks has."""
    steps = -(-form.row_bytes(k) // 128)
    return -(-steps // ranks)


def clusters(sms: int, ranks: int) -> int:
    """Clusters of `ranks` blocks, one block an SM, that run at a time: of an H200's 132 SMs, in parts of 8 to 18, there are
    66 of 2, 30 of 4 and 15 of 8 (cuOccupancyMaxActiveClusters). One more, and a launch takes twice as long."""
    return sms // ranks if ranks <= 2 else sms * 10 // 11 // ranks


def ready(source: str, function: str, *defines: str) -> Kernel:
    """The kernel, allowed as much shared memory as a block can have."""
    return raised(kernel(source, function, *defines), SHARED_BYTES - STATIC_BYTES)


def rows_of(x: Tensor, width: int) -> Tensor:
    """x as contiguous [rows, width] that starts at a multiple of 16 bytes."""
    x = x.reshape(-1, width).contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def check_weight(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    """ValueError unless a weight is what the kernel reads: dtype, shape, contiguous, 16-byte aligned, on the device."""
    if tensor.dtype != dtype or tuple(tensor.shape) != shape or tensor.device != device:
        raise ValueError(
            f"{name}: found {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, expected {dtype} {shape} on {device}"
        )
    if not tensor.is_contiguous() or tensor.data_ptr() % 16:
        raise ValueError(f"{name}: expected a contiguous tensor that starts at a multiple of 16 bytes")

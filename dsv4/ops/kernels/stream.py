"""Launch plans of the kernels that stream weights through shared memory (stream.cuh)."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.ops.kernels.build import Kernel, kernel
from dsv4.ops.kernels.limits import SHARED_BYTES, raised

BF16, FP8, FP4 = 0, 1, 2
MAX_STAGES = 12
MAX_TOKENS = 64
STATIC_BYTES = 4096  # what a kernel may declare besides its dynamic shared memory


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


@functools.cache
def processors(device: int) -> int:
    """How many SMs the device has."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@dataclass(frozen=True)
class Plan:
    """Warps, warps that split K, tiles of 8 tokens, blocks that split K, ring stages, dynamic shared memory in bytes."""

    warps: int
    kw: int
    tiles: int
    ranks: int
    stages: int
    shared: int
    tail: bool

    def defines(self, number: int) -> tuple[str, ...]:
        named = {"FMT": number, "WARPS": self.warps, "KW": self.kw, "NT": self.tiles, "STAGES": self.stages}
        return *(f"{key}={value}" for key, value in named.items()), f"TAIL={int(self.tail)}"

    @property
    def threads(self) -> int:
        return self.warps * 32


def steps_of(form: Format, k: int, ranks: int = 1) -> int:
    """Steps of 128 bytes of a row, of the share that one of `ranks` blocks has."""
    steps = -(-form.row_bytes(k) // 128)
    return -(-steps // ranks)


def ring_plan(form: Format, k: int, rows: int, warps: int, kw: int, tiles: int = 1, ranks: int = 1) -> Plan | None:
    """The plan whose rings take the shared memory that `rows` rows of activations leave. None if that is not enough."""
    stage = warps * (16 * 144 + (256 if form.number == FP4 else 0))
    fixed = warps * tiles * 1024 + 256 + rows * (steps_of(form, k, ranks) * form.step_values * 2 + 64)
    stages = min(MAX_STAGES, (SHARED_BYTES - STATIC_BYTES - fixed) // stage)
    if stages < 3:
        return None
    whole = 256 if form.number == FP4 else form.step_values  # NVFP4 scales come in pieces of 16 bytes
    return Plan(warps, kw, tiles, ranks, stages, fixed + stages * stage, k % whole != 0)


def clocks(form: Format, plan: Plan, tokens: int, n: int, k: int, groups: int, sms: int) -> float:
    """Rough estimate of a linear's duration, to choose among plans: instructions or bytes, and what a tile costs."""
    rw, steps = plan.warps // plan.kw, steps_of(form, k, plan.ranks)
    tiles = groups * -(-(n // groups) // (16 * rw))
    items = -(-tiles // min(tiles, clusters(sms, plan.ranks)))
    step = (120, 280, 560)[form.number] + (2, 4, 8)[form.number] * 4 * (plan.tiles - 1)
    issue = items * -(-steps // plan.kw) * plan.warps / 4 * step
    in_flight = plan.stages * plan.warps * 2304
    bandwidth = items * rw * steps * (2304 if form.number == FP4 else 2048) / (17 * min(1, in_flight / 65536))
    outputs = -(-plan.tiles * 128 * rw // (plan.threads * plan.ranks))
    tile = 800 + outputs * (30 + 6 * plan.kw * plan.ranks) + (1000 if plan.ranks > 1 else 0)
    stage = 1000 + tokens * steps * form.step_values / 8 / plan.threads * 30
    return max(issue, bandwidth) + items * tile + stage


@functools.cache
def linear_plan(number: int, tokens: int, n: int, k: int, groups: int, sms: int) -> Plan | None:
    """How linear() runs `tokens` (1 to 64) tokens; None if their activations leave no room in shared memory."""
    form = FORMATS[number]
    tiles = next(t for t in (1, 2, 4, 8) if tokens <= 8 * t)
    best = None
    for warps in (8, 12, 14, 16) if tiles <= (1 if number == FP8 else 2) else (8,):
        for kw in (w for w in (1, 2, 4, 6, 7, 8, 12, 14, 16) if warps % w == 0):
            for ranks in (1, 2, 4, 8):
                plan = ring_plan(form, k, tokens, warps, kw, tiles, ranks)
                if plan is None or (ranks > 1 and steps_of(form, k) < ranks * kw):
                    continue
                cost = clocks(form, plan, tokens, n, k, groups, sms)
                if best is None or cost < best[0]:
                    best = cost, plan
    return best and best[1]


def clusters(sms: int, ranks: int) -> int:
    """Clusters of `ranks` blocks, one block an SM, that run at a time (an H200's parts hold 16 or 18 SMs each)."""
    return sms // ranks if ranks <= 2 else sms // 16 * 16 // ranks


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


def run_linear(
    number: int,
    x: Tensor,
    codes: Tensor,
    scales: Tensor | None,
    scale_2: Tensor | None,
    y: Tensor,
    groups: int = 1,
    pdl: bool = True,
    plan: Plan | None = None,
) -> None:
    """y [tokens, n] = x [tokens, groups * k] W^T; y bf16 or float32. At most 64 tokens a launch, and half of them where
    they do not fit into shared memory."""
    tokens, n = y.shape
    k = x.shape[-1] // groups
    sms = processors(x.device.index)
    if plan is None and tokens <= MAX_TOKENS:
        plan = linear_plan(number, tokens, n, k, groups, sms)
    if plan is None:
        if tokens == 1:
            raise ValueError(f"linear: an input width of {k} does not fit in shared memory")
        half = min(MAX_TOKENS, (tokens + 15) // 16 * 8)
        for part in (slice(0, half), slice(half, None)):
            run_linear(number, x[part], codes, scales, scale_2, y[part], groups, pdl)
        return
    defines = plan.defines(number) + (("OUT_FP32=1",) if y.dtype == torch.float32 else ())
    function = ready("gemv_linear.cu", "linear", *defines)
    grid = min(groups * -(-(n // groups) // (16 * (plan.warps // plan.kw))), clusters(sms, plan.ranks))
    cluster = plan.ranks if plan.ranks > 1 else None
    function(
        grid, plan.threads, x, codes, scales, scale_2, y, tokens, n, k, groups, plan.ranks,
        shared=plan.shared, cluster=cluster, pdl=pdl,
    )  # fmt: skip


def dequantize(number: int, codes: Tensor, scales: Tensor, n: int, k: int) -> Tensor:
    """bf16 [n, k] of FP8-block weights; of NVFP4 weights without their scale_2 (then exact)."""
    out = torch.empty((n, k), dtype=torch.bfloat16, device=codes.device)
    groups = (k + 7) // 8 * n
    name = {FP8: "dequantize_fp8", FP4: "dequantize_fp4"}[number]
    kernel("gemv_dequantize.cu", name, "THREADS=256")(-(-groups // 256), 256, codes, scales, out, n, k)
    return out

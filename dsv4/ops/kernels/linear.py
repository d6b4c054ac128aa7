"""Launches of the linear kernels: gemv_linear.cu and gemv_project.cu for up to 64 tokens, the library's GEMMs for more."""

import functools
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace

import torch
from torch import Tensor

from dsv4.ops.kernels.build import kernel
from dsv4.ops.kernels.limits import SHARED_BYTES
from dsv4.ops.kernels.stream import (
    BF16,
    FORMATS,
    FP4,
    FP8,
    STATIC_BYTES,
    Format,
    check_weight,
    clusters,
    processors,
    ready,
    steps_of,
)

MAX_TOKENS = 64
STAGES = 6, 4, 3  # few choices, since each is a kernel to be compiled
SUMS_BYTES = 24 * 1024  # of the warps' sums, where they need not all be kept
NEIGHBOURLY = 110 * 1024  # shared memory that leaves room for a block of the next kernel of the stream
LIMITS = NEIGHBOURLY, SHARED_BYTES - STATIC_BYTES


def ceil(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


@dataclass(frozen=True)
class Plan:
    """How product.cuh divides the work: warps, warps that split K, tiles of 8 tokens, blocks of a cluster that split K,
    ring stages, tiles of sums kept and how often, parts of the rows, dynamic shared memory in bytes."""

    warps: int
    kw: int
    nt: int
    ranks: int
    stages: int
    slots: int
    buffers: int
    parts: int
    shared: int

    def defines(self, tail: bool) -> tuple[str, ...]:
        named = {"WARPS": self.warps, "KW": self.kw, "NT": self.nt, "STAGES": self.stages, "TAIL": int(tail)}
        return tuple(f"{key}={value}" for key, value in named.items())

    @property
    def threads(self) -> int:
        return self.warps * 32

    @property
    def cluster(self) -> int | None:
        return self.ranks if self.ranks > 1 else None


@dataclass(frozen=True)
class Work:
    """One product: format, tokens, rows, width, groups of rows, whether a norm comes first."""

    form: Format
    tokens: int
    n: int
    k: int
    groups: int = 1
    norm: bool = False

    @property
    def tail(self) -> bool:
        """Whether rows do not fill steps of 128 bytes; NVFP4 scales come in pieces of 16 bytes, for 256 values."""
        return self.k % self.form.step_values != 0

    def rows_of(self, parts: int) -> int:
        """The most rows that one of `parts` parts has."""
        rows, each = self.n // self.groups, parts // self.groups
        return ceil(rows, each) if rows % 4 else ceil(rows // 4, each) * 4


@dataclass(frozen=True)
class Cut:
    """How a block's work is cut: warps, warps that split K, tiles of 8 tokens, blocks that split K."""

    warps: int
    kw: int
    nt: int
    ranks: int

    @staticmethod
    def all(tokens: int, norm: bool = False) -> Iterator["Cut"]:
        nt = next(t for t in (1, 2, 4, 8) if tokens <= 8 * t)
        for ranks in (1,) if norm else (1, 2, 4, 8):  # the norm needs whole rows
            for warps in (12, 8) if nt in (2, 4) else (8,):
                yield from (Cut(warps, kw, nt, ranks) for kw in (1, 2, 4, 8) if warps % kw == 0)


def layout(work: Work, cut: Cut, parts: int, most: int) -> Plan | None:
    """The plan with as many ring stages as `most` bytes of shared memory allow; None if they allow none, or if a warp
    or block would have no share of K."""
    form, rows, steps = work.form, work.rows_of(parts), steps_of(work.form, work.k, cut.ranks)
    if cut.kw > steps or (cut.ranks - 1) * steps >= steps_of(form, work.k):
        return None
    rounds = ceil(rows, 16 * (cut.warps // cut.kw))
    slot = cut.warps * work.tokens * 80
    if cut.ranks > 1 or (cut.kw > 1 and rounds * slot <= SUMS_BYTES):
        slots, buffers = rounds, 1
    elif cut.kw > 1 and slot <= SUMS_BYTES // 2:
        slots, buffers = SUMS_BYTES // 2 // slot, 2
    else:
        slots, buffers = 1, 1
    fixed = work.tokens * (steps * form.step_values * 2 + 64) + (4 * work.k if work.norm else 0)
    if form.number == FP8:
        fixed += ceil(((rows - 2) // 128 + 2) * steps, 4) * 16
    stage = cut.warps * (2304 if form.number == FP4 else 2048)
    for kept in (slots, 1):
        used = fixed + buffers * kept * slot
        for stages in STAGES:
            if used + stages * stage <= most:
                return Plan(*astuple(cut), stages, kept, buffers, parts, used + stages * stage)
    return None


def clocks(work: Work, plan: Plan) -> float:
    """Rough estimate of a block's duration, to choose among plans: instructions and bytes, what comes before and after."""
    form, rows, steps = work.form, work.rows_of(plan.parts), steps_of(work.form, work.k, plan.ranks)
    rounds = ceil(rows, 16 * (plan.warps // plan.kw))
    products = form.step_values // 16 * plan.nt
    step = (130, 160, 390)[form.number] + 9 * products
    issue = plan.warps / 4 * rounds * (ceil(steps, plan.kw) * step + 80)
    bandwidth = rows * steps * (2304 if form.number == FP4 else 2048) / 16 / 17
    stage = 1000 + work.tokens * steps * form.step_values / 8 / plan.threads * 25
    sums = rows * work.tokens * plan.kw / plan.threads * (12 if plan.nt == 1 else 60)
    alone = 1500 if plan.shared > NEIGHBOURLY else 0  # the next kernel cannot start its rings beside it
    cluster = ceil(rounds, plan.slots) * (3000 + 1500 * plan.ranks) if plan.ranks > 1 else 0
    return max(issue, bandwidth) + 0.3 * min(issue, bandwidth) + stage + sums + alone + cluster


@functools.cache
def linear_plan(work: Work, sms: int) -> Plan | None:
    """How to run 1 to 64 tokens; None if their activations leave no room in shared memory."""
    plans = []
    for cut in Cut.all(work.tokens, work.norm):
        parts = work.groups * max(1, min(work.n, clusters(sms, cut.ranks)) // work.groups)
        plans += [plan for most in LIMITS if (plan := layout(work, cut, parts, most))]
    return min(plans, key=lambda plan: (-plan.warps, clocks(work, plan)), default=None)


def check_linear(op_name: str, number: int, x: Tensor, n: int, groups: int = 1, norm: Tensor | None = None) -> None:
    """ValueError unless the kernels can multiply x [..., k], or [..., groups, k], with a weight [n, k] of this format."""
    k = x.shape[-1]
    if x.dtype != torch.bfloat16:
        raise ValueError(f"{op_name}: x has dtype {x.dtype}, expected bfloat16 or float32")
    FORMATS[number].check(k, op_name)
    if n % groups or (groups > 1 and (x.dim() < 2 or x.shape[-2] != groups)):
        raise ValueError(f"{op_name}: {groups} groups do not fit x {tuple(x.shape)} and {n} rows")
    if norm is not None:
        check_weight(f"{op_name} norm", norm, torch.float32, (k,), x.device)


def strided_rows(x: Tensor, groups: int = 1) -> Tensor:
    """x [..., groups, k] or [..., k] as [rows, groups * k] whose rows are contiguous and start at multiples of 16 bytes; a
    copy only where x is not like that."""
    if groups > 1:
        x = x.flatten(-2)  # a view if the groups stand side by side
    rows = x.reshape(-1, x.shape[-1])
    stride = rows.stride(0) if len(rows) > 1 else 0
    aligned = rows.stride(-1) == 1 and stride % 8 == 0 and rows.data_ptr() % 16 == 0
    return rows if aligned else rows.clone(memory_format=torch.contiguous_format)


def linear(
    number: int,
    x: Tensor,
    codes: Tensor,
    scales: Tensor | None,
    scale_2: Tensor | None,
    groups: int = 1,
    norm: Tensor | None = None,
    eps: float = 0.0,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """[..., n] of `dtype` from at most 64 rows x [..., k] or [..., groups, k] and n rows of codes."""
    n = codes.shape[0]
    rows = strided_rows(x, groups)
    y = torch.empty((len(rows), n), dtype=dtype, device=x.device)
    if len(rows) and n:
        run_linear(number, rows, codes, scales, scale_2, y, groups, norm, eps)
    return y.view(*x.shape[: -1 if groups == 1 else -2], n)


def run_linear(
    number: int,
    x: Tensor,
    codes: Tensor,
    scales: Tensor | None,
    scale_2: Tensor | None,
    y: Tensor,
    groups: int = 1,
    norm: Tensor | None = None,
    eps: float = 0.0,
    pdl: bool = True,
    plan: Plan | None = None,
) -> None:
    """y [tokens, n] = x [tokens, groups * k] W^T; y bf16 or float32. At most 64 tokens a launch, and half of them where
    they do not fit into shared memory."""
    tokens, n = y.shape
    k = x.shape[-1] // groups
    work = Work(FORMATS[number], tokens, n, k, groups, norm is not None)
    plan = plan or linear_plan(work, processors(x.device.index))
    if plan is None:
        if tokens == 1:
            raise ValueError(f"linear: an input width of {k} does not fit in shared memory")
        half = (tokens + 15) // 16 * 8
        for part in (slice(0, half), slice(half, None)):
            run_linear(number, x[part], codes, scales, scale_2, y[part], groups, norm, eps, pdl)
        return
    out = "float" if y.dtype == torch.float32 else "__nv_bfloat16"
    function = ready("gemv_linear.cu", "linear", f"FMT={number}", f"OUT={out}", *plan.defines(work.tail))
    function(
        plan.parts, plan.threads, x, norm, codes, scales, scale_2, y, tokens, n, k, groups, x.stride(0),
        int(scale_2 is not None and scale_2.dim() > 0), plan.slots, plan.buffers,
        eps, plan.ranks, shared=plan.shared, cluster=plan.cluster, pdl=pdl,
    )  # fmt: skip


@functools.cache
def project_plans(tokens: int, n: int, m: int, k: int, sms: int) -> tuple[Plan, Plan] | None:
    """Plans of the FP8 and of the bf16 rows that share a launch; None if the activations leave no room in shared memory."""
    works = Work(FORMATS[FP8], tokens, n, k), Work(FORMATS[BF16], tokens, m, k)
    plans = []
    for cut in Cut.all(tokens):
        total = clusters(sms, cut.ranks)
        for share in range(1, total):
            parts = min(n, share), min(m, total - share)
            for most in LIMITS:
                pair = tuple(layout(work, cut, count, most) for work, count in zip(works, parts, strict=True))
                if None not in pair:
                    plans.append(pair)
    return min(plans, key=lambda pair: (-pair[0].warps, max(map(clocks, works, pair))), default=None)


def project(x: Tensor, codes: Tensor, scales: Tensor, plain: Tensor) -> tuple[Tensor, Tensor]:
    """bf16 [..., N] and float32 [..., M] from at most 64 rows x [..., k], FP8 [N, k] and bf16 [M, k]."""
    rows = strided_rows(x)
    y = torch.empty((len(rows), len(codes)), dtype=torch.bfloat16, device=x.device)
    z = torch.empty((len(rows), len(plain)), dtype=torch.float32, device=x.device)
    if len(rows):
        run_project(rows, codes, scales, plain, y, z)
    return y.view(*x.shape[:-1], len(codes)), z.view(*x.shape[:-1], len(plain))


def run_project(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    plain: Tensor,
    y: Tensor,
    z: Tensor,
    pdl: bool = True,
    plans: tuple[Plan, Plan] | None = None,
) -> None:
    """Fill y bf16 [tokens, N] and z float32 [tokens, M]."""
    tokens, k = x.shape
    n, m = y.shape[1], z.shape[1]
    if n and m:
        plans = plans or project_plans(tokens, n, m, k, processors(x.device.index))
    if not plans:  # nothing to share a launch, or no room for all tokens
        if n:
            run_linear(FP8, x, codes, scales, None, y, pdl=pdl)
        if m:
            run_linear(BF16, x, plain, None, None, z, pdl=pdl)
        return
    first, second = plans
    stages = min(first.stages, second.stages)
    defines = replace(first, stages=stages).defines(k % FORMATS[FP8].step_values != 0)
    ready("gemv_project.cu", "project", *defines)(
        first.parts + second.parts, first.threads, x, codes, scales, y, n, plain, z, m, tokens, k, x.stride(0),
        first.slots, first.buffers, second.slots, second.buffers,
        first.parts, first.ranks,
        shared=max(first.shared, second.shared), cluster=first.cluster, pdl=pdl,
    )  # fmt: skip


def grouped_matmul(x: Tensor, weight: Tensor, groups: int = 1, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """[..., n] of `dtype` from bf16 x [..., k] or [..., groups, k] and weight [n, k], by the library."""
    n, k = weight.shape
    if groups == 1:
        return torch.mm(x.reshape(-1, k), weight.T, out_dtype=dtype).view(*x.shape[:-1], n)
    rows = x.reshape(-1, groups, k).transpose(0, 1)
    y = torch.bmm(rows, weight.view(groups, n // groups, k).transpose(1, 2), out_dtype=dtype)
    return y.transpose(0, 1).reshape(*x.shape[:-2], n)


def dequantize(number: int, codes: Tensor, scales: Tensor, n: int, k: int) -> Tensor:
    """bf16 [n, k] of FP8-block weights; of NVFP4 weights without their scale_2 (then exact)."""
    out = torch.empty((n, k), dtype=torch.bfloat16, device=codes.device)
    groups = (k + 7) // 8 * n
    name = {FP8: "dequantize_fp8", FP4: "dequantize_fp4"}[number]
    kernel("gemv_dequantize.cu", name, "THREADS=256")(-(-groups // 256), 256, codes, scales, out, n, k)
    return out

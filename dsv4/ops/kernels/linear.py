"""Launches of the linear kernels: gemv_*.cu for few tokens, gemm_*.cu (gemm.py) up to 128, the library's GEMMs for more."""

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsv4.ops.kernels import gemm, gemv_nvfp4
from dsv4.ops.kernels.build import kernel
from dsv4.ops.kernels.limits import SHARED_BYTES
from dsv4.ops.kernels.stream import (
    ALONE,
    BESIDE,
    BF16,
    FORMATS,
    FP4,
    FP8,
    STATIC_BYTES,
    Weight,
    ceil,
    check_weight,
    clusters,
    defines,
    processors,
    ready,
    steps_of,
)

MAX_TOKENS = 128
FEW = 8  # tokens that product.cuh takes at most
WARPS = 8
STAGES = 6, 5, 4, 3
SUMS_BYTES = 24 * 1024  # of the warps' sums, where they need not all be kept
ACTIVATION_BYTES = 32 * 1024  # of all tokens that a block should have at most: it takes in some 25 bytes a clock
WITH_ATTENTION = 118 * 1024  # what there is room for beside a block of attention of one token
WHOLE = SHARED_BYTES - STATIC_BYTES


@dataclass(frozen=True)
class Plan:
    """How product.cuh divides the work: warps that split K, blocks of a cluster that split K, a warp's steps of a tile, the
    most columns, ring stages, tiles of sums kept and how often, parts of the rows, dynamic shared memory in bytes."""

    kw: int
    ranks: int
    steps: int
    most: int
    stages: int
    slots: int
    buffers: int
    parts: int
    shared: int

    def defines(self, tail: bool) -> tuple[str, ...]:
        return defines(WARPS=WARPS, KW=self.kw, NT=1, STAGES=self.stages, TAIL=int(tail), STEPS=self.steps, MOST=self.most)

    @property
    def threads(self) -> int:
        return WARPS * 32

    @property
    def cluster(self) -> int | None:
        return self.ranks if self.ranks > 1 else None


@dataclass(frozen=True)
class Work(gemm.Product):
    """A product of few tokens; `whole`: no blocks split K."""

    whole: bool = False

    @property
    def ranks(self) -> int:
        """Blocks of a cluster that split K; the norm needs whole rows."""
        if self.norm or self.whole:
            return 1
        wanted = (ranks for ranks in (1, 2, 4) if self.tokens * self.k * 2 <= ranks * ACTIVATION_BYTES)
        return next(wanted, 8)

    @property
    def few(self) -> int:
        """Tokens up to which a step takes no longer with product.cuh than with gemm.cuh, as measured on an H200."""
        return 1 if self.norm and self.form.number != FP8 else FEW

    @property
    def leads(self) -> bool:
        """Whether the kernel before has few blocks: attention before groups, hyper-connections before plain weights."""
        return self.groups > 1 or self.form.number == BF16

    @property
    def spans(self) -> bool:
        """Whether a block may have rows of two groups."""
        return self.tokens == 1 and self.groups > 1 and self.n // self.groups % 4 == 0

    @property
    def columns(self) -> int:
        """How many tokens a block multiplies with, or groups of one token."""
        return 2 if self.spans else self.tokens

    def parts(self, sms: int) -> int:
        """Parts of the rows, for one cluster each."""
        if self.spans:
            return max(self.groups, min(self.n // 4, sms))
        return self.groups * max(1, min(self.n, clusters(sms, self.ranks)) // self.groups)

    def rows_of(self, parts: int) -> int:
        """The most rows that one of `parts` parts has."""
        rows, each = (self.n, parts) if self.spans else (self.n // self.groups, parts // self.groups)
        return ceil(rows, each) if rows % 4 else ceil(rows // 4, each) * 4

    def kw(self, parts: int) -> int:
        """Warps that split K: so many that each has few activations to begin with, no more than that, and few idle ones."""
        rows, steps = self.rows_of(parts), steps_of(self.form, self.k, self.ranks)
        most = 256 if self.tokens == 1 else 1024  # values of a token; with more tokens it takes longer to add up sums
        counts = [kw for kw in (1, 2, 4, 8) if kw <= steps]
        counts = [kw for kw in counts if ceil(steps, kw) * self.form.step_values <= most] or counts[-1:]
        turns = [ceil(rows, 16 * (WARPS // kw)) * ceil(steps, kw) for kw in counts]
        return next(kw for kw, turn in zip(counts, turns, strict=True) if turn <= 1.25 * min(turns))


def layout(work: Work, kw: int, parts: int, most: int, least: int = 0) -> Plan | None:
    """The plan with as many ring stages as `most` bytes of shared memory allow, and `least` bytes; None if none is."""
    form, columns, ranks = work.form, work.columns, work.ranks
    rows, steps = work.rows_of(parts), steps_of(form, work.k, ranks)
    rounds = ceil(rows, 16 * (WARPS // kw))
    slot = WARPS * columns * 80
    if ranks > 1 or (kw > 1 and rounds * slot <= SUMS_BYTES):
        slots, buffers = rounds, 1
    elif kw > 1:
        slots, buffers = SUMS_BYTES // 2 // slot, 2
    else:
        slots, buffers = 1, 1
    used = columns * (steps * form.step_values * 2 + 64) + (4 * work.k if work.norm else 0) + buffers * slots * slot
    if form.number == FP8:
        used += ceil(((rows - 2) // 128 + 2) * steps, 4) * 16
    if ranks > 1:
        used += ceil(ceil(rows, 4) * columns, ranks) * ranks * 16
    stage = WARPS * (2304 if form.number == FP4 else 2048)
    for stages in STAGES:
        if used + stages * stage <= most:
            limit = FEW if work.tokens > 1 else columns
            shared = max(used + stages * stage, least)
            return Plan(kw, ranks, ceil(steps, kw), limit, stages, slots, buffers, parts, shared)
    return None


def limits(tokens: int, leads: bool) -> tuple[int, ...]:
    """Shared memory of a block to be tried; with several tokens attention leaves no room beside it anyway."""
    return (WITH_ATTENTION if leads else BESIDE, WHOLE) if tokens == 1 else (WHOLE,)


@functools.cache
def linear_plan(work: Work, sms: int) -> Plan | None:
    """How to run 1 to 8 tokens; None if their activations leave no room in shared memory."""
    parts = work.parts(sms)
    sizes = limits(work.tokens, work.leads)
    plans = (layout(work, work.kw(parts), parts, most, ALONE if work.leads else 0) for most in sizes)
    plan = next((plan for plan in plans if plan), None)
    if plan is None and work.ranks > 1:  # a cluster keeps the sums of all its rows
        return linear_plan(replace(work, whole=True), sms)
    return plan


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
    x: Tensor,
    weight: Weight,
    groups: int = 1,
    norm: Tensor | None = None,
    eps: float = 0.0,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """[..., n] of `dtype` from at most 128 rows x [..., k] or [..., groups, k] and a weight of n rows."""
    n = len(weight.codes)
    rows = strided_rows(x, groups)
    y = torch.empty((len(rows), n), dtype=dtype, device=x.device)
    if len(rows) and n:
        run_linear(rows, weight, y, groups, norm, eps)
    return y.view(*x.shape[: -1 if groups == 1 else -2], n)


def halves(tokens: int) -> tuple[slice, slice]:
    """Of the tokens of a launch that there is no room for."""
    half = tokens // 2 if tokens <= FEW else (tokens + 15) // 16 * 8
    return slice(0, half), slice(half, None)


def run_linear(x: Tensor, weight: Weight, y: Tensor, groups: int = 1, norm: Tensor | None = None, eps: float = 0.0) -> None:
    """y [tokens, n] = x [tokens, groups * k] W^T; y bf16 or float32. At most 64 tokens a launch, and half of them where
    they do not fit into shared memory."""
    tokens, n = y.shape
    if tokens == 1 and weight.number == FP4 and gemv_nvfp4.run(x, weight, y, groups=groups, norm=norm, eps=eps):
        return
    k = x.shape[-1] // groups
    work = Work(FORMATS[weight.number], tokens, n, k, groups, norm is not None)
    if tokens > work.few and gemm.run_linear(x, weight, y, groups, norm, eps):
        return
    plan = linear_plan(work, processors(x.device.index)) if tokens <= FEW else None
    if plan is None:
        if tokens == 1:
            raise ValueError(f"linear: an input width of {k} does not fit in shared memory")
        for part in halves(tokens):
            run_linear(x[part], weight, y[part], groups, norm, eps)
        return
    out = "float" if y.dtype == torch.float32 else "__nv_bfloat16"
    kind = f"FMT={weight.number}", f"OUT={out}", f"NORM={int(work.norm)}"
    ready("gemv_linear.cu", "linear", *kind, *plan.defines(work.tail))(
        plan.parts, plan.threads, x, norm, *weight, y, tokens, n, k, groups, x.stride(0), int(weight.row_scales),
        plan.slots, plan.buffers, eps, plan.ranks, shared=plan.shared, cluster=plan.cluster, pdl=True,
    )  # fmt: skip


@functools.cache
def project_plans(
    tokens: int, n: int, m: int, k: int, sms: int, number: int = FP8, exact: int = BF16
) -> tuple[Plan, Plan] | None:
    """Plans of the n rows in format `number` and of the m exact ones in format `exact` that share a launch; None if the
    activations leave no room in shared memory."""
    works = Work(FORMATS[number], tokens, n, k), Work(FORMATS[exact], tokens, m, k)
    total = clusters(sms, works[0].ranks)

    def busiest(parts: tuple[int, int]) -> int:
        """Bytes of weights of the block that has most."""
        return max(work.rows_of(count) * work.form.row_bytes(k) for work, count in zip(works, parts, strict=True))

    parts = min(((min(n, share), min(m, total - share)) for share in range(1, total)), key=busiest)
    kw = works[0].kw(parts[0])
    for most in limits(tokens, leads=True):
        pair = tuple(layout(work, kw, count, most, ALONE) for work, count in zip(works, parts, strict=True))
        if None not in pair:
            return pair
    return None


def project(x: Tensor, weight: Weight, exact: Weight) -> tuple[Tensor, Tensor]:
    """bf16 [..., N] and float32 [..., M] from at most 128 rows x [..., k], and weights of N and of M rows."""
    rows, n, m = strided_rows(x), len(weight.codes), len(exact.codes)
    y = torch.empty((len(rows), n), dtype=torch.bfloat16, device=x.device)
    z = torch.empty((len(rows), m), dtype=torch.float32, device=x.device)
    if len(rows):
        run_project(rows, weight, exact, y, z)
    return y.view(*x.shape[:-1], n), z.view(*x.shape[:-1], m)


def run_project(x: Tensor, weight: Weight, exact: Weight, y: Tensor, z: Tensor) -> None:
    """Fill y bf16 [tokens, N] and z float32 [tokens, M]."""
    tokens, k = x.shape
    n, m, forms = y.shape[1], z.shape[1], (weight.number, exact.number)
    if tokens == 1 and forms == (FP4, FP4) and gemv_nvfp4.run(x, weight, y, exact, z):
        return
    if tokens > FEW and n and m and gemm.run_project(x, weight, exact, y, z):
        return
    if tokens > gemm.TOKENS[-1]:
        for part in halves(tokens):
            run_project(x[part], weight, exact, y[part], z[part])
        return
    plans = None
    if n and m and tokens <= FEW:
        plans = project_plans(tokens, n, m, k, processors(x.device.index), *forms)
    if not plans:  # nothing to share a launch, or no room for all tokens
        if n:
            run_linear(x, weight, y)
        if m:
            run_linear(x, exact, z)
        return
    first, second = plans
    tail = any(k % FORMATS[number].step_values for number in forms)
    both = replace(first, stages=min(first.stages, second.stages)).defines(tail)
    ready("gemv_project.cu", "project", f"FMT={forms[0]}", f"EXACT={forms[1]}", *both, f"EXACT_STEPS={second.steps}")(
        first.parts + second.parts, first.threads, x, *weight, y, n, *exact, z, m, tokens, k, x.stride(0),
        int(weight.row_scales), int(exact.row_scales),
        first.slots, first.buffers, second.slots, second.buffers, first.parts, first.ranks,
        shared=max(first.shared, second.shared), cluster=first.cluster, pdl=True,
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

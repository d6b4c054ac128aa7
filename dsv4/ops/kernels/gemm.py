"""Launches of gemm_linear.cu and gemm_project.cu: linears of up to 64 tokens."""

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsv4.ops.kernels.limits import SHARED_BYTES
from dsv4.ops.kernels.stream import (
    FORMATS,
    FP4,
    FP8,
    STATIC_BYTES,
    Format,
    Weight,
    ceil,
    clusters,
    defines,
    processors,
    ready,
    steps_of,
)

TOKENS = 8, 16, 32, 64  # tokens that a kernel multiplies at a time
STAGES = 8, 6, 4, 3, 2
MOST_BYTES = SHARED_BYTES - STATIC_BYTES
MOST_RING = 100 * 1024
# Tiles whose sums a warp keeps in registers, by warps and tokens at a time.
MOST_TILES = {8: {8: 4, 16: 4, 32: 3, 64: 3}, 12: {8: 3, 16: 3, 32: 2, 64: 1}}


@dataclass(frozen=True)
class Plan:
    """How gemm.cuh divides the work: warps, tokens at a time, tiles of 16 rows that a warp keeps, blocks of a cluster that
    split K, ring stages, pieces of 256 values of a token, clusters, where received sums lie, bytes of shared memory."""

    warps: int
    tokens: int
    tiles: int
    ranks: int
    stages: int
    pieces: int
    parts: int
    received: int
    shared: int

    def defines(self, tail: bool) -> tuple[str, ...]:
        return defines(
            WARPS=self.warps, N=self.tokens, TILES=self.tiles, RANKS=self.ranks, STAGES=self.stages, PIECES=self.pieces,
            TAIL=int(tail), APART=int(self.received > 0),
        )  # fmt: skip

    @property
    def cluster(self) -> int | None:
        return self.ranks if self.ranks > 1 else None


@dataclass(frozen=True)
class Product:
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

    def rows(self, parts: int, of: int) -> int:
        """The most rows that one of `of` shares of one of `parts` parts has."""
        rows, each = self.n // self.groups, parts // self.groups
        granule = 1 if rows % 4 else 4
        return ceil(ceil(rows // granule, each), of) * granule


def layout(work: Product, warps: int, ranks: int, parts: int, stages: tuple[int, ...] = STAGES) -> Plan | None:
    """The plan with the first of `stages` that shared memory has room for; None if there is none, or if a block would have
    no share of K."""
    form, steps = work.form, steps_of(work.form, work.k, ranks)
    tokens = next((t for t in TOKENS if work.tokens <= t), None)
    if tokens is None or tokens < 2 * ranks:  # blocks send each other the sums of two tokens at a time
        return None
    pieces = next((p for p in (4, 8, 16) if steps * form.step_values <= 256 * p), None)
    if pieces is None or (ranks > 1 and (ranks - 1) * steps >= steps_of(form, work.k)):
        return None
    if tokens not in MOST_TILES[warps] or (work.norm and warps > 8 and pieces > 4):  # registers
        return None
    all_tiles = ceil(work.rows(parts, warps), 16)
    tiles = 1 if ranks == 1 else min(all_tiles, MOST_TILES[warps][tokens])
    x = tokens * steps * form.step_values * 2
    sums = warps * tiles * 16 * ceil(tokens, ranks) * ranks * 4 if ranks > 1 else 0
    table = (ceil(work.rows(parts, 1) - 2, 128) + 2) * steps if form.number == FP8 else 0
    for count in stages:
        ring = warps * count * (2304 if form.number == FP4 else 2048)
        used = ceil(x + ring + (ceil(table, 2) * 2 + tokens) * 4 + 8, 16) * 16
        apart = sums and used + sums <= MOST_BYTES
        if not apart and (all_tiles > tiles or sums > x + ring) and ranks > 1:
            continue
        if used <= MOST_BYTES and ring <= MOST_RING:
            return Plan(warps, tokens, tiles, ranks, count, pieces, parts, used if apart else 0, used + sums * bool(apart))
    return None


def clocks(work: Product, plan: Plan) -> float:
    """Rough estimate of a block's duration, to choose among plans as measured on an H200."""
    form, steps = work.form, steps_of(work.form, work.k, plan.ranks)
    rows, tiles = work.rows(plan.parts, 1), ceil(work.rows(plan.parts, plan.warps), 16)
    all_tiles = tiles * plan.warps if plan.ranks > 1 else ceil(rows, 64) * 4
    weights = rows * steps * (144 if form.number == FP4 else 128) / 25
    decode = 1.4 if form.number == FP4 else 1
    multiply = steps * decode * (tiles * 130 + all_tiles * (40 + 0.75 * plan.tokens))
    x = plan.tokens * steps * form.step_values * 2
    sums = plan.warps * plan.tiles * 16 * plan.tokens * 4 * ceil(tiles, plan.tiles)
    exchange = sums / 25 + ceil(tiles, plan.tiles) * (1000 + 320 * plan.ranks) if plan.ranks > 1 else 0
    stage = x * (1 / 25 + plan.tokens / 1700)
    few = 1500 if plan.stages * plan.warps < 32 else 0
    return max(weights, multiply) + 0.3 * min(weights, multiply) + stage + few + exchange


@functools.cache
def linear_plan(work: Product, sms: int) -> Plan | None:
    """How to run up to 64 tokens; None if their activations leave no room in shared memory."""
    plans = []
    for ranks in (1,) if work.norm else (1, 2, 4, 8):  # the norm needs whole rows
        parts = work.groups * max(1, min(work.n, clusters(sms, ranks)) // work.groups)
        plans += [plan for warps in MOST_TILES if (plan := layout(work, warps, ranks, parts))]
    return min(plans, key=functools.partial(clocks, work), default=None)


def run_linear(x: Tensor, weight: Weight, y: Tensor, groups: int, norm: Tensor | None, eps: float) -> bool:
    """y [tokens, n] = x [tokens, groups * k] W^T; y bf16 or float32. False, and nothing done, without a plan."""
    tokens, n = y.shape
    k = x.shape[-1] // groups
    work = Product(FORMATS[weight.number], tokens, n, k, groups, norm is not None)
    plan = linear_plan(work, processors(x.device.index))
    if plan is None:
        return False
    out = "float" if y.dtype == torch.float32 else "__nv_bfloat16"
    kind = f"FMT={weight.number}", f"OUT={out}", f"NORM={int(work.norm)}"
    ready("gemm_linear.cu", "gemm_linear", *kind, *plan.defines(work.tail))(
        plan.parts, plan.warps * 32, x, norm, *weight, y, tokens, n, k, groups, x.stride(0), int(weight.row_scales), eps,
        plan.received, shared=plan.shared, cluster=plan.cluster, pdl=True,
    )  # fmt: skip
    return True


@functools.cache
def project_plans(tokens: int, n: int, m: int, k: int, sms: int, number: int, exact: int) -> tuple[Plan, Plan] | None:
    """Plans of the n rows in format `number` and of the m exact ones in format `exact` that share a launch; None if the
    activations leave no room in shared memory."""
    works = Product(FORMATS[number], tokens, n, k), Product(FORMATS[exact], tokens, m, k)
    plans = []
    for warps in MOST_TILES:
        for ranks in (1, 2, 4, 8):
            total = clusters(sms, ranks)
            for share in range(1, total):
                parts = min(n, share), min(m, total - share)
                for stages in STAGES:
                    pair = tuple(
                        layout(work, warps, ranks, count, (stages,)) for work, count in zip(works, parts, strict=True)
                    )
                    if None not in pair:
                        plans.append(pair)
                        break

    def worth(pair: tuple[Plan, Plan]) -> tuple[bool, float]:
        """12 warps take less than 8, by 4 to 14 % at Flash widths, but not with several exchanges of sums."""
        again = any(work.rows(p.parts, p.warps) > 16 * p.tiles for work, p in zip(works, pair, strict=True))
        return pair[0].warps < 12 or again, max(map(clocks, works, pair))

    return min(plans, key=worth, default=None)


def run_project(x: Tensor, weight: Weight, exact: Weight, y: Tensor, z: Tensor) -> bool:
    """Fill y bf16 [tokens, N] and z float32 [tokens, M]. False, and nothing done, without a plan."""
    tokens, k = x.shape
    n, m, forms = y.shape[1], z.shape[1], (weight.number, exact.number)
    plans = project_plans(tokens, n, m, k, processors(x.device.index), *forms)
    if plans is None:
        return False
    first, second = plans
    ready("gemm_project.cu", "gemm_project", *project_defines(first, second, k, *forms))(
        first.parts + second.parts, first.warps * 32, x, *weight, y, n, *exact, z, m, tokens, k, x.stride(0),
        int(weight.row_scales), int(exact.row_scales), first.parts, first.received, second.received,
        shared=max(first.shared, second.shared), cluster=first.cluster, pdl=True,
    )  # fmt: skip
    return True


def project_defines(first: Plan, second: Plan, k: int, number: int, exact: int) -> tuple[str, ...]:
    """What gemm_project.cu is compiled with."""
    tail = any(k % FORMATS[form].step_values for form in (number, exact))
    shared = replace(first, pieces=max(first.pieces, second.pieces)).defines(tail)
    return (
        f"FMT={number}",
        f"EXACT={exact}",
        *shared,
        *defines(EXACT_TILES=second.tiles, EXACT_APART=int(second.received > 0)),
    )

"""Launch plans of the expert kernels for decode: how warps share rows and K, and what fits into shared memory."""

import functools
import math
from dataclasses import dataclass

from dsv4.ops.kernels.limits import SHARED_BYTES
from dsv4.ops.kernels.stream import BF16, FORMATS, FP4, FP8, STATIC_BYTES, Format, steps_of

MOST_PICKS = 32  # of one token, a shared expert of the stack among them
MAX_STAGES = 6
WHOLE = SHARED_BYTES - STATIC_BYTES
# Warps, tiles of 16 rows a step and shared memory of a block for one token. NVFP4 takes the most arithmetic, and was faster
# in one large block an SM than in small ones that leave room for the next kernel.
BLOCKS = {BF16: (8, 2, 112 * 1024), FP8: (8, 2, 112 * 1024), FP4: (16, 1, 200 * 1024)}
CLOCKS = {BF16: 100, FP8: 200, FP4: 310}  # of a scheduler for a step of 16 rows, in a warp


def _tail(number: int, width: int) -> bool:
    """Whether rows do not fill steps of 128 bytes; NVFP4 scales come in pieces of 16 bytes."""
    return width % (256 if number == FP4 else FORMATS[number].step_values) != 0


def _stage_bytes(number: int, tiles: int) -> int:
    return tiles * (2048 + (256 if number == FP4 else 0))


def _row_bytes(form: Format, width: int) -> int:
    """Of a row of activations in shared memory."""
    return steps_of(form, width) * form.step_values * 2 + 64


@dataclass(frozen=True)
class TokenPlan:
    """Of one launch for one token: warps of the shared expert (of `warps`), parts along K of a routed and of a shared tile,
    ring stages, units a block has at most, dynamic shared memory in bytes; warps, and tiles of 16 rows a step."""

    shared_warps: int
    parts: int
    shared_parts: int
    stages: int
    slots: int
    bytes: int
    tail: bool
    warps: int
    tiles: int

    def defines(self, number: int) -> tuple[str, ...]:
        return (
            *(f"FMT={number}", f"WARPS={self.warps}", "KW=1", "NT=1", f"MT={self.tiles}", f"STAGES={self.stages}"),
            *(f"TAIL={int(self.tail)}", f"SHARED={self.shared_warps}", f"PARTS={self.parts}"),
            f"SHARED_PARTS={self.shared_parts}",
        )


@functools.cache
def token_plan(number: int, gate_up: bool, width: int, rows: int, picks: int, beside: bool, sms: int) -> TokenPlan | None:
    """How a block's tiles are dealt out to its warps in the fewest clocks; `beside`: with a shared expert in FP8. None if
    the activations leave no room in shared memory."""
    warps, step_tiles, most = BLOCKS[number]
    steps, shared_steps = steps_of(FORMATS[number], width), steps_of(FORMATS[FP8], width)
    if gate_up:
        tiles, shared_tiles = (math.ceil(count * math.ceil(rows / (8 * step_tiles)) / sms) for count in (picks, 1))
    else:
        shared_tiles = math.ceil(math.ceil(rows / 8 / sms) / (2 * step_tiles))
        tiles = shared_tiles * picks

    def clocks(count: int, workers: int, parts: int, steps: int, number: int) -> int:
        return math.ceil(count * parts / workers) * (math.ceil(steps / parts) * CLOCKS[number] * step_tiles + 150)

    best = None
    for shared_warps in range(1, warps // 2 + 1) if beside else (0,):
        for parts in divisors(warps - shared_warps):
            for shared_parts in divisors(max(1, shared_warps)):
                cost = clocks(tiles, warps - shared_warps, parts, steps, number)
                if beside:
                    cost = max(cost, clocks(shared_tiles, shared_warps, shared_parts, shared_steps, FP8))
                order = cost, parts + shared_parts
                best = (
                    min(best, (order, (shared_warps, parts, shared_parts)))
                    if best
                    else (order, (shared_warps, parts, shared_parts))
                )
    shared_warps, parts, shared_parts = best[1]
    slots = tiles * parts + (shared_tiles * shared_parts if beside else 0)
    fixed = slots * 64 * step_tiles + (1 if gate_up else picks) * _row_bytes(FORMATS[number], width)
    fixed += _row_bytes(FORMATS[FP8], width) if beside else 0
    stage = warps * _stage_bytes(number, step_tiles)
    stages = min(MAX_STAGES, max(2, (most - fixed) // stage))
    if fixed + stages * stage > WHOLE:
        return None
    tail = _tail(number, width) or (beside and _tail(FP8, width))
    return TokenPlan(shared_warps, parts, shared_parts, stages, slots, fixed + stages * stage, tail, warps, step_tiles)


def divisors(n: int) -> list[int]:
    """Of a small number, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]


@dataclass(frozen=True)
class ExpertsPlan:
    """Of one launch for several tokens: warps, warps that split K, tiles of 16 rows a step, ring stages, dynamic shared
    memory in bytes."""

    warps: int
    kw: int
    tiles: int
    stages: int
    bytes: int
    tail: bool

    def defines(self, number: int, beside: bool) -> tuple[str, ...]:
        return (
            *(f"FMT={number}", f"WARPS={self.warps}", f"KW={self.kw}", "NT=1", f"MT={self.tiles}", f"STAGES={self.stages}"),
            *(f"TAIL={int(self.tail)}", f"SHARED={int(beside)}"),
        )


def ring_plan(number: int, width: int, columns: int, beside: bool, warps: int, kw: int, tiles: int) -> ExpertsPlan | None:
    """The plan whose rings take the shared memory that `columns` rows of activations leave; None if that is not enough."""
    stage = warps * _stage_bytes(number, tiles)
    longest = max(_row_bytes(FORMATS[n], width) for n in ((number, FP8) if beside else (number,)))
    fixed = 2 * warps * tiles * 512 + columns * longest
    stages = min(MAX_STAGES, (WHOLE - fixed) // stage)
    tail = _tail(number, width) or (beside and _tail(FP8, width))
    return ExpertsPlan(warps, kw, tiles, stages, fixed + stages * stage, tail) if stages >= 2 else None


@functools.cache
def experts_plan(number: int, gate_up: bool, width: int, tokens: int, beside: bool) -> ExpertsPlan | None:
    """The plan for `tokens` tokens; None if their activations leave no room in shared memory. Of those tried with 8 and 32
    tokens of Flash in NVFP4, 8 warps with two tiles a step were the fastest or near to it, two of them sharing a row; for
    many tokens down has tiles enough for each warp to take its own."""
    for tiles, kw in ((2, 2 if gate_up or tokens <= 16 else 1), (1, 1)):
        plan = ring_plan(number, width, min(8, tokens), beside, 8, kw, tiles)
        if plan:
            return plan
    return None

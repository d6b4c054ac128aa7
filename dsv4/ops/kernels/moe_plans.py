"""Launch plans of the expert kernels for decode: how warps share rows and K, and what fits into shared memory."""

import functools
import math
from dataclasses import dataclass

from dsv4.ops.kernels.limits import SHARED_BYTES
from dsv4.ops.kernels.stream import FORMATS, FP4, FP8, STATIC_BYTES, Format, steps_of

MOST_PICKS = 32  # of one token, a shared expert of the stack among them
MAX_STAGES = 6
WHOLE = SHARED_BYTES - STATIC_BYTES
PAIR_WARPS = 16  # that multiply pairs of rows, in a block of moe_token.cu
MOST_GATE = 8  # registers of 16 bytes of a thread, for rows of the gate
LEAST_GATE_ROWS = 4  # of a block that has any: the last blocks begin last, and fewer exchange their scores sooner
SLOT_BYTES = 18432  # of its ring, or what a pair of rows takes if that is more


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
    """Of the launch for one token: warps that multiply; slots of the ring and their bytes; pairs of rows of y that a warp
    has at most; dynamic shared memory in bytes."""

    hidden: int
    inter: int
    warps: int
    stages: int
    slot: int
    down_pairs: int
    bytes: int

    @property
    def threads(self) -> int:
        return (self.warps + 3) * 32

    def defines(self, number: int, beside: bool) -> tuple[str, ...]:
        return (
            *(f"H={self.hidden}", f"I={self.inter}", f"FMT={number}", f"BESIDE={int(beside)}", f"WARPS={self.warps}"),
            *(f"STAGES={self.stages}", f"SLOT={self.slot}", f"DOWN_PAIRS={self.down_pairs}"),
            *("KW=1", "NT=1", "TAIL=0"),
        )

    def routing_defines(self, experts: int, k: int, sms: int) -> tuple[str, ...] | None:
        """Further ones, for a launch that picks k of so many experts; None if the rows of the gate that a block has are too
        large for registers."""
        rows = max(LEAST_GATE_ROWS, math.ceil(experts / sms))
        if rows * math.ceil(self.hidden / (256 * self.warps)) > MOST_GATE:
            return None
        return f"E={experts}", f"TOP={k}", f"ROWS={rows}"


def _bytes(number: int, width: int) -> int:
    """Of a row of weights, with its NVFP4 scales."""
    return FORMATS[number].row_bytes(width) + (width // 16 if number == FP4 else 0)


@functools.cache
def token_plan(number: int, hidden: int, inter: int, picks: int, beside: bool, sms: int) -> TokenPlan | None:
    """For one token with `picks` experts of the stack; `beside`: and a shared one in FP8. None for widths that do not fill
    the lanes of a warp, or if the activations leave no room in shared memory."""
    if hidden % 1024 or inter % 1024:
        return None
    down_pairs = math.ceil(math.ceil(hidden // 2 / sms) / PAIR_WARPS)
    pairs = [2 * _bytes(n, width) for n in {number, FP8 if beside else number} for width in (hidden, inter)]
    largest = max(SLOT_BYTES, *pairs)
    slot = max(pair * min(8, 1 << (largest // pair).bit_length() - 1) for pair in pairs)  # 1, 2, 4 or 8 pairs
    activations = 2 * (hidden + (picks + beside) * inter)
    stages = (WHOLE - activations) // slot
    if stages < 3:
        return None
    return TokenPlan(hidden, inter, PAIR_WARPS, stages, slot, down_pairs, activations + stages * slot)


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
def experts_plan(number: int, gate_up: bool, width: int, entries: int, beside: bool) -> ExpertsPlan | None:
    """The plan for `entries` (token, choice) pairs; None if activations leave no room in shared memory. Of those tried with
    8 and 32 tokens of Flash in NVFP4, 8 warps with two tiles a step were the fastest or near to it, two of them sharing a
    row; for many tokens down has tiles enough for each warp to take its own."""
    for tiles, kw in ((2, 2 if gate_up or entries <= 96 else 1), (1, 1)):
        plan = ring_plan(number, width, min(8, entries), beside, 8, kw, tiles)
        if plan:
            return plan
    return None

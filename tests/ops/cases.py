"""Shared by the op tests: random inputs with outliers, flat batches, tolerances, and one set of arguments an op.

`ARGUMENTS` has one or more entries for every op of the `dsv4::` namespace; test_registry runs each of them through
opcheck, FakeTensorMode and torch.compile. A new op without an entry fails there.
"""

import math
import mmap
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from dsv4.ops.fp8 import decode_e8m0, quantize_fp8_block
from dsv4.ops.nvfp4 import quantize_nvfp4
from dsv4.ops.row_formats import key_bytes, row_bytes, stored

# dtype of the result -> (rtol, atol); atol counts in units of the largest expected value when that is above 1.
TOLERANCE = {
    # Two float32 evaluations of the same sum of up to 512 products in different orders: a few ulps of the largest
    # partial sum (2^-24 each), of which a softmax or a norm passes on about ten.
    torch.float32: (2e-5, 5e-6),
    # Computed in float32 and rounded once: results on either side of a rounding boundary differ by one bfloat16 ulp,
    # 2^-7 of the value at most. The absolute part is for values near 0 that come from cancellation.
    torch.bfloat16: (2**-7, 2e-5),
}


def assert_near(actual: Tensor, expected: Tensor, dtype: torch.dtype | None = None) -> None:
    """Compare values under the tolerance of `dtype` (that of `actual` unless given); shapes must be equal too."""
    rtol, atol = TOLERANCE[dtype or actual.dtype]
    finite = expected[expected.isfinite()].abs().double()
    scale = max(1.0, finite.max().item()) if finite.numel() else 1.0
    torch.testing.assert_close(actual.double(), expected.double(), rtol=rtol, atol=atol * scale, equal_nan=False)


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Equal bit for bit: NaN equals the same NaN, and -0.0 differs from 0.0."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    assert torch.equal(actual.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))


class Draw:
    """Random inputs from one seed."""

    def __init__(self, seed: int):
        self.seed = seed
        self.generator = torch.Generator().manual_seed(seed)
        self.random = random.Random(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0, outliers: float = 0.0) -> Tensor:
        """N(0, scale^2); with outliers > 0 about one value in 64 is that many times larger."""
        x = torch.randn(shape, generator=self.generator) * scale
        if outliers:
            x = torch.where(torch.rand(shape, generator=self.generator) < 1 / 64, x * outliers, x)
        return x.to(dtype)

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator) * (high - low) + low

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """low <= value < high. Small ones in a float dtype make every sum exact, so results can be compared bitwise."""
        return torch.randint(low, high, shape, generator=self.generator).to(dtype)

    def distinct(self, rows: int, count: int, below: int) -> Tensor:
        """int64 [rows, count]: distinct numbers in each row."""
        return torch.rand(rows, below, generator=self.generator).argsort(-1)[:, :count]

    def inv_freq(self, rope: int) -> Tensor:
        """float32 [rope / 2], from 1 downwards like a real one."""
        return 10000.0 ** -(torch.arange(0, rope, 2) / rope)

    def chunks(self, length: int, sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Random (start, stop) pairs that cover `length` tokens, each as long as one of `sizes`."""
        start = 0
        while start < length:
            stop = min(length, start + self.random.choice(sizes))
            yield start, stop
            start = stop


# --- flat batches -----------------------------------------------------------------------------------------------------

CHUNK_SIZES = (1, 2, 3, 5, 7, 50, 130, 300)  # below, at and above the rates 4 and 128 and the window 128
LENGTHS = (1, 3, 4, 5, 127, 128, 129, 131, 256, 300)  # around the same boundaries
GARBAGE_POSITIONS = (0, 3, 127, -1, -129, 2**40)  # what an inert token may carry


@dataclass
class Batch:
    """One step's tokens: positions and slots, int64 [T]."""

    positions: Tensor
    slots: Tensor

    def rows(self, sequences: Sequence[Tensor], inert: float = torch.nan) -> Tensor:
        """This batch's rows of per-slot data [length, ...]; inert tokens get rows full of `inert`."""
        sample = sequences[0]
        out = torch.full((len(self.slots), *sample.shape[1:]), inert, dtype=sample.dtype)
        for row, (slot, position) in enumerate(zip(self.slots.tolist(), self.positions.tolist(), strict=True)):
            if slot >= 0:
                out[row] = sequences[slot][position]
        return out

    def scatter(self, rows: Tensor, sequences: Sequence[Tensor]) -> None:
        """The reverse of `rows`: put result rows where their token belongs."""
        for row, (slot, position) in enumerate(zip(self.slots.tolist(), self.positions.tolist(), strict=True)):
            if slot >= 0:
                sequences[slot][position] = rows[row]


def make_batch(segments: Sequence[tuple[int, int, int]], garbage: Sequence[int] = ()) -> Batch:
    """Segments (slot, start, stop), side by side; slot -1 makes inert tokens that carry `garbage` positions in turn."""
    positions, slots = [], []
    for slot, start, stop in segments:
        for position in range(start, stop):
            inert = slot < 0 and len(garbage) > 0
            positions.append(garbage[position % len(garbage)] if inert else position)
            slots.append(slot)
    return Batch(torch.tensor(positions, dtype=torch.int64), torch.tensor(slots, dtype=torch.int64))


def one_by_one(lengths: Sequence[int]) -> Iterator[Batch]:
    """Every token of every slot (slot s has lengths[s] tokens) in a batch of its own, slot after slot."""
    for slot, length in enumerate(lengths):
        for position in range(length):
            yield make_batch([(slot, position, position + 1)])


def random_steps(draw: Draw, lengths: Sequence[int], sizes: Sequence[int] = CHUNK_SIZES) -> Iterator[Batch]:
    """The same tokens as `one_by_one` in random chunks of several slots mixed, with inert tokens in between."""
    done = [0] * len(lengths)
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        waiting = [slot for slot, n in enumerate(lengths) if done[slot] < n]
        chosen = draw.random.sample(waiting, draw.random.randint(1, len(waiting)))
        segments = []
        for slot in chosen:
            stop = min(lengths[slot], done[slot] + draw.random.choice(sizes))
            if draw.random.random() < 0.5:
                segments.append((-1, 0, draw.random.randint(1, 3)))
            segments.append((slot, done[slot], stop))
            done[slot] = stop
        if draw.random.random() < 0.5:
            segments.append((-1, 0, draw.random.randint(1, 5)))
        garbage = draw.random.sample(GARBAGE_POSITIONS, len(GARBAGE_POSITIONS))
        yield make_batch(segments, garbage)


def inert_batch(count: int) -> Batch:
    """A batch without any active token, positions garbage."""
    return make_batch([(-1, 0, count)], GARBAGE_POSITIONS)


def sparse_zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Zeros of any size in address space without memory: pages exist once they are written. A row number past 2^31 can
    be met for real, where int32 arithmetic wraps to another row or to an invalid address."""
    size = math.prod(shape) * dtype.itemsize
    try:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000))
    except OSError as error:
        pytest.skip(f"{size / 2**30:.0f} GiB of address space: {error}")
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def compact(rows: Tensor, rope: int, width: int) -> Tensor:
    """A compact buffer [S, n, width] of rows [S, n, D], keys rotated."""
    buffer = torch.zeros(*rows.shape[:2], width, dtype=torch.uint8, device=rows.device)
    for view, part in stored(rows, buffer, rope):
        view.copy_(part)
    return buffer


# --- one set of arguments an op ---------------------------------------------------------------------------------------


def _batch() -> Batch:
    """Two slots in the middle of their sequences and two inert tokens, seven tokens in all."""
    return make_batch([(1, 6, 9), (-1, 0, 1), (0, 3, 5), (-1, 0, 1)], (9,))


def _q_rope(draw: Draw, dtype: torch.dtype) -> tuple:
    return draw.normal(7, 3, 16, dtype=dtype), draw.inv_freq(8), _batch().positions, 1e-6, True


def _kv_rope(draw: Draw, dtype: torch.dtype) -> tuple:
    return draw.normal(7, 16, dtype=dtype), draw.normal(16), draw.inv_freq(8), _batch().positions, 1e-6


def _kv_write(draw: Draw, dtype: torch.dtype, dim: int = 16) -> tuple:
    batch = _batch()
    return draw.normal(7, dim, dtype=dtype), batch.positions, batch.slots, draw.normal(3, 8, dim, dtype=dtype)


def _compress(draw: Draw, dtype: torch.dtype, dim: int = 16) -> tuple:
    batch, width, rings = _batch(), 2 * dim, [draw.normal(3, 8, 2 * dim) for _ in range(2)]
    inputs = draw.normal(7, width), draw.normal(7, width), draw.normal(4, width), draw.normal(dim), draw.inv_freq(8)
    return *inputs, batch.positions, batch.slots, *rings, draw.normal(3, 5, dim, dtype=dtype), 4, 1e-6


def _compress_hca(draw: Draw, dtype: torch.dtype, dim: int = 16) -> tuple:
    batch, rings = _batch(), [draw.normal(3, 4, dim) for _ in range(2)]
    inputs = draw.normal(7, dim), draw.normal(7, dim), draw.normal(4, dim), draw.normal(dim), draw.inv_freq(8)
    return *inputs, batch.positions, batch.slots, *rings, draw.normal(3, 5, dim, dtype=dtype), 4, 1e-6


def _advance_window(draw: Draw, dtype: torch.dtype, dim: int = 16) -> tuple:
    batch = _batch()
    inputs = draw.normal(7, 2 * dim, dtype=dtype), draw.normal(7, 8 + dim, dtype=dtype), draw.normal(dim), draw.inv_freq(8)
    return *inputs, batch.positions, batch.slots, draw.normal(3, 8, dim, dtype=dtype), 2, 1e-6, True


def _advance_hca(draw: Draw, dtype: torch.dtype, dim: int = 16) -> tuple:
    (q_all, y, *rest), state = _advance_window(draw, dtype, dim)[:7], _compress_hca(draw, dtype, dim)[7:10]
    return q_all, y, draw.normal(7, 2 * dim), *rest, draw.normal(4, dim), draw.normal(dim), *state, 2, 4, 1e-6, True


def _advance_csa(draw: Draw, dtype: torch.dtype, dim: int = 16, index_dim: int = 8) -> tuple:
    (_, y, *rest), state = _advance_window(draw, dtype, dim)[:7], _compress(draw, dtype, dim)[7:10]
    q_all, z = draw.normal(7, 2 * dim + 4 * index_dim, dtype=dtype), draw.normal(7, 4 * dim + 4 * index_dim + 4)
    main = draw.normal(4, 2 * dim), draw.normal(dim), *state
    index_state = _compress(draw, dtype, index_dim)[7:10]
    index = draw.normal(4, 2 * index_dim), draw.normal(index_dim), *index_state
    return q_all, y, z, *rest, *main, *index, 2, 4, 4, 1e-6, True


def _advance_state(draw: Draw, dtype: torch.dtype) -> tuple:
    sampled, stop_ids = (draw.integers(0, 12, 3), draw.normal(3), draw.normal(3, 12)), draw.integers(-1, 12, 3, 2)
    numbers = draw.integers(0, 12, 3), draw.integers(0, 99, 3), draw.integers(-1, 3, 3), draw.integers(1, 3, 3)
    return *sampled, stop_ids, *numbers, draw.integers(0, 2, 3, 12).bool(), draw.normal(3, 12), torch.full((2, 3), 7)


def _without_write(make: Callable[[Draw, torch.dtype], tuple]) -> Callable[[Draw, torch.dtype], tuple]:
    return lambda draw, dtype: (*make(draw, dtype)[:-1], False)


def _index_topk(draw: Draw, dtype: torch.dtype, dim: int = 16) -> tuple:
    batch = _batch()
    q, keys = draw.normal(7, 4, dim, dtype=dtype), draw.normal(3, 5, dim, dtype=dtype)
    return q, draw.normal(7, 4), keys, batch.positions, batch.slots, 4, 3


def _attend(draw: Draw, dtype: torch.dtype, dim: int = 16) -> tuple:
    batch = _batch()
    q, kv = draw.normal(7, 3, dim, dtype=dtype), draw.normal(7, dim, dtype=dtype)
    ring = draw.normal(3, 8, dim, dtype=dtype)
    entries, indices = draw.normal(3, 5, dim, dtype=dtype), draw.integers(-1, 5, 7, 3, dtype=torch.int32)
    return q, kv, ring, entries, indices, draw.normal(3), draw.inv_freq(8), batch.positions, batch.slots, 4


def _compact(make: Callable[..., tuple], formats: dict[int, str], **sizes: int) -> Callable[[Draw, torch.dtype], tuple]:
    """The arguments with the given numbers in compact formats: "fp8 rows", or "fp8" or "fp4" keys. `sizes`: a dim of 72,
    of which 8 have rope, for rows, and 32 for keys."""

    def arguments(draw: Draw, dtype: torch.dtype) -> tuple:
        args = list(make(draw, dtype, **sizes))
        for number, name in formats.items():
            dim = args[number].shape[-1]
            args[number] = compact(args[number], 8, row_bytes(dim, 8) if name == "fp8 rows" else key_bytes(dim, name))
        return tuple(args)

    return arguments


def _index_topk_all(draw: Draw, dtype: torch.dtype) -> tuple:
    return *_index_topk(draw, dtype)[:-1], 9


def _attend_all(draw: Draw, dtype: torch.dtype) -> tuple:
    q, kv, ring, entries, _, *rest = _attend(draw, dtype)
    return q, kv, ring, entries, None, *rest


def _attend_window(draw: Draw, dtype: torch.dtype) -> tuple:
    q, kv, ring, _, _, *rest = _attend(draw, dtype)
    return q, kv, ring, None, None, *rest


def _hc_pre(draw: Draw, dtype: torch.dtype) -> tuple:
    weights = draw.normal(24, 64), draw.normal(24), draw.normal(3), draw.normal(16)
    return draw.normal(5, 4, 16, dtype=dtype), *weights, 1e-6, 1e-6, 20


def _hc_post(draw: Draw, dtype: torch.dtype) -> tuple:
    y, streams = draw.normal(5, 16, dtype=dtype), draw.normal(5, 4, 16, dtype=dtype)
    return y, streams, draw.normal(5, 4), draw.normal(5, 4, 4)


def _hc_head(draw: Draw, dtype: torch.dtype) -> tuple:
    weights = draw.normal(4, 64), draw.normal(4), draw.normal(1), draw.normal(16)
    return draw.normal(5, 4, 16, dtype=dtype), *weights, 1e-6, 1e-6


def _hc_mix(draw: Draw, dtype: torch.dtype) -> tuple:
    return *_hc_post(draw, dtype), *_hc_pre(draw, dtype)[1:]


def _hc_mix_head(draw: Draw, dtype: torch.dtype) -> tuple:
    return *_hc_post(draw, dtype), *_hc_head(draw, dtype)[1:], 20


def _linear_fp32(draw: Draw, dtype: torch.dtype) -> tuple:
    return draw.normal(5, 16, dtype=dtype), draw.normal(12, 16, dtype=dtype)


def _linear_fp8_block(draw: Draw, dtype: torch.dtype) -> tuple:
    weight, scale = quantize_fp8_block(draw.normal(160, 136))
    return draw.normal(5, 136, dtype=dtype), weight, decode_e8m0(scale), 1


def _linear_fp8_block_grouped(draw: Draw, dtype: torch.dtype) -> tuple:
    return draw.normal(5, 2, 136, dtype=dtype), *_linear_fp8_block(draw, dtype)[1:3], 2


def _linear_fp8_block_normed(draw: Draw, dtype: torch.dtype) -> tuple:
    """RMSNorm folded in, and x a view of wider rows."""
    x, weight, scale, _ = _linear_fp8_block(draw, dtype)
    return torch.cat((x, x), -1)[:, :136], weight, scale, 1, draw.normal(136), 1e-6


def _project(draw: Draw, dtype: torch.dtype) -> tuple:
    return *_linear_fp8_block(draw, dtype)[:3], None, draw.normal(12, 136, dtype=dtype)


def _project_nvfp4(draw: Draw, dtype: torch.dtype) -> tuple:
    """A scale_2 for each row of the one, one for all of the other."""
    x, *exact = _linear_nvfp4(draw, dtype)
    packed, scale, _ = quantize_nvfp4(draw.normal(20, 32))
    return x, packed, scale, draw.uniform(0.5, 2, 20), *exact


def _linear_nvfp4(draw: Draw, dtype: torch.dtype) -> tuple:
    return draw.normal(5, 32, dtype=dtype), *quantize_nvfp4(draw.normal(12, 32))


def _linear_nvfp4_grouped(draw: Draw, dtype: torch.dtype) -> tuple:
    """Two groups, RMSNorm, a scale_2 for each row and a float32 result, on a view of wider rows."""
    packed, scale, _ = quantize_nvfp4(draw.normal(12, 32))
    x = draw.normal(5, 3, 32, dtype=dtype)[:, :2]
    return x, packed, scale, draw.uniform(0.5, 2, 12), None, 2, draw.normal(32), 1e-6, True


def _linear_nvfp4_w4a4(draw: Draw, dtype: torch.dtype) -> tuple:
    return *_linear_nvfp4(draw, dtype), "nvfp4"


def _with_two_batch_dimensions(make: Callable[[Draw, torch.dtype], tuple]) -> Callable[[Draw, torch.dtype], tuple]:
    def arguments(draw: Draw, dtype: torch.dtype) -> tuple:
        x, *rest = make(draw, dtype)
        return torch.stack((x, -x, x / 2)), *rest

    return arguments


def _route_topk(draw: Draw, dtype: torch.dtype) -> tuple:
    return draw.normal(7, 16, dtype=dtype), draw.normal(8, 16, dtype=dtype), draw.normal(8), _batch().slots, 3, 1.5


def _route_hash(draw: Draw, dtype: torch.dtype) -> tuple:
    x, gate = draw.normal(7, 16, dtype=dtype), draw.normal(8, 16, dtype=dtype)
    return x, gate, draw.distinct(20, 3, 8), draw.integers(0, 20, 7), _batch().slots, 1.5


def _moe(draw: Draw, dtype: torch.dtype) -> tuple:
    routed = draw.integers(-1, 4, 5, 2, dtype=torch.int32), draw.uniform(0, 1, 5, 2)
    stack = draw.normal(4, 64, 16, dtype=dtype), draw.normal(4, 16, 32, dtype=dtype)
    return draw.normal(5, 16, dtype=dtype), *routed, *stack, 10.0


def quantize_experts(gate_up: Tensor, down: Tensor) -> tuple[Tensor, ...]:
    """[E, 2I, H] and [E, H, I] -> the six NVFP4 tensors that moe_nvfp4 takes; w1 and w3 each with their own scale_2."""
    parts = [[quantize_nvfp4(half) for half in both.chunk(2)] for both in gate_up]
    codes, scale = (torch.stack([torch.cat((w1[i], w3[i])) for w1, w3 in parts]) for i in (0, 1))
    scale_2 = torch.stack([torch.stack((w1[2], w3[2])) for w1, w3 in parts])
    downs = [quantize_nvfp4(w) for w in down]
    return codes, scale, scale_2, *(torch.stack([d[i] for d in downs]) for i in range(3))


def quantize_fp8_experts(gate_up: Tensor, down: Tensor) -> tuple[Tensor, ...]:
    """[E, 2I, H] and [E, H, I] -> the four FP8-block tensors that moe_fp8 takes; w1 and w3 each in blocks of their own."""
    halves = [[quantize_fp8_block(half) for half in both.chunk(2)] for both in gate_up]
    codes, scale = (torch.stack([torch.cat((w1[i], w3[i])) for w1, w3 in halves]) for i in (0, 1))
    downs, down_scale = (torch.stack(part) for part in zip(*map(quantize_fp8_block, down), strict=True))
    return codes, decode_e8m0(scale), downs, decode_e8m0(down_scale)


def _moe_fp8(draw: Draw, dtype: torch.dtype) -> tuple:
    routed = draw.integers(-1, 3, 5, 2, dtype=torch.int32), draw.uniform(0, 1, 5, 2)
    stack = quantize_fp8_experts(draw.normal(3, 2 * 132, 136), draw.normal(3, 136, 132))
    return draw.normal(5, 136, dtype=dtype), *routed, *stack, 10.0


def _moe_nvfp4(draw: Draw, dtype: torch.dtype) -> tuple:
    routed = draw.integers(-1, 4, 5, 2, dtype=torch.int32), draw.uniform(0, 1, 5, 2)
    stack = quantize_experts(draw.normal(4, 64, 16), draw.normal(4, 16, 32))
    return draw.normal(5, 16, dtype=dtype), *routed, *stack, 10.0


def _moe_nvfp4_shared(draw: Draw, dtype: torch.dtype) -> tuple:
    shared = quantize_fp8_experts(draw.normal(1, 64, 16), draw.normal(1, 16, 32))
    return *_moe_nvfp4(draw, dtype), *(tensor[0] for tensor in shared)


def _moe_nvfp4_shared_last(draw: Draw, dtype: torch.dtype) -> tuple:
    x, experts, *rest = _moe_nvfp4(draw, dtype)
    return x, experts.clamp(max=2), *rest, None, None, None, None, True


def _with_its_router(make: Callable[[Draw, torch.dtype], tuple]) -> Callable[[Draw, torch.dtype], tuple]:
    def arguments(draw: Draw, dtype: torch.dtype) -> tuple:
        x, _, _, *rest = make(draw, dtype)
        count, slots = 3 if rest[-1] is True else 4, torch.tensor([0, 1, -1, 2, 3])
        return x, draw.normal(count, 16, dtype=dtype), draw.normal(count), slots, 2, 1.5, *rest

    return arguments


def _with_the_last_shared(make: Callable[[Draw, torch.dtype], tuple], count: int) -> Callable[[Draw, torch.dtype], tuple]:
    def arguments(draw: Draw, dtype: torch.dtype) -> tuple:
        x, experts, *rest = make(draw, dtype)
        return x, experts.clamp(max=count - 2), *rest, True

    return arguments


def _quantize_nvfp4(draw: Draw, dtype: torch.dtype) -> tuple:
    return (draw.normal(5, 48, dtype=dtype, outliers=20.0),)


def _sample(draw: Draw, dtype: torch.dtype) -> tuple:
    filters = torch.tensor([0, 3, 5]), torch.tensor([1.0, 0.9, 0.5]), torch.tensor([0.0, 0.1, 0.0])
    numbers = torch.tensor([1.0, 1.2, 1.0]), draw.integers(0, 2**62, 3), draw.integers(0, 2**20, 3)
    seen = draw.integers(0, 2, 3, 12).bool()
    return draw.normal(3, 12, dtype=dtype), seen, torch.tensor([0.0, 0.7, 1.0]), *filters, *numbers


# "op" or "op: what is special about it"
ARGUMENTS: dict[str, Callable[[Draw, torch.dtype], tuple]] = {
    "advance_csa": _advance_csa,
    "advance_csa: compact": _compact(_advance_csa, {7: "fp8 rows", 12: "fp8 rows", 17: "fp4"}, dim=72, index_dim=32),
    "advance_csa: compact keys": _compact(_advance_csa, {17: "fp8"}, index_dim=32),
    "advance_csa: no write": _without_write(_advance_csa),
    "advance_hca": _advance_hca,
    "advance_hca: compact": _compact(_advance_hca, {7: "fp8 rows", 12: "fp8 rows"}, dim=72),
    "advance_hca: no write": _without_write(_advance_hca),
    "advance_state": _advance_state,
    "advance_window": _advance_window,
    "advance_window: compact": _compact(_advance_window, {6: "fp8 rows"}, dim=72),
    "attend": _attend,
    "attend: all entries": _attend_all,
    "attend: compact": _compact(_attend, {2: "fp8 rows", 3: "fp8 rows"}, dim=72),
    "attend: window": _attend_window,
    "compress": _compress,
    "compress: compact": _compact(_compress, {9: "fp8 rows"}, dim=72),
    "compress: compact keys": _compact(_compress, {9: "fp4"}, dim=32),
    "compress: no overlap": _compress_hca,
    "hc_head": _hc_head,
    "hc_mix": _hc_mix,
    "hc_mix_head": _hc_mix_head,
    "hc_post": _hc_post,
    "hc_pre": _hc_pre,
    "index_topk": _index_topk,
    "index_topk: compact fp4": _compact(_index_topk, {2: "fp4"}, dim=32),
    "index_topk: compact fp8": _compact(_index_topk, {2: "fp8"}, dim=32),
    "index_topk: more than blocks": _index_topk_all,
    "kv_rope": _kv_rope,
    "kv_write": _kv_write,
    "kv_write: compact": _compact(_kv_write, {3: "fp8 rows"}, dim=72),
    "linear_fp32": _linear_fp32,
    "linear_fp32: 3-d": _with_two_batch_dimensions(_linear_fp32),
    "linear_fp8_block": _linear_fp8_block,
    "linear_fp8_block: groups": _linear_fp8_block_grouped,
    "linear_fp8_block: norm, strided": _linear_fp8_block_normed,
    "linear_fp8_block: 3-d": _with_two_batch_dimensions(_linear_fp8_block),
    "linear_nvfp4": _linear_nvfp4,
    "linear_nvfp4: groups, norm, strided": _linear_nvfp4_grouped,
    "linear_nvfp4: W4A4": _linear_nvfp4_w4a4,
    "linear_nvfp4: 3-d": _with_two_batch_dimensions(_linear_nvfp4),
    "moe": _moe,
    "moe: shared last": _with_the_last_shared(_moe, 4),
    "moe_fp8": _moe_fp8,
    "moe_fp8: shared last": _with_the_last_shared(_moe_fp8, 3),
    "moe_nvfp4": _moe_nvfp4,
    "moe_nvfp4: shared": _moe_nvfp4_shared,
    "moe_nvfp4: shared last": _moe_nvfp4_shared_last,
    "moe_nvfp4_w4a4": _moe_nvfp4,
    "project": _project,
    "project: NVFP4": _project_nvfp4,
    "q_rope": _q_rope,
    "quantize_nvfp4": _quantize_nvfp4,
    "quantize_nvfp4: 3-d": _with_two_batch_dimensions(_quantize_nvfp4),
    "route_hash": _route_hash,
    "route_moe_nvfp4": _with_its_router(_moe_nvfp4),
    "route_moe_nvfp4: shared": _with_its_router(_moe_nvfp4_shared),
    "route_moe_nvfp4: shared last": _with_its_router(_moe_nvfp4_shared_last),
    "route_topk": _route_topk,
    "sample": _sample,
}

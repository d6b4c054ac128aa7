"""compress on CUDA against its reference in float32: decode, chunks, mixed slots, long sequences, state bits."""

import pytest
import torch

from dsv4.ops.row_formats import key_bytes, row_bytes, rows_of
from tests.gpu import small_kernels
from tests.gpu.small_kernels import assert_replay_equals, call, reference
from tests.ops.cases import (
    GARBAGE_POSITIONS,
    assert_same_bits,
    compact,
    inert_batch,
    make_batch,
    one_by_one,
    random_steps,
)

pytestmark = small_kernels.needs_gpu
BF16, EPS = torch.bfloat16, 1e-6
# rate, overlap, width of an entry, rope
KINDS = {
    "CSA": (4, True, 512, 64),
    "HCA": (128, False, 512, 64),
    "index": (4, True, 128, 64),
    "odd": (3, True, 20, 8),
    "tiny": (128, False, 64, 16),
}


class Compressor:
    """Random weights and two states that the kernel and the reference advance side by side."""

    def __init__(self, draw, kind, lengths, start=0):
        self.rate, self.overlap, self.dim, self.rope = KINDS[kind]
        self.width = self.dim * (2 if self.overlap else 1)
        depth = self.rate * (2 if self.overlap else 1)
        self.c = [draw.normal(n, self.width, outliers=20.0) for n in lengths]
        self.z = [draw.normal(n, self.width, scale=2.0, outliers=8.0) for n in lengths]
        self.weights = draw.normal(self.rate, self.width), draw.normal(self.dim) + 1.0, draw.inv_freq(self.rope)
        slots, blocks = len(lengths), ((max(lengths) + start) // self.rate // 4 + 1) * 4
        rings = [draw.normal(slots, depth, self.width) for _ in range(2)]
        entries = draw.normal(slots, blocks, self.dim, dtype=BF16)
        self.mine = [t.clone().to(small_kernels.DEVICE) for t in (*rings, entries)]
        self.theirs = [t.clone().to(small_kernels.DEVICE) for t in (*rings, entries.float())]
        self.start = start

    def arguments(self, batch, state):
        positions = torch.where(batch.slots >= 0, batch.positions + self.start, batch.positions)
        rows = batch.rows(self.c), batch.rows(self.z)
        return *rows, *self.weights, positions, batch.slots, *state, self.rate, EPS

    def step(self, batch):
        call("compress", *self.arguments(batch, self.mine))
        reference("compress", *self.arguments(batch, self.theirs))

    def check(self):
        """Rings bit for bit; entries within two roundings (before the norm and at the end) of their pair of channels, which
        rope mixes; nothing else written."""
        for mine, theirs in zip(self.mine[:2], self.theirs[:2], strict=True):
            assert_same_bits(mine, theirs)
        mine, theirs = (entries.double().unflatten(-1, (-1, 2)) for entries in (self.mine[2], self.theirs[2]))
        assert mine.isfinite().all()
        # Two roundings to bf16 are 2^-7 at most, and a little more where the rounded values change the norm itself.
        error = (mine - theirs).abs() - 1.25 * 2**-7 * theirs.norm(dim=-1, keepdim=True)
        assert error.max() <= 1e-3, f"entry off by {error.max():.3g} at {(error == error.max()).nonzero()[0].tolist()}"


@pytest.mark.parametrize("kind", KINDS)
def test_single_tokens(kind, draw):
    compressor = Compressor(draw, kind, (261, 3))
    for batch in one_by_one((261, 3)):
        compressor.step(batch)
    compressor.check()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", ((300, 129, 5, 256), (1, 131, 4)), ids=str)
def test_random_chunks(kind, lengths, draw):
    """Slots mixed, inert tokens in between, chunks shorter and longer than the ring; inert rows are NaN."""
    compressor = Compressor(draw, kind, lengths)
    for batch in random_steps(draw, lengths):
        compressor.step(batch)
    compressor.check()


@pytest.mark.parametrize("kind", ("CSA", "HCA", "tiny"))
def test_one_long_chunk(kind, draw):
    """One chunk of several rings, then single tokens that need what it left."""
    compressor = Compressor(draw, kind, (1100, 517))
    compressor.step(make_batch([(1, 0, 510), (0, 0, 1000)]))
    for position in range(510, 517):
        compressor.step(make_batch([(1, position, position + 1), (0, position + 490, position + 491)]))
    compressor.check()


@pytest.mark.parametrize("kind", ("CSA", "index", "tiny"))
def test_every_split_into_two_chunks(kind, draw):
    rate = KINDS[kind][0]
    length = 13 if rate == 4 else 257
    for cut in range(1, length) if rate == 4 else (1, 127, 128, 129, 255, 256):
        compressor = Compressor(draw, kind, (length,))
        compressor.step(make_batch([(0, 0, cut)]))
        compressor.step(make_batch([(0, cut, length)]))
        compressor.check()


@pytest.mark.parametrize("kind", ("CSA", "HCA"))
def test_chunks_and_single_tokens_give_the_same_bits(kind, draw):
    first = Compressor(draw, kind, (260,))
    state = [t.clone() for t in first.mine]
    for batch in one_by_one((260,)):
        first.step(batch)
    expected, first.mine = first.mine, state
    first.step(make_batch([(0, 0, 7)]))
    first.step(make_batch([(0, 7, 260)]))
    for mine, wanted in zip(first.mine, expected, strict=True):
        assert_same_bits(mine, wanted)


@pytest.mark.parametrize("kind", ("CSA", "HCA"))
def test_a_million_tokens_in(kind, draw):
    """Positions around 1,000,000: the offsets, the rope angle, and gates in the hundreds that a softmax must survive."""
    start = 1_000_000 - 1_000_000 % KINDS[kind][0] - KINDS[kind][0]
    compressor = Compressor(draw, kind, (300,), start)
    compressor.z = [z * 50 for z in compressor.z]
    for low, high in ((0, 1), (1, 2), (2, 150), (150, 151), (151, 300)):
        compressor.step(make_batch([(0, low, high)]))
    compressor.check()


# Formats of entries by kind.
COMPACT = (("CSA", "fp8 rows"), ("HCA", "fp8 rows"), ("index", "fp8"), ("index", "fp4"))


@pytest.mark.parametrize("sizes", ((1,), (1, 2, 3, 5, 50, 130, 300)), ids=("single tokens", "chunks"))
@pytest.mark.parametrize(("kind", "form"), COMPACT)
def test_compact_entries(kind, form, sizes, draw):
    """The bytes of the plain kernel's entries, quantised by the reference; nothing else written."""
    lengths = (261, 131, 5)
    plain = Compressor(draw, kind, lengths)
    width = row_bytes(plain.dim, plain.rope) if form == "fp8 rows" else key_bytes(plain.dim, form)
    state = [*(t.clone() for t in plain.mine[:2]), compact(plain.mine[2], plain.rope, width)]
    for batch in random_steps(draw, lengths, sizes):
        call("compress", *plain.arguments(batch, plain.mine))
        call("compress", *plain.arguments(batch, state))
    for mine, wanted in zip(state, (*plain.mine[:2], compact(plain.mine[2], plain.rope, width)), strict=True):
        assert_same_bits(mine, wanted)


def test_compact_entries_past_two_gigabytes(draw):
    """The last block of a million tokens in slot 14: as in a small buffer, and nothing else written."""
    compressor = Compressor(draw, "CSA", (4,))
    positions, rings = torch.arange(1_048_572, 1_048_576), [t.repeat(15, 1, 1) for t in compressor.mine[:2]]
    rows = compressor.c[0], compressor.z[0], *compressor.weights, positions
    many, few = (torch.zeros(*n, 584, dtype=torch.uint8, device=small_kernels.DEVICE) for n in ((15, 262_144), (1, 4)))
    call("compress", *rows, torch.full((4,), 14), *rings, many, 4, EPS)
    call("compress", *rows, torch.zeros(4, dtype=torch.int64), *compressor.mine[:2], few, 4, EPS)  # in its last row
    found = [rows_of(entries[-1:], 512, 64, BF16)[0, -1] for entries in (many, few)]
    assert_same_bits(*found)
    assert found[0].any() and many.count_nonzero() == few.count_nonzero()


def test_nothing_active(draw):
    compressor = Compressor(draw, "CSA", (8, 8))
    before = [t.clone() for t in compressor.mine]
    call("compress", *compressor.arguments(inert_batch(5), compressor.mine))
    for mine, wanted in zip(compressor.mine, before, strict=True):
        assert_same_bits(mine, wanted)


@pytest.mark.parametrize("kind", ("CSA", "HCA", "index"))
def test_replay_equals_eager(kind, draw):
    compressor = Compressor(draw, kind, (260, 128, 9))
    before = [t.clone() for t in compressor.mine]
    batch = make_batch([(1, 127, 128), (-1, 0, 1), (0, 250, 260), (2, 7, 8)], GARBAGE_POSITIONS)
    args = small_kernels.to_device(compressor.arguments(batch, compressor.mine))

    def reset():
        for mine, kept in zip(compressor.mine, before, strict=True):
            mine.copy_(kept)

    def run():
        call("compress", *args)
        return tuple(compressor.mine)

    assert_replay_equals(run, reset)


def test_unsupported_inputs_are_named(draw):
    compressor = Compressor(draw, "CSA", (8,))
    args = list(compressor.arguments(make_batch([(0, 0, 1)]), compressor.mine))
    args[0] = args[0].to(BF16)
    with pytest.raises(ValueError, match=r"compress: c must be torch\.float32, found torch\.bfloat16"):
        call("compress", *args)

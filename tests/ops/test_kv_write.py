"""kv_write against a dictionary of rows, and compiled.

Rows are random; the op only copies them, so everything is compared bit for bit.
"""

import pytest
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code

from dsv4 import ops
from tests.ops.cases import (
    LENGTHS,
    assert_same_bits,
    inert_batch,
    make_batch,
    one_by_one,
    random_steps,
    sparse_zeros,
)

DTYPES = (torch.float32, torch.bfloat16)
WINDOW = 128


def expected_ring(ring, sequences):
    """Row p mod window holds the last written position p."""
    ring = ring.clone()
    for slot, rows in enumerate(sequences):
        for position in range(len(rows)):
            ring[slot, position % ring.shape[1]] = rows[position]
    return ring


# Lengths around the window, in three groups of slots that share batches.
@pytest.mark.parametrize("lengths", ((1, 3, 127, 0), (128, 129, 4, 5), (300, 131, 256)), ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_chunks(lengths, dtype, draw):
    """Chunks up to 300 tokens, longer than the ring, mixed with other slots' and with inert tokens of NaN."""
    sequences = [draw.normal(n, 8, dtype=dtype) for n in lengths]
    before = draw.normal(len(lengths), WINDOW, 8, dtype=dtype)
    expected = expected_ring(before, sequences)
    ring = before.clone()
    for batch in random_steps(draw, lengths):
        ops.kv_write(batch.rows(sequences), batch.positions, batch.slots, ring)
    assert_same_bits(ring, expected)


def test_one_token_at_a_time(draw):
    lengths = (131, 3)
    sequences = [draw.normal(n, 4) for n in lengths]
    ring = torch.full((2, WINDOW, 4), torch.nan)
    expected = expected_ring(ring, sequences)
    for batch in one_by_one(lengths):
        ops.kv_write(batch.rows(sequences), batch.positions, batch.slots, ring)
    assert_same_bits(ring, expected)


# Every length of the list, as one chunk: what is left is the last `window` rows.
@pytest.mark.parametrize("length", LENGTHS)
def test_whole_sequence_in_one_chunk(length, draw):
    rows = draw.normal(length, 4)
    ring = torch.zeros(2, WINDOW, 4)
    batch = make_batch([(1, 0, length)])
    ops.kv_write(rows, batch.positions, batch.slots, ring)
    assert_same_bits(ring, expected_ring(torch.zeros(2, WINDOW, 4), [rows[:0], rows]))


@pytest.mark.parametrize("window", (1, 3, 16))
def test_small_windows(window, draw):
    """Chunks many times the ring."""
    lengths = (50, 7)
    sequences = [draw.normal(n, 4) for n in lengths]
    ring = torch.zeros(2, window, 4)
    for batch in random_steps(draw, lengths):
        ops.kv_write(batch.rows(sequences), batch.positions, batch.slots, ring)
    assert_same_bits(ring, expected_ring(torch.zeros(2, window, 4), sequences))


@pytest.mark.parametrize("count", (1, 5, 200))
def test_inert_batch_changes_nothing(count, draw):
    """Nothing but inert tokens, positions garbage and rows NaN; fewer and more than the ring has rows."""
    ring = draw.normal(2, WINDOW, 4)
    before = ring.clone()
    batch = inert_batch(count)
    ops.kv_write(torch.full((count, 4), torch.nan), batch.positions, batch.slots, ring)
    assert_same_bits(ring, before)


def test_nan_rows_stay_where_they_belong(draw):
    """A row of NaN is written like any other, and to one place."""
    ring = draw.normal(2, 8, 4)
    expected = ring.clone()
    expected[1, 5] = torch.nan
    ops.kv_write(torch.full((1, 4), torch.nan), torch.tensor([13]), torch.tensor([1]), ring)
    assert_same_bits(ring, expected)


def test_bug_large_row_numbers():
    """slot * window + position beyond 2^31 rows, and a position near a million.
    https://github.com/ROCm/aiter/pull/4028"""
    slots = 2**24 + 1
    ring = sparse_zeros(slots, 128, 1)
    position = 1_048_575
    ops.kv_write(torch.ones(1, 1, dtype=torch.bfloat16), torch.tensor([position]), torch.tensor([slots - 1]), ring)
    assert ring[slots - 1, 127].item() == 1.0
    for slot in (0, 1, slots // 2, slots - 2):
        assert (ring[slot] == 0).all()
    assert (ring[slots - 1, :127] == 0).all()


class TwoWrites(nn.Module):
    """A layer that writes its ring twice in one step, as a graph of several layers does to several rings."""

    def __init__(self, ring):
        super().__init__()
        self.register_buffer("ring", ring)

    def forward(self, first, second, positions, later, slots):
        ops.kv_write(first, positions, slots, self.ring)
        ops.kv_write(second, later, slots, self.ring)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_compiled_module_writes_its_buffer(dtype, draw):
    """Two writes that overlap in two rows, in one graph, twice: the second wins, the buffer keeps its address, and the
    generated code neither allocates nor copies anything of the ring's size."""
    batch = make_batch([(1, 0, 4), (-1, 0, 1)])
    first, second, ring = (draw.normal(*s, 8, dtype=dtype) for s in ((5,), (5,), (2, 16)))
    module = TwoWrites(ring.clone())
    address = module.ring.data_ptr()
    torch._dynamo.reset()
    step = torch.compile(module, fullgraph=True)
    eager = TwoWrites(ring.clone())
    steps = [(batch.positions + start, batch.positions + start + 2, batch.slots) for start in (0, 8)]
    _, code = run_and_get_code(step, first, second, *steps[0])
    step(second, first, *steps[1])
    eager(first, second, *steps[0])
    eager(second, first, *steps[1])
    assert_same_bits(module.ring, eager.ring)
    assert_same_bits(module.ring[1, 2:6], second[:4])
    assert_same_bits(module.ring[0], ring[0])
    assert module.ring.data_ptr() == address
    body = code[0].split("def call(")[1]
    assert body.count("torch.ops.dsv4.kv_write") == 2
    assert "empty_strided_cpu((2, 16, 8)" not in body and "copy_(" not in body

"""attend against loops over keys in float64 and transformers' attention; state, padding and extremes."""

import math

import pytest
import torch
from torch import nn

from dsv4 import ops
from tests.ops.cases import (
    LENGTHS,
    Batch,
    assert_near,
    assert_same_bits,
    inert_batch,
    make_batch,
    one_by_one,
    random_steps,
    sparse_zeros,
)
from tests.ops.oracles import CSA, HCA, RATES, SLIDING, hf, inv_freq, randomise, tiny_config

DTYPES = (torch.float32, torch.bfloat16)
NO_SINK = -1e4  # takes no probability from logits of normal size


class Sequences:
    """Random q, kv, entries and picks for slots of given lengths; blocks beyond a sequence's own are NaN."""

    def __init__(self, draw, lengths, mode, rate=4, window=16, heads=2, dim=12, dtype=torch.float32):
        self.lengths, self.mode, self.rate, self.window, self.dtype = lengths, mode, rate, window, dtype
        self.q = [draw.normal(n, heads, dim, dtype=dtype, scale=2.0) for n in lengths]
        self.kv = [draw.normal(n, dim, dtype=dtype, outliers=5.0) for n in lengths]
        blocks = max(lengths) // rate + 2
        self.entries = torch.full((len(lengths), blocks, dim), torch.nan, dtype=dtype)
        for slot, n in enumerate(lengths):
            self.entries[slot, : n // rate] = draw.normal(n // rate, dim, dtype=dtype)
        # Five picks of any blocks, some not complete yet, in any order, with -1 between them.
        self.indices = [draw.distinct(n, 5, blocks + 2).int() - 2 for n in lengths]
        self.indices = [torch.where(i < 0, -1, i).int() for i in self.indices]
        self.sinks, self.inv_freq = draw.normal(heads), draw.inv_freq(8)

    def new_ring(self, fill=torch.nan):
        return torch.full((len(self.lengths), self.window, self.kv[0].shape[-1]), fill, dtype=self.dtype)

    def attend(self, batch, ring, **changes):
        """One step: attention, then the ring is written."""
        inputs = {
            "q": batch.rows(self.q),
            "kv": batch.rows(self.kv),
            "ring": ring,
            "entries": self.entries if self.mode != "window" else None,
            "indices": batch.rows(self.indices, inert=0) if self.mode == "picks" else None,
            "sinks": self.sinks,
        }
        out = ops.attend(*(inputs | changes).values(), self.inv_freq, batch.positions, batch.slots, self.rate)
        ops.kv_write(inputs["kv"], batch.positions, batch.slots, ring)
        return out

    def run(self, steps, fill=torch.nan):
        out = [torch.full_like(q, 777.0) for q in self.q]
        ring = self.new_ring(fill)
        for batch in steps:
            rows = self.attend(batch, ring)
            assert (rows[batch.slots < 0] == 0).all()
            batch.scatter(rows, out)
        return out

    def naive(self, slot, position):
        """float64, key by key."""
        keys = [self.kv[slot][p] for p in range(max(0, position - self.window + 1), position + 1)]
        visible = (position + 1) // self.rate
        if self.mode == "all":
            keys += list(self.entries[slot, :visible])
        elif self.mode == "picks":
            keys += [self.entries[slot, i] for i in self.indices[slot][position].tolist() if 0 <= i < visible]
        return naive_attend(self.q[slot][position], keys, self.sinks, self.inv_freq, position)


def naive_attend(q, keys, sinks, frequencies, position):
    """q [heads, D], keys a list of [D]: softmax with the sink in maximum and denominator, then rope backwards."""
    q, out = q.double(), []
    for head in range(q.shape[0]):
        logits = [float(q[head] @ key.double()) * q.shape[-1] ** -0.5 for key in keys]
        sink = float(sinks[head])
        top = max([*logits, sink])
        total = math.exp(sink - top) + sum(math.exp(v - top) for v in logits)
        attended = torch.zeros(q.shape[-1], dtype=torch.float64)
        for value, key in zip(logits, keys, strict=True):
            attended += math.exp(value - top) / total * key.double()
        rope = 2 * len(frequencies)
        for i, frequency in enumerate(frequencies.tolist()):
            a, b = attended[-rope + 2 * i].item(), attended[-rope + 2 * i + 1].item()
            cos, sin = math.cos(position * frequency), math.sin(position * frequency)
            attended[-rope + 2 * i], attended[-rope + 2 * i + 1] = a * cos + b * sin, b * cos - a * sin
        out.append(attended)
    return torch.stack(out)


# The three kinds of layer; a window of 16 keeps the loops short and lets 41 tokens go round it twice.
@pytest.mark.parametrize("mode", ("window", "all", "picks"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matches_loops(mode, dtype, draw):
    sequences = Sequences(draw, (41, 3, 17), mode, dtype=dtype)
    actual = sequences.run(random_steps(draw, sequences.lengths, (1, 2, 3, 5, 7, 20, 41)))
    for slot, length in enumerate(sequences.lengths):
        expected = torch.stack([sequences.naive(slot, position) for position in range(length)])
        assert_near(actual[slot], expected)


# Every length of the list, mixed in three groups; window 128 and rates as in the model.
@pytest.mark.parametrize("lengths", (LENGTHS[:4], LENGTHS[4:8], LENGTHS[8:]), ids=str)
@pytest.mark.parametrize(("mode", "rate"), (("window", 4), ("picks", 4), ("all", 128)))
def test_chunks_give_what_single_tokens_give(mode, rate, lengths, draw):
    sequences = Sequences(draw, lengths, mode, rate, window=128)
    expected = sequences.run(one_by_one(lengths))
    actual = sequences.run(random_steps(draw, lengths))
    for a, b in zip(actual, expected, strict=True):
        assert_near(a, b)


@pytest.mark.parametrize("layer", (SLIDING, CSA, HCA), ids=("sliding", "CSA", "HCA"))
def test_matches_transformers(layer, draw):
    """300 tokens through transformers' attention at once, and through the ops in random chunks. Its output before the
    grouped projection is what attend returns; its indexer's picks are taken over, since index_topk has its own test."""
    config, length = tiny_config(), 300
    module = randomise(hf.DeepseekV4Attention(config, layer), draw)
    frequencies = inv_freq(config, layer)
    seen = {}
    module.o_a_proj.register_forward_pre_hook(lambda _, args: seen.update(out=args[0]))
    if layer == CSA:
        module.compressor.indexer.register_forward_hook(lambda _, args, out: seen.update(picks=out))
    x, positions = draw.normal(1, length, 32), torch.arange(length)
    distance = positions[:, None] - positions
    mask = torch.where((distance >= 0) & (distance < 128), 0.0, -torch.inf)[None, None]
    angles = positions[None, :, None] * frequencies
    rope = (angles.cos(), angles.sin())
    module(x, {"main": rope, "compress": rope}, positions[None], mask)
    expected = seen["out"].reshape(length, 4, 32)

    rate, entries, indices = RATES.get(layer, 1), None, None
    ring = torch.full((2, 128, 32), torch.nan)
    if layer != SLIDING:
        width, depth = (64, 8) if layer == CSA else (32, 128)
        rings = [torch.full((2, depth, width), torch.nan) for _ in range(2)]
        entries = torch.full((2, 80, 32), torch.nan)
        compressor = module.compressor
    for start, stop in draw.chunks(length, (1, 2, 3, 5, 7, 50, 130)):
        part = x[0, start:stop]
        batch = Batch(positions[start:stop], torch.ones(stop - start, dtype=torch.int64))
        at = batch.positions, batch.slots
        q = module.q_b_proj(module.q_a_norm(module.q_a_proj(part))).view(-1, 4, 32)
        q = ops.q_rope(q, frequencies, batch.positions, 1e-6)
        kv = ops.kv_rope(module.kv_proj(part), module.kv_norm.weight.data, frequencies, batch.positions, 1e-6)
        if layer != SLIDING:
            projected = compressor.kv_proj(part), compressor.gate_proj(part), compressor.position_bias.data
            norm = compressor.kv_norm.weight.data
            ops.compress(*projected, norm, frequencies, *at, *rings, entries, rate, 1e-6)
        if layer == CSA:
            indices = seen["picks"][0, start:stop].int()
        out = ops.attend(q, kv, ring, entries, indices, module.sinks.data, frequencies, *at, rate)
        ops.kv_write(kv, *at, ring)
        assert_near(out, expected[start:stop])


def test_which_keys_are_seen(draw):
    """q = 0 weighs all keys alike and one-hot rows show which ones they were: the last 128 with the token itself, and
    the blocks complete by then, those of the window included. All residues mod 4, positions 0 to 139."""
    length, blocks = 140, 36
    dim = length + blocks + 2  # the last two channels are rope's and stay 0
    kv, entries = torch.eye(length, dim), torch.full((1, blocks, dim), torch.nan)
    entries[0] = 0
    entries[0, :, length : length + blocks] = torch.eye(blocks)
    ring = torch.full((1, 128, dim), torch.nan)
    for batch in random_steps(draw, (length,), (1, 2, 3, 5, 7, 50, 130)):
        rows = batch.rows([kv])
        q = torch.zeros(len(rows), 1, dim)
        at = torch.zeros(1), torch.ones(1), batch.positions, batch.slots, 4
        out = ops.attend(q, rows, ring, entries, None, *at)
        ops.kv_write(rows, batch.positions, batch.slots, ring)
        for t, (position, slot) in enumerate(zip(batch.positions.tolist(), batch.slots.tolist(), strict=True)):
            if slot < 0:
                continue
            expected = torch.zeros(dim)
            expected[max(0, position - 127) : position + 1] = 1
            expected[length : length + (position + 1) // 4] = 1
            assert_near(out[t, 0], expected / (1 + expected.sum()))


def test_bug_output_is_turned_back(draw):
    """A token that sees only itself gets its own row as it was before rope, at any position.
    https://github.com/AMD-AGI/Primus/pull/930"""
    frequencies, positions = draw.inv_freq(8), torch.tensor([0, 5, 127, 3000])
    plain = draw.normal(4, 12)
    kv = ops.q_rope(plain[:, None], frequencies, positions, norm=False)[:, 0]
    at = torch.full((2,), NO_SINK), frequencies, positions, torch.arange(4), 4
    out = ops.attend(draw.normal(4, 2, 12), kv, torch.zeros(4, 1, 12), None, None, *at)
    assert_near(out, plain[:, None].expand(4, 2, 12))


def test_bug_softmax_scale(draw):
    """512^-0.5 and no YaRN factor of 1.277: two keys whose dots differ by sqrt(D) log 3 weigh 1 : 3.
    https://github.com/AMD-AGI/Primus/pull/930"""
    q, kv = torch.zeros(2, 1, 16), torch.zeros(2, 16)
    q[1, 0, 0] = 1.0
    kv[1, 0] = 4 * math.log(3.0)
    kv[0, 1] = kv[1, 2] = 1.0
    batch = make_batch([(0, 0, 2)])
    at = torch.tensor([NO_SINK]), torch.ones(1), batch.positions, batch.slots, 4
    out = ops.attend(q, kv, torch.zeros(1, 8, 16), None, None, *at)
    assert_near(out[1, 0, 1:3], torch.tensor([0.25, 0.75]))


@pytest.mark.parametrize("mode", ("window", "all", "picks"))
def test_bug_zero_entries(mode, draw):
    """The first tokens have no entry to read, whatever the buffer holds: NaN everywhere here. Then the first block.
    https://github.com/vllm-project/vllm/issues/51970"""
    sequences = Sequences(draw, (5, 3), mode)
    before = sequences.entries.clone()
    sequences.entries[:] = torch.nan
    ring = sequences.new_ring()
    for position in range(5):
        if position == 3:
            sequences.entries[:] = before
        batch = make_batch([(0, position, position + 1)])
        assert_near(sequences.attend(batch, ring)[0], sequences.naive(0, position))


def test_no_room_for_entries(draw):
    """A buffer of no blocks, and a pick list of no entries."""
    sequences = Sequences(draw, (3,), "window")
    batch, ring = make_batch([(0, 0, 3)]), sequences.new_ring()
    expected = sequences.attend(batch, ring)
    assert_near(sequences.attend(batch, ring, entries=torch.zeros(1, 0, 12)), expected)
    none = torch.zeros(3, 0, dtype=torch.int32)
    assert_near(sequences.attend(batch, ring, entries=sequences.entries, indices=none), expected)


@pytest.mark.parametrize("mode", ("window", "all", "picks"))
def test_inert_tokens(mode, draw):
    """Zeros for themselves, and what they carry reaches nobody else: zeros, NaN, garbage positions."""
    sequences = Sequences(draw, (30, 9), mode)
    out = {}
    for garbage, positions in ((0.0, (0,)), (torch.nan, (0, 127, -129, 2**40)), (1e30, (3,))):
        batch, ring = make_batch([(-1, 0, 4), (1, 0, 9), (-1, 0, 2), (0, 0, 30)], positions), sequences.new_ring()
        q, kv = batch.rows(sequences.q, inert=garbage), batch.rows(sequences.kv, inert=garbage)
        rows = sequences.attend(batch, ring, q=q, kv=kv)
        assert (rows[batch.slots < 0] == 0).all()
        out[str(garbage)] = rows[batch.slots >= 0]
    first, *others = out.values()
    for other in others:
        assert_same_bits(other, first)
    batch = inert_batch(70)
    assert (sequences.attend(batch, sequences.new_ring()) == 0).all()


@pytest.mark.parametrize("mode", ("window", "all", "picks"))
def test_reused_slot_equals_fresh_one(mode, draw):
    """Whatever an earlier sequence left, NaN at worst: bit for bit the result of a slot of zeros."""
    sequences = Sequences(draw, (150, 20), mode, window=128)
    steps = list(random_steps(draw, sequences.lengths))
    poisoned = sequences.run(steps, fill=torch.nan)
    sequences.entries = sequences.entries.nan_to_num(0.0)
    fresh = sequences.run(steps, fill=0.0)
    for a, b in zip(poisoned, fresh, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("sink", (60.0, 100.0, 1e4, -100.0, -1e30))
def test_sink_far_from_the_logits(sink, draw):
    """exp(sink - max of the keys) overflows from 88 on; with the sink in the maximum nothing does. Far below, it takes
    nothing."""
    sequences = Sequences(draw, (20,), "all")
    sequences.sinks = torch.tensor([sink, 0.0])
    actual = sequences.run([make_batch([(0, 0, 20)])])[0]
    expected = torch.stack([sequences.naive(0, position) for position in range(20)])
    assert actual.isfinite().all()
    # In units of the largest value, which a sink of 60 makes about 1e-26; below 1e-38 float32 has nothing left.
    atol = max(1e-38, 2e-5 * expected[:, 0].abs().max().item())
    torch.testing.assert_close(actual[:, 0].double(), expected[:, 0], rtol=1e-4, atol=atol)
    assert_near(actual[:, 1], expected[:, 1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_outliers_stay_finite(dtype, draw):
    """Queries, rows and entries of 1e4: logits of 1e8."""
    sequences = Sequences(draw, (40,), "all", dtype=dtype)
    sequences.q = [draw.normal(40, 2, 12, dtype=dtype, scale=1e4)]
    sequences.kv = [draw.normal(40, 12, dtype=dtype, scale=1e4)]
    sequences.entries[:, :10] *= 1e4
    out = sequences.run(random_steps(draw, (40,)))[0]
    assert out.isfinite().all()
    assert out.abs().max() > 1e3


def test_order_of_picks_does_not_matter(draw):
    """The same set of entries in any order, -1 anywhere in the row."""
    sequences = Sequences(draw, (40,), "picks")
    batch, ring = make_batch([(0, 0, 40)]), sequences.new_ring()
    expected = sequences.attend(batch, ring.clone())
    shuffled = sequences.indices[0][:, [3, 0, 4, 2, 1]]
    padded = torch.cat((torch.full((40, 2), -1, dtype=torch.int32), shuffled), 1)
    assert_near(sequences.attend(batch, ring.clone(), indices=padded), expected)


def test_bug_large_row_numbers(draw):
    """slot * blocks + block beyond 2^31 entries, slot * window + row beyond 2^31 ring rows.
    https://github.com/ROCm/aiter/pull/4028"""
    blocks, slots, slot = 1024, 2**24 + 1, 2**24
    entries, ring = sparse_zeros(slots, blocks, 2), sparse_zeros(slots, 128, 2)
    entries[slot, 1000], entries[slot, 3], ring[slot, 126] = 1.0, 2.0, 4.0
    q, kv = torch.zeros(1, 1, 2, dtype=torch.bfloat16), torch.full((1, 2), 8.0, dtype=torch.bfloat16)
    at = torch.zeros(1), torch.zeros(1), torch.tensor([4 * blocks - 1]), torch.tensor([slot]), 4
    picks = torch.tensor([[1000, -1, 3]], dtype=torch.int32)
    out = ops.attend(q, kv, ring, entries, picks, *at)
    # 128 window rows of which two are not zero, two entries, and the sink.
    assert_near(out[0, 0], torch.full((2,), (1.0 + 2.0 + 4.0 + 8.0) / (128 + 2 + 1)))


class Layer(nn.Module):
    """Attention as a layer's graph has it: read the ring, then write it; here for two chunks of one slot."""

    def __init__(self, ring, entries):
        super().__init__()
        self.register_buffer("ring", ring)
        self.register_buffer("entries", entries)

    def forward(self, first, second, sinks, frequencies):
        outs = []
        for q, kv, positions, slots in (first, second):
            outs.append(ops.attend(q, kv, self.ring, self.entries, None, sinks, frequencies, positions, slots, 4))
            ops.kv_write(kv, positions, slots, self.ring)
        return outs


@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
def test_compiled_reads_before_it_writes(backend, draw):
    """The second chunk sees the first one's rows, and the first sees none of its own in the ring: a window of 4 rows is
    overwritten whole by each chunk. Two steps of one graph."""
    sequences = Sequences(draw, (16,), "all", window=4)

    def chunk(start):
        batch = make_batch([(0, start, start + 4)])
        return batch.rows(sequences.q), batch.rows(sequences.kv), batch.positions, batch.slots

    expected = sequences.run([make_batch([(0, start, start + 4)]) for start in (0, 4, 8, 12)])[0]
    layer = Layer(sequences.new_ring(), sequences.entries)
    address = layer.ring.data_ptr()
    torch._dynamo.reset()
    step = torch.compile(layer, fullgraph=True, backend=backend)
    outs = [*step(chunk(0), chunk(4), sequences.sinks, sequences.inv_freq)]
    outs += step(chunk(8), chunk(12), sequences.sinks, sequences.inv_freq)
    assert_same_bits(torch.cat(outs), expected)
    assert_same_bits(layer.ring[0], sequences.kv[0][12:])
    assert layer.ring.data_ptr() == address

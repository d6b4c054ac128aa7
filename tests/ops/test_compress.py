"""compress against transformers' compressors, loops in float64 and values by hand; state, padding and extremes."""

import math

import pytest
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code

from dsv4 import ops
from tests.ops.cases import (
    CHUNK_SIZES,
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
from tests.ops.oracles import CSA, HCA, hf, inv_freq, new_cache, randomise, tiny_config

DTYPES = (torch.float32, torch.bfloat16)
EPS = 1e-6
DIM, ROPE = 12, 8
KINDS = {"CSA": (4, True), "HCA": (128, False)}  # rate, overlap


class Compressor:
    """Random weights, and c and z for slots of given lengths."""

    def __init__(self, draw, lengths, rate, overlap, dtype=torch.float32):
        self.lengths, self.rate, self.overlap, self.dtype = lengths, rate, overlap, dtype
        self.width, self.depth = (2 * DIM, 2 * rate) if overlap else (DIM, rate)
        self.c = [draw.normal(n, self.width, outliers=20.0) for n in lengths]
        self.z = [draw.normal(n, self.width, scale=2.0) for n in lengths]
        self.ape, self.norm, self.inv_freq = draw.normal(rate, self.width), draw.normal(DIM), draw.inv_freq(ROPE)

    def new_state(self, fill=torch.nan):
        """c_ring, z_ring and entries with room for one block more than needed."""
        slots, blocks = len(self.lengths), max(self.lengths) // self.rate + 1
        rings = [torch.full((slots, self.depth, self.width), fill) for _ in range(2)]
        return *rings, torch.full((slots, blocks, DIM), fill, dtype=self.dtype)

    def step(self, batch, state, **changes):
        inputs = {"c": batch.rows(self.c), "z": batch.rows(self.z)} | changes
        weights = self.ape, self.norm, self.inv_freq
        ops.compress(*inputs.values(), *weights, batch.positions, batch.slots, *state, self.rate, EPS)

    def run(self, steps, fill=torch.nan):
        state = self.new_state(fill)
        for batch in steps:
            self.step(batch, state)
        return state

    def naive(self, slot, block):
        """One entry in float64, channel by channel; the pooled value rounded once to the entries' dtype."""
        rows = []  # (position, offset of the half) of every slot of the softmax
        if self.overlap and block > 0:
            rows += [(p, 0) for p in range((block - 1) * self.rate, block * self.rate)]
        rows += [(p, DIM if self.overlap else 0) for p in range(block * self.rate, (block + 1) * self.rate)]
        pooled = torch.zeros(DIM, dtype=torch.float64)
        for channel in range(DIM):
            gates = [float(self.z[slot][p, o + channel]) + float(self.ape[p % self.rate, o + channel]) for p, o in rows]
            top = max(gates)
            weights = [math.exp(g - top) for g in gates]
            values = [float(self.c[slot][p, o + channel]) for p, o in rows]
            pooled[channel] = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
        pooled = pooled.float().to(self.dtype).double()
        entry = pooled / math.sqrt(float(pooled.square().mean()) + EPS) * self.norm.double()
        for i, frequency in enumerate(self.inv_freq.tolist()):
            angle = block * self.rate * frequency
            a, b = entry[-ROPE + 2 * i].item(), entry[-ROPE + 2 * i + 1].item()
            entry[-ROPE + 2 * i] = a * math.cos(angle) - b * math.sin(angle)
            entry[-ROPE + 2 * i + 1] = a * math.sin(angle) + b * math.cos(angle)
        return entry

    def assert_state(self, state, expected, near=True):
        """Equal entries for complete blocks, equal rings bit for bit for the positions a later token can read, and
        entries after the last complete block untouched (NaN)."""
        for slot, n in enumerate(self.lengths):
            complete = n // self.rate
            compare = assert_near if near else assert_same_bits
            compare(state[2][slot, :complete], expected[2][slot, :complete])
            assert state[2][slot, complete:].isnan().all()
            rows = torch.arange(max(0, n - self.depth), n) % self.depth
            for ring, wanted in zip(state[:2], expected[:2], strict=True):
                assert_same_bits(ring[slot, rows], wanted[slot, rows])


# A small rate beside the real ones: HCA at 128 takes 128 tokens an entry, so few entries of it.
@pytest.mark.parametrize(("rate", "overlap"), ((4, True), (128, False), (3, True), (3, False)))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matches_loops(rate, overlap, dtype, draw):
    lengths = (258, 129, 3) if rate == 128 else (42, 5, 3)
    compressor = Compressor(draw, lengths, rate, overlap, dtype)
    state = compressor.run(random_steps(draw, lengths))
    for slot, n in enumerate(lengths):
        for block in range(n // rate):
            expected = compressor.naive(slot, block)
            if dtype == torch.bfloat16:
                # Rounded before the norm and after it; a pooled value on a boundary may fall to either side.
                assert ((state[2][slot, block].double() - expected).abs() <= 2**-6 * expected.abs() + 2**-6).all()
            else:
                assert_near(state[2][slot, block], expected)


def transformers_entries(module, config, layer, x, positions_of_chunks):
    """Entries after feeding x [length, H] through transformers' cache in the given chunks."""
    cache = new_cache(config)
    name = "indexer" if isinstance(module, hf.DeepseekV4Indexer) else "compressor"
    residual = x[:, :24]
    for start, stop in positions_of_chunks:
        part = x[None, start:stop], residual[None, start:stop], torch.arange(start, stop)[None]
        module(*part, cache, layer)
    return cache.layers[layer].compressed_kv[name][0]


MODULES = {
    "CSA": (hf.DeepseekV4CSACompressor, CSA, 32),
    "HCA": (hf.DeepseekV4HCACompressor, HCA, 32),
    "indexer": (hf.DeepseekV4Indexer, CSA, 16),
}


# 131 tokens one by one, 300 in chunks: the same for ours, in chunks drawn anew.
@pytest.mark.parametrize("sizes", ((1,), CHUNK_SIZES), ids=("one by one", "chunks"))
@pytest.mark.parametrize("kind", MODULES)
def test_matches_transformers(kind, sizes, draw):
    """The three compressors of the model, fed through transformers' cache."""
    make, layer, dim = MODULES[kind]
    config, length = tiny_config(), 131 if sizes == (1,) else 300
    module = randomise(make(config), draw)
    x = draw.normal(length, 32, outliers=10.0)
    expected = transformers_entries(module, config, layer, x, draw.chunks(length, sizes))

    rate, overlap = KINDS["HCA" if kind == "HCA" else "CSA"]
    width, depth = (2 * dim, 2 * rate) if overlap else (dim, rate)
    rings, entries = [torch.full((2, depth, width), torch.nan) for _ in range(2)], torch.full((2, 80, dim), torch.nan)
    frequencies, norm = inv_freq(config, layer), module.kv_norm.weight.data
    for start, stop in draw.chunks(length, sizes):
        batch = Batch(torch.arange(start, stop), torch.ones(stop - start, dtype=torch.int64))
        c = ops.linear_fp32(x[start:stop], module.kv_proj.weight.data)
        z = ops.linear_fp32(x[start:stop], module.gate_proj.weight.data)
        at = batch.positions, batch.slots
        ops.compress(c, z, module.position_bias.data, norm, frequencies, *at, *rings, entries, rate, EPS)
    assert len(expected) == length // rate
    assert_near(entries[1, : length // rate], expected)
    assert entries[0].isnan().all() and entries[1, length // rate :].isnan().all()


@pytest.mark.parametrize("lengths", (LENGTHS[:4], LENGTHS[4:8], LENGTHS[8:]), ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_give_what_single_tokens_give(kind, lengths, draw):
    """Every length of the list, all residues mod 4 and mod 128 on the way, slots mixed and inert tokens between."""
    compressor = Compressor(draw, lengths, *KINDS[kind])
    expected = compressor.run(one_by_one(lengths))
    compressor.assert_state(compressor.run(random_steps(draw, lengths)), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_one_chunk_beyond_the_ring(kind, draw):
    """300 tokens at once: many blocks in one call, and only the last rows of the ring survive."""
    compressor = Compressor(draw, (300, 300), *KINDS[kind])
    expected = compressor.run(one_by_one((300, 300)))
    compressor.assert_state(compressor.run([make_batch([(1, 0, 300), (0, 0, 300)])]), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_every_split_into_two_chunks(kind, draw):
    """0..n then n..m for every residue n of the rate: the open block and, for CSA, the one before it carry over."""
    rate, overlap = KINDS[kind]
    length = 13 if rate == 4 else 257
    compressor = Compressor(draw, (length,), rate, overlap)
    expected = compressor.run(one_by_one((length,)))
    for cut in range(1, length):
        state = compressor.run([make_batch([(0, 0, cut)]), make_batch([(0, cut, length)])])
        compressor.assert_state(state, expected)


@pytest.mark.parametrize("length", (3, 4, 5))
def test_bug_short_prompts(length, draw):
    """No entry from 3 tokens, one from 4 and from 5, finite, and the next tokens go on from there.
    https://github.com/GDzhu01/vllm-ascend-deepseekv4/issues/76"""
    compressor = Compressor(draw, (9,), 4, True)
    state = compressor.run([make_batch([(0, 0, length)])])
    assert state[2][0, : length // 4].isfinite().all() and state[2][0, length // 4 :].isnan().all()
    compressor.step(make_batch([(0, length, 9)]), state)
    for block in range(2):
        assert_near(state[2][0, block], compressor.naive(0, block))


def test_bug_rope_at_the_first_position():
    """Block w turns by the angle of w * rate, not of w and not of its last position. One channel pair, by hand.
    https://github.com/AMD-AGI/Primus/pull/930"""
    c, z = torch.tensor([[1.0, 0.0]]).repeat(8, 1), torch.zeros(8, 2)
    rings, entries = [torch.zeros(1, 4, 2) for _ in range(2)], torch.zeros(1, 2, 2)
    weights = torch.zeros(4, 2), torch.ones(2), torch.tensor([0.25])
    batch = make_batch([(0, 0, 8)])
    ops.compress(c, z, *weights, batch.positions, batch.slots, *rings, entries, 4, 0.0)
    size = math.sqrt(2.0)  # (1, 0) over its root mean square
    expected = [[size, 0.0], [size * math.cos(4 * 0.25), size * math.sin(4 * 0.25)]]
    assert_near(entries[0], torch.tensor(expected))


def test_overlap_by_hand():
    """Gates 0 everywhere: CSA block 0 is the mean of its four second halves, block 1 the mean of block 0's first halves
    and its own second halves. A huge gate picks one slot alone."""
    c = torch.zeros(8, 4)
    c[:, :2] = torch.tensor([100.0, 0.0])  # first halves
    c[:4, 2:], c[4:, 2:] = torch.tensor([1.0, 1.0]), torch.tensor([0.0, 100.0])
    z, batch = torch.zeros(8, 4), make_batch([(0, 0, 8)])
    weights = torch.zeros(4, 4), torch.ones(2), torch.zeros(1)

    def entries_of(z):
        rings, entries = [torch.full((1, 8, 4), torch.nan) for _ in range(2)], torch.zeros(1, 2, 2)
        ops.compress(c, z, *weights, batch.positions, batch.slots, *rings, entries, 4, 0.0)
        return entries[0]

    assert_near(entries_of(z), torch.ones(2, 2))
    z[2, :2] = 1e4  # token 2, as the previous block's member of block 1: both channels
    assert_near(entries_of(z), torch.tensor([[1.0, 1.0], [math.sqrt(2.0), 0.0]]))
    z[2, :2] = 0.0
    z[5, 3] = 1e4  # channel 1 only: the softmax runs for each channel by itself, so channel 0 stays at 50
    assert_near(entries_of(z)[1], torch.tensor([50.0, 100.0]) / math.sqrt((50.0**2 + 100.0**2) / 2))


def test_ape_belongs_to_the_position(draw):
    """A gate bias row for position mod rate: the same as adding it to z beforehand."""
    compressor = Compressor(draw, (21,), 4, True)
    expected = compressor.run([make_batch([(0, 0, 21)])])
    compressor.z = [compressor.z[0] + compressor.ape[torch.arange(21) % 4]]
    compressor.ape = torch.zeros_like(compressor.ape)
    compressor.assert_state(compressor.run(random_steps(draw, (21,))), expected)


@pytest.mark.parametrize("fill", (0.0, torch.nan), ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_inert_tokens_change_nothing(kind, fill, draw):
    """Alone: state as it was, bit for bit. Among others: no trace of their NaN, and the others' results stay."""
    compressor = Compressor(draw, (140, 7), *KINDS[kind])
    state = compressor.run(one_by_one((140, 7)), fill=0.5)
    before = [t.clone() for t in state]
    for count in (1, 6, 300):
        batch = inert_batch(count)
        garbage = torch.full((count, compressor.width), fill)
        compressor.step(batch, state, c=garbage, z=garbage)
        for now, then in zip(state, before, strict=True):
            assert_same_bits(now, then)
    plain, padded = compressor.new_state(), compressor.new_state()
    compressor.step(make_batch([(1, 0, 7), (0, 0, 140)]), plain)
    batch = make_batch([(-1, 0, 3), (1, 0, 7), (-1, 0, 2), (0, 0, 140), (-1, 0, 4)], (127, 3, 0, -1))
    garbage = batch.rows(compressor.c, inert=fill), batch.rows(compressor.z, inert=fill)
    compressor.step(batch, padded, c=garbage[0], z=garbage[1])
    compressor.assert_state(padded, plain)


@pytest.mark.parametrize("kind", KINDS)
def test_other_slots_are_left_alone(kind, draw):
    """A step of one slot writes to that slot only, whether a block ends in it or not."""
    compressor = Compressor(draw, (130, 130, 130), *KINDS[kind])
    state = compressor.run(one_by_one((130, 130, 130)))
    for start, stop in ((124, 126), (126, 130)):
        before = [t.clone() for t in state]
        compressor.step(make_batch([(1, start, stop)]), state)
        for now, then in zip(state, before, strict=True):
            assert_same_bits(now[[0, 2]], then[[0, 2]])


@pytest.mark.parametrize("kind", KINDS)
def test_reused_slot_equals_fresh_one(kind, draw):
    """A slot needs no clearing: after a longer sequence, or full of NaN, it gives bit for bit what zeros give."""
    compressor = Compressor(draw, (150, 30), *KINDS[kind])
    steps = list(random_steps(draw, compressor.lengths))
    fresh, poisoned = compressor.run(steps, fill=0.0), compressor.run(steps, fill=torch.nan)
    used = Compressor(draw, (300, 300), *KINDS[kind]).run(one_by_one((300, 300)))
    before = used[2].clone()
    for batch in steps:
        compressor.step(batch, used)
    compressor.assert_state(poisoned, fresh, near=False)
    for slot, n in enumerate(compressor.lengths):
        complete = n // compressor.rate
        assert_same_bits(used[2][slot, :complete], fresh[2][slot, :complete])
        assert_same_bits(used[2][slot, complete:], before[slot, complete:])


@pytest.mark.parametrize("kind", KINDS)
def test_outliers_stay_finite(kind, draw):
    """Candidates and gates of 1e4, and rows of zeros: finite entries. Gates are whole numbers, so that z + ape is
    exact: near 1e4 a float32 has steps of 2^-10, which the softmax would show."""
    compressor = Compressor(draw, (260,), *KINDS[kind])
    compressor.c = [draw.normal(260, compressor.width, scale=1e4)]
    compressor.z = [draw.integers(-10000, 10001, 260, compressor.width, dtype=torch.float32)]
    compressor.ape = draw.integers(-3, 4, *compressor.ape.shape, dtype=torch.float32)
    compressor.c[0][:4] = 0.0
    state = compressor.run(random_steps(draw, (260,)))
    complete = 260 // compressor.rate
    assert state[2][0, :complete].isfinite().all()
    for block in range(complete):
        assert_near(state[2][0, block], compressor.naive(0, block))


@pytest.mark.parametrize("kind", KINDS)
def test_gates_may_be_minus_infinity(kind, draw):
    """Slots with gate -inf weigh nothing, as the missing ones of block 0; the rest keep their softmax."""
    rate, overlap = KINDS[kind]
    compressor = Compressor(draw, (2 * rate,), rate, overlap)
    for row in range(0, 2 * rate, 2):
        compressor.z[0][row] = -torch.inf
    state = compressor.run(random_steps(draw, (2 * rate,)))
    for block in range(2):
        assert_near(state[2][0, block], compressor.naive(0, block))


def test_bug_large_row_numbers(draw):
    """slot * blocks + block beyond 2^31, at position 4095 of the last slot.
    https://github.com/ROCm/aiter/pull/4028"""
    slots, blocks = 2**21 + 1, 1024
    entries = sparse_zeros(slots, blocks, 2)
    rings = [sparse_zeros(slots, 8, 4, dtype=torch.float32) for _ in range(2)]
    weights = torch.zeros(4, 4), torch.ones(2), torch.ones(1)
    batch = Batch(torch.arange(4 * blocks - 4, 4 * blocks), torch.full((4,), slots - 1))
    args = draw.normal(4, 4), draw.normal(4, 4), *weights, batch.positions, batch.slots
    ops.compress(*args, *rings, entries, 4, EPS)
    assert (entries[slots - 1, blocks - 1] != 0).all()
    assert (entries[slots - 1, : blocks - 1] == 0).all()
    for slot in (0, 1, slots // 2, slots - 2):
        assert (entries[slot] == 0).all()


class Layer(nn.Module):
    """A CSA layer's two compressors over the same tokens, main and indexer, with their state in buffers."""

    def __init__(self, main, index):
        super().__init__()
        for name, state in (("main", main), ("index", index)):
            for part, tensor in zip(("c", "z", "entries"), state, strict=True):
                self.register_buffer(f"{name}_{part}", tensor)

    def forward(self, main, index, positions, slots, later):
        at = slots, self.main_c, self.main_z, self.main_entries, 4, EPS
        ops.compress(*main, positions, *at)
        ops.compress(*index, positions, slots, self.index_c, self.index_z, self.index_entries, 4, EPS)
        ops.compress(*main, later, *at)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_compiled_module_writes_its_buffers(dtype, draw):
    """Two states in one graph and one of them advanced twice; as eager, in place, nothing of a state's size copied."""
    both = [Compressor(draw, (24, 24), 4, True, dtype) for _ in range(2)]
    states = [compressor.new_state(fill=0.25) for compressor in both]
    batch = make_batch([(0, 0, 6), (-1, 0, 1), (1, 4, 8)])
    inputs = [(batch.rows(c.c), batch.rows(c.z), c.ape, c.norm, c.inv_freq) for c in both]
    args = *inputs, batch.positions, batch.slots, batch.positions + 6
    eager, compiled = (Layer(*([t.clone() for t in state] for state in states)) for _ in range(2))
    eager(*args)
    addresses = [b.data_ptr() for b in compiled.buffers()]
    torch._dynamo.reset()
    _, code = run_and_get_code(torch.compile(compiled, fullgraph=True), *args)
    for now, wanted in zip(compiled.buffers(), eager.buffers(), strict=True):
        assert_same_bits(now, wanted)
    assert [b.data_ptr() for b in compiled.buffers()] == addresses
    body = code[0].split("def call(")[1].split("\ndef ")[0]
    assert body.count("torch.ops.dsv4.compress") == 3
    assert "empty_strided" not in body and "copy_(" not in body

"""advance_* against transformers' attention and its indexer, against the ops they are made of, and compiled."""

import pytest
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code

from dsv4 import ops
from dsv4.ops.advance import heads_a_warp
from dsv4.ops.row_formats import rows_of
from tests.ops.advance_layer import COMPACT, COMPACT_KINDS, EPS, KINDS, SMALL, Layer, decode_batches
from tests.ops.cases import assert_near, assert_same_bits, inert_batch, make_batch, random_steps
from tests.ops.oracles import CSA, HCA, RATES, SLIDING, hf, inv_freq, randomise, tiny_config

DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("write", (True, False))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_is_the_ops_it_stands_for(kind, dtype, write, draw):
    """Bit for bit, results and states: single tokens of several slots with `write`, any chunks without."""
    lengths = (29, 7, 14)
    layer = Layer(draw, kind, lengths, dtype)
    other = layer.fork()
    for batch in decode_batches(lengths) if write else random_steps(draw, lengths, (1, 2, 3, 5, 13)):
        results, expected = layer.advance(batch, write), other.separately(batch, write)
        for actual, wanted in zip((*results, *layer.state()), (*expected, *other.state()), strict=True):
            assert_same_bits(actual, wanted)


@pytest.mark.parametrize("write", (True, False))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "kv", "index"), COMPACT_KINDS)
def test_compact_formats(kind, kv, index, dtype, write, draw):
    """A layer with compact rows or keys against a plain one: results and states are the plain ones quantised, byte by
    byte, keys and index queries rotated before."""
    lengths = (29, 7, 14)
    plain = Layer(draw, kind, lengths, dtype, COMPACT)
    layer = plain.stored_as(kv, index)
    for batch in decode_batches(lengths) if write else random_steps(draw, lengths, (1, 2, 3, 5, 13)):
        results, expected = layer.advance(batch, write), plain.results_as(plain.advance(batch, write), kv, index)
        for actual, wanted in zip(results, expected, strict=True):
            assert_same_bits(actual[batch.slots >= 0], wanted[batch.slots >= 0])
        for actual, wanted in zip(layer.state(), plain.stored_as(kv, index).state(), strict=True):
            assert_same_bits(actual, wanted)


def attended(layer, batch, write, sinks):
    """One step of attention on a layer's state: what the model does with it."""
    at = batch.positions, batch.slots
    q, kv, *index = layer.advance(batch, write)
    indices = ops.index_topk(*index, layer.index[-1], *at, layer.rate, 5) if index else None
    entries = layer.main[-1] if layer.main else None
    out = ops.attend(q, kv, layer.ring, entries, indices, sinks, layer.inv_freq, *at, max(layer.rate, 1))
    if not write:
        ops.kv_write(kv, *at, layer.ring)
    return out


@pytest.mark.parametrize(("kind", "kv", "index"), COMPACT_KINDS)
def test_compact_chunks_give_what_single_tokens_give(kind, kv, index, draw):
    """Through attention, at every residue of both rates and of the window. Two sums may differ in their last bits, and then
    a rounding to the few values of a code may fall to either side: in no more than a few rows."""
    lengths = (261, 131, 5)
    plain = Layer(draw, kind, lengths, sizes=COMPACT._replace(window=128, hca_rate=128))
    sinks = draw.normal(COMPACT.heads)
    single, chunked = (plain.stored_as(kv, index) for _ in range(2))
    expected, actual = ([torch.full((n, COMPACT.heads, COMPACT.dim), torch.nan) for n in lengths] for _ in range(2))
    for batch in decode_batches(lengths):
        batch.scatter(attended(single, batch, True, sinks), expected)
    for batch in random_steps(draw, lengths):
        batch.scatter(attended(chunked, batch, False, sinks), actual)
    wrong = [((a - b).abs() > 1e-4).any(-1).any(-1) for a, b in zip(actual, expected, strict=True)]
    assert torch.cat(wrong).float().mean() <= 0.02
    # A chunk's rows are quantised once more when they are written, which may change their bytes and no value.
    rings = [rows_of(x.ring, COMPACT.dim, COMPACT.rope, torch.float32) for x in (single, chunked)]
    assert (rings[0] != rings[1]).float().mean() <= 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_the_ring_may_be_written_before_attention(kind, draw):
    """With one token a slot, attention over the ring that holds the token's row already is what it is over the ring
    before: at positions within the first window and beyond, where a row that has left is replaced."""
    lengths = (3 * SMALL.window + 1, 5)
    layer = Layer(draw, kind, lengths)
    later = layer.fork()
    sinks = draw.normal(SMALL.heads)
    for batch in decode_batches(lengths):
        at = sinks, layer.inv_freq, batch.positions, batch.slots, max(layer.rate, 1)
        (q, kv, *_), _ = layer.advance(batch, True), later.advance(batch, False)
        out = [ops.attend(q, kv, x.ring, x.main[-1] if x.main else None, None, *at) for x in (layer, later)]
        assert_same_bits(out[0], out[1])
        ops.kv_write(kv, batch.positions, batch.slots, later.ring)
        assert_same_bits(layer.ring, later.ring)


@pytest.mark.parametrize("kind", KINDS)
def test_inert_tokens_change_nothing(kind, draw):
    layer = Layer(draw, kind, (9, 5))
    before = [t.clone() for t in layer.state()]
    layer.advance(inert_batch(6), True)
    for now, then in zip(layer.state(), before, strict=True):
        assert_same_bits(now, then)


# What transformers projects, put side by side as this library's projections do, and its attention at the end.
@pytest.mark.parametrize("layer", (SLIDING, CSA, HCA), ids=("sliding", "CSA", "HCA"))
def test_matches_transformers(layer, draw):
    """261 tokens through transformers' attention at once; 100 of them here as a chunk, the rest one by one. The indexer's
    picks are our own: where rounding decides between equal scores, a token may differ."""
    config, length = tiny_config(), 261
    module = randomise(hf.DeepseekV4Attention(config, layer), draw)
    frequencies, seen = inv_freq(config, layer), {}
    module.o_a_proj.register_forward_pre_hook(lambda _, args: seen.update(out=args[0]))
    x, positions = draw.normal(1, length, 32), torch.arange(length)
    distance = positions[:, None] - positions
    mask = torch.where((distance >= 0) & (distance < 128), 0.0, -torch.inf)[None, None]
    angles = positions[None, :, None] * frequencies
    rope = (angles.cos(), angles.sin())
    if layer == CSA:
        indexer = module.compressor.indexer
        indexer.register_forward_hook(lambda _, args, out: seen.update(picks=out))
    module(x, {"main": rope, "compress": rope}, positions[None], mask)
    expected = seen["out"].reshape(length, 4, 32)

    def project(part):
        low = module.q_a_norm(module.q_a_proj(part))
        q_all = [module.q_b_proj(low)]
        z = [] if layer == SLIDING else [module.compressor.kv_proj(part), module.compressor.gate_proj(part)]
        if layer == CSA:
            q_all.append(indexer.q_b_proj(low))
            z += [indexer.kv_proj(part), indexer.gate_proj(part), indexer.scorer.weights_proj(part)]
        y = torch.cat((module.q_a_proj(part), module.kv_proj(part)), 1)
        return torch.cat(q_all, 1), y, *([torch.cat(z, 1)] if z else [])

    def state(compressor, dim, overlap):
        depth, width = (8, 2 * dim) if overlap else (128, dim)
        rings = [torch.full((2, depth, width), torch.nan) for _ in range(2)]
        weights = compressor.position_bias.data, compressor.kv_norm.weight.data
        return *weights, *rings, torch.full((2, 80, dim), torch.nan)

    rate, ring, states = RATES.get(layer, 1), torch.full((2, 128, 32), torch.nan), []
    if layer != SLIDING:
        states += state(module.compressor, 32, layer == CSA)
    if layer == CSA:
        states += state(indexer, 16, True)
    op = {SLIDING: ops.advance_window, CSA: ops.advance_csa, HCA: ops.advance_hca}[layer]
    sizes = {SLIDING: (4,), CSA: (4, 16, rate), HCA: (4, rate)}[layer]
    same = 0
    for start, stop in ((0, 100), *((p, p + 1) for p in range(100, length))):
        at, write = (positions[start:stop], torch.ones(stop - start, dtype=torch.int64)), stop == start + 1
        norm = module.kv_norm.weight.data
        q, kv, *index = op(*project(x[0, start:stop]), norm, frequencies, *at, ring, *states, *sizes, EPS, write)
        entries = states[4] if states else None
        indices, agree = None, torch.ones(stop - start, dtype=torch.bool)
        if layer == CSA:
            indices = ops.index_topk(*index, states[9], *at, rate, 6)
            theirs = torch.where(seen["picks"][0, start:stop] < (at[0][:, None] + 1) // 4, seen["picks"][0, start:stop], -1)
            agree = (indices.sort().values == theirs.sort().values).all(1)
        out = ops.attend(q, kv, ring, entries, indices, module.sinks.data, frequencies, *at, rate)
        if not write:
            ops.kv_write(kv, *at, ring)
        assert_near(out[agree], expected[start:stop][agree])
        same += int(agree.sum())
    assert same >= 0.97 * length


class TwoSteps(nn.Module):
    """Two decode steps of one layer in one graph: the second needs what the first has written."""

    def __init__(self, kind, state):
        super().__init__()
        self.op = getattr(ops, f"advance_{kind}")
        for number, tensor in enumerate(state):
            self.register_buffer(f"state{number}", tensor)

    def forward(self, first, second, weights, sizes, positions, later, slots):
        kv_norm, frequencies, *compressors = weights
        ring, *rest = self.buffers()
        states = []
        for number in range(0, len(compressors), 2):
            states += [*compressors[number : number + 2], *rest[number // 2 * 3 : number // 2 * 3 + 3]]
        results = self.op(*first, kv_norm, frequencies, positions, slots, ring, *states, *sizes, True)
        return *results, *self.op(*second, kv_norm, frequencies, later, slots, ring, *states, *sizes, True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_module_writes_its_buffers(kind, dtype, draw):
    """As eager, results and buffers, in place; the generated code allocates nothing and copies no state."""
    layer = Layer(draw, kind, (24, 24), dtype)
    batches = [make_batch([(1, p, p + 1), (-1, 0, 1), (0, p + 3, p + 4)]) for p in (3, 4)]
    weights = [layer.kv_norm, layer.inv_freq, *layer.main[:2], *layer.index[:2]]
    args = *(layer.inputs(b) for b in batches), weights, layer.constants(), *(b.positions for b in batches)
    eager, compiled = (TwoSteps(kind, [t.clone() for t in layer.state()]) for _ in range(2))
    expected = eager(*args, batches[0].slots)
    addresses = [b.data_ptr() for b in compiled.buffers()]
    torch._dynamo.reset()
    results, code = run_and_get_code(torch.compile(compiled, fullgraph=True), *args, batches[0].slots)
    for actual, wanted in zip((*results, *compiled.buffers()), (*expected, *eager.buffers()), strict=True):
        assert_same_bits(actual, wanted)
    assert [b.data_ptr() for b in compiled.buffers()] == addresses
    body = code[0].split("def call(")[1].split("\ndef ")[0]
    assert body.count(f"torch.ops.dsv4.advance_{kind}.default(") == 2
    assert "empty_strided" not in body and "copy_(" not in body


@pytest.mark.parametrize(
    ("heads", "index_heads", "index_dim"), ((64, 64, 128), (64, 0, 0), (4, 16, 128), (3, 4, 32), (2, 2, 8))
)
def test_heads_a_warp_divide_the_heads(heads, index_heads, index_dim):
    """And a lane has one weight of the indexer at most."""
    counts = [heads_a_warp(tokens, heads, index_heads, index_dim) for tokens in (1, 8, 9, 32, 33, 4096)]
    assert counts[:2] == [1, 1] and counts == sorted(counts)
    for count in counts:
        assert heads % count == index_heads % count == 0 and (not index_heads or index_dim >= 8 * count)

"""index_topk against explicit loops and transformers' indexer.

Most inputs are small integers: every product and sum is then exact in float32, so scores, ties and selections are exact
too, and chunks or tiles cannot change them. T = 150 tokens pass two of the reference's tile borders.
"""

import pytest
import torch

from dsv4 import ops
from tests.ops.cases import (
    CHUNK_SIZES,
    Batch,
    assert_same_bits,
    inert_batch,
    make_batch,
    one_by_one,
    random_steps,
    sparse_zeros,
)
from tests.ops.oracles import CSA, hf, inv_freq, new_cache, randomise, tiny_config

DTYPES = (torch.float32, torch.bfloat16)


def scores_of(q, weights, keys):
    """One token, q [heads][d], weights [heads], keys [blocks][d]: sum over heads of weight * max(0, dot)."""
    scores = []
    for key in keys:
        total = 0.0
        for head, weight in zip(q, weights, strict=True):
            total += weight * max(0.0, sum(a * b for a, b in zip(head, key, strict=True)))
        scores.append(total)
    return scores


def naive_index_topk(q, weights, keys, positions, slots, rate, topk):
    """A list of picked blocks a token, best first, the lower block first among equals."""
    picks = []
    for t, (position, slot) in enumerate(zip(positions.tolist(), slots.tolist(), strict=True)):
        visible = min(max(position + 1, 0) // rate, keys.shape[1]) if slot >= 0 else 0
        scores = scores_of(q[t].tolist(), weights[t].tolist(), keys[slot, :visible].tolist())
        picks.append(sorted(range(visible), key=lambda block: (-scores[block], block))[:topk])
    return picks


def assert_picks(actual, expected, width):
    """The same sets, and -1 in what is left of the row."""
    assert actual.dtype == torch.int32 and actual.shape == (len(expected), width)
    for row, picks in zip(actual.tolist(), expected, strict=True):
        assert sorted(row) == [-1] * (width - len(picks)) + sorted(picks)


def integer_inputs(draw, tokens, slots, blocks, dtype=torch.float32, heads=2, dim=4):
    q, keys = (
        draw.integers(-2, 3, tokens, heads, dim, dtype=dtype),
        draw.integers(-2, 3, slots, blocks, dim, dtype=dtype),
    )
    return q, draw.integers(-2, 3, tokens, heads, dtype=torch.float32), keys


# topk below, at and above the number of blocks; rate 1 shows every position's own border.
@pytest.mark.parametrize("rate", (1, 4))
@pytest.mark.parametrize("topk", (1, 5, 12, 40))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matches_loops(topk, rate, dtype, draw):
    q, weights, keys = integer_inputs(draw, 150, 3, 12, dtype)
    positions, slots = draw.integers(0, 12 * rate, 150), draw.integers(-1, 3, 150)
    args = q, weights, keys, positions, slots, rate, topk
    assert_picks(ops.index_topk(*args), naive_index_topk(*args), min(topk, 12))


def test_visibility_at_every_residue(draw):
    """Block w is visible from the token that completes it: at position 4w + 3, not at 4w + 2."""
    q, weights, keys = integer_inputs(draw, 21, 1, 6)
    positions = torch.arange(21)
    actual = ops.index_topk(q, weights, keys, positions, torch.zeros(21, dtype=torch.int64), 4, 6)
    for position, row in enumerate(actual.tolist()):
        assert sorted(b for b in row if b >= 0) == list(range((position + 1) // 4))


def test_ties_take_the_lowest_blocks():
    """All scores 0 (all heads cut off by ReLU), all equal, and one better than the rest."""
    keys = torch.ones(1, 10, 2)
    one, at = torch.ones(1, 1), (torch.tensor([39]), torch.tensor([0]), 4, 4)
    assert_picks(ops.index_topk(-torch.ones(1, 1, 2), one, keys, *at), [[0, 1, 2, 3]], 4)
    assert_picks(ops.index_topk(torch.ones(1, 1, 2), one, keys, *at), [[0, 1, 2, 3]], 4)
    keys[0, 7] = 2
    assert_picks(ops.index_topk(torch.ones(1, 1, 2), one, keys, *at), [[0, 1, 2, 7]], 4)
    # A negative weight turns the order round; a score of 0 beats a negative one.
    assert_picks(ops.index_topk(torch.ones(1, 1, 2), -one, keys, *at), [[0, 1, 2, 3]], 4)
    keys[0, 8] = -1
    assert_picks(ops.index_topk(torch.ones(1, 1, 2), -one, keys, *at), [[0, 1, 2, 8]], 4)
    # So many equal blocks that an unstable sort would show.
    many, late = torch.ones(1, 3000, 2), (torch.tensor([12_000]), torch.tensor([0]), 4, 4)
    many[0, [700, 2900]] = 2
    assert_picks(ops.index_topk(torch.ones(1, 1, 2), one, many, *late), [[0, 1, 700, 2900]], 4)


def test_bug_relu_is_per_head():
    """Two heads with opposite dots: block 0 scores max(0, 3) + max(0, -3) = 3, block 1 scores 1 + 1 = 2. Summed before
    the ReLU, block 0 would score 0. https://github.com/1CatAI/1Cat-vLLM/pull/250"""
    q = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    keys = torch.tensor([[[3.0, -3.0], [1.0, 1.0]]])
    actual = ops.index_topk(q, torch.ones(1, 2), keys, torch.tensor([7]), torch.tensor([0]), 4, 1)
    assert actual.tolist() == [[0]]


def test_chunks_give_the_same_picks(draw):
    """Random chunks of three slots, mixed and with inert tokens of NaN, against one token at a time."""
    lengths = (131, 5, 64)
    q, weights, keys = zip(*(integer_inputs(draw, n, 1, 33) for n in lengths), strict=True)
    keys = torch.cat(keys)
    expected = [torch.full((n, 6), -7, dtype=torch.int32) for n in lengths]
    for batch in one_by_one(lengths):
        picks = ops.index_topk(batch.rows(q), batch.rows(weights), keys, batch.positions, batch.slots, 4, 6)
        batch.scatter(picks, expected)
    actual = [torch.full((n, 6), -7, dtype=torch.int32) for n in lengths]
    for batch in random_steps(draw, lengths, CHUNK_SIZES):
        picks = ops.index_topk(batch.rows(q), batch.rows(weights), keys, batch.positions, batch.slots, 4, 6)
        assert (picks[batch.slots < 0] == -1).all()
        batch.scatter(picks, actual)
    for a, b in zip(actual, expected, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("garbage", (0.0, torch.nan), ids=str)
def test_inert_batch(garbage, draw):
    """Nothing but inert tokens, positions garbage."""
    batch = inert_batch(9)
    q, weights = torch.full((9, 2, 4), garbage), torch.full((9, 2), garbage)
    picks = ops.index_topk(q, weights, draw.normal(2, 5, 4), batch.positions, batch.slots, 4, 3)
    assert (picks == -1).all()


def test_bug_zero_entries(draw):
    """Before the first block is complete there is nothing to read, whatever the buffer holds; and it may have no room
    for a block at all. https://github.com/vllm-project/vllm/issues/51970"""
    q, weights, _ = integer_inputs(draw, 3, 1, 1)
    positions, slots = torch.arange(3), torch.zeros(3, dtype=torch.int64)
    picks = ops.index_topk(q, weights, torch.full((1, 8, 4), torch.nan), positions, slots, 4, 6)
    assert (picks == -1).all() and picks.shape == (3, 6)
    assert ops.index_topk(q, weights, torch.zeros(1, 0, 4), positions, slots, 4, 6).shape == (3, 0)


def test_stale_keys_do_not_matter(draw):
    """A slot used before: keys beyond the visible blocks, NaN or huge, change no pick."""
    q, weights, keys = integer_inputs(draw, 30, 2, 12)
    positions, slots = torch.arange(30).clamp(max=23), torch.ones(30, dtype=torch.int64)
    clean = ops.index_topk(q, weights, keys, positions, slots, 4, 5)
    for garbage in (torch.nan, torch.inf, 1e30):
        keys[1, 6:], keys[0] = garbage, garbage
        assert_same_bits(ops.index_topk(q, weights, keys, positions, slots, 4, 5), clean)


def test_nan_scores_stay_in_range(draw):
    """A NaN key ranks last among the visible; a NaN query picks visible blocks or -1, never anything else."""
    q, weights, keys = integer_inputs(draw, 4, 1, 8)
    keys[0, 2] = torch.nan
    q[1], weights[2] = torch.nan, torch.nan
    positions, slots = torch.tensor([27, 27, 27, 11]), torch.zeros(4, dtype=torch.int64)
    picks = ops.index_topk(q, weights, keys, positions, slots, 4, 5).tolist()
    for row, visible in zip(picks, (7, 7, 7, 3), strict=True):
        real = [b for b in row if b != -1]
        assert len(set(real)) == len(real) == min(5, visible) and all(0 <= b < visible for b in real)
    assert 2 not in picks[0]
    assert sorted(picks[3]) == [-1, -1, 0, 1, 2]


def test_overflowing_scores_stay_in_range(draw):
    """Products beyond float32: infinite scores, and infinity minus infinity."""
    q, weights, keys = integer_inputs(draw, 5, 1, 8)
    picks = ops.index_topk(q * 1e30, weights, keys * 1e30, torch.full((5,), 23), torch.zeros(5, dtype=torch.int64), 4, 4)
    for row in picks.tolist():
        assert len(set(row)) == 4 and all(0 <= b < 6 for b in row)


def test_bug_large_row_numbers(draw):
    """slot * blocks + block beyond 2^31 (a million tokens have 262144 blocks a slot; here fewer, and more slots).
    https://github.com/ROCm/aiter/pull/4028"""
    blocks, slots = 1024, 2**21 + 1
    keys = sparse_zeros(slots, blocks, 2)
    keys[slots - 1, 1000] = 1.0
    keys[slots - 1, 3] = 2.0
    q, position = torch.ones(1, 1, 2, dtype=torch.bfloat16), torch.tensor([4 * blocks - 1])
    picks = ops.index_topk(q, torch.ones(1, 1), keys, position, torch.tensor([slots - 1]), 4, 3)
    assert_picks(picks, [[0, 3, 1000]], 3)


def assert_best(picks, scores, visible, topk):
    """picks of one token hold every visible block that clearly belongs there and none that clearly does not."""
    real = [b for b in picks.tolist() if b >= 0]
    assert len(set(real)) == len(real) == min(topk, visible) and all(b < visible for b in real)
    if visible > topk:
        border = scores[:visible].sort(descending=True).values[topk - 1].item()
        slack = 1e-5 * scores[:visible].abs().max().item()
        for block in range(visible):
            if scores[block] > border + slack:
                assert block in real
            if scores[block] < border - slack:
                assert block not in real


# 131 tokens one by one, 300 in the chunk sizes of the list: 75 blocks for 6 picks.
@pytest.mark.parametrize("sizes", ((1,), CHUNK_SIZES), ids=("one by one", "chunks"))
def test_matches_transformers(sizes, draw):
    """The indexer whole: its compressor, its query, its weights, fed through transformers' cache. Selections are
    compared by score, since equal scores to within rounding may go either way."""
    config = tiny_config()
    module, length = randomise(hf.DeepseekV4Indexer(config), draw), 131 if sizes == (1,) else 300
    x, residual = draw.normal(length, 32), draw.normal(length, 24)
    cache, theirs = new_cache(config), []
    for start, stop in draw.chunks(length, sizes):
        part = x[None, start:stop], residual[None, start:stop], torch.arange(start, stop)[None]
        theirs += list(module(*part, cache, CSA)[0])
    their_keys = cache.layers[CSA].compressed_kv["indexer"][0]

    frequencies = inv_freq(config, CSA)
    rings, keys = [torch.full((2, 8, 32), torch.nan) for _ in range(2)], torch.full((2, 80, 16), torch.nan)
    ours = []
    for start, stop in draw.chunks(length, sizes):
        batch = Batch(torch.arange(start, stop), torch.ones(stop - start, dtype=torch.int64))
        part, at = x[start:stop], (batch.positions, batch.slots)
        c, z = module.kv_proj(part), module.gate_proj(part)
        norm = module.kv_norm.weight.data
        ops.compress(c, z, module.position_bias.data, norm, frequencies, *at, *rings, keys, 4, 1e-6)
        q = module.q_b_proj(residual[start:stop]).view(-1, 16, 16)
        q = ops.q_rope(q, frequencies, batch.positions, norm=False)
        weights = module.scorer.weights_proj(part) * 16**-0.5 * 16**-0.5
        ours += list(ops.index_topk(q, weights, keys, *at, 4, 6))

    queries = module.q_b_proj(residual).view(1, length, 16, 16).transpose(1, 2)
    angles = torch.arange(length)[None, :, None] * frequencies
    queries = hf.apply_rotary_pos_emb(queries, angles.cos(), angles.sin()).transpose(1, 2)
    scores = module.scorer(queries.double(), their_keys[None].double(), x[None])[0].double()
    for t in range(length):
        assert_best(ours[t], scores[t], (t + 1) // 4, 6)
        assert_best(theirs[t], scores[t], (t + 1) // 4, 6)


def test_short_contexts_pick_everything(draw):
    """While (t + 1) // 4 <= topk the indexer is a no-op, so short runs of a real model do not test it."""
    q, weights, keys = draw.normal(48, 4, 8), draw.normal(48, 4), draw.normal(1, 20, 8)
    batch = make_batch([(0, 0, 48)])
    picks = ops.index_topk(q, weights, keys, batch.positions, batch.slots, 4, 12)
    for t, row in enumerate(picks.tolist()):
        assert sorted(b for b in row if b >= 0) == list(range((t + 1) // 4))

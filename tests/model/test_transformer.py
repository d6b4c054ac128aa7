"""What the model as a whole promises beside the right numbers: causality, independence of the rows of a batch, and a
residual that stays bounded over many layers."""

import pytest
import torch

from dsv4.model.transformer import HyperConnection
from dsv4.ops import hc_post, hc_pre
from tests.model.random_checkpoints import NAMES, VOCAB, clear_tokens, expected, model, new_cache, run, run_in_chunks
from tests.ops.cases import GARBAGE_POSITIONS, Draw, assert_same_bits

N, HIDDEN = 4, 64


def tokens(draw: Draw, name: str, length: int) -> list[int]:
    return draw.integers(2, VOCAB[name], length).tolist()


@pytest.mark.parametrize("name", NAMES)
def test_bug_later_tokens_move_earlier_logits(name, draw):
    """The indexer had no causal mask, so the future chose the blocks of the past. Here not one bit may move: all rows
    of a batch of the same shape take the same arithmetic. https://github.com/huggingface/transformers/issues/45820"""
    ids = tokens(draw, name, 200)
    before = run_in_chunks(name, new_cache(name), 0, ids, len(ids))
    for t in (2, 3, 126, 127, draw.random.randint(5, 198)):
        changed = ids[: t + 1] + [2 + (token - 1) % (VOCAB[name] - 2) for token in ids[t + 1 :]]
        after = run_in_chunks(name, new_cache(name), 0, changed, len(ids))
        assert_same_bits(after[: t + 1], before[: t + 1])
        assert (after[t + 1] - before[t + 1]).abs().max() > 1e-2  # and the change does matter where it may


@pytest.mark.parametrize("name", NAMES)
def test_every_token_matters_to_the_last(name, draw):
    """The converse: 300 tokens back there are only compressed entries, and a change there still reaches the end."""
    ids = tokens(draw, name, 300)
    before = run_in_chunks(name, new_cache(name), 0, ids, len(ids))[-1]
    for position in (0, 127, draw.random.randint(1, 255), 299):  # in complete blocks, and the last token itself
        changed = [*ids]
        changed[position] = 2 + (ids[position] - 1) % (VOCAB[name] - 2)
        assert (run_in_chunks(name, new_cache(name), 0, changed, len(ids))[-1] - before).abs().max() > 1e-4


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("side", ["left", "right", "between"])
def test_bug_padding_is_pooled(name, side, draw):
    """Padding was pooled into compressed blocks. Rows of 5 and 9 tokens, padded to 12 on either side and in between,
    have the logits that they have alone. https://github.com/huggingface/transformers/issues/45938"""
    whole = [clear_tokens(name, length + 20, draw) for length in (5, 9)]
    rows = [ids[:-20] for ids in whole]
    alone = [run_in_chunks(name, new_cache(name), 0, row, len(row)) for row in rows]
    pads = [(-1, draw.random.choice(GARBAGE_POSITIONS), [0] * (12 - len(row))) for row in rows]
    order = {
        "left": [pads[0], (0, 0, rows[0]), pads[1], (1, 0, rows[1])],
        "right": [(0, 0, rows[0]), pads[0], (1, 0, rows[1]), pads[1]],
        "between": [pads[0], (0, 0, rows[0]), pads[1], pads[0], (1, 0, rows[1]), pads[1]],
    }[side]
    cache = new_cache(name, slots=2, fill=torch.nan)
    got = [logits for (slot, _, _), logits in zip(order, run(name, cache, order), strict=True) if slot >= 0]
    # and on: 20 more tokens each, decoded side by side
    for step in range(20):
        batch = [(slot, len(row) + step, [whole[slot][len(row) + step]]) for slot, row in enumerate(rows)]
        got = [torch.cat(pair) for pair in zip(got, run(name, cache, batch), strict=True)]
    for ids, logits, short in zip(whole, got, alone, strict=True):
        torch.testing.assert_close(logits[: len(short)], short, rtol=1e-5, atol=5e-5)
        torch.testing.assert_close(logits, expected(name, ids), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_other_rows_move_no_bit(name, draw):
    """A batch of one shape: whatever the other slots' tokens, the padding and the other slots' state are (NaN too), a
    row's logits and its state have the same bits."""
    mine, length = tokens(draw, name, 150), 140

    def go(fill: float) -> tuple[torch.Tensor, dict]:
        cache = new_cache(name, slots=3, fill=fill)
        out = []
        for start, count in ((0, 70), (70, 3), (73, 60), (133, 7)):
            others = [tokens(draw, name, 9), tokens(draw, name, 4)]
            batch = [
                (0, start, others[0]),
                (-1, draw.random.choice(GARBAGE_POSITIONS), tokens(draw, name, 2)),
                (1, start, mine[start : start + count]),
                (2, start + 5, others[1]),
            ]
            out.append(run(name, cache, batch)[2])
        for step in range(length, 150):
            batch = [(0, step + 3, tokens(draw, name, 1)), (1, step, [mine[step]]), (-1, step, [0])]
            out.append(run(name, cache, batch)[1])
        return torch.cat(out), cache.state_of(1)

    logits, state = go(0.0)
    for fill in (0.0, torch.nan, 1e30):
        again, _ = go(fill)
        assert_same_bits(again, logits)
    assert logits.isfinite().all() and all(not part.isnan().any() for part in state.values())


@pytest.mark.parametrize("name", NAMES)
def test_inert_batches_leave_the_state(name, draw):
    """Batches of padding only, as the ones that compile and capture run, between the chunks of a sequence."""
    ids = tokens(draw, name, 140)
    plain, disturbed = new_cache(name), new_cache(name)
    for start in range(0, 140, 35):
        wanted = run(name, plain, [(0, start, ids[start : start + 35])])[0]
        for position in GARBAGE_POSITIONS:
            hidden = run(name, disturbed, [(-1, position, tokens(draw, name, draw.random.randint(1, 6)))])[0]
            assert hidden.isfinite().all()
        assert_same_bits(run(name, disturbed, [(0, start, ids[start : start + 35])])[0], wanted)
    for (part, wanted), got in zip(plain.state_of(0).items(), disturbed.state_of(0).values(), strict=True):
        assert torch.equal(got, wanted), part


def test_order_of_the_sequences_in_a_batch_does_not_matter(draw):
    rows = [clear_tokens("tiny", length, draw) for length in (7, 1, 30)]
    segments = [(slot, 0, row) for slot, row in enumerate(rows)]
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        logits = run("tiny", new_cache("tiny", 3), [segments[i] for i in order])
        for i, got in zip(order, logits, strict=True):
            alone = run("tiny", new_cache("tiny", 3), [segments[i]])[0]
            torch.testing.assert_close(got, alone, rtol=1e-5, atol=5e-5)


# --- hyper-connections over many layers -------------------------------------------------------------------------------


def _site(draw: Draw, scale: float) -> tuple[torch.Tensor, ...]:
    """Coefficients of one hyper-connection: fn, base, scale, norm."""
    fn = draw.normal(24, N * HIDDEN, scale=2 * (N * HIDDEN) ** -0.5)
    return fn, draw.normal(24), torch.full((3,), scale), 1 + draw.normal(HIDDEN, scale=0.1)


@pytest.mark.parametrize("scale", [0.7, 3.0])
def test_residual_over_61_layers(scale, draw):
    """61 layers are 122 random connections. Each new stream is a mean of the old ones (columns sum to 1), so mixing
    alone never makes a stream larger than the largest; and with sublayers whose output has the size of a normalised
    vector the residual grows like a sum of 122 such outputs at most, not exponentially."""
    tokens = 8
    alone = start = draw.normal(tokens, N, HIDDEN)
    fed = alone.clone()
    columns = rows = 0.0
    norms = [fed.norm(dim=-1).mean().item()]
    for _ in range(2 * 61):
        site = _site(draw, scale)
        _, _, comb = hc_pre(alone, *site, 1e-6, 1e-6, 20)
        alone = hc_post(torch.zeros(tokens, HIDDEN), alone, torch.zeros(tokens, N), comb)
        x, post, comb = hc_pre(fed, *site, 1e-6, 1e-6, 20)
        columns = max(columns, (comb.sum(-2) - 1).abs().max().item())
        rows = max(rows, (comb.sum(-1) - 1).abs().max().item())
        sublayer = draw.normal(HIDDEN, HIDDEN, scale=HIDDEN**-0.5)
        fed = hc_post(x @ sublayer, fed, post, comb)
        norms.append(fed.norm(dim=-1).mean().item())
    drift = ((alone.sum(1) - start.sum(1)).abs().max() / start.sum(1).abs().max()).item()
    growth = (alone.norm(dim=-1).max() / start.norm(dim=-1).max()).item()
    print(
        f"scale {scale}: columns sum to 1 within {columns:.1e}, rows within {rows:.1e}; mixing alone over 61 layers: "
        f"largest stream times {growth:.3f}, sum of streams drifts by {drift:.1e}; with sublayers the residual's norm "
        f"goes from {norms[0]:.1f} to {norms[-1]:.1f} (largest {max(norms):.1f}, one output {HIDDEN**0.5:.1f})"
    )
    assert columns < 1e-5
    # Sinkhorn ends on columns: rows are as near as 20 iterations come, which for peaked matrices is not very near
    assert growth < 1.05
    assert max(norms) < norms[0] + 2 * 122 * HIDDEN**0.5


def test_rows_converge_for_moderate_matrices(draw):
    """At the scale of an untrained model (logits of about 1) the rows sum to 1 as well, after 20 iterations: nearly all
    of them, since among many draws there are peaked ones."""
    streams = draw.normal(256, N, HIDDEN)
    _, _, comb = hc_pre(streams, *_site(draw, 0.3), 1e-6, 1e-6, 20)
    rows, columns = (comb.sum(-1) - 1).abs().amax(-1), (comb.sum(-2) - 1).abs().max().item()
    most, all_rows = rows.quantile(0.95).item(), rows.max().item()
    print(f"rows within {all_rows:.1e}, 95 % of them within {most:.1e}, columns within {columns:.1e}")
    assert columns < 1e-5 and most < 1e-3 and all_rows < 0.02


def test_residual_of_a_real_model_is_bounded(draw):
    """The same inside the random checkpoint: the streams that each connection collapses, for a long prompt."""
    sizes = []
    hooks = [
        module.register_forward_hook(lambda _m, _a, out: sizes.append(out[0].float().norm(dim=-1).max().item()))
        for module in model("pro").modules()
        if isinstance(module, HyperConnection)
    ]
    try:
        run_in_chunks("pro", new_cache("pro"), 0, tokens(draw, "pro", 300), 300)
    finally:
        for hook in hooks:
            hook.remove()
    print("largest stream before each connection:", " ".join(f"{size:.0f}" for size in sizes))
    assert len(sizes) == 10 and max(sizes) < 100 * sizes[0]

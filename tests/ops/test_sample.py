"""sample against explicit loops, exact distributions, transformers' logits processors and Philox's known answers."""

import math

import pytest
import torch
from transformers.generation import logits_process as hf

from dsv4 import ops
from dsv4.ops.sample import gumbel_noise, philox
from tests.ops.cases import assert_near

LOGITS = (2.0, -1.0, 0.5, 1.5, -0.5, 0.0, 1.0, -2.0, 0.25, 1.25, -3.0, 0.75)
OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


def sample(logits, seeds, positions=None, seen=None, **settings):
    """ops.sample with one setting for all rows; positions default to 0."""
    rows = logits.shape[0]
    values = OFF | settings
    columns = {
        name: torch.full((rows,), value, dtype=torch.int64 if name == "top_k" else torch.float32)
        for name, value in values.items()
    }
    seeds = torch.as_tensor(seeds).expand(rows)
    positions = torch.zeros(rows, dtype=torch.int64) if positions is None else positions
    seen = torch.zeros_like(logits, dtype=torch.bool) if seen is None else seen
    return ops.sample(logits, seen, *columns.values(), seeds, positions)


def naive_distribution(logits, seen, temperature, top_k, top_p, min_p, repetition_penalty):
    """One row of Python floats -> exact probabilities, filter by filter."""
    values = list(logits)
    for token, was_seen in enumerate(seen):
        if was_seen:
            values[token] = values[token] / repetition_penalty if values[token] > 0 else values[token] * repetition_penalty
    if temperature == 0:
        best = max(range(len(values)), key=lambda t: (values[t], -t))
        return [float(t == best) for t in range(len(values))]
    values = [v / temperature for v in values]
    order = sorted(range(len(values)), key=lambda t: (-values[t], t))

    def probabilities(tokens):
        exps = [math.exp(values[t] - values[order[0]]) for t in tokens]
        return [e / sum(exps) for e in exps]

    if top_k > 0:
        order = order[:top_k]
    if top_p < 1:
        before, kept = 0.0, []
        for token, p in zip(order, probabilities(order), strict=True):
            if before < top_p or not kept:
                kept.append(token)
            before += p
        order = kept
    probs = probabilities(order)
    order = [token for token, p in zip(order, probs, strict=True) if p >= min_p * probs[0]]
    out = [0.0] * len(values)
    for token, p in zip(order, probabilities(order), strict=True):
        out[token] = p
    return out


def assert_follows(tokens, distribution):
    """Chi-square of the drawn tokens against exact probabilities, at most 6 standard deviations above its mean. Callers
    use fixed seeds, so the outcome is always the same: the bound says how unlikely it is, not how often it fails."""
    draws, counts = len(tokens), torch.bincount(tokens, minlength=len(distribution)).tolist()
    kept = [token for token, p in enumerate(distribution) if p > 0]
    for token, count in enumerate(counts):
        assert count == 0 or distribution[token] > 0, f"token {token} was filtered out and drawn {count} times"
    assert all(draws * distribution[token] >= 5 for token in kept), "too few draws for the chi-square"
    statistic = sum((counts[t] - draws * distribution[t]) ** 2 / (draws * distribution[t]) for t in kept)
    freedom = len(kept) - 1
    assert statistic <= freedom + 6 * math.sqrt(2 * freedom) + 1e-9, f"chi-square {statistic:.1f} of {freedom}"


# Random123's known answers (kat_vectors of the reference distribution): counter, key, result.
KNOWN_ANSWERS = (
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
)


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_philox_known_answers(counter, key, result):
    words = [tuple(torch.tensor(int(word, 16)) for word in text.split()) for text in (counter, key)]
    assert " ".join(f"{word:08x}" for word in philox(*words).tolist()) == result


def test_philox_broadcasts(draw):
    """Counters by column and keys by row, as the sampler uses it: each word the same as alone."""
    counters, keys = draw.integers(0, 2**32, 5), draw.integers(0, 2**32, 3, 1)
    zero = torch.zeros((), dtype=torch.int64)
    together = philox((counters, zero, zero, zero), (keys, zero))
    assert together.shape == (3, 5, 4) and ((together >= 0) & (together < 2**32)).all()
    for row in range(3):
        for column in range(5):
            alone = philox((counters[column], zero, zero, zero), (keys[row, 0], zero))
            assert torch.equal(together[row, column], alone)


def naive_philox(counter, key):
    """Philox4x32-10 on Python integers."""
    c, (k0, k1) = list(counter), key
    for _ in range(10):
        first, second = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(second >> 32) ^ c[1] ^ k0, second & 0xFFFFFFFF, (first >> 32) ^ c[3] ^ k1, first & 0xFFFFFFFF]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c


def naive_noise(seed, position, token):
    """Counter (token // 4, position low, position high, 0), key (seed low, seed high), word token % 4; its upper 23
    bits and a half make a uniform number u; the noise is -log(-log(u))."""
    low, high = (value & 0xFFFFFFFF for value in (position, position >> 32))
    word = naive_philox((token // 4, low, high, 0), (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))[token % 4]
    return -math.log(-math.log(((word >> 9) + 0.5) / 2**23))


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_naive_philox_known_answers(counter, key, result):
    words = ([int(word, 16) for word in text.split()] for text in (counter, key))
    assert " ".join(f"{word:08x}" for word in naive_philox(*words)) == result


# Seeds and positions with both halves in use, and a negative seed.
@pytest.mark.parametrize("seed", (0, 7, 0x299F31D0A4093822, -3))
@pytest.mark.parametrize("position", (0, 1, 1_048_575, 3 * 2**32 + 7))
def test_draw_is_gumbel_argmax_of_philox(seed, position):
    """Seeded results are a promise: the token is the argmax of logit / temperature + noise, as computed here from
    integers. Eleven tokens, so the last counter is used in part."""
    noise = [naive_noise(seed, position, token) for token in range(11)]
    at = torch.tensor([seed]), torch.tensor([position])
    torch.testing.assert_close(gumbel_noise(*at, 11)[0], torch.tensor(noise), rtol=1e-5, atol=1e-6)
    for temperature in (0.5, 1.0, 2.0):
        values = [logit / temperature + n for logit, n in zip(LOGITS, noise, strict=False)]
        token, _ = sample(torch.tensor([LOGITS[:11]]), at[0], at[1], temperature=temperature)
        assert token.item() == values.index(max(values))


def test_noise_is_finite():
    """The smallest and the largest uniform number, 2^-24 and 1 - 2^-24, are float32 values away from 0 and 1."""
    for bits in (0, 2**23 - 1):
        uniform = (torch.tensor(bits).float() + 0.5) * 2.0**-23
        assert 0 < uniform < 1 and (-torch.log(-torch.log(uniform))).isfinite()
    seeds = torch.arange(-5, 5) * 2**60 + 3  # negative seeds are keys too
    assert gumbel_noise(seeds, torch.arange(10) * 2**40, 1000).isfinite().all()


SETTINGS = (
    {},
    {"temperature": 0.7},
    {"temperature": 1.8},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.3},
    {"repetition_penalty": 1.5},
    {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.3},
    {"temperature": 1.5, "top_p": 0.5, "min_p": 0.5},
    {"temperature": 2.0, "top_k": 3, "top_p": 0.95, "repetition_penalty": 0.8},
)
DRAWS = 20_000


# 20000 draws a setting; the seeds are fixed, one setting each, so that a bound on chance needs no repeats.
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_draws_follow_the_exact_distribution(settings):
    seen = [token % 3 == 0 for token in range(len(LOGITS))]
    rows = torch.tensor(LOGITS).expand(DRAWS, -1)
    seeds = torch.arange(DRAWS) + 1_000_003 * SETTINGS.index(settings)
    tokens, _ = sample(rows, seeds, seen=torch.tensor(seen).expand(DRAWS, -1), **settings)
    assert_follows(tokens, naive_distribution(LOGITS, seen, **(OFF | settings)))


def test_positions_draw_anew():
    """One seed, 20000 positions: the same distribution; and the pairs of neighbours follow its product."""
    rows = torch.tensor(LOGITS[:4]).expand(DRAWS, -1)
    tokens, _ = sample(rows, 1234, torch.arange(DRAWS))
    probs = naive_distribution(LOGITS[:4], [False] * 4, **OFF)
    assert_follows(tokens, probs)
    pairs = tokens[0::2] * 4 + tokens[1::2]
    assert_follows(pairs, [a * b for a in probs for b in probs])


def test_large_vocabularies_have_no_pattern():
    """Equal logits over 1001 tokens: every residue mod 4 (the four words of a counter) and every tenth of the range is
    drawn as often as the others."""
    tokens, _ = sample(torch.zeros(4000, 1001), torch.arange(4000), torch.arange(4000))
    assert_follows(tokens % 4, [251 / 1001, 250 / 1001, 250 / 1001, 250 / 1001])
    assert_follows(tokens // 101, [101 / 1001] * 9 + [92 / 1001])


def processed_by_transformers(logits, seen, settings):
    """float32 [V] -> its logits after transformers' processors in the order of its generate()."""
    ids, scores = torch.tensor(seen).nonzero().T, torch.tensor(logits)[None]
    steps = []
    if settings["repetition_penalty"] != 1.0:
        steps.append(hf.RepetitionPenaltyLogitsProcessor(settings["repetition_penalty"]))
    steps.append(hf.TemperatureLogitsWarper(settings["temperature"]))
    if settings["top_k"] > 0:
        steps.append(hf.TopKLogitsWarper(settings["top_k"]))
    if settings["top_p"] < 1:
        steps.append(hf.TopPLogitsWarper(settings["top_p"]))
    if settings["min_p"] > 0:
        steps.append(hf.MinPLogitsWarper(settings["min_p"]))
    for step in steps:
        scores = step(ids, scores)
    return scores[0]


def test_loops_agree_with_transformers(draw):
    """The loops that the draws are held to keep what transformers keeps, with the same probabilities."""
    for _ in range(50):
        logits, seen = draw.normal(12, scale=2.0).tolist(), draw.integers(0, 2, 12).bool().tolist()
        settings = {
            "temperature": draw.random.uniform(0.3, 2.0),
            "top_k": draw.random.choice((0, 1, 4, 12)),
            "top_p": draw.random.choice((1.0, 0.3, 0.9)),
            "min_p": draw.random.choice((0.0, 0.05, 0.4)),
            "repetition_penalty": draw.random.choice((1.0, 0.7, 1.6)),
        }
        expected = processed_by_transformers(logits, seen, settings).softmax(-1)
        assert_near(torch.tensor(naive_distribution(logits, seen, **settings)), expected, torch.float32)


def test_support_matches_transformers(draw):
    """Many draws of random rows and settings touch exactly what transformers keeps: nothing else, and, where every kept
    token has probability over 1 %, all of it (2000 draws miss one with chance 2e-9)."""
    for _ in range(30):
        logits, seen = draw.normal(8, scale=2.0).tolist(), draw.integers(0, 2, 8).bool().tolist()
        settings = {
            "temperature": draw.random.uniform(0.3, 2.0),
            "top_k": draw.random.choice((0, 1, 4, 8, 100)),
            "top_p": draw.random.choice((1.0, 0.3, 0.9)),
            "min_p": draw.random.choice((0.0, 0.05, 0.4)),
            "repetition_penalty": draw.random.choice((1.0, 1.6)),
        }
        kept = processed_by_transformers(logits, seen, settings | {"top_k": min(settings["top_k"], 8)}).softmax(-1)
        rows = torch.tensor(logits).expand(2000, -1)
        tokens, _ = sample(rows, draw.integers(0, 2**62, 2000), seen=torch.tensor(seen).expand(2000, -1), **settings)
        drawn = set(tokens.tolist())
        assert drawn <= {t for t, p in enumerate(kept.tolist()) if p > 0}, (logits, settings)
        assert drawn >= {t for t, p in enumerate(kept.tolist()) if p > 0.01}, (logits, settings)


def test_settings_are_per_row(draw):
    """Rows with settings of their own, mixed with each other: each as in a batch by itself."""
    rows, vocab = len(SETTINGS), 50
    logits, seen = draw.normal(rows, vocab, scale=2.0), draw.integers(0, 2, rows, vocab).bool()
    seeds, positions = draw.integers(0, 2**62, rows), draw.integers(0, 2**20, rows)
    values = [OFF | settings for settings in SETTINGS]
    columns = [torch.tensor([v[name] for v in values]) for name in OFF]
    tokens, logprobs = ops.sample(logits, seen, *columns, seeds, positions)
    for row, settings in enumerate(SETTINGS):
        one = slice(row, row + 1)
        alone = sample(logits[one], seeds[one], positions[one], seen[one], **settings)
        assert tokens[row] == alone[0][0]
        assert_near(logprobs[row], alone[1][0])
    order = torch.randperm(rows, generator=draw.generator)
    moved = ops.sample(logits[order], seen[order], *(c[order] for c in columns), seeds[order], positions[order])
    assert torch.equal(moved[0], tokens[order])


def test_same_seed_and_position_same_token(draw):
    """A draw depends on seed, position and logits only; both halves of each count."""
    logits = draw.normal(1, 1000).expand(64, -1)
    seeds = torch.tensor([5, 5 + 2**32, 6, -5]).repeat(16)
    positions = (torch.arange(16) * (2**32 // 8 + 1)).repeat_interleave(4)
    first = sample(logits, seeds, positions)[0]
    assert torch.equal(sample(logits, seeds, positions)[0], first)
    assert len(set(first.tolist())) > 40  # 64 draws of 1000 tokens: nearly all different


@pytest.mark.parametrize("penalty", (1.0, 1.4))
def test_temperature_0_takes_the_largest(penalty, draw):
    """The largest penalised logit, whatever the filters and the seed; the lowest token among equals."""
    logits, seen = draw.normal(40, 30, scale=3.0), draw.integers(0, 2, 40, 30).bool()
    filters = {"temperature": 0.0, "top_k": 3, "top_p": 0.5, "min_p": 0.2, "repetition_penalty": penalty}
    tokens, _ = sample(logits, draw.integers(0, 2**62, 40), seen=seen, **filters)
    penalised = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
    assert torch.equal(tokens, penalised.argmax(-1))
    ties = torch.zeros(1, 9)
    ties[0, [3, 7]] = 1.0
    assert sample(ties, 1, temperature=0.0)[0].item() == 3


@pytest.mark.parametrize("settings", ({"top_k": 1}, {"top_p": 0.0}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-6}))
def test_narrow_filters_keep_the_largest(settings, draw):
    logits = draw.normal(50, 30, scale=3.0)
    tokens, _ = sample(logits, draw.integers(0, 2**62, 50), **settings)
    assert torch.equal(tokens, logits.argmax(-1))


def test_ties_at_the_border_of_top_k():
    """Exactly k tokens stay, the lower ones of equals."""
    tokens, _ = sample(torch.zeros(2000, 6), torch.arange(2000), top_k=2)
    assert set(tokens.tolist()) == {0, 1}


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_logprob_is_of_the_unmodified_logits(dtype, draw):
    """Whatever penalty, temperature and filters did."""
    logits, seen = draw.normal(20, 30, dtype=dtype, scale=3.0), draw.integers(0, 2, 20, 30).bool()
    for settings in SETTINGS:
        tokens, logprobs = sample(logits, draw.integers(0, 2**62, 20), seen=seen, **settings)
        assert tokens.dtype == torch.int64 and logprobs.dtype == torch.float32
        expected = logits.double().log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
        assert_near(logprobs, expected)


def test_extreme_logits(draw):
    """Masked tokens (-inf) are never drawn; 1e4 beside them does no harm; NaN logits give a token of the vocabulary."""
    logits = draw.normal(200, 20)
    logits[:, 5:] = -torch.inf
    tokens, logprobs = sample(logits, torch.arange(200), temperature=2.0, top_p=0.999)
    assert (tokens < 5).all() and logprobs.isfinite().all()
    logits[:, 3] = 1e4
    tokens, logprobs = sample(logits, torch.arange(200))
    assert (tokens == 3).all() and (logprobs == 0).all()
    for settings in ({}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5, "min_p": 0.1}):
        tokens, _ = sample(torch.full((2, 20), torch.nan), torch.arange(2), **settings)
        assert ((tokens >= 0) & (tokens < 20)).all()


@pytest.mark.parametrize("vocab", (1, 2, 3, 4, 5, 129280))
def test_vocabulary_sizes(vocab):
    """Sizes that do not divide by Philox's four words, and the model's."""
    tokens, logprobs = sample(torch.zeros(2, vocab), torch.arange(2), top_p=0.99)
    assert ((tokens >= 0) & (tokens < vocab)).all()
    assert_near(logprobs, torch.full((2,), -math.log(vocab)))

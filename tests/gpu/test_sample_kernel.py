"""sample on CUDA against its reference: the same tokens from the same seeds, ties included, in every combination."""

import pytest
import torch

from tests.gpu import small_kernels
from tests.gpu.small_kernels import assert_replay_equals, call, poison, reference

pytestmark = small_kernels.needs_gpu
BF16 = torch.bfloat16
OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
VOCABULARIES = (1, 5, 1000, 4099, 129_280, 151_937)


def arguments(draw, logits, seen=None, **settings):
    """One setting, or one a row, for each of OFF's names."""
    rows = logits.shape[0]
    columns = []
    for name, value in (OFF | settings).items():
        dtype = torch.int64 if name == "top_k" else torch.float32
        columns.append(torch.as_tensor(value, dtype=dtype).expand(rows).contiguous())
    seen = torch.zeros(logits.shape, dtype=torch.bool) if seen is None else seen
    return logits, seen, *columns, draw.integers(-(2**62), 2**62, rows), draw.integers(0, 2**35, rows)


def check(args, exact=True):
    logits = args[0]
    poison(logits[:, 0].float())
    token, logprob = call("sample", *args)
    wanted, value = reference("sample", *args)
    assert token.dtype == torch.int64 and ((token >= 0) & (token < logits.shape[1])).all()
    differ = (token != wanted).nonzero().flatten().tolist()
    assert not differ, f"rows {differ}: {token[differ].tolist()} instead of {wanted[differ].tolist()}"
    torch.testing.assert_close(logprob, value, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", (torch.float32, BF16), ids=str)
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_greedy(vocab, dtype, draw):
    logits = draw.normal(3, vocab, scale=3.0, dtype=dtype, outliers=3.0)
    seen = draw.integers(0, 2, 3, vocab).bool()
    check(arguments(draw, logits, temperature=0.0))
    check(arguments(draw, logits, seen, temperature=0.0, repetition_penalty=(1.0, 1.3, 0.8)))


def test_greedy_ties_pick_the_lower_token(draw):
    """Equal maxima in one thread, across threads, across blocks."""
    for places in ((4, 5), (100, 40_000, 129_279), (129_278, 129_279), (0, 64_000)):
        logits = draw.normal(1, 129_280).clamp(max=3.0)
        logits[0, list(places)] = 7.0
        token, _ = call("sample", *arguments(draw, logits, temperature=0.0))
        assert token.item() == places[0]


@pytest.mark.parametrize("dtype", (torch.float32, BF16), ids=str)
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_plain_draw(vocab, dtype, draw):
    logits = draw.normal(4, vocab, scale=3.0, dtype=dtype)
    seen = draw.integers(0, 2, 4, vocab).bool()
    check(arguments(draw, logits, seen, temperature=(0.3, 1.0, 2.0, 50.0), repetition_penalty=(1.0, 1.0, 1.2, 3.0)))


SETTINGS = {
    "top_k": {"top_k": (1, 2, 50, 1000, 10**6, 3)},
    "top_p": {"top_p": (0.0, 0.1, 0.5, 0.9, 0.99, 0.999)},
    "min_p": {"min_p": (0.001, 0.01, 0.1, 0.5, 1.0, 2.0)},
    "all": {
        "top_k": (20, 0, 50, 0, 7, 3000),
        "top_p": (0.9, 0.5, 1.0, 0.95, 0.3, 0.8),
        "min_p": (0.0, 0.05, 0.02, 0.0, 0.2, 0.001),
        "temperature": (0.7, 1.5, 1.0, 0.0, 3.0, 2.0),
        "repetition_penalty": (1.1, 1.0, 1.3, 1.2, 1.0, 1.0),
    },
}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_filters(vocab, settings, draw):
    """A flat distribution, so that what is kept shows in what is drawn."""
    for scale in (0.3, 3.0):
        logits = draw.normal(6, vocab, scale=scale)
        check(arguments(draw, logits, draw.integers(0, 2, 6, vocab).bool(), **SETTINGS[settings]))


@pytest.mark.parametrize("vocab", (1000, 129_280))
@pytest.mark.parametrize(
    "settings",
    ({"top_k": 40}, {"top_p": 0.37}, {"top_k": 300, "top_p": 0.61}, {"min_p": 0.3}, {"top_k": 301, "min_p": 0.1}),
    ids=str,
)
def test_ties_at_the_threshold(settings, vocab, draw):
    """Four values in the whole row: a filter ends among hundreds of equal logits and keeps the lower tokens."""
    logits = draw.integers(0, 4, 1, vocab, dtype=torch.float32).expand(24, -1).contiguous()
    check(arguments(draw, logits, **settings))


def test_equal_logits(draw):
    logits = torch.zeros(8, 5000)
    check(arguments(draw, logits, top_k=100))
    check(arguments(draw, logits, temperature=0.0))


def test_masked_logits(draw):
    """Tokens at -inf, as a grammar leaves them: never drawn, and nothing becomes NaN."""
    logits = draw.normal(4, 129_280)
    logits[draw.integers(0, 50, 4, 129_280) > 0] = -torch.inf
    logits[0] = -torch.inf
    logits[0, 77_777] = 1.0
    for settings in ({}, {"top_k": 5000}, {"top_p": 0.9}, {"min_p": 0.1}, {"temperature": 0.0}):
        check(arguments(draw, logits, **settings))


def test_large_logits(draw):
    check(arguments(draw, draw.normal(4, 129_280, scale=1e4), top_p=0.9, temperature=(0.01, 1.0, 100.0, 1e4)))
    check(arguments(draw, draw.normal(4, 1000, scale=1e30), temperature=(0.0, 1.0, 1.0, 0.0)))


def test_many_rows(draw):
    """More clusters than fit on the chip at once, each row with other settings."""
    rows = 70
    settings = {
        "temperature": [(0.0, 0.7, 1.0)[i % 3] for i in range(rows)],
        "top_k": [(0, 50, 0, 1000)[i % 4] for i in range(rows)],
        "top_p": [(1.0, 0.9, 1.0, 0.95, 0.5)[i % 5] for i in range(rows)],
    }
    check(arguments(draw, draw.normal(rows, 129_280, scale=2.0), **settings))


def test_replay_equals_eager(draw):
    seen = draw.integers(0, 2, 6, 129_280).bool()
    args = small_kernels.to_device(arguments(draw, draw.normal(6, 129_280), seen, **SETTINGS["all"]))
    assert_replay_equals(lambda: call("sample", *args))


def test_unsupported_inputs_are_named(draw):
    args = list(arguments(draw, draw.normal(2, 10)))
    args[0] = args[0].double()
    with pytest.raises(ValueError, match=r"sample: logits of torch\.float64 are not supported"):
        call("sample", *args)

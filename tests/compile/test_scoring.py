"""Scores against log-softmax of the engine's own teacher-forced logits, however requests are packed."""

import math
import random

import pytest
import torch

from dsv4.compile import scoring
from tests.model import random_checkpoints

VOCAB, CONTEXT = 448, 400


def engine_with(max_batch, chunk=96):
    return random_checkpoints.engine("tiny", max_batch=max_batch, max_context=CONTEXT, prefill_chunk=chunk)


@pytest.fixture(scope="module")
def engine():
    return engine_with(3)


@pytest.fixture(scope="module")
def requests():
    """Lengths around every border: one token, a chunk, HCA's block of 128 positions, more than the head's block of rows."""
    draw = random.Random(5)

    def ids(count):
        return [draw.randrange(2, VOCAB) for _ in range(count)]

    lengths = [(1, 1), (1, 130), (64, 32), (127, 2), (128, 1), (33, 64), (300, 101), (5, 9), (95, 1), (96, 1), (2, 70)]
    return [(ids(context), ids(continuation)) for context, continuation in lengths]


@pytest.fixture(scope="module")
def scores(engine, requests):
    return engine.score(requests)


def test_sums_and_greedy_flags_are_those_of_the_logits(engine, requests, scores):
    for (context, continuation), score in zip(requests, scores, strict=True):
        logits = engine.logits([(context + continuation)[:-1]])[0][len(context) - 1 :].double()
        expected = logits.log_softmax(-1).gather(1, torch.tensor(continuation)[:, None]).sum().item()
        assert score.logprob == pytest.approx(expected, rel=1e-5)
        assert score.greedy == (logits.argmax(-1).tolist() == continuation)
        assert list(score.best_tokens) == logits.argmax(-1).tolist()
        assert len(score.token_logprobs) == len(continuation) and sum(score.token_logprobs) == score.logprob


def test_greedy_text_is_recognised_and_one_other_token_spoils_it(engine):
    prompt = engine.tokenizer.encode("She looked at him with surprise, and said,")
    text = engine.generate([prompt], max_new_tokens=6, temperature=0, ignore_eos=True)[0].token_ids
    other = [*text[:3], text[3] + 1, *text[4:]]
    right, wrong, last = engine.score([(prompt, text), (prompt, other), (prompt, [*text[:5], text[5] + 1])])
    assert right.greedy and not wrong.greedy and not last.greedy
    assert right.logprob > max(wrong.logprob, last.logprob)


@pytest.mark.parametrize("max_batch, chunk", [(1, 96), (8, 96), (2, 33)])
def test_packing_does_not_matter(requests, scores, max_batch, chunk):
    other = engine_with(max_batch, chunk)
    for order in (requests, requests[::-1]):
        got = other.score(order)
        for a, b in zip(got if order is requests else got[::-1], scores, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=2e-3, rel=1e-6) and a.greedy == b.greedy


def test_choices_of_one_token_share_a_forward(engine, monkeypatch):
    ran = []
    prefill = engine.runner.prefill
    monkeypatch.setattr(engine.runner, "prefill", lambda chunk: ran.append(chunk) or prefill(chunk))
    context = list(range(10, 60))
    together = engine.score([(context, [token]) for token in (5, 6, 7, 5)])
    assert sum(piece.count for chunk in ran for piece in chunk.pieces) == len(context)
    assert together[0] == together[3]
    for token, score in zip((5, 6, 7), together, strict=False):
        assert engine.score([(context, [token])])[0].logprob == pytest.approx(score.logprob, abs=1e-6)
    whole = math.fsum(math.exp(s.logprob) for s in engine.score([(context, [token]) for token in range(VOCAB)]))
    assert whole == pytest.approx(1, abs=1e-4)


def test_the_head_sees_blocks_of_one_size_and_only_needed_rows(engine, requests, monkeypatch):
    sizes = []
    logits = engine.model.logits
    monkeypatch.setattr(engine.model, "logits", lambda hidden: sizes.append(len(hidden)) or logits(hidden))
    engine.score(requests)
    needed = sum(len(continuation) for _, continuation in requests)
    assert set(sizes) == {scoring.HEAD_ROWS} and len(sizes) == -(-needed // scoring.HEAD_ROWS)


def test_nothing_is_nothing_and_the_window_is_used_to_its_end(engine):
    assert engine.score([]) == []
    full = [7] * engine.cache.max_context
    assert engine.score([(full, [8])])[0].logprob < 0


@pytest.mark.parametrize(
    "request_, words",
    [
        (([], [1]), "request 1 has an empty context"),
        (([1], []), "request 1 has an empty continuation"),
        (([1], [VOCAB]), "token id 448"),
        (([1], [True]), "token id True"),
        (([1] * 400, [1, 2]), "400 + 2 tokens, but max_context is 400"),
    ],
)
def test_bad_requests_are_named_before_anything_runs(engine, request_, words, monkeypatch):
    monkeypatch.setattr(engine.runner, "prefill", None)
    with pytest.raises(ValueError, match=r"^request 1 ") as error:
        engine.score([([1], [2]), request_])
    assert words in str(error.value)


def test_not_while_a_stream_is_unfinished(engine):
    stream = engine.stream("The", max_new_tokens=4, temperature=0)
    next(stream, None)
    with pytest.raises(RuntimeError, match="one thing at a time"):
        engine.score([([1], [2])])
    stream.close()


def test_nothing_compiles_for_new_lengths(requests, scores):
    compiled = random_checkpoints.compiled_engine()
    before = random_checkpoints.graphs_compiled()
    with torch.compiler.set_stance("fail_on_recompile"):
        got = compiled.score(requests)
    assert random_checkpoints.graphs_compiled() == before
    for a, b in zip(got, scores, strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=2e-3, rel=1e-5) and a.greedy == b.greedy

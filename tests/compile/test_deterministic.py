"""deterministic=True: the same bits for a request alone and among others, in any slot and order, whatever slots held."""

import math

import pytest
import torch

import dsv4
from dsv4.compile import runner
from tests.model import random_checkpoints
from tests.model.tiny_oracle import TINY

VOCAB, CONTEXT, CHUNK = 448, 300, 96
LENGTHS = (1, 5, 64, 65, 33, 130)  # none, one and two chunks of both sizes; the last token goes into a decode step


def load(folder, max_batch, dtype=torch.float32, prefill_chunk=CHUNK, compile=False):
    return dsv4.load(
        folder, "cpu", dtype, max_batch, CONTEXT, prefill_chunk=prefill_chunk, compile=compile, deterministic=True
    )


@pytest.fixture(scope="module")
def engines():
    """Eager float32 engines by max_batch."""
    return {size: load(random_checkpoints.folder("tiny"), size) for size in (1, 3, 8, 32)}


@pytest.fixture(scope="module")
def compiled():
    return load(random_checkpoints.nvfp4_folder("small"), 3, prefill_chunk=64, compile=True)  # one prefill shape


@pytest.fixture
def prompts(draw):
    return [draw.integers(2, VOCAB, length).tolist() for length in LENGTHS]


def generated(engine, prompts, max_new_tokens=7, **settings):
    """Tokens, log-probabilities and the most likely tokens with theirs: all that a completion says of the arithmetic."""
    completions = engine.generate(prompts, max_new_tokens, ignore_eos=True, logprobs=2, **settings)
    return [(completion.token_ids, completion.logprobs) for completion in completions]


def assert_independent(engine, prompts, max_new_tokens=7):
    """Greedy and sampled; alone, together, in the other order, and after NaN was left behind in the whole cache."""

    def run(prompts, **settings):
        return generated(engine, prompts, max_new_tokens, **settings)

    alone = [run([prompt], temperature=0)[0] for prompt in prompts]
    assert run(prompts, temperature=0) == alone
    for buffer in engine.cache.buffers():
        buffer.fill_(math.nan)
    assert run(prompts[::-1], temperature=0)[::-1] == alone
    drawn = run(prompts, temperature=0.9, top_p=0.8, seed=11)
    assert drawn == [run([p], temperature=0.9, top_p=0.8, seed=11 + i)[0] for i, p in enumerate(prompts)]


def test_generation(engines, prompts):
    assert_independent(engines[3], prompts)


def test_generation_of_the_compiled_engine(compiled, draw):
    with torch.compiler.set_stance("fail_on_recompile"):
        assert_independent(compiled, [draw.integers(2, 50, length).tolist() for length in LENGTHS])


def test_generation_in_bf16_with_quantised_weights(prompts):
    engine = load(TINY, 2, torch.bfloat16)
    alone = [generated(engine, [prompt], 3, temperature=0)[0] for prompt in prompts[1:4]]
    assert generated(engine, prompts[3:0:-1], 3, temperature=0)[::-1] == alone


def test_max_batch_of_one_multiple_of_eight(engines, prompts):
    expected = generated(engines[1], prompts, temperature=0)
    assert [len(engine.runner.state.slots) for engine in engines.values()] == [8, 8, 8, 32]
    for size in (3, 8):
        assert generated(engines[size], prompts, temperature=0) == expected


def test_scores_at_every_batch_size_in_both_orders_and_after_other_work(engines, draw):
    requests = [(draw.integers(2, VOCAB, n).tolist(), draw.integers(2, VOCAB, m).tolist()) for n, m in
                ((1, 1), (40, 30), (64, 1), (65, 70), (130, 3), (9, 2))]  # fmt: skip
    context = requests[1][0]
    requests += [(context, [5]), (context, [6]), (context[:-1], [context[-1], 7])]  # of which some share a forward
    expected = engines[1].score(requests)
    others = [draw.integers(2, VOCAB, 1 + n).tolist() for n in range(50)]
    unrelated = [(other, [token]) for other in others for token in range(10)]
    for engine in engines.values():
        engine.score(unrelated)
        assert engine.score(requests) == expected
        assert engine.score(requests[::-1])[::-1] == expected
    assert [engines[8].score([request])[0] for request in requests] == expected


def test_the_chunks_of_a_prompt_depend_on_nothing_else(engines, prompts, monkeypatch):
    """On a CPU chunks of 64 and 96 rows happen to give the same bits; kernels of a GPU differ by shape."""
    ran = []
    engine = engines[3]
    prefill = engine.runner.prefill
    monkeypatch.setattr(engine.runner, "prefill", lambda chunk: ran.append(chunk) or prefill(chunk))

    def chunks(run, prompts):
        ran.clear()
        run(prompts)
        assert all(len(chunk.pieces) == 1 for chunk in ran)
        return [(chunk.tokens, chunk.positions) for chunk in ran]

    for run in (
        lambda prompts: engine.generate(prompts, max_new_tokens=2),
        lambda prompts: engine.score([(prompt, [5]) for prompt in prompts]),
        engine.logits,
    ):
        alone = [chunk for prompt in prompts for chunk in chunks(run, [prompt])]
        assert sorted(chunks(run, prompts[::-1])) == sorted(alone)


def test_logits(engines, prompts):
    for engine in engines.values():
        for prompt, logits in zip(prompts, engine.logits(prompts), strict=True):
            assert torch.equal(logits, engines[3].logits([prompt])[0])


def test_a_device_that_cannot_is_refused_at_load(monkeypatch):
    step = runner.decode_step

    def uneven(model, cache, state):
        step(model, cache, state)
        state.logits[-1] += 1e-3 * (state.slots.shape[0] == 8)

    monkeypatch.setattr(runner, "decode_step", uneven)
    folder = random_checkpoints.folder("small")
    with pytest.raises(
        ValueError, match=r"deterministic=True cannot be kept: on this cpu equal rows of a decode batch of 8"
    ):
        load(folder, 8)
    assert load(folder, 9).runner.deterministic
    dsv4.load(folder, "cpu", torch.float32, max_batch=8, max_context=CONTEXT, compile=False)  # nothing was promised

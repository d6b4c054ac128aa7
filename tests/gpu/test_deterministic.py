"""deterministic=True on a CUDA device: bitwise the same alone and among others, for the captured step and the eager one."""

from pathlib import Path

import pytest
import torch

import dsv4
from tests.compile.test_deterministic import assert_independent, generated

TINY = Path(__file__).parents[2] / "examples" / "tiny"
LENGTHS = (1, 5, 64, 65, 33, 300, 17, 129)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def load(max_batch, compile=False, **settings):
    settings = dict(max_context=512, prefill_chunk=256, compile=compile, deterministic=True) | settings
    return dsv4.load(TINY, device="cuda", max_batch=max_batch, **settings)


@pytest.fixture(scope="module")
def prompts():
    draw = torch.Generator().manual_seed(3)
    return [torch.randint(2, 4000, (length,), generator=draw).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def engine():
    return load(3)


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "captured"])
def test_alone_together_in_the_other_order_and_after_nan(compile, engine, prompts):
    engine = load(3, compile=True) if compile else engine
    assert_independent(engine, prompts, 24)


def test_another_max_batch_of_the_same_eight(engine, prompts):
    assert generated(load(8), prompts, 24, temperature=0) == generated(engine, prompts, 24, temperature=0)


def test_scores_at_every_batch_size(engine, prompts):
    requests = [(prompt[: len(prompt) // 2 + 1], [*prompt[len(prompt) // 2 + 1 :], 7]) for prompt in prompts]
    requests += [(prompts[2], [token]) for token in range(5, 9)]
    expected = engine.score(requests)
    for size in (1, 32):
        other = load(size)
        assert other.score(requests) == expected and other.score(requests[::-1])[::-1] == expected


def test_how_far_neighbours_move_a_score_without_it(prompts):
    """The figure of docs/eval.md: chunks are shared, and kernels sum in another order for another shape."""
    engine = load(8, deterministic=False)
    requests = [(prompt[:1], [*prompt[1:], 7]) for prompt in prompts]
    together = engine.score(requests)
    alone = [engine.score([request])[0] for request in requests]
    gaps = [
        abs(x - y) for a, b in zip(alone, together, strict=True) for x, y in
        zip(a.token_logprobs, b.token_logprobs, strict=True)
    ]  # fmt: skip
    print(f"log-probability of a token alone and among others: mean {sum(gaps) / len(gaps):.1e}, largest {max(gaps):.1e}")
    assert sum(gaps) / len(gaps) < 0.02

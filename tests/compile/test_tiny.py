"""The shipped checkpoint: the same logits and the same text as transformers on its dequantised weights."""

import pytest
import torch

import dsv4
from tests.model.tiny_oracle import TINY, tiny_in_transformers

TEXT = (
    "She looked at him with surprise, and said, that she had never thought of it before. The whale rose out of the "
    "water, and the king of the country was in the house of his father. The function returns the number of rows in "
    "the table, or zero if there are none; it raises an error when the argument is not an integer. "
)
PROMPTS = ["She looked at him with surprise, and said,", "The function returns", "And God said to Abraham,"]
STEPS = 64


@pytest.fixture(scope="module")
def compiled():
    return dsv4.load(TINY, device="cpu", max_batch=3, max_context=1024, prefill_chunk=64)


def test_float32_logits_equal_transformers(compiled):
    """Over enough tokens that the indexer has to choose: more than 4 * index_topk."""
    engine = dsv4.load(TINY, device="cpu", dtype="fp32", max_context=1024, prefill_chunk=128, compile=False)
    ids = (engine.tokenizer.encode(TEXT * 6))[:420]
    assert len(ids) > 4 * engine.config.index_topk
    with torch.no_grad():
        expected = tiny_in_transformers()(torch.tensor([ids]), use_cache=False).logits[0]
    gap = (engine.logits([ids])[0] - expected).abs().max().item()
    print(f"largest logit difference from transformers in float32: {gap:.2e} of {expected.abs().max().item():.1f}")
    assert gap < 1e-3


def greedy(engine, new_tokens=STEPS):
    return engine.generate(PROMPTS, max_new_tokens=new_tokens, temperature=0, ignore_eos=True, logprobs=2)


def first_difference(ours, theirs, top_of):
    """None, or (index, margin of the two best logits there)."""
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a != b:
            best, second = sorted(top_of(index).values(), reverse=True)[:2]
            return index, best - second
    return None


def test_bf16_text_compiled_equals_eager(compiled):
    eager = dsv4.load(TINY, device="cpu", max_batch=3, max_context=1024, prefill_chunk=64, compile=False)
    for a, b in zip(greedy(compiled), greedy(eager), strict=True):
        assert a.token_ids == b.token_ids


def test_bf16_text_equals_transformers(compiled):
    """Token by token for 64 tokens, or until the two candidates' logits are closer than bf16 can tell apart for either
    side (transformers rounds its logits, and parts before them, to bf16, which the official code and dsv4 do not)."""
    oracle = tiny_in_transformers(torch.bfloat16)
    compared = []
    for completion in greedy(compiled):
        ids = completion.prompt_token_ids + completion.token_ids
        with torch.no_grad():
            logits = oracle(torch.tensor([ids]), use_cache=False).logits[0].float()
        logits = logits[len(completion.prompt_token_ids) - 1 : -1]
        expected = logits.argmax(-1).tolist()
        parted = first_difference(completion.token_ids, expected, lambda i: completion.logprobs[i].top)  # noqa: B023
        gap = None
        if parted:
            index, ours = parted
            theirs = (logits[index, expected[index]] - logits[index, completion.token_ids[index]]).item()
            gap = min(ours, theirs)
        compared.append(parted)
        print(f"{'all ' + str(STEPS) if parted is None else parted[0]} tokens equal; gap there {gap}")
        assert gap is None or gap < 1e-2

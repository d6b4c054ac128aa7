"""The whole model against transformers' in float32: the correctness gate. Every way of running a sequence (scored by
the engine, in chunks, token by token through the decode step, beside other sequences) must give the same logits."""

import copy

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

import dsv4
from dsv4.model.config import CSA, HCA, SLIDING
from tests.model.random_checkpoints import (
    LENGTH,
    NAMES,
    SETTINGS,
    VOCAB,
    clear_tokens,
    dequantised_oracle,
    engine,
    expected,
    folder,
    model,
    new_cache,
    nvfp4_folder,
    oracle,
    randomise,
    run,
    run_in_chunks,
)
from tests.ops.cases import LENGTHS, Draw, random_steps

TO_TRANSFORMERS = 1e-4
# The same model in another batch, relative to the largest logit (5 to 10): only the order of summation differs. For
# comparison: with these weights, transformers in chunks is up to 3.4e-5 (absolute) away from transformers in one piece.
# What batches must never do to each other is tested to the bit in test_transformer.
TO_ITSELF = 1e-5


def assert_close(actual: Tensor, wanted: Tensor, bound: float) -> None:
    assert actual.shape == wanted.shape and actual.dtype == wanted.dtype == torch.float32
    distance = (actual - wanted).abs().max().item()  # NaN is not within any bound
    assert distance <= bound, f"logits differ by {distance:.2e}, allowed {bound:.0e}"


def assert_same(actual: Tensor, wanted: Tensor) -> None:
    assert_close(actual, wanted, TO_ITSELF * max(1.0, wanted.abs().max().item()))


@pytest.fixture(params=NAMES)
def name(request) -> str:
    return request.param


@pytest.fixture
def ids(name, draw) -> list[int]:
    return clear_tokens(name, LENGTH, draw)


def decode_teacher_forced(engine, row: int, ids: list[int]) -> Tensor:
    """Logits [len, vocab] from the decode step, given every token instead of the one it drew. Only `row` is active."""
    state, parts = engine.runner.state, []
    for position, token in enumerate(ids):
        state.tokens[row], state.positions[row], state.slots[row] = token, position, row
        state.remaining[row] = 2
        engine.runner.decode()
        parts.append(state.logits[row].clone())
    state.slots[row] = -1
    return torch.stack(parts)


def test_engine_logits(name, ids):
    [logits] = engine(name).logits([ids])
    assert_close(logits, expected(name, ids), TO_TRANSFORMERS)


def test_token_by_token_decode(name, ids):
    logits = decode_teacher_forced(engine(name, max_batch=2), 1, ids)
    assert_close(logits, expected(name, ids), TO_TRANSFORMERS)


@pytest.mark.parametrize("size", [3, 5, 50, 130])
def test_chunks(name, ids, size):
    logits = run_in_chunks(name, new_cache(name), 0, ids, size)
    assert_close(logits, expected(name, ids), TO_TRANSFORMERS)


def test_one_chunk_of_everything(name, ids):
    logits = run_in_chunks(name, new_cache(name), 0, ids, LENGTH)
    assert_close(logits, expected(name, ids), TO_TRANSFORMERS)


@pytest.mark.parametrize("length", [*range(1, 10), 15, 16, 17, 127, 128, 129, 131, 255, 256, 257])
def test_lengths_around_the_boundaries(length, draw):
    """Blocks of 4 and 128 and windows of 16: a prompt may end anywhere, and then 6 tokens follow one by one."""
    ids = clear_tokens("tiny", length + 6, draw)
    cache = new_cache("tiny")
    first = run_in_chunks("tiny", cache, 0, ids[:length], length)
    rest = run_in_chunks("tiny", cache, 0, ids[length:], 1, start=length)
    assert_close(torch.cat((first, rest)), expected("tiny", ids), TO_TRANSFORMERS)


def test_five_thousand_tokens():
    """Far beyond the window and with 9 of 1,250 blocks picked: chunks, then one by one through every residue of a block of
    4 and of 128. Always the same tokens: among so many choices near ties are the rule, and these have none."""
    ids = Draw(5).integers(2, VOCAB["wide"], 5000).tolist()
    cache = new_cache("wide", max_context=5000)
    first = run_in_chunks("wide", cache, 0, ids[:4865], 500)
    rest = run_in_chunks("wide", cache, 0, ids[4865:], 1, start=4865)
    assert_close(torch.cat((first, rest)), expected("wide", ids), TO_TRANSFORMERS)


def test_ragged_batch(name, draw):
    """Ten sequences in ten slots, in random chunks side by side with padding in between; then each goes on for three
    decode steps of the whole batch. Every row as if it were alone."""
    rows = [clear_tokens(name, length + 3, draw) for length in LENGTHS]
    cache = new_cache(name, len(rows), fill=torch.nan)
    got = [torch.full((len(row), model(name).config.vocab_size), torch.nan) for row in rows]
    for batch in random_steps(draw, LENGTHS):
        tokens = batch.rows([torch.tensor(row) for row in rows], inert=1).long()
        batch.scatter(model(name).logits(model(name)(tokens, batch.positions, batch.slots, cache)), got)
    for step in range(3):
        batch = [(slot, length + step, [rows[slot][length + step]]) for slot, length in enumerate(LENGTHS)]
        for (slot, position, _), logits in zip(batch, run(name, cache, batch), strict=True):
            got[slot][position] = logits[0]
    for row, logits in zip(rows, got, strict=True):
        alone = run_in_chunks(name, new_cache(name), 0, row, len(row))
        assert_same(logits, alone)
        assert_close(logits, expected(name, row), TO_TRANSFORMERS)


def test_engine_logits_of_a_ragged_batch(draw):
    """More prompts than slots, chunks that hold several of them, prompts that end on a chunk's border."""
    many = engine("tiny", max_batch=3, max_context=320, prefill_chunk=100)
    prompts = [clear_tokens("tiny", length, draw) for length in (*LENGTHS, 64, 100, 36, 164, 200)]
    draw.random.shuffle(prompts)
    for prompt, logits in zip(prompts, many.logits(prompts), strict=True):
        assert_same(logits, engine("tiny").logits([prompt])[0])


def test_without_yarn_and_with_other_block_rates(tmp_path, draw):
    """config.json as transformers writes it may leave YaRN out and have other rates and hash layers in the middle."""
    settings = SETTINGS["tiny"] | dict(
        rope_parameters=None,
        compress_rates={CSA: 6, HCA: 10},
        layer_types=[HCA, CSA, SLIDING, CSA],
        mlp_layer_types=["moe", "hash_moe", "moe", "hash_moe"],
        index_topk=200,  # all blocks are picked, so there are no near ties
    )
    theirs = DeepseekV4ForCausalLM(DeepseekV4Config(**settings)).eval()
    randomise(theirs, 3)
    theirs.save_pretrained(tmp_path)
    ours = dsv4.load(tmp_path, "cpu", max_batch=2, max_context=100, prefill_chunk=7, compile=False)
    ids = draw.integers(2, 448, 90).tolist()
    wanted = theirs(torch.tensor([ids]), use_cache=False).logits[0]
    assert_close(ours.logits([ids])[0], wanted, TO_TRANSFORMERS)
    assert_close(decode_teacher_forced(ours, 0, ids), wanted, TO_TRANSFORMERS)


def test_bfloat16_stays_near_float32(draw):
    """A bfloat16 engine on the same weights: as near to float32 as rounding allows, and nearer than transformers'."""
    # the weights themselves rounded to bfloat16, so that only the arithmetic differs
    rounded = copy.deepcopy(oracle("pro"))
    for parameter in rounded.parameters():
        parameter.copy_(parameter.bfloat16())
    ids = draw.integers(2, 80, 100).tolist()
    exact = rounded(torch.tensor([ids]), use_cache=False).logits[0]
    theirs = rounded.bfloat16()(torch.tensor([ids]), use_cache=False).logits[0].float()
    ours = dsv4.load(folder("pro"), "cpu", torch.bfloat16, max_context=128, prefill_chunk=33, compile=False)
    [logits] = ours.logits([ids])
    # by the median token, because a token whose rounded scores pick another block or expert is far off in both
    error, their_error = (((x - exact).std(-1).median() / exact.std()).item() for x in (logits, theirs))
    print(f"relative error of bfloat16 logits: {error:.4f}, transformers {their_error:.4f}")
    assert logits.dtype == torch.float32
    assert error < 0.03 and error < 1.1 * their_error


def test_nvfp4_checkpoint(name, draw):
    """NVIDIA's experts-only format through the engine, in float32, against transformers on the dequantised weights."""
    ids = draw.integers(2, VOCAB[name], 27).tolist()  # six blocks: all are picked, so there are no near ties
    ours = dsv4.load(nvfp4_folder(name), "cpu", torch.float32, max_batch=2, max_context=64, compile=False)
    assert set(ours.load_report.checkpoint.formats) == {"NVFP4", "FP8 block", "plain"}
    wanted = dequantised_oracle(name)(torch.tensor([ids]), use_cache=False).logits[0]
    assert_close(ours.logits([ids])[0], wanted, TO_TRANSFORMERS)
    assert_close(decode_teacher_forced(ours, 1, ids), wanted, TO_TRANSFORMERS)
    assert (wanted - expected(name, ids)).abs().max() > 0.01  # quantised weights are other weights


def test_oracle_would_notice(draw: Draw):
    """The oracle is sensitive: another selection, a token more in the window or a swapped block changes its logits by
    far more than the bound."""
    name, ids = "tiny", clear_tokens("tiny", 200, draw)
    wanted = expected(name, ids)
    for layer, change in ((1, {"index_topk": 7}), (0, {"sliding_window": 17})):
        module = oracle(name).model.layers[layer].self_attn
        target = module.compressor.indexer if "index_topk" in change else oracle(name).config
        [(attribute, value)] = change.items()
        before = getattr(target, attribute)
        setattr(target, attribute, value)
        try:
            assert (expected(name, ids) - wanted).abs().max() > 100 * TO_TRANSFORMERS
        finally:
            setattr(target, attribute, before)

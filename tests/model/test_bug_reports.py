"""Bugs that were reported against other engines and concern the whole model, one test each.

Those that one op or the loader can have are beside the tests of that op (`test_bug_...` in tests/ops) and of the loader
(tests/model/test_checkpoint.py); causality and padding are in test_transformer.py.
"""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

import dsv4
from dsv4.model.cache import Cache
from dsv4.model.config import CSA, SLIDING
from dsv4.ops.nvfp4 import quantize_nvfp4
from tests.model.random_checkpoints import (
    SETTINGS,
    clear_tokens,
    compiled_engine,
    engine,
    expected,
    folder,
    model,
    new_cache,
    oracle,
    randomise,
    run_in_chunks,
)
from tests.ops.cases import assert_same_bits


def assert_near(actual: Tensor, wanted: Tensor, bound: float = 1e-4) -> None:
    assert (actual - wanted).abs().max().item() <= bound


def snapshot(cache: Cache, slot: int) -> dict[str, Tensor]:
    return {name: part.clone() for name, part in cache.state_of(slot).items()}


def restore(cache: Cache, slot: int, saved: dict[str, Tensor]) -> None:
    for name, part in cache.state_of(slot).items():
        part.copy_(saved[name])


def test_mlx_lm_1189_garbage_after_some_windows(draw):
    """One theta with YaRN for all layers, compressed keys without rope, sigmoid and mean in the indexer: fine at first,
    garbage after a few windows. Three windows of 16. https://github.com/ml-explore/mlx-lm/pull/1189"""
    ids = clear_tokens("tiny", 48, draw)
    logits = run_in_chunks("tiny", new_cache("tiny"), 0, ids, 48)
    assert_near(logits, expected("tiny", ids))
    assert_near(logits[-16:], expected("tiny", ids)[-16:])


def test_sglang_34788_yarn_in_sliding_layers(draw):
    """YaRN leaked into layers that have a window only. Every layer's frequencies are those of transformers' for its
    kind, and the two kinds differ. https://github.com/sgl-project/sglang/pull/34788"""
    rotary = oracle("tiny").model.rotary_emb
    for layer, block in enumerate(model("tiny").layers):
        kind = "main" if model("tiny").config.layer_types[layer] == SLIDING else "compress"
        wanted = getattr(rotary, f"{kind}_inv_freq")
        assert_same_bits(block.attn.inv_freq, wanted)  # the compressor's and the indexer's too
    plain = 10000.0 ** -(torch.arange(0, 16, 2) / 16)
    torch.testing.assert_close(rotary.main_inv_freq, plain)
    assert not torch.allclose(rotary.compress_inv_freq, 160000.0 ** -(torch.arange(0, 16, 2) / 16))  # YaRN acts


@pytest.mark.parametrize("kind, rope", [(SLIDING, "rope_theta"), (CSA, "compress_rope_theta")])
def test_atlas_276_theta_of_the_wrong_kind(tmp_path, kind, rope, draw):
    """Sliding layers were rotated with the compressed layers' theta. A one-layer model follows its own theta only.
    https://github.com/Avarok-Cybersecurity/atlas/pull/276"""
    ids = draw.integers(2, 448, 40).tolist()
    logits = {}
    for changed in (None, "rope_theta", "compress_rope_theta"):
        path, settings = tmp_path / str(changed), one_layer(kind)
        theirs = DeepseekV4ForCausalLM(DeepseekV4Config(**settings | ({changed: 500.0} if changed else {}))).eval()
        randomise(theirs, 1)
        theirs.save_pretrained(path)
        [logits[changed]] = dsv4.load(path, "cpu", max_context=64, compile=False).logits([ids])
        assert_near(logits[changed], theirs(torch.tensor([ids]), use_cache=False).logits[0])
    other = {"rope_theta": "compress_rope_theta", "compress_rope_theta": "rope_theta"}[rope]
    assert_same_bits(logits[other], logits[None])
    assert (logits[rope] - logits[None]).abs().max() > 0.01


def one_layer(kind: str) -> dict:
    """Settings of a model of one layer, where all blocks are picked."""
    return SETTINGS["tiny"] | dict(num_hidden_layers=1, layer_types=[kind], mlp_layer_types=["moe"], index_topk=100)


def test_primus_930_one_csa_layer(tmp_path, draw):
    """The softmax scale times 1.277 from YaRN, rope at the pool's index instead of its first position, and an output
    that was not turned back: one CSA layer and 40 tokens show each. https://github.com/AMD-AGI/Primus/pull/930"""
    theirs = DeepseekV4ForCausalLM(DeepseekV4Config(**one_layer(CSA))).eval()
    randomise(theirs, 2)
    theirs.save_pretrained(tmp_path)
    ids = draw.integers(2, 448, 40).tolist()
    ours = dsv4.load(tmp_path, "cpu", max_context=64, prefill_chunk=9, compile=False)
    assert_near(ours.logits([ids])[0], theirs(torch.tensor([ids]), use_cache=False).logits[0])


@pytest.mark.parametrize("length", [3, 4, 5])
def test_vllm_ascend_76_prompts_of_3_4_5_tokens(length, draw):
    """Rows of NaN or zeros from the fourth token on, because the compressor ran without the true lengths. Prefill and
    the decode that follows it. https://github.com/GDzhu01/vllm-ascend-deepseekv4/issues/76"""
    ids = clear_tokens("tiny", length + 4, draw)
    [completion] = engine("tiny", prefill_chunk=64).generate([ids[:length]], max_new_tokens=4, temperature=0.0, logprobs=0)
    assert all(torch.isfinite(torch.tensor(entry.logprob)) for entry in completion.logprobs)
    logits = expected("tiny", ids[:length] + completion.token_ids)
    assert completion.token_ids == logits.argmax(-1)[length - 1 : -1].tolist()


@pytest.mark.parametrize("length", [127, 128, 129, 130, 255, 256, 257])
def test_llama_cpp_26063_saved_state_diverges(length, draw):
    """State that was saved and restored diverged from 129 tokens on. Saved at each length, restored into another slot
    of another cache whose state is NaN, the next 20 tokens have the same bits.
    https://github.com/ggml-org/llama.cpp/pull/26063"""
    ids = draw.integers(2, 448, length + 20).tolist()
    first, second = new_cache("tiny", 2), new_cache("tiny", 2, fill=torch.nan)
    run_in_chunks("tiny", first, 0, ids[:length], 130)
    saved = snapshot(first, 0)
    wanted = run_in_chunks("tiny", first, 0, ids[length:], 1, start=length)
    restore(second, 1, saved)
    assert_same_bits(run_in_chunks("tiny", second, 1, ids[length:], 1, start=length), wanted)


@pytest.mark.parametrize("keep", [129, 130, 131])
def test_llama_cpp_25588_removed_suffix_leaves_compressed_rows(keep, draw):
    """Removing the last tokens of a sequence left their compressed rows behind. Ten tokens further, back to a length
    that 4 does not divide, and on with other tokens: rows of blocks that are complete again come from the new tokens
    only. https://github.com/ggml-org/llama.cpp/pull/25588"""
    ids = draw.integers(2, 448, keep).tolist()
    dropped, other = draw.integers(2, 448, 10).tolist(), draw.integers(2, 448, 12).tolist()
    cache = new_cache("tiny")
    run_in_chunks("tiny", cache, 0, ids, 50)
    saved = snapshot(cache, 0)
    run_in_chunks("tiny", cache, 0, dropped, 1, start=keep)
    for name, part in cache.state_of(0).items():
        if not name.endswith("entries"):  # rings are overwritten and must be put back; entries are found by position
            part.copy_(saved[name])
    fresh = new_cache("tiny")
    run_in_chunks("tiny", fresh, 0, ids, 50)
    got, wanted = (run_in_chunks("tiny", c, 0, other, 1, start=keep) for c in (cache, fresh))
    assert_same_bits(got, wanted)


def test_llama_cpp_25259_a_conversation_goes_on(draw):
    """The model forgot what was said, after its cache was used again. Each turn sends the whole conversation, through
    an engine whose one slot has held the turns before. https://github.com/ggml-org/llama.cpp/issues/25259"""
    settings = dict(max_new_tokens=7, temperature=0.0, ignore_eos=True, logprobs=0)
    used, conversation = engine("tiny", prefill_chunk=64), []
    for _ in range(4):
        conversation += draw.integers(2, 448, draw.random.randint(20, 60)).tolist()
        new = dsv4.load(folder("tiny"), "cpu", max_context=384, prefill_chunk=64, compile=False)
        [turn], [wanted] = used.generate([conversation], **settings), new.generate([conversation], **settings)
        assert (turn.token_ids, turn.logprobs) == (wanted.token_ids, wanted.logprobs)
        conversation += turn.token_ids


@pytest.mark.parametrize("shared", [20, 130])
def test_atom_1417_window_of_another_request(shared, draw):
    """A request with a known prefix read another request's window. A runs and ends; B, which shares its first tokens,
    runs in the same slot and gives what a new engine gives. https://github.com/ROCm/ATOM/issues/1417"""
    prefix = draw.integers(2, 448, shared).tolist()
    a, b = (prefix + draw.integers(2, 448, 40).tolist() for _ in range(2))
    used = engine("tiny", prefill_chunk=64)
    used.generate([a], max_new_tokens=12, temperature=0.0, ignore_eos=True)
    [got] = used.generate([b], max_new_tokens=12, temperature=0.0, ignore_eos=True, logprobs=0)
    new = dsv4.load(folder("tiny"), "cpu", max_context=384, prefill_chunk=64, compile=False)
    [wanted] = new.generate([b], max_new_tokens=12, temperature=0.0, ignore_eos=True, logprobs=0)
    assert (got.token_ids, got.logprobs) == (wanted.token_ids, wanted.logprobs)


def test_vllm_51970_compiled_before_there_are_entries(draw):
    """A graph captured while there were no compressed entries read out of bounds later. The steps are compiled and
    captured with idle rows; then decode starts at position 0 and passes 3, 4, 127 and 128, with the logits of a whole
    prefill. https://github.com/vllm-project/vllm/issues/51970"""
    ids = clear_tokens("tiny", 132, draw)
    runner = compiled_engine().runner
    for buffer in compiled_engine().cache.buffers():
        buffer.fill_(torch.nan)
    parts = []
    for position, token in enumerate(ids):
        runner.state.tokens[1], runner.state.positions[1], runner.state.slots[1] = token, position, 1
        runner.state.remaining[1] = 2
        runner.decode()
        parts.append(runner.state.logits[1].clone())
    runner.state.slots[1] = -1
    for buffer in compiled_engine().cache.buffers():
        buffer.zero_()
    assert_near(torch.stack(parts), expected("tiny", ids))


# --- a router and hash layers as they are stored ----------------------------------------------------------------------


def edited(tmp_path, change):
    """A copy of the tiny checkpoint after change(tensors, config)."""
    path = shutil.copytree(folder("tiny"), tmp_path / "edited")
    tensors, config = load_file(path / "model.safetensors"), json.loads((path / "config.json").read_text())
    change(tensors, config)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


GATE = "model.layers.{}.ffn.gate."


def test_atlas_186_quantised_router_is_refused(tmp_path):
    """The router was quantised to 4 bits with everything else, and routing fell apart. Here it is read as stored or
    not at all. https://github.com/Avarok-Cybersecurity/atlas/pull/186"""

    def change(tensors, config):
        name = GATE.format(1)
        packed, scale, scale_2 = quantize_nvfp4(tensors[f"{name}weight"])
        tensors |= {f"{name}weight": packed, f"{name}weight_scale": scale, f"{name}weight_scale_2": scale_2}

    with pytest.raises(ValueError, match=r"gate\.weight has dtype U8, expected BF16 or F16 or F32"):
        dsv4.load(edited(tmp_path, change), "cpu", compile=False)


@pytest.mark.parametrize("layer, leaf", [(1, "bias"), (0, "tid2eid")])
def test_atlas_186_missing_router_parts_are_fatal(tmp_path, layer, leaf):
    """gate.bias was looked for under another name and hash layers were missing; both ran on in silence.
    https://github.com/Avarok-Cybersecurity/atlas/pull/186"""
    name = GATE.format(layer) + leaf
    path = edited(tmp_path, lambda tensors, config: tensors.pop(name))
    with pytest.raises(ValueError, match=f"no tensor {name.replace('.', '[.]')} in"):
        dsv4.load(path, "cpu", compile=False)


def test_atlas_186_hash_layers_that_the_config_forgets(tmp_path):
    """A config that has one hash layer fewer than the weights is another model: a bias is missing, and a table is left.
    https://github.com/Avarok-Cybersecurity/atlas/pull/186"""

    def change(tensors, config):
        config["mlp_layer_types"] = ["moe"] * 4

    with pytest.raises(ValueError, match=r"no tensor .*gate\.bias"):
        dsv4.load(edited(tmp_path, change), "cpu", compile=False)


def test_atlas_186_router_is_not_rounded_below_the_engine_dtype():
    """The report's cure: the router in bf16 or float32. https://github.com/Avarok-Cybersecurity/atlas/pull/186"""
    for layer, block in enumerate(model("tiny").layers):
        theirs = oracle("tiny").model.layers[layer].mlp.gate
        assert_same_bits(block.ffn.gate, theirs.weight.data)
        if block.ffn.hashed:
            assert_same_bits(block.ffn.tid2eid, theirs.tid2eid)
        else:
            assert_same_bits(block.ffn.bias, theirs.e_score_correction_bias)


def test_every_report_has_its_url():
    """A test in this file that is named after a report says where it is."""
    for name, test in globals().items():
        if name.startswith("test_") and name != "test_every_report_has_its_url":
            assert "https://github.com/" in (test.__doc__ or ""), name

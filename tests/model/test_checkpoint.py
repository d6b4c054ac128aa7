"""Checkpoint folders: what loads and exactly how, and the bugs that other engines had with the same folders."""

import json

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from dsv4.model import names
from dsv4.model.checkpoint import FolderSource, ProgressLine, load_folder
from dsv4.model.linear import Fp8BlockLinear, Nvfp4Experts, Nvfp4Linear, PlainExperts, PlainLinear
from dsv4.model.shards import Reader
from dsv4.ops.fp8 import decode_e8m0, quantize_fp8_block
from tests.model import checkpoints as mini
from tests.model.checkpoints import (
    build,
    edited,
    linear,
    load,
    mxfp4,
    nvfp4,
    nvfp4_experts_tensors,
    plain_tensors,
    refused,
    same,
    write,
)

WQ_A = "layers.1.attn.wq_a"
W1 = "layers.1.ffn.experts.1.w1"


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("engine", [torch.float32, torch.bfloat16])
def test_plain_weights_are_cast_to_the_engine_dtype(tmp_path, stored, engine):
    tensors = plain_tensors(stored)
    given, report = load(write(tmp_path, tensors), engine)
    for name, (kind, _) in mini.inventory().items():
        if kind == mini.LINEAR:
            assert type(given[name]) is PlainLinear
            assert given[name].groups == (mini.GROUPS if name.endswith("wo_a") else 1)
            assert same(given[name].weight, tensors[name + ".weight"].to(engine))
        else:
            assert same(given[name], tensors[name].to(torch.int64 if kind == mini.INT else torch.float32))
    experts = given["layers.2.ffn.experts"]
    assert type(experts) is PlainExperts
    for e in range(mini.EXPERTS):
        w1, w2, w3 = (tensors[f"layers.2.ffn.experts.{e}.w{i}.weight"].to(engine) for i in (1, 2, 3))
        assert same(experts.gate_up[e], torch.cat((w1, w3)))
        assert same(experts.down[e], w2)
    assert report.formats["plain"].tensors == len(tensors)
    assert report.formats["plain"].bytes == sum(value.nbytes for value in tensors.values())


def test_nvfp4_experts_and_fp8_linears_keep_their_bytes(tmp_path):
    tensors = nvfp4_experts_tensors()
    given, report = load(write(tmp_path, tensors))
    for name in ("attn.wq_a", "attn.wo_a", "ffn.shared_experts.w2"):
        module = given[f"layers.1.{name}"]
        assert type(module) is Fp8BlockLinear
        assert same(module.weight, tensors[f"layers.1.{name}.weight"])
        assert same(module.scale, decode_e8m0(tensors[f"layers.1.{name}.scale"]))
    assert given["layers.1.attn.wo_a"].groups == mini.GROUPS
    assert type(given["layers.1.attn.compressor.wkv"]) is PlainLinear
    experts = given["layers.1.ffn.experts"]
    assert type(experts) is Nvfp4Experts
    for e in range(mini.EXPERTS):
        prefix = f"layers.1.ffn.experts.{e}."
        w1, w2, w3 = (
            {key: tensors[f"{prefix}w{i}.{key}"] for key in ("weight", "weight_scale", "weight_scale_2")} for i in (1, 2, 3)
        )
        assert same(experts.gate_up[e], torch.cat((w1["weight"], w3["weight"])))
        assert same(experts.gate_up_scale[e], torch.cat((w1["weight_scale"], w3["weight_scale"])))
        assert same(experts.gate_up_scale_2[e], torch.stack((w1["weight_scale_2"], w3["weight_scale_2"])))
        assert same(experts.down[e], w2["weight"])
        assert same(experts.down_scale[e], w2["weight_scale"])
        assert same(experts.down_scale_2[e], w2["weight_scale_2"])
    used = sum(count.tensors for count in report.formats.values())
    assert used + report.ignored["input_scale"].tensors == len(tensors)
    assert report.formats["NVFP4"].tensors == 3 * 3 * 9 and report.ignored["input_scale"].tensors == 3 * 9
    assert "NVFP4: 81 tensors" in str(report)


def test_nvfp4_linears_anywhere(tmp_path):
    weight = torch.randn(24, 64)
    tensors = plain_tensors() | nvfp4("layers.1.attn.wq_a", weight)
    tensors["layers.1.attn.wq_a.weight_scale_2"] = tensors["layers.1.attn.wq_a.weight_scale_2"].reshape(1)
    source = FolderSource(write(tmp_path, tensors), "cpu", torch.bfloat16)
    module = source.at("layers").at("1").at("attn").linear("wq_a", 24, 64)
    assert type(module) is Nvfp4Linear
    assert module.scale_2.shape == () and module.scale.shape == (24, 4) and module.weight.shape == (24, 32)


def test_shards_hold_the_same_as_one_file(tmp_path):
    tensors = nvfp4_experts_tensors()
    keys = sorted(tensors)
    shards = [{key: tensors[key] for key in keys[i::3]} for i in range(3)]
    one, _ = load(write(tmp_path / "one", tensors))
    three, _ = load(write(tmp_path / "three", *shards))
    for name, given in one.items():
        ours, theirs = ([value] if isinstance(value, Tensor) else list(value.buffers()) for value in (given, three[name]))
        assert all(same(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("original", [False, True])
def test_what_transformers_saves(tmp_path, dtype, original):
    """Stacked experts under module names, and the names that save_pretrained writes by default."""
    config = DeepseekV4Config(
        vocab_size=mini.VOCAB,
        hidden_size=mini.HIDDEN,
        num_hidden_layers=len(mini.RATIOS),
        num_attention_heads=mini.HEADS,
        head_dim=mini.HEAD_DIM,
        qk_rope_head_dim=16,
        q_lora_rank=mini.Q_LORA,
        n_routed_experts=mini.EXPERTS,
        num_experts_per_tok=mini.TOPK,
        moe_intermediate_size=mini.INTER,
        index_n_heads=mini.INDEX_HEADS,
        index_head_dim=mini.INDEX_DIM,
        o_groups=mini.GROUPS,
        o_lora_rank=mini.O_LORA,
        num_hash_layers=mini.HASH_LAYERS,
        compress_ratios=list(mini.RATIOS),
    )
    torch.manual_seed(0)
    model = DeepseekV4ForCausalLM(config).to(dtype)
    for parameter in model.parameters():
        parameter.data.normal_()
    model.save_pretrained(tmp_path, save_original_format=original)
    given, report = load(tmp_path, dtype)
    assert report.naming == ("hf-original" if original else "hf")
    expected = {names.hf_to_native(name): value for name, value in model.state_dict().items()}
    for name, (kind, _) in mini.inventory().items():
        if kind == mini.LINEAR:
            assert same(given[name].weight, expected.pop(name + ".weight"))
        else:
            assert same(given[name], expected[name].to(given[name].dtype))
            del expected[name]
    for layer in range(len(mini.RATIOS)):
        experts = given[f"layers.{layer}.ffn.experts"]
        assert same(experts.gate_up, expected.pop(f"layers.{layer}.ffn.experts.gate_up_proj"))
        assert same(experts.down, expected.pop(f"layers.{layer}.ffn.experts.down_proj"))
    assert not expected


def test_hf_names_with_separate_quantised_experts(tmp_path):
    """The names of an all-NVFP4 export: hf modules, one tensor per expert, weights_proj straight under the indexer."""
    native = nvfp4_experts_tensors()
    tensors = {names.native_to_hf(name): value for name, value in native.items()}
    scorer = "model.layers.1.self_attn.compressor.indexer.scorer.weights_proj.weight"
    tensors[scorer.replace("scorer.", "")] = tensors.pop(scorer)
    given, report = load(write(tmp_path, tensors))
    assert report.naming == "hf"
    assert same(given["layers.1.attn.indexer.weights_proj"].weight, native["layers.1.attn.indexer.weights_proj.weight"])
    assert same(given["layers.1.ffn.experts"].down[2], native["layers.1.ffn.experts.2.w2.weight"])
    assert type(given[WQ_A]) is Fp8BlockLinear


def test_int32_tables_become_int64(tmp_path):
    name = "layers.0.ffn.gate.tid2eid"
    table = plain_tensors()[name]
    given, _ = load(write(tmp_path, edited({name: table.int()})))
    assert same(given[name], table)


def test_check_reads_no_data(tmp_path, monkeypatch):
    folder = write(tmp_path, nvfp4_experts_tensors())

    def read(self, *arguments):
        raise AssertionError("data was read")

    monkeypatch.setattr(Reader, "_read", read)
    report = FolderSource.check(folder, build, torch.bfloat16)
    assert report.formats["NVFP4"].tensors == 81
    source = FolderSource(folder, "meta", torch.bfloat16)
    experts = build(source)["layers.1.ffn.experts"]
    assert all(buffer.is_meta for buffer in experts.buffers())
    assert experts.gate_up.shape == (mini.EXPERTS, 2 * mini.INTER, mini.HIDDEN // 2)
    assert experts.gate_up_scale_2.shape == (mini.EXPERTS, 2) and experts.down_scale_2.shape == (mini.EXPERTS,)


def test_progress_counts_every_byte(tmp_path, capsys):
    tensors = nvfp4_experts_tensors() | {"mtp.0.norm.weight": torch.ones(4)}
    calls = []
    load_folder(write(tmp_path, tensors), build, "cpu", torch.bfloat16, lambda *call: calls.append(call))
    total = sum(value.nbytes for value in tensors.values()) - 16
    assert calls[-1] == (total, total)
    assert calls == sorted(calls)
    load_folder(tmp_path, build, "cpu", torch.bfloat16, ProgressLine())
    assert capsys.readouterr().err.endswith("/s\n")


def test_unused_files_are_reported(tmp_path):
    folder = write(tmp_path, plain_tensors())
    (folder / "adapter.safetensors").write_bytes(b"not even read")
    _, report = load(folder)
    assert report.unused_files == ("adapter.safetensors",)


# Bugs reported against other engines


def test_vllm_51946_e8m0_byte_120_is_two_to_the_minus_seven(tmp_path):
    """The scale's byte was copied as a number: 120.0 instead of 2^-7. https://github.com/vllm-project/vllm/pull/51946"""
    weight = torch.ones(128, 128).to(torch.float8_e4m3fn)
    scale = torch.full((1, 1), 120, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    folder = write(tmp_path, {"head.weight": weight, "head.scale": scale})
    module, _ = load(folder, request=linear("head", 128, 128))
    assert module.scale.tolist() == [[2.0**-7]]


def test_tensorrt_llm_16196_excluded_modules_stored_fp8_are_read_as_fp8(tmp_path):
    """Modules excluded from NVFP4 were built as BF16 although stored FP8: excluded means "as in the base checkpoint".
    https://github.com/NVIDIA/TensorRT-LLM/issues/16196"""
    folder = write(tmp_path, nvfp4_experts_tensors())
    config = {"quantization_config": {"quant_algo": "NVFP4", "ignore": ["*.attn.*", "*.ffn.shared_experts.*", "head"]}}
    (folder / "config.json").write_text(json.dumps(config))
    given, _ = load(folder)
    assert type(given["layers.0.attn.wq_b"]) is Fp8BlockLinear
    assert type(given["layers.2.ffn.shared_experts.w1"]) is Fp8BlockLinear
    assert type(given["head"]) is PlainLinear


@pytest.mark.parametrize("mtp_format", ["MXFP4", "NVFP4"])
def test_tensorrt_llm_16276_mtp_in_another_format_than_the_trunk(tmp_path, mtp_format):
    """Draft experts were assumed to be in the trunk's format. https://github.com/NVIDIA/TensorRT-LLM/pull/16276"""
    trunk = nvfp4_experts_tensors() if mtp_format == "MXFP4" else plain_tensors()
    module = "mtp.0.ffn.experts.0.w1"
    mtp = mxfp4(module, 32, 64) if mtp_format == "MXFP4" else nvfp4(module, torch.randn(32, 64))
    _, report = load(write(tmp_path, trunk | mtp))
    assert report.skipped["mtp."].tensors == len(mtp)


@pytest.mark.parametrize("prefix", ["mtp.", "model.mtp."])
def test_llm_compressor_2735_skipped_mtp_is_reported(tmp_path, prefix):
    """mtp.* vanished without a word. https://github.com/vllm-project/llm-compressor/issues/2735"""
    tensors = plain_tensors()
    if prefix == "model.mtp.":
        tensors = {names.native_to_hf(name): value for name, value in tensors.items()}
    mtp = {f"{prefix}0.norm.weight": torch.ones(8), f"{prefix}0.e_proj.weight": torch.ones(8, 8)}
    _, report = load(write(tmp_path, tensors | mtp))
    assert list(report.skipped) == [prefix]
    assert (report.skipped[prefix].tensors, report.skipped[prefix].bytes) == (2, 4 * 72)
    assert f"skipped {prefix}*: 2 tensors, 288 B" in str(report)


@pytest.mark.parametrize("suffix", ["scale", "weight_scale_inv", "weight_scale"])
@pytest.mark.parametrize("input_scale", [False, True])
def test_vllm_43454_scale_suffixes_and_input_scale(tmp_path, suffix, input_scale):
    """KeyError on input_scale, and on weight_scale against weight_scale_inv.
    https://github.com/vllm-project/vllm/issues/43454"""
    tensors = nvfp4_experts_tensors(input_scale, suffix)
    given, report = load(write(tmp_path, tensors))
    assert same(given[WQ_A].scale, decode_e8m0(tensors[f"{WQ_A}.{suffix}"]))
    assert ("input_scale" in report.ignored) == input_scale


def test_float32_block_scales_multiply(tmp_path):
    weight, scale = quantize_fp8_block(torch.randn(130, 300))
    scale = decode_e8m0(scale) * 1.1
    folder = write(tmp_path, {"head.weight": weight, "head.weight_scale_inv": scale, "head.input_scale": torch.ones(())})
    module, _ = load(folder, request=linear("head", 130, 300))
    assert same(module.scale, scale) and scale.shape == (2, 3)


def test_abliterix_94_fp8_without_scale_is_refused(tmp_path):
    """`.scale` was not recognised and FP8 was cast without it: weights 3361 times too big, in silence.
    https://github.com/wuwangzhang1216/abliterix/pull/94"""
    folder = write(tmp_path, edited({f"{WQ_A}.scale": None}))
    refused(folder, "model.safetensors", f"{WQ_A}.weight is F8_E4M3", "without its scale", ".scale or .weight_scale_inv")


def test_transformers_45930_expert_scales_are_not_expert_weights(tmp_path):
    """The pattern of expert weights also matched the scales beside them.
    https://github.com/huggingface/transformers/pull/45930"""
    folder = write(tmp_path, edited({f"{W1}.weight": None}))
    refused(folder, f"no tensor {W1}.weight")


@pytest.mark.parametrize("kind", ["native", "hf"])
def test_missing_required_tensors_are_fatal(tmp_path, kind):
    """A loader that skipped what it could not find ran a model without its indexer. Any one tensor may be missing."""
    tensors = plain_tensors()
    translate = names.native_to_hf if kind == "hf" else str
    for name in sorted(tensors)[:: 5 if kind == "native" else 17]:
        rest = {translate(key): value for key, value in tensors.items() if key != name}
        refused(write(tmp_path, rest), f"no tensor {translate(name)} in", "the model needs it")

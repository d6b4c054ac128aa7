"""Every format of checkpoint: one model in each of them gives the logits of transformers on the weights it stands for."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import dsv4
from dsv4.model.export import quantization_config
from dsv4.model.linear import Fp8BlockLinear, Fp8Experts, Nvfp4Experts, Nvfp4Linear, PlainExperts, PlainLinear
from tests.model import format_checkpoints
from tests.model.format_checkpoints import NAME, VARIANTS, in_transformers, oracle, tensors_of
from tests.model.random_checkpoints import clear_tokens

LENGTH = 45  # 11 blocks of 4 tokens, of which 6 are picked; three windows


def load(path):
    return dsv4.load(path, "cpu", torch.float32, max_context=64, prefill_chunk=20, compile=False)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits(name, tmp_path, draw):
    variant = VARIANTS[name]
    theirs = in_transformers(format_checkpoints.write(tmp_path, variant))
    ids = clear_tokens(NAME, LENGTH, draw, theirs)
    engine = load(tmp_path)
    wanted = theirs(torch.tensor([ids]), use_cache=False).logits[0]
    distance = (engine.logits([ids])[0] - wanted).abs().max().item()
    assert distance <= 1e-4, f"logits differ by {distance:.2e}"
    assert (wanted - oracle(NAME)(torch.tensor([ids]), use_cache=False).logits[0]).abs().max() > 1e-3  # other weights
    block = engine.runner.model.layers[1]
    experts = {"plain": PlainExperts, "write": Fp8Experts}.get(variant.experts.__name__, Nvfp4Experts)
    assert type(block.ffn.experts) is experts
    for part, module in ((variant.linears, block.attn.wo_a), (variant.others, block.attn.wx.exact)):
        linear = {"plain": PlainLinear, "write": Fp8BlockLinear}.get(part.__name__, Nvfp4Linear)
        assert type(module) is linear


@pytest.mark.parametrize("kind", ["native", "native, fused"])
def test_mxfp4_is_what_its_lossless_cast_is(kind, tmp_path, draw):
    """The native release, and its experts cast to NVFP4 with equal scales in both halves: the same logits to the bit."""
    format_checkpoints.write(tmp_path / "native", VARIANTS[kind])
    native = load(tmp_path / "native")
    experts = native.runner.model.layers[2].ffn.experts
    assert (torch.log2(experts.gate_up_scale_2) % 1 == 0).all()
    assert torch.equal(experts.down_scale.float()[..., ::2], experts.down_scale.float()[..., 1::2])
    format_checkpoints.write(tmp_path / "cast", VARIANTS["nvfp4 experts"])
    file = tmp_path / "cast" / "model.safetensors"
    tensors = load_file(file)
    for layer, block in enumerate(native.runner.model.layers):
        stack = block.ffn.experts
        for expert in range(len(stack.gate_up)):
            parts = [*zip(*(t[expert].chunk(2) for t in (stack.gate_up, stack.gate_up_scale)), strict=True)]
            parts = [(*part, scale_2) for part, scale_2 in zip(parts, stack.gate_up_scale_2[expert], strict=True)]
            parts.append((stack.down[expert], stack.down_scale[expert], stack.down_scale_2[expert]))
            for name, part in zip(("w1", "w3", "w2"), parts, strict=True):
                prefix = f"layers.{layer}.ffn.experts.{expert}.{name}."
                for suffix, tensor in zip(("weight", "weight_scale", "weight_scale_2"), part, strict=True):
                    tensors[prefix + suffix] = tensor.clone()
    save_file(tensors, file)
    ids = draw.integers(2, 64, LENGTH).tolist()
    assert torch.equal(load(tmp_path / "cast").logits([ids])[0], native.logits([ids])[0])


EARLY = {  # of NVIDIA's exports; the later generation is dsv4.model.export.quantization_config
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
    "quant_algo": None,
    "moe_quant_algo": "NVFP4",
    "quantized_layers": {
        f"layers.{layer}.ffn.experts.{expert}.{part}": {"quant_algo": "NVFP4", "awq_block_size": 16}
        for layer in range(4)
        for expert in range(4)
        for part in ("w1", "w2", "w3")
    },
}


def test_both_generations_of_metadata(tmp_path, draw):
    """The same weights described in two ways, or not at all: tensors are told by their dtypes."""
    format_checkpoints.write(tmp_path, VARIANTS["nvfp4 experts"])
    config, ids = json.loads((tmp_path / "config.json").read_text()), draw.integers(2, 64, LENGTH).tolist()
    logits = []
    for description in (None, EARLY, quantization_config(4)):
        (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": description}))
        ignored = {"producer": {"name": "modelopt"}, "quantization": {"exclude_modules": ["*.attn.*", "head"]}}
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(ignored))
        logits.append(load(tmp_path).logits([ids])[0])
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])


@pytest.mark.parametrize("different", [False, True])
def test_scale_2_of_w1_and_w3(different, tmp_path):
    """Equal in NVIDIA's exports, where fused kernels rely on it; elsewhere not. Each expert keeps both."""
    variant = VARIANTS["nvfp4 experts, different scale_2" if different else "nvfp4 experts"]
    format_checkpoints.write(tmp_path, variant)
    tensors, _ = tensors_of(variant)
    for layer, block in enumerate(load(tmp_path).runner.model.layers):
        scale_2 = block.ffn.experts.gate_up_scale_2
        for expert, (w1, w3) in enumerate(scale_2.tolist()):
            prefix = f"layers.{layer}.ffn.experts.{expert}."
            assert w1 == tensors[f"{prefix}w1.weight_scale_2"].item()
            assert w3 == tensors[f"{prefix}w3.weight_scale_2"].item()
            assert (w1 != w3) == different


def test_tensorrt_llm_16276_trunk_mxfp4_and_mtp_nvfp4(tmp_path):
    """Draft experts were assumed to be in the trunk's format; the converse of the test in test_checkpoint.
    https://github.com/NVIDIA/TensorRT-LLM/pull/16276"""
    format_checkpoints.write(tmp_path, VARIANTS["native"])
    mtp = {}
    for part, shape in (("w1", (128, 160)), ("w2", (160, 128)), ("w3", (128, 160))):
        stored, _ = format_checkpoints.nvfp4(torch.randn(shape))
        mtp |= {f"mtp.0.ffn.experts.0.{part}.{suffix}": tensor for suffix, tensor in stored.items()}
    add(tmp_path, mtp)
    report = load(tmp_path).load_report.checkpoint
    assert report.skipped["mtp."].tensors == len(mtp) == 12
    assert report.formats.keys() == {"MXFP4", "FP8 block", "plain"}


@pytest.mark.parametrize(
    ("kind", "modules"),
    [("MTP", ("mtp.0.e_proj", "mtp.0.h_proj")), ("DSpark", ("mtp.0.main_proj", "mtp.2.markov_head.markov_w1"))],
)
def test_draft_heads_are_skipped_and_named(kind, modules, tmp_path):
    format_checkpoints.write(tmp_path, VARIANTS["native"])
    add(tmp_path, {f"{module}.weight": torch.ones(8, 8) for module in modules})
    report = load(tmp_path).load_report.checkpoint
    assert report.draft == kind
    assert f"skipped mtp.*: 2 tensors, 512 B (a draft head: {kind})" in str(report)


def add(path, tensors):
    file = path / "model.safetensors"
    save_file(load_file(file) | tensors, file)

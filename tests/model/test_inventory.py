"""The inventories of the releases against their published counts, and whole models built from headers of that content."""

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dsv4.model import names
from dsv4.model.checkpoint import FolderSource
from dsv4.model.config import ModelConfig, flash, pro
from dsv4.model.inventory import Expected, all_nvfp4_release, native_release, nvfp4_experts_release
from dsv4.model.linear import Fp8BlockLinear, Fp8Experts, Nvfp4Experts, Nvfp4Linear
from dsv4.model.shards import BITS, Folder, Stored
from dsv4.model.transformer import Transformer

RELEASES = {"Flash": flash, "Pro": pro}


def folder_of(tensors: list[Expected]) -> Folder:
    """A folder whose headers would hold these tensors, without any file."""
    stored, end = {}, 0
    for tensor in tensors:
        nbytes = math.prod(tensor.shape) * BITS[tensor.dtype] // 8
        stored[tensor.name] = Stored(Path("model.safetensors"), tensor.name, tensor.dtype, tensor.shape, end, nbytes)
        end += nbytes
    assert len(stored) == len(tensors)  # no name twice
    return Folder(Path("release"), stored, ())


def dry_build(config: ModelConfig, tensors: list[Expected]):
    """The model on the meta device, and the report that accounts for every tensor."""
    source = FolderSource(folder_of(tensors), "meta", torch.bfloat16)
    return Transformer(config, source), source.finish()


@pytest.mark.parametrize(("name", "count", "draft"), [("Flash", 69_187, 1575), ("Pro", 145_116, 2343)])
def test_published_counts(name, count, draft):
    tensors = list(native_release(RELEASES[name]()))
    assert len(tensors) == len({tensor.name for tensor in tensors}) == count
    assert sum(names.is_skipped(tensor.name) for tensor in tensors) == draft
    assert list(native_release(RELEASES[name](), draft=None)) == [t for t in tensors if not names.is_skipped(t.name)]


def test_published_counts_of_dspark():
    """Of Flash-0731's index: 72,317 tensors, 4,705 of them of the draft head, in three blocks.
    https://github.com/vllm-project/vllm/pull/41834"""
    tensors = list(native_release(flash(), draft="DSpark"))
    assert len(tensors) == len({tensor.name for tensor in tensors}) == 72_317
    blocks = Counter(tensor.name[:5] for tensor in tensors if names.is_skipped(tensor.name))
    assert blocks == {"mtp.0": 1568, "mtp.1": 1565, "mtp.2": 1572}


def test_dspark_is_skipped_and_counted():
    tensors = list(native_release(flash(), draft="DSpark"))
    _, report = dry_build(flash(), tensors)
    nbytes = sum(stored.nbytes for key, stored in folder_of(tensors).tensors.items() if key.startswith("mtp."))
    assert report.draft == "DSpark"
    assert (report.skipped["mtp."].tensors, report.skipped["mtp."].bytes) == (4705, nbytes)
    assert f"skipped mtp.*: 4705 tensors, {nbytes / 1e9:.1f} GB (a draft head: DSpark)" in str(report)


def test_dtypes_of_flash():
    """Every FP8 or I8 weight has one scale; 417 F32 tensors are the hyper-connections, sinks, biases and ape."""
    counts = Counter(tensor.dtype for tensor in native_release(flash()))
    assert counts["F32"] == 417 and counts["I64"] == 3 and counts["I8"] == 44 * 256 * 3
    assert counts["F8_E8M0"] == counts["I8"] + counts["F8_E4M3"]


def test_size_of_the_exports():
    """NVIDIA's exports are published as about 168 GB and 913 GB."""
    for make, low, high in ((flash, 160e9, 176e9), (pro, 890e9, 930e9)):
        folder = folder_of(list(nvfp4_experts_release(make())))
        assert low < sum(stored.nbytes for stored in folder.tensors.values()) < high


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("hc_head_fn", (4, 28672), "F32"),
        ("layers.0.hc_attn_fn", (24, 28672), "F32"),
        ("layers.60.attn.wq_a.scale", (12, 56), "F8_E8M0"),
        ("layers.60.attn.wq_b.weight", (65536, 1536), "F8_E4M3"),
        ("layers.60.attn.wo_a.weight", (16384, 4096), "F8_E4M3"),
        ("layers.60.attn.wo_b.weight", (7168, 16384), "F8_E4M3"),
        ("layers.2.attn.compressor.ape", (4, 1024), "F32"),
        ("layers.3.attn.compressor.ape", (128, 512), "F32"),
        ("layers.2.attn.indexer.wq_b.weight", (8192, 1536), "F8_E4M3"),
        ("layers.2.attn.indexer.compressor.ape", (4, 256), "F32"),
        ("layers.2.ffn.gate.tid2eid", (129280, 6), "I64"),
        ("layers.3.ffn.gate.bias", (384,), "F32"),
        ("layers.3.ffn.experts.383.w1.weight", (3072, 3584), "I8"),
        ("layers.3.ffn.experts.383.w1.scale", (3072, 224), "F8_E8M0"),
        ("layers.3.ffn.experts.383.w2.weight", (7168, 1536), "I8"),
        ("layers.3.ffn.experts.383.w2.scale", (7168, 96), "F8_E8M0"),
        ("mtp.0.e_proj.weight", (7168, 7168), "F8_E4M3"),
        ("mtp.0.ffn.gate.bias", (384,), "F32"),
    ],
)
def test_shapes_of_pro(name, shape, dtype):
    assert Expected(name, shape, dtype) in native_release(pro())


@pytest.mark.parametrize("name", RELEASES)
def test_native_builds_from_headers(name):
    """Also: experts are held as NVFP4, and the draft head is skipped and named."""
    config = RELEASES[name]()
    model, report = dry_build(config, list(native_release(config)))
    experts = model.layers[-1].ffn.experts
    assert type(experts) is Nvfp4Experts and type(model.layers[-1].attn.wo_a) is Fp8BlockLinear
    inter, hidden = config.moe_intermediate_size, config.hidden_size
    assert experts.gate_up.shape == (config.n_routed_experts, 2 * inter, hidden // 2)
    assert experts.gate_up_scale.shape == (config.n_routed_experts, 2 * inter, hidden // 16)
    assert report.draft == "MTP"
    assert report.skipped["mtp."].tensors == {"Flash": 1575, "Pro": 2343}[name]
    assert report.formats["MXFP4"].tensors == config.num_hidden_layers * config.n_routed_experts * 6


@pytest.mark.parametrize("name", RELEASES)
@pytest.mark.parametrize("draft_experts", ["MXFP4", "NVFP4"])
def test_nvfp4_builds_from_headers(name, draft_experts):
    config = RELEASES[name]()
    model, report = dry_build(config, list(nvfp4_experts_release(config, draft_experts=draft_experts)))
    assert type(model.layers[-1].ffn.experts) is Nvfp4Experts
    assert report.formats["NVFP4"].tensors == config.num_hidden_layers * config.n_routed_experts * 9
    assert report.formats.keys() == {"NVFP4", "FP8 block", "plain"}


@pytest.mark.parametrize("name", RELEASES)
def test_base_model_builds_from_headers(name):
    config = RELEASES[name]()
    model, report = dry_build(config, list(native_release(config, experts="FP8")))
    experts, blocks = model.layers[-1].ffn.experts, [config.moe_intermediate_size // 128, config.hidden_size // 128]
    assert type(experts) is Fp8Experts
    assert experts.gate_up_scale.shape == (config.n_routed_experts + 1, 2 * blocks[0], blocks[1])  # the shared one is last
    assert report.formats.keys() == {"FP8 block", "plain"}


def test_compressed_tensors_flash_builds_from_headers():
    """As llm-compressor writes the all-NVFP4 variant: other names, and global scales of one dimension."""
    renamed = {"weight_scale_2": "weight_global_scale", "input_scale": "input_global_scale"}
    tensors = []
    for tensor in all_nvfp4_release(flash()):
        module, _, suffix = tensor.name.rpartition(".")
        suffix = "weight_packed" if tensor.dtype == "U8" else renamed.get(suffix, suffix)
        shape = (1,) if suffix.endswith("global_scale") else tensor.shape
        tensors.append(replace(tensor, name=f"{module}.{suffix}", shape=shape))
    _, report = dry_build(flash(), tensors)
    assert report.formats.keys() == {"NVFP4 (compressed-tensors)", "plain"}


def test_all_nvfp4_pro_builds_from_headers():
    """Shapes and dtypes of an export's layer 2, which spells `indexer.weights_proj` without transformers' `scorer`."""
    config = pro()
    tensors = [replace(t, name=t.name.replace("scorer.", "")) for t in all_nvfp4_release(config)]
    indexer = "model.layers.2.self_attn.compressor.indexer."
    assert Expected(f"{indexer}q_b_proj.weight", (8192, 768), "U8") in tensors
    assert Expected(f"{indexer}weights_proj.weight", (64, 3584), "U8") in tensors
    assert Expected(f"{indexer}position_bias", (4, 256), "BF16") in tensors
    assert Expected(f"{indexer}kv_norm.weight", (128,), "BF16") in tensors
    assert Expected("model.layers.2.self_attn.compressor.indexer.kv_proj.weight", (256, 3584), "U8") in tensors
    assert Expected("model.layers.2.self_attn.o_a_proj.weight", (16384, 2048), "U8") in tensors
    model, report = dry_build(config, tensors)
    assert report.naming == "hf" and report.formats.keys() == {"NVFP4", "plain"}
    attention = model.layers[2].attn
    linears = [module for module in attention.modules() if type(module).__module__ == "dsv4.model.linear"]
    assert len(linears) >= 4 and {type(module) for module in linears} == {Nvfp4Linear}
    assert attention.wo_a.groups == 16


def test_unknown_expert_format():
    with pytest.raises(ValueError, match="found 'INT4', expected one of MXFP4, FP8, NVFP4"):
        list(native_release(flash(), experts="INT4"))
    with pytest.raises(ValueError, match="found 'Eagle', expected None or one of MTP, DSpark"):
        list(native_release(flash(), draft="Eagle"))

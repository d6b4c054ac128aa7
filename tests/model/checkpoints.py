"""Small checkpoint folders for tests: their tensors by native name, ways to store them, and a model that asks for all.

The miniature has the three kinds of layers (sliding with hash routing, CSA, HCA) and sizes that tell every dimension
from every other, so that a transposed or swapped tensor cannot fit.
"""

import functools
import json
import re
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from dsv4.model.checkpoint import FolderSource, load_folder
from dsv4.model.source import Source
from dsv4.ops.fp8 import quantize_fp8_block
from dsv4.ops.nvfp4 import quantize_nvfp4

VOCAB, HIDDEN, INTER, EXPERTS, TOPK = 40, 160, 48, 3, 2
HEADS, HEAD_DIM, Q_LORA, GROUPS, O_LORA = 4, 32, 80, 2, 24
INDEX_HEADS, INDEX_DIM = 6, 16
RATIOS = (0, 4, 128)
HASH_LAYERS = 1

LINEAR, FLOAT, INT = "linear", "float", "int"
FP8_NAMES = ("wq_a", "wq_b", "attn.wkv", "wo_a", "wo_b", "shared_experts")


def inventory() -> dict[str, tuple[str, tuple[int, ...]]]:
    """Every tensor of the miniature but the experts: native name -> (kind, shape). Linears go without `.weight`."""
    out = {
        "embed.weight": (FLOAT, (VOCAB, HIDDEN)),
        "head": (LINEAR, (VOCAB, HIDDEN)),
        "norm.weight": (FLOAT, (HIDDEN,)),
        "hc_head_fn": (FLOAT, (4, 4 * HIDDEN)),
        "hc_head_base": (FLOAT, (4,)),
        "hc_head_scale": (FLOAT, (1,)),
    }
    for layer, ratio in enumerate(RATIOS):
        rows = {
            "attn_norm.weight": (FLOAT, (HIDDEN,)),
            "ffn_norm.weight": (FLOAT, (HIDDEN,)),
            "attn.attn_sink": (FLOAT, (HEADS,)),
            "attn.wq_a": (LINEAR, (Q_LORA, HIDDEN)),
            "attn.q_norm.weight": (FLOAT, (Q_LORA,)),
            "attn.wq_b": (LINEAR, (HEADS * HEAD_DIM, Q_LORA)),
            "attn.wkv": (LINEAR, (HEAD_DIM, HIDDEN)),
            "attn.kv_norm.weight": (FLOAT, (HEAD_DIM,)),
            "attn.wo_a": (LINEAR, (GROUPS * O_LORA, HEADS * HEAD_DIM // GROUPS)),
            "attn.wo_b": (LINEAR, (HIDDEN, GROUPS * O_LORA)),
            "ffn.gate.weight": (FLOAT, (EXPERTS, HIDDEN)),
            "ffn.shared_experts.w1": (LINEAR, (INTER, HIDDEN)),
            "ffn.shared_experts.w2": (LINEAR, (HIDDEN, INTER)),
            "ffn.shared_experts.w3": (LINEAR, (INTER, HIDDEN)),
        }
        for site in ("attn", "ffn"):
            shapes = (("fn", (24, 4 * HIDDEN)), ("base", (24,)), ("scale", (3,)))
            rows |= {f"hc_{site}_{part}": (FLOAT, shape) for part, shape in shapes}
        if layer < HASH_LAYERS:
            rows["ffn.gate.tid2eid"] = (INT, (VOCAB, TOPK))
        else:
            rows["ffn.gate.bias"] = (FLOAT, (EXPERTS,))
        if ratio:
            rows |= _compressor("attn.compressor", ratio, HEAD_DIM)
        if ratio == 4:
            rows |= _compressor("attn.indexer.compressor", ratio, INDEX_DIM)
            rows["attn.indexer.wq_b"] = (LINEAR, (INDEX_HEADS * INDEX_DIM, Q_LORA))
            rows["attn.indexer.weights_proj"] = (LINEAR, (INDEX_HEADS, HIDDEN))
        out |= {f"layers.{layer}.{name}": row for name, row in rows.items()}
    return out


def _compressor(name: str, ratio: int, dim: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    width = 2 * dim if ratio == 4 else dim
    return {
        f"{name}.wkv": (LINEAR, (width, HIDDEN)),
        f"{name}.wgate": (LINEAR, (width, HIDDEN)),
        f"{name}.ape": (FLOAT, (ratio, width)),
        f"{name}.norm.weight": (FLOAT, (dim,)),
    }


def expert_shapes() -> dict[str, tuple[int, int]]:
    """The native names of all experts' weights, without `.weight`."""
    sizes = {"w1": (INTER, HIDDEN), "w2": (HIDDEN, INTER), "w3": (INTER, HIDDEN)}
    return {
        f"layers.{layer}.ffn.experts.{expert}.{part}": size
        for layer in range(len(RATIOS))
        for expert in range(EXPERTS)
        for part, size in sizes.items()
    }


def build(source: Source) -> dict:
    """Ask for everything the miniature needs; what the source gave, by native name. Experts stand at their layer."""
    given = {}
    for name, (kind, shape) in inventory().items():
        *scopes, leaf = name.split(".") if kind == LINEAR else name.removesuffix(".weight").split(".")
        scope = source
        for part in scopes:
            scope = scope.at(part)
        if kind == LINEAR:
            given[name] = scope.linear(leaf, *shape, groups=GROUPS if leaf == "wo_a" else 1)
        elif kind == INT:
            given[name] = scope.tensor(leaf, shape, torch.int64)
        else:
            leaf += ".weight" if name.endswith(".weight") else ""
            given[name] = scope.tensor(leaf, shape, torch.float32)
    for layer in range(len(RATIOS)):
        ffn = source.at("layers").at(str(layer)).at("ffn")
        given[f"layers.{layer}.ffn.experts"] = ffn.experts("experts", EXPERTS, HIDDEN, INTER)
    return given


def plain_tensors(dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """All tensors of the miniature, unquantised, under native names."""
    return dict(_plain_tensors(dtype))


def nvfp4_experts_tensors(input_scale: bool = True, fp8_suffix: str = "scale") -> dict[str, Tensor]:
    """The miniature as NVIDIA's experts-only exports store it: experts NVFP4, most linears FP8, the rest BF16."""
    return dict(_nvfp4_experts_tensors(input_scale, fp8_suffix))


@functools.cache
def _plain_tensors(dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {name + ".weight" if kind == LINEAR else name: (kind, shape) for name, (kind, shape) in inventory().items()}
    shapes |= {f"{name}.weight": (LINEAR, shape) for name, shape in expert_shapes().items()}
    tensors = {}
    for name, (kind, shape) in shapes.items():
        if kind == INT:
            tensors[name] = torch.randint(0, EXPERTS, shape, generator=generator)
        else:
            tensors[name] = torch.randn(shape, generator=generator).to(dtype)
    return tensors


@functools.cache
def _nvfp4_experts_tensors(input_scale: bool, fp8_suffix: str) -> dict[str, Tensor]:
    tensors = {}
    for name, value in plain_tensors().items():
        module = name.removesuffix(".weight")
        if ".ffn.experts." in name:
            tensors |= nvfp4(module, value, input_scale)
        elif name.endswith(".weight") and any(part in name for part in FP8_NAMES) and value.ndim == 2:
            tensors[name], tensors[f"{module}.{fp8_suffix}"] = quantize_fp8_block(value)
        else:
            tensors[name] = value
    return tensors


def nvfp4(module: str, weight: Tensor, input_scale: bool = True) -> dict[str, Tensor]:
    """The tensors of one NVFP4 weight. scale_2 differs from weight to weight."""
    packed, scale, scale_2 = quantize_nvfp4(weight)
    tensors = {f"{module}.weight": packed, f"{module}.weight_scale": scale, f"{module}.weight_scale_2": scale_2}
    return tensors | ({f"{module}.input_scale": torch.tensor(0.5)} if input_scale else {})


def reciprocal_nvfp4(module: str, weight: Tensor, scale_2: Tensor | None = None) -> dict[str, Tensor]:
    """One NVFP4 weight as compressed-tensors stores it: the global scale divides, and has one dimension."""
    packed, scale, scale_2 = quantize_nvfp4(weight, scale_2)
    names = ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale")
    values = (packed, scale, 1 / scale_2.reshape(1), torch.ones(1))
    return {f"{module}.{name}": value for name, value in zip(names, values, strict=True)}


def mxfp4(module: str, out_features: int, in_features: int) -> dict[str, Tensor]:
    """The tensors of one MXFP4 weight as the native release stores experts; in_features divisible by 32."""
    scale = torch.full((out_features, in_features // 32), 120, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    return {f"{module}.weight": torch.zeros(out_features, in_features // 2, dtype=torch.int8), f"{module}.scale": scale}


def write(folder: Path, *shards: dict[str, Tensor], index: bool | None = None) -> Path:
    """Write a folder of one safetensors file, or of several and their index. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    files = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    files = files if len(shards) > 1 else ["model.safetensors"]
    for file, tensors in zip(files, shards, strict=True):
        save_file(tensors, folder / file)
    if index or (index is None and len(shards) > 1):
        weight_map = {name: file for file, tensors in zip(files, shards, strict=True) for name in tensors}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def write_raw(folder: Path, header: bytes | dict, data: bytes = b"", length: int | None = None) -> Path:
    """Write a folder whose model.safetensors has this header and data, right or wrong."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    prefix = struct.pack("<Q", len(header) if length is None else length)
    (folder / "model.safetensors").write_bytes(prefix + header + data)
    return folder


def load(folder, dtype=torch.bfloat16, request=build):
    """What `request` was given from the folder, on the CPU, and the report."""
    return load_folder(folder, request, "cpu", dtype)


def refused(folder, *words, request=build, headers=True) -> str:
    """The load is refused with one line holding all words: from the headers alone, or only once data is read."""
    with pytest.raises(ValueError) as caught:
        load(folder, request=request)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, f"{word!r} not in {message!r}"
    if headers:
        with pytest.raises(ValueError, match=re.escape(message)):
            FolderSource.check(folder, request, torch.bfloat16)
    else:
        FolderSource.check(folder, request, torch.bfloat16)
    return message


def same(a: Tensor, b: Tensor) -> bool:
    """Equal to the bit, dtype and shape included."""
    return (
        a.dtype == b.dtype and a.shape == b.shape and a.reshape(-1).view(torch.uint8).equal(b.reshape(-1).view(torch.uint8))
    )


def edited(changes: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """The miniature with NVFP4 experts, some tensors replaced, added or (None) left out."""
    return {name: value for name, value in (nvfp4_experts_tensors() | changes).items() if value is not None}


def linear(name, out_features, in_features, groups=1):
    """A request for one linear, for folders that hold little else."""
    return lambda source: source.linear(name, out_features, in_features, groups)

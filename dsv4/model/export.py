"""Write a checkpoint in NVIDIA's experts-only NVFP4 format: routed experts NVFP4, attention linears, the indexer's query
projection and shared experts FP8-block, everything else plain, all under native names.

    folder/config.json, model.safetensors                                       when it fits one shard
    folder/config.json, model-0000i-of-0000n.safetensors, model.safetensors.index.json   otherwise
"""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from dsv4.ops.fp8 import divided, quantize_fp8_block
from dsv4.ops.nvfp4 import E2M1_MAX, E4M3_MAX, GROUP, quantize_nvfp4

_LAYER = r"(?:layers|mtp)\.\d+\."
_EXPERT = re.compile(rf"^({_LAYER}ffn\.experts\.\d+\.)(w[123])\.weight$")
_FP8 = re.compile(
    rf"^{_LAYER}(?:attn\.(?:wq_a|wq_b|wkv|wo_a|wo_b)|attn\.indexer\.wq_b|ffn\.shared_experts\.w[123]|"
    r"[eh]_proj)\.weight$"
)
_FLOAT32 = re.compile(r"(?:hc_\w+|attn_sink|\.ape|ffn\.gate\.bias)$")
_INT64 = re.compile(r"ffn\.gate\.tid2eid$")
_BFLOAT16 = re.compile(r"(?:^|\.)(?:embed|head|norm|\w+_norm|[eh]norm|wkv|wgate|weights_proj|gate)\.weight$")
SHARD_BYTES = 5 * 2**30


def quantization_config(num_hidden_layers: int) -> dict:
    """The `quantization_config` of the later generation of nvidia/DeepSeek-V4-*-NVFP4: FP8 base, NVFP4 experts."""
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "quant_algo": "MIXED_PRECISION",
        "moe_quant_algo": "NVFP4",
        "group_size": GROUP,
        "config_groups": {
            "group_0": {
                "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": GROUP},
                "input_activations": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": GROUP},
                "targets": ["Linear"],
            }
        },
        "quantized_layers": {
            f"layers.{i}.ffn.experts": {"quant_algo": "NVFP4", "group_size": GROUP} for i in range(num_hidden_layers)
        },
        "ignore": ["*.attn.*", "*.ffn.shared_experts.*", "head", "mtp.*"],
    }


def stored_kind(name: str) -> str:
    """How the format stores a native-named tensor: "nvfp4", "fp8", or as plain "bfloat16", "float32" or "int64".

    ValueError for a name that the format has no place for.
    """
    for pattern, kind in (
        (_EXPERT, "nvfp4"),
        (_FP8, "fp8"),
        (_INT64, "int64"),
        (_FLOAT32, "float32"),
        (_BFLOAT16, "bfloat16"),
    ):
        if pattern.search(name):
            return kind
    raise ValueError(f"{name}: not a tensor of a DeepSeek-V4 checkpoint")


def nvfp4_tensors(tensors: dict[str, Tensor], input_amax: float = 2688.0) -> Iterator[tuple[str, Tensor]]:
    """Yield the checkpoint's tensors, name by name, from native-named float tensors (2-d weights [out, in]).

    Raises ValueError for a name that the format has no place for, a weight that is not finite, an expert without all of
    w1, w2, w3, or an inner dimension that NVFP4 groups do not divide.
    """
    for name, value in tensors.items():
        if not _INT64.search(name) and not value.is_floating_point():
            raise ValueError(f"{name}: expected a float tensor, found {value.dtype}")
        if value.is_floating_point() and not torch.isfinite(value).all():
            raise ValueError(f"{name}: holds values that are not finite")
        kind = stored_kind(name)
        if kind == "nvfp4":
            prefix, part = _EXPERT.match(name).groups()
            yield from _expert_tensors(tensors, prefix, part, input_amax)
        elif kind == "fp8":
            if value.dim() != 2:
                raise ValueError(f"{name}: expected [out, in], found shape {tuple(value.shape)}")
            weight, scale = quantize_fp8_block(value)
            yield name, weight
            yield name.removesuffix("weight") + "scale", scale
        else:
            yield name, value.to(getattr(torch, kind))


def shared_scale_2(*weights: Tensor) -> Tensor:
    """The scale_2 of weights quantised together: fused gate-up kernels read one for w1 and w3."""
    amax = max(weight.float().abs().max() for weight in weights)
    return divided(amax, E2M1_MAX * E4M3_MAX) if amax > 0 else torch.ones_like(amax)


def _expert_tensors(tensors: dict[str, Tensor], prefix: str, part: str, input_amax: float) -> Iterator[tuple[str, Tensor]]:
    missing = [p for p in ("w1", "w2", "w3") if f"{prefix}{p}.weight" not in tensors]
    if missing:
        raise ValueError(f"{prefix.rstrip('.')}: lacks {', '.join(missing)}")
    value = tensors[f"{prefix}{part}.weight"]
    if value.dim() != 2 or value.shape[1] % GROUP:
        raise ValueError(
            f"{prefix}{part}.weight: NVFP4 needs [out, in] with in divisible by {GROUP}, found shape {tuple(value.shape)}"
        )
    both = ("w1", "w3") if part != "w2" else ("w2",)
    scale_2 = shared_scale_2(*(tensors[f"{prefix}{p}.weight"] for p in both))
    packed, scale, scale_2 = quantize_nvfp4(value, scale_2)
    name = f"{prefix}{part}."
    yield name + "weight", packed
    yield name + "weight_scale", scale
    yield name + "weight_scale_2", scale_2.reshape(())
    yield name + "input_scale", torch.tensor(input_amax / (E2M1_MAX * E4M3_MAX), dtype=torch.float32)


def save_nvfp4_experts(
    folder: str | Path,
    config_json: dict,
    tensors: dict[str, Tensor],
    input_amax: float = 2688.0,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write `folder` with config.json and safetensors in the experts-only NVFP4 format.

    tensors: native names without prefix ("layers.0.attn.wq_a.weight"), float, 2-d weights [out, in]; tid2eid integer.
    config_json: native spelling; its `quantization_config` is replaced by this format's.
    input_amax: the activation's calibrated maximum, stored as input_scale = input_amax / 2688 (the default gives 1.0, no
    calibration); weight-only kernels do not read it.
    Files are written in a folder beside and renamed into place one by one; config.json and the index come last, so an
    interrupted write leaves no folder that looks complete but is not. Other files in the folder stay. Errors as
    nvfp4_tensors, and ValueError for a config without num_hidden_layers or tensors of other layers.
    """
    folder = Path(folder)
    layers = config_json.get("num_hidden_layers")
    if not isinstance(layers, int) or layers < 1:
        raise ValueError(f"config_json: num_hidden_layers must be a positive integer, found {layers!r}")
    found = {int(m[1]) for name in tensors if (m := re.match(r"layers\.(\d+)\.", name))}
    if found != set(range(layers)):
        raise ValueError(f"tensors: layers {sorted(found)} do not match num_hidden_layers {layers}")
    shards = [{}]
    size = total = 0
    for name, value in nvfp4_tensors(tensors, input_amax):
        bytes_ = value.numel() * value.element_size()
        if shards[-1] and size + bytes_ > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = value.contiguous()
        size, total = size + bytes_, total + bytes_
    files = (
        ["model.safetensors"]
        if len(shards) == 1
        else [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    )
    folder.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=".writing-", dir=folder))
    try:
        for file, shard in zip(files, shards, strict=True):
            save_file(shard, aside / file, metadata={"format": "pt"})
            (aside / file).chmod(0o644)  # safetensors creates files that only their owner may read
        if len(shards) > 1:
            index = {
                "metadata": {"total_size": total},
                "weight_map": {name: file for file, shard in zip(files, shards, strict=True) for name in shard},
            }
            (aside / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
            files.append("model.safetensors.index.json")
        config = {**config_json, "quantization_config": quantization_config(layers)}
        (aside / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        for stale in folder.glob("model*.safetensors*"):  # a checkpoint of another shard count must not linger beside this
            if stale.name not in files:
                stale.unlink()
        for file in [*files, "config.json"]:
            os.replace(aside / file, folder / file)
    finally:
        shutil.rmtree(aside, ignore_errors=True)

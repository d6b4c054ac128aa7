"""One float32 model written in every format that checkpoints come in, with the weights that each file stands for.

The weights are those of random_checkpoints' "formats" model. A `Variant` says how each kind of tensor is stored and named;
`write` makes its folder and returns the dequantised weights, which come from formulas of this file and not from dsv4's.
"""

import functools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from dsv4.model import names
from dsv4.model.config import ModelConfig
from dsv4.model.inventory import native_release
from dsv4.ops.fp8 import quantize_fp8_block
from dsv4.ops.nvfp4 import encode_e2m1, pack_nibbles, quantize_nvfp4
from tests.model.random_checkpoints import SETTINGS, folder, oracle

NAME = "formats"
DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "I64": torch.int64}
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
PARTS = ("w1", "w3", "w2")
Stored = tuple[dict[str, Tensor], Tensor]  # tensors by suffix, and the float32 weight that they stand for


def values_of(packed: Tensor) -> Tensor:
    """Nibbles of [..., K/2] bytes as values [..., K]."""
    packed = packed.view(torch.uint8).long()
    return torch.stack((E2M1[packed % 16], E2M1[packed // 16]), -1).flatten(-2)


def plain(weight: Tensor, scale_2: Tensor | None = None) -> Stored:
    return {"weight": weight.bfloat16()}, weight.bfloat16().float()


def nvfp4(weight: Tensor, scale_2: Tensor | None = None) -> Stored:
    packed, scale, scale_2 = quantize_nvfp4(weight, scale_2)
    value = values_of(packed) * scale.float().repeat_interleave(16, -1) * scale_2
    tensors = {"weight": packed, "weight_scale": scale, "weight_scale_2": scale_2, "input_scale": torch.tensor(1e-3)}
    return tensors, value


def nvfp4_without_input_scale(weight: Tensor, scale_2: Tensor | None = None) -> Stored:
    tensors, value = nvfp4(weight, scale_2)
    del tensors["input_scale"]
    return tensors, value


def nvfp4_reciprocal(weight: Tensor, scale_2: Tensor | None = None) -> Stored:
    """As compressed-tensors defines it: scales are quantised times the global scale, and values divided by it."""
    global_scale = 6 * 448 / weight.abs().max() if scale_2 is None else 1 / scale_2
    packed, scale, _ = quantize_nvfp4(weight, 1 / global_scale)
    value = values_of(packed) * (scale.float() / global_scale).repeat_interleave(16, -1)
    names = ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale")
    return dict(zip(names, (packed, scale, global_scale.reshape(1), torch.ones(1)), strict=True)), value


def mxfp4(weight: Tensor, scale_2: Tensor | None = None) -> Stored:
    groups = weight.unflatten(-1, (-1, 32))
    exponent = groups.abs().amax(-1).log2().floor() - 2
    packed = pack_nibbles(encode_e2m1((groups * torch.exp2(-exponent)[..., None]).flatten(-2)))
    value = values_of(packed) * torch.exp2(exponent).repeat_interleave(32, -1)
    return {"weight": packed.view(torch.int8), "scale": (exponent + 127).byte().view(torch.float8_e8m0fnu)}, value


def fp8(suffix: str, powers_of_two: bool = True) -> Callable[..., Stored]:
    def write(weight: Tensor, scale_2: Tensor | None = None) -> Stored:
        codes, scale = quantize_fp8_block(weight)
        exact = torch.exp2(scale.view(torch.uint8).float() - 127) * (1 if powers_of_two else 1.1)
        rows, columns = weight.shape
        blocks = exact.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        return {"weight": codes, suffix: scale if powers_of_two else exact}, codes.float() * blocks

    return write


@dataclass(frozen=True)
class Variant:
    """How a checkpoint is stored: routed experts, the linears that releases store in FP8, and those they store in BF16
    (compressors, weights_proj); a position_bias in BF16 or F32; names; and how experts are laid out.

    scale_2 of w1 and w3: "each" its own, "shared" by the two of an expert, "one" for all experts of the layer.
    fused: None for one tensor per expert and projection, else how a fused tensor's suffixes are attached to its name.
    """

    experts: Callable[..., Stored]
    linears: Callable[..., Stored]
    others: Callable[..., Stored] = plain
    bias: torch.dtype = torch.float32
    naming: str = "native"
    scale_2: str = "each"
    expert_names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    fused: Callable[[str], str] | None = None
    scorer: str = "scorer."


def underscore(suffix: str) -> str:
    """`gate_up_proj`, `gate_up_proj_weight_scale`."""
    return "" if suffix == "weight" else f"_{suffix}"


def dotted(suffix: str) -> str:
    """`gate_up_proj.weight`, `gate_up_proj.weight_scale`."""
    return f".{suffix}"


def transformers_fp8(suffix: str) -> str:
    """`gate_up_proj`, `gate_up_proj_scale_inv`."""
    return "" if suffix == "weight" else "_scale_inv"


ALL_NVFP4 = dict(linears=nvfp4, others=nvfp4, bias=torch.bfloat16, naming="hf")
ALL_RECIPROCAL = dict(linears=nvfp4_reciprocal, others=nvfp4_reciprocal, naming="hf")
VARIANTS = {
    "bf16": Variant(plain, plain),
    "bf16, fused": Variant(plain, plain, naming="hf", fused=underscore),
    "native": Variant(mxfp4, fp8("scale")),
    "native, hf names": Variant(mxfp4, fp8("weight_scale_inv"), naming="hf"),
    "native, fused": Variant(mxfp4, fp8("weight_scale_inv"), naming="hf", fused=underscore),
    "base, .scale": Variant(fp8("scale"), fp8("scale")),
    "base, F32 .scale": Variant(fp8("scale", False), fp8("scale", False)),
    "base, .weight_scale_inv": Variant(fp8("weight_scale_inv"), fp8("weight_scale_inv")),
    "base, F32 .weight_scale_inv": Variant(fp8("weight_scale_inv", False), fp8("weight_scale_inv", False), naming="hf"),
    "base, F32 .weight_scale": Variant(fp8("weight_scale", False), fp8("weight_scale", False)),
    "base, fused": Variant(fp8("weight_scale_inv", False), fp8("weight_scale_inv"), naming="hf", fused=transformers_fp8),
    "nvfp4 experts": Variant(nvfp4, fp8("scale"), scale_2="shared"),
    "nvfp4 experts, no input_scale": Variant(nvfp4_without_input_scale, fp8("scale"), scale_2="shared"),
    "nvfp4 experts, different scale_2": Variant(nvfp4, fp8("scale")),
    "all nvfp4": Variant(nvfp4, **ALL_NVFP4, scorer=""),
    "all nvfp4, w1": Variant(nvfp4, **ALL_NVFP4, expert_names=PARTS),
    "all nvfp4, fused": Variant(nvfp4, **ALL_NVFP4, fused=underscore),
    "all nvfp4, fused, shared": Variant(nvfp4, **ALL_NVFP4, fused=underscore, scale_2="shared", scorer=""),
    "all nvfp4, fused, one": Variant(nvfp4, **ALL_NVFP4, fused=dotted, scale_2="one"),
    "compressed-tensors experts": Variant(nvfp4_reciprocal, fp8("weight_scale", False)),
    "compressed-tensors": Variant(nvfp4_reciprocal, **ALL_RECIPROCAL, scale_2="shared"),
    "compressed-tensors, fused": Variant(nvfp4_reciprocal, **ALL_RECIPROCAL, fused=dotted),
}


@functools.cache
def config() -> ModelConfig:
    return ModelConfig.from_folder(folder(NAME))


@functools.cache
def weights() -> dict[str, Tensor]:
    """The float32 model by native names, one tensor per expert and projection."""
    out = {}
    for key, value in oracle(NAME).state_dict().items():
        name = names.hf_to_native(key)
        prefix, _, leaf = name.rpartition(".")
        if leaf == "gate_up_proj":
            for expert, both in enumerate(value):
                out[f"{prefix}.{expert}.w1.weight"], out[f"{prefix}.{expert}.w3.weight"] = both.chunk(2)
        elif leaf == "down_proj":
            out |= {f"{prefix}.{expert}.w2.weight": down for expert, down in enumerate(value)}
        else:
            out[name] = value
    return out


OTHERS = re.compile(r"\.(wkv|wgate|weights_proj)\.weight$")  # linears that releases store in BF16


def tensors_of(variant: Variant) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of a checkpoint under their names in the file, and the weights they stand for by native name."""
    files, meant = {}, {}
    naming = names.HF if variant.naming == "hf" else names.NATIVE
    for expected in native_release(config(), draft=None):
        name = expected.name
        if expected.dtype == "F8_E8M0" or ".ffn.experts." in name:
            continue
        value, spelt = weights()[name], naming.from_native(name)
        if expected.dtype == "F8_E4M3" or OTHERS.search(name):
            write = variant.linears if expected.dtype == "F8_E4M3" else variant.others
            stored, meant[name] = write(value)
            files |= {spelt.removesuffix("weight") + suffix: tensor for suffix, tensor in stored.items()}
        else:
            files[spelt] = value.to(variant.bias if name.endswith(".ape") else DTYPES[expected.dtype])
            meant[name] = files[spelt].to(value.dtype)
    for layer in range(config().num_hidden_layers):
        prefix = f"layers.{layer}.ffn.experts."
        spelt = f"model.layers.{layer}.mlp.experts." if variant.naming == "hf" else prefix
        files |= {spelt + leaf: tensor for leaf, tensor in _experts(variant, prefix, meant).items()}
    return {name.replace("scorer.", variant.scorer): tensor.contiguous() for name, tensor in files.items()}, meant


def _experts(variant: Variant, prefix: str, meant: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a layer's experts by what follows `experts.` in their names."""
    count = config().n_routed_experts
    each = {}  # part -> its tensors by suffix, expert by expert
    for part in PARTS:
        each[part] = []
        for expert in range(count):
            stored, meant[f"{prefix}{expert}.{part}.weight"] = variant.experts(
                weights()[f"{prefix}{expert}.{part}.weight"], _scale_2(variant, prefix, expert, part)
            )
            each[part].append(stored)
    if variant.fused is None:
        leaves = PARTS if variant.naming == "native" else variant.expert_names
        return {
            f"{expert}.{leaf}.{suffix}": tensor
            for part, leaf in zip(PARTS, leaves, strict=True)
            for expert, stored in enumerate(each[part])
            for suffix, tensor in stored.items()
        }
    files = {}
    for leaf, parts in (("gate_up_proj", ("w1", "w3")), ("down_proj", ("w2",))):
        for suffix, sample in each["w1"][0].items():
            rows = [[each[part][expert][suffix] for part in parts] for expert in range(count)]
            if sample.numel() > 1:
                tensor = torch.stack([torch.cat(row) for row in rows])
            else:
                tensor = torch.stack([torch.stack([one.reshape(()) for one in row]) for row in rows])
                tensor = {"each": tensor, "shared": tensor[:, 0], "one": tensor[0, 0]}[variant.scale_2]
            files[leaf + variant.fused(suffix)] = tensor
    return files


def _scale_2(variant: Variant, prefix: str, expert: int, part: str) -> Tensor | None:
    """The scale_2 that a variant demands for an expert's weight, None where it is the weight's own."""
    if variant.scale_2 == "each":
        return None
    pair = (part,) if part == "w2" else ("w1", "w3")
    group = [expert] if variant.scale_2 == "shared" else range(config().n_routed_experts)
    return max(weights()[f"{prefix}{e}.{p}.weight"].abs().max() for e in group for p in pair) / (6 * 448)


def write(path: Path, variant: Variant) -> dict[str, Tensor]:
    """Write the folder; returns the weights it stands for by native name."""
    path.mkdir(parents=True, exist_ok=True)
    tensors, meant = tensors_of(variant)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config().to_json()))
    return meant


def in_transformers(meant: dict[str, Tensor]) -> DeepseekV4ForCausalLM:
    """transformers' model in float32 with these weights, none left over."""
    meant = dict(meant)
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**SETTINGS[NAME]))
    state = {}
    for layer in range(config().num_hidden_layers):
        each = [
            [meant.pop(f"layers.{layer}.ffn.experts.{expert}.{part}.weight") for part in PARTS]
            for expert in range(config().n_routed_experts)
        ]
        prefix = f"model.layers.{layer}.mlp.experts."
        state[prefix + "gate_up_proj"] = torch.stack([torch.cat((w1, w3)) for w1, w3, _ in each])
        state[prefix + "down_proj"] = torch.stack([w2 for _, _, w2 in each])
    state |= {names.native_to_hf(name): value for name, value in meant.items()}
    model.load_state_dict(state, strict=True)
    return model.eval()

"""The formats that `dsv4 quantize` writes: how each stores a tensor, what it calls it, and what its config.json says.

    nvfp4-experts   NVIDIA's: routed experts NVFP4, most linears FP8 block, the rest BF16 and F32; native names
    all-nvfp4       every linear but the router and the head NVFP4, the rest BF16 and F32; transformers' names

A target is asked by native name, and knows nothing of what a source holds.
"""

from collections.abc import Callable
from dataclasses import dataclass

from dsv4.model import names
from dsv4.model.export import quantization_config, stored_kind
from dsv4.ops.nvfp4 import GROUP

_BF16_LINEARS = (".wkv.weight", ".wgate.weight", ".weights_proj.weight")  # of the releases: compressors and indexer


@dataclass(frozen=True)
class Target:
    """`kind` says how a tensor is stored, by its native name ("nvfp4", "fp8", "bfloat16", "float32", "int64"; ValueError
    for a name that is none of the model's), `spelt` what it is called in the file; `quantization_config` makes that part
    of config.json from the number of layers."""

    kind: Callable[[str], str]
    spelt: Callable[[str], str]
    quantization_config: Callable[[int], dict]


def _all_nvfp4_kind(name: str) -> str:
    kind = stored_kind(name)
    if kind == "fp8" or name.endswith(_BF16_LINEARS):
        return "nvfp4"
    return "bfloat16" if name.endswith(".ape") else kind


def _all_nvfp4_config(num_hidden_layers: int) -> dict:
    """As ModelOpt writes it for a model whose linears are all NVFP4 but those it ignores."""
    four_bits = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": GROUP}
    return {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "group_size": GROUP,
        "config_groups": {"group_0": {"weights": four_bits, "input_activations": four_bits, "targets": ["Linear"]}},
        "ignore": ["lm_head", *(f"model.layers.{layer}.mlp.gate" for layer in range(num_hidden_layers)), "mtp.*"],
    }


TARGETS = {
    "nvfp4-experts": Target(stored_kind, str, quantization_config),
    "all-nvfp4": Target(_all_nvfp4_kind, names.native_to_hf, _all_nvfp4_config),
}

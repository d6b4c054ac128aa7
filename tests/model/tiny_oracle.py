"""examples/tiny in transformers: its weights dequantised by the formulas of the formats, loaded strictly."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from dsv4.model.names import native_to_hf
from dsv4.ops.fp8 import dequantize_fp8_block
from dsv4.ops.nvfp4 import dequantize_nvfp4

TINY = Path(__file__).parents[2] / "examples" / "tiny"


def dequantised_weights() -> dict[str, torch.Tensor]:
    """Native name -> float32 weight."""
    stored = load_file(TINY / "model.safetensors")
    weights = {}
    for name, tensor in stored.items():
        base = name.removesuffix(".weight")
        if f"{name}_scale_2" in stored:
            weights[name] = dequantize_nvfp4(tensor, stored[f"{name}_scale"], stored[f"{name}_scale_2"])
        elif f"{base}.scale" in stored and name.endswith(".weight"):
            weights[name] = dequantize_fp8_block(tensor, stored[f"{base}.scale"])
        elif not name.endswith((".scale", ".weight_scale", ".weight_scale_2", ".input_scale")):
            weights[name] = tensor.float() if tensor.is_floating_point() else tensor
    return weights


def tiny_in_transformers(dtype: torch.dtype = torch.float32) -> DeepseekV4ForCausalLM:
    """The oracle model, with every parameter taken from the checkpoint and none left over."""
    settings = json.loads((TINY / "config.json").read_text())
    settings.pop("quantization_config")
    config = DeepseekV4Config(**settings, attn_implementation="eager")
    model = DeepseekV4ForCausalLM(config)
    weights = dequantised_weights()
    state = {}
    for layer in range(config.num_hidden_layers):
        experts = f"layers.{layer}.ffn.experts."
        each = [
            [weights.pop(f"{experts}{e}.{part}.weight") for part in ("w1", "w3", "w2")]
            for e in range(config.n_routed_experts)
        ]
        target = f"model.layers.{layer}.mlp.experts."
        state[target + "gate_up_proj"] = torch.stack([torch.cat((w1, w3)) for w1, w3, _ in each])
        state[target + "down_proj"] = torch.stack([w2 for _, _, w2 in each])
    state |= {native_to_hf(name): tensor for name, tensor in weights.items()}
    model.load_state_dict(state, strict=True)
    return model.to(dtype).eval()

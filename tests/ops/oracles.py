"""transformers' DeepseekV4 modules with random weights, at sizes where a 300-token sequence costs milliseconds, and a
search for what NVFP4 makes of some values."""

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as hf
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

from tests.ops.cases import Draw

SLIDING, CSA, HCA = range(3)  # layer numbers in the tiny configuration
RATES = {CSA: 4, HCA: 128}


def tiny_config(**changes) -> DeepseekV4Config:
    """Real rates, window, theta, YaRN and stream count; small widths."""
    values = {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "compress_ratios": [0, 4, 128],
        "num_hash_layers": 1,
        "num_attention_heads": 4,
        "head_dim": 32,
        "qk_rope_head_dim": 8,
        "q_lora_rank": 24,
        "o_groups": 2,
        "o_lora_rank": 8,
        "index_n_heads": 16,
        "index_head_dim": 16,
        "index_topk": 6,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 16,
        "vocab_size": 64,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 16,
            "original_max_position_embeddings": 65536,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    }
    config = DeepseekV4Config(**(values | changes))
    config._attn_implementation = "eager"
    return config


def randomise(module: nn.Module, draw: Draw) -> nn.Module:
    """Fill every parameter: N(0, 1 / fan_in) for matrices, around 1 for norms, N(0, 1) for the other vectors."""
    for name, parameter in module.named_parameters():
        if parameter.dim() > 1 and "position_bias" not in name:
            value = draw.normal(*parameter.shape, scale=parameter.shape[-1] ** -0.5)
        else:
            value = draw.normal(*parameter.shape) + (1.0 if "norm" in name else 0.0)
        parameter.copy_(value)
    return module.eval()


def inv_freq(config: DeepseekV4Config, layer: int) -> Tensor:
    """The layer's rope frequencies: theta 10000 plain for sliding layers, theta 160000 with YaRN for the others."""
    rotary = hf.DeepseekV4RotaryEmbedding(config)
    return rotary.main_inv_freq if layer == SLIDING else rotary.compress_inv_freq


def rotary_cos_sin(frequencies: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """What transformers' apply_rotary_pos_emb takes, for positions [T]: cos and sin [1, T, R/2] in float32."""
    angles = positions[None, :, None].float() * frequencies
    return angles.cos(), angles.sin()


def new_cache(config: DeepseekV4Config) -> DynamicCache:
    return DynamicCache(config=config)


def nearest_nvfp4(x: Tensor) -> Tensor:
    """Each row of float32 [..., K] in NVFP4 and back, every value by search for the nearest of the eight magnitudes."""
    magnitudes = torch.tensor([0.0, 1.0, 2.0, 4.0, 0.5, 1.5, 3.0, 6.0])  # even codes first: they win ties
    groups = x.unflatten(-1, (-1, 16))
    scale_2 = groups.abs().amax((-1, -2), keepdim=True) / 2688
    step = (groups.abs().amax(-1, keepdim=True) / 6 / scale_2).to(torch.float8_e4m3fn).float() * scale_2
    nearest = ((groups / step).abs()[..., None] - magnitudes).abs().argmin(-1)
    return torch.where(step > 0, magnitudes[nearest] * groups.sign() * step, 0).flatten(-2)

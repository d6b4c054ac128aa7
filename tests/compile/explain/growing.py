"""transformers' DeepseekV4ForCausalLM, two small layers with random weights, decoding over the cache that it makes."""

import torch
from torch import Tensor
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from tests.model.random_checkpoints import SETTINGS

torch.manual_seed(0)
model = DeepseekV4ForCausalLM(DeepseekV4Config(**SETTINGS["small"], attn_implementation="eager")).eval()


@torch.no_grad()
def decode(ids: Tensor, cache) -> Tensor:
    return model(ids, past_key_values=cache, use_cache=True).logits


@torch.no_grad()
def inputs() -> tuple:
    cache = model(torch.arange(20)[None], use_cache=True).past_key_values
    return torch.tensor([[3]]), cache

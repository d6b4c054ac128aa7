"""How long transformers' own DeepseekV4 takes for a layer and a token on the same GPU: the reference, eager, in bf16."""

import statistics
import sys
import time

import torch

from dsv4.model.config import CSA, HCA, ModelConfig

SHAPE = (
    "vocab_size",
    "hidden_size",
    "num_attention_heads",
    "head_dim",
    "q_lora_rank",
    "o_groups",
    "o_lora_rank",
    "sliding_window",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
)


def transformers_layer(ours: ModelConfig, context: int, steps: int, device: str = "cuda") -> dict[str, float]:
    """Seconds a token of one layer of each kind ("CSA", "HCA"), from models of one and of three layers of that kind.

    Random weights at the widths of `ours`; `context` tokens are prefilled and then `steps` decoded at batch 1. The time is
    that of the host's clock with the device synchronised, since launching is what bounds it.
    """
    shape = {key: getattr(ours, key) for key in SHAPE}
    seconds = {}
    with torch.device(device), torch.no_grad():
        for kind, layer_type in (("CSA", CSA), ("HCA", HCA)):
            one, three = (_token_seconds(shape, layer_type, layers, context, steps) for layers in (1, 3))
            seconds[kind] = (three - one) / 2
            print(f"transformers, {kind}: {seconds[kind] * 1e3:.2f} ms a layer", file=sys.stderr, flush=True)
    return seconds


def _token_seconds(shape: dict, layer_type: str, layers: int, context: int, steps: int) -> float:
    """Median time of a decoded token of a model of `layers` alike, on the device that is set."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    config = DeepseekV4Config(
        **shape, num_hidden_layers=layers, layer_types=[layer_type] * layers, mlp_layer_types=["moe"] * layers
    )
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = DeepseekV4ForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    tokens = torch.randint(shape["vocab_size"], (1, context))
    synchronize = torch.cuda.synchronize if tokens.is_cuda else lambda: None
    cache, times = None, []
    for _ in range(steps + 3):
        synchronize()
        start = time.perf_counter()
        out = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, tokens = out.past_key_values, out.logits[:, -1:].argmax(-1)
        synchronize()
        times.append(time.perf_counter() - start)
    del model, cache, out
    if tokens.is_cuda:
        torch.cuda.empty_cache()  # for the next one, of tens of GiB
    return statistics.median(times[3:])

"""How long transformers' own DeepseekV4 takes for a layer and a token on the same GPU: the reference, eager, in bf16."""

import statistics
import time

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


def transformers_layer(widths: str, context: int, steps: int) -> dict[str, float]:
    """Seconds a token of one layer of each kind ("CSA", "HCA"), from models of one and of three layers of that kind.

    Random weights at the release's widths; `context` tokens are prefilled and then `steps` decoded at batch 1. The time is
    that of the host's clock with the device synchronised, since launching is what bounds it.
    """
    import torch
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    from dsv4.model import config as configs
    from dsv4.model.config import CSA, HCA

    ours = getattr(configs, widths)()
    shape = {key: getattr(ours, key) for key in SHAPE}
    seconds = {}
    for kind, layer_type in (("CSA", CSA), ("HCA", HCA)):
        medians = []
        for layers in (1, 3):
            config = DeepseekV4Config(
                **shape, num_hidden_layers=layers, layer_types=[layer_type] * layers, mlp_layer_types=["moe"] * layers
            )
            with torch.device("cuda"), torch.no_grad():
                torch.set_default_dtype(torch.bfloat16)
                try:
                    model = DeepseekV4ForCausalLM(config).eval()
                finally:
                    torch.set_default_dtype(torch.float32)
                tokens = torch.randint(shape["vocab_size"], (1, context))
                cache, times = None, []
                for _ in range(steps + 3):
                    torch.cuda.synchronize()
                    start = time.perf_counter()
                    out = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
                    cache, tokens = out.past_key_values, out.logits[:, -1:].argmax(-1)
                    torch.cuda.synchronize()
                    times.append(time.perf_counter() - start)
            medians.append(statistics.median(times[3:]))
            del model, cache, out
            torch.cuda.empty_cache()
        seconds[kind] = (medians[1] - medians[0]) / 2
    return seconds

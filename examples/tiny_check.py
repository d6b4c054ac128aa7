"""The training model against transformers' implementation and dsv4's quantisers; runs on a CPU."""

import re

import torch
from tiny_export import config_json
from tiny_model import TinyConfig, TinyV4, to_native
from tiny_quantise import fake_fp8, fake_nvfp4
from tiny_sinkhorn import sinkhorn


def check(seed):
    """The training model's fp32 logits against transformers on the same random weights; also Sinkhorn's gradient."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    torch.manual_seed(seed)
    c = TinyConfig(index_topk=16, vocab_size=512)
    model = TinyV4(c).eval()
    with torch.no_grad():  # move everything off its neutral start, so that nothing is tested against 0 or 1
        for name, p in model.named_parameters():
            if p.dim() < 2 or name.endswith(".ape"):
                p += 0.3 * torch.randn_like(p)
            elif name.endswith("_fn"):
                p *= 2
        for layer in model.layers:
            if hasattr(layer.ffn.gate, "bias"):
                layer.ffn.gate.bias.normal_(std=0.1)
    for name, p in model.named_parameters():
        if name.endswith("_scale"):
            p.data.add_(0.5)
    hf = DeepseekV4ForCausalLM(DeepseekV4Config(**config_json(c), attn_implementation="eager")).eval()
    state = hf_state(to_native(model))
    missing, unexpected = hf.load_state_dict(state, strict=False)
    missing = [m for m in missing if not m.endswith("inv_freq")]
    if missing or unexpected:
        raise SystemExit(f"names differ: missing {missing}, unexpected {unexpected}")
    hf.float()
    length = 512
    ids = torch.randint(c.vocab_size, (2, length))
    with torch.no_grad():
        ours = model.logits(model(ids, torch.tensor(False))[0])
        theirs = hf(input_ids=ids, use_cache=False).logits
        dense = model.logits(model(ids, torch.tensor(True))[0])
    error = (ours - theirs).abs().max().item()
    print(f"{length} tokens, logits up to {theirs.abs().max():.2f}: largest difference {error:.2e}")
    print(f"with every visible CSA entry instead of the indexer's choice: {(dense - theirs).abs().max():.2e}")
    logits = (2 * torch.randn(4, 4, 5, dtype=torch.float64)).requires_grad_()
    torch.autograd.gradcheck(lambda x: sinkhorn(x, 20, 1e-6), (logits,))
    check_fake_quantisation()
    if error > 1e-4:
        raise SystemExit("the training model differs from transformers")
    print("check passed")


def check_fake_quantisation():
    from dsv4.ops.fp8 import dequantize_fp8_block, quantize_fp8_block
    from dsv4.ops.nvfp4 import dequantize_nvfp4, quantize_nvfp4

    w = torch.randn(256, 384) * torch.exp(torch.randn(256, 1))
    nv = dequantize_nvfp4(*quantize_nvfp4(w))
    print(
        f"fake NVFP4 against dsv4.ops: {(fake_nvfp4(w, w.abs().max()) - nv).abs().max():.1e}, "
        f"fake FP8: {(fake_fp8(w) - dequantize_fp8_block(*quantize_fp8_block(w))).abs().max():.1e}"
    )


def hf_state(native):
    """Native names -> transformers' (facts: one regular map; routed experts fused as [E, 2I, H])."""
    rules = [
        (r"^embed\.", "model.embed_tokens."),
        (r"^head\.", "lm_head."),
        (r"^norm\.", "model.norm."),
        (r"^hc_head_", "model.hc_head.hc_"),
        (r"^layers\.", "model.layers."),
        (r"\.attn_norm\.", ".input_layernorm."),
        (r"\.ffn_norm\.", ".post_attention_layernorm."),
        (r"\.hc_(attn|ffn)_", r".\1_hc."),
        (r"\.attn\.attn_sink", ".self_attn.sinks"),
        (r"\.attn\.", ".self_attn."),
        (r"\.indexer\.compressor\.", ".compressor.indexer."),
        (r"self_attn\.indexer\.", "self_attn.compressor.indexer."),
        (r"self_attn\.q_norm", "self_attn.q_a_norm"),
        (r"\.wq_a\.", ".q_a_proj."),
        (r"\.wq_b\.", ".q_b_proj."),
        (r"\.wkv\.", ".kv_proj."),
        (r"\.wgate\.", ".gate_proj."),
        (r"\.wo_a\.", ".o_a_proj."),
        (r"\.wo_b\.", ".o_b_proj."),
        (r"\.ape$", ".position_bias"),
        (r"(compressor\.(?:indexer\.)?)norm\.", r"\1kv_norm."),
        (r"indexer\.weights_proj", "indexer.scorer.weights_proj"),
        (r"\.ffn\.gate\.bias", ".ffn.gate.e_score_correction_bias"),
        (r"shared_experts\.w1", "shared_experts.gate_proj"),
        (r"shared_experts\.w2", "shared_experts.down_proj"),
        (r"shared_experts\.w3", "shared_experts.up_proj"),
        (r"\.ffn\.", ".mlp."),
    ]
    out, experts = {}, {}
    for name, value in native.items():
        if m := re.match(r"layers\.(\d+)\.ffn\.experts\.(\d+)\.(w[123])\.weight", name):
            experts.setdefault(int(m[1]), {})[int(m[2]), m[3]] = value
            continue
        for pattern, new in rules:
            name = re.sub(pattern, new, name)
        out[name] = value
    for layer, parts in experts.items():
        count = 1 + max(e for e, _ in parts)
        out[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = torch.stack(
            [torch.cat((parts[e, "w1"], parts[e, "w3"])) for e in range(count)]
        )
        out[f"model.layers.{layer}.mlp.experts.down_proj"] = torch.stack([parts[e, "w2"] for e in range(count)])
    return out

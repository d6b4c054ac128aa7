"""Weights of a training run on disk, and the checkpoint folder made from them."""

import json
import pathlib
import shutil

import torch
from safetensors.torch import load_file, save_file
from tiny_data import BOS, EOS, PAD
from tiny_model import to_native


def config_json(c):
    """config.json in the native spelling of the released checkpoints."""
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "torch_dtype": "bfloat16",
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "num_hidden_layers": len(c.compress_ratios),
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": 1,
        "head_dim": c.head_dim,
        "qk_rope_head_dim": c.qk_rope_head_dim,
        "q_lora_rank": c.q_lora_rank,
        "o_groups": c.o_groups,
        "o_lora_rank": c.o_lora_rank,
        "sliding_window": c.sliding_window,
        "compress_ratios": list(c.compress_ratios),
        "index_n_heads": c.index_n_heads,
        "index_head_dim": c.index_head_dim,
        "index_topk": c.index_topk,
        "n_routed_experts": c.n_routed_experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": c.num_experts_per_tok,
        "moe_intermediate_size": c.moe_intermediate_size,
        "routed_scaling_factor": c.routed_scaling_factor,
        "num_hash_layers": c.num_hash_layers,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "swiglu_limit": c.swiglu_limit,
        "hidden_act": "silu",
        "expert_dtype": "fp4",
        "hc_mult": c.hc_mult,
        "hc_sinkhorn_iters": c.hc_sinkhorn_iters,
        "hc_eps": c.hc_eps,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": c.rope_theta,
        "compress_rope_theta": c.compress_rope_theta,
        "rope_scaling": {
            "type": "yarn",
            "factor": c.rope_factor,
            "original_max_position_embeddings": c.rope_original,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        "max_position_embeddings": c.max_position_embeddings,
        "num_nextn_predict_layers": 0,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }


def save_weights(model, out, log, note, piece=14 * 2**20):
    """bf16 weights under native names in pieces below 16 MiB; written aside, then renamed."""
    pieces, size = [{}], 0
    for name, value in to_native(model, torch.bfloat16).items():
        n = value.numel() * value.element_size()
        if size + n > piece:
            pieces.append({})
            size = 0
        pieces[-1][name] = value
        size += n
    for i, tensors in enumerate(pieces):
        save_file(tensors, out / f"part-{i}.tmp", metadata={"note": note})
    for i in range(len(pieces)):
        (out / f"part-{i}.tmp").rename(out / f"weights-{i}.safetensors")
    log(f"saved {len(pieces)} files: {note}")


def write_json(path, value):
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n")


def export(run, folder, config, tokenizer):
    """Weights of a run -> checkpoint folder: NVFP4 experts, config, tokenizer and generation settings, report."""
    from dsv4.model.export import save_nvfp4_experts

    run, folder, tensors = pathlib.Path(run), pathlib.Path(folder), {}
    pieces = sorted(run.glob("weights-*.safetensors"))
    if not pieces:
        raise SystemExit(f"{run} holds no weights-*.safetensors; `train --out {run}` writes them")
    for path in pieces:
        tensors |= load_file(path)
    folder.mkdir(parents=True, exist_ok=True)
    save_nvfp4_experts(folder, config_json(config), tensors)
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    write_json(folder / "generation_config.json", {"do_sample": True, "temperature": 1.0, "top_p": 1.0, **ids})
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "pad_token": PAD,
            "add_bos_token": False,
            "add_eos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": config.max_position_embeddings,
        },
    )
    shutil.copyfile(tokenizer, folder / "tokenizer.json")
    shutil.copyfile(run / "report.json", folder / "report.json")
    print(f"{folder}: {sum(f.stat().st_size for f in folder.iterdir()) / 1e6:.1f} MB")

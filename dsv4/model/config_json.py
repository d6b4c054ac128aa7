"""`config.json` to the arguments of `ModelConfig` and back, in both spellings found in the wild.

Native (DeepSeek's releases): `compress_ratios`, `num_hash_layers`, `qk_rope_head_dim`, `rope_scaling`, `torch_dtype`.
transformers 5: `layer_types`, `compress_rates`, `mlp_layer_types`, `partial_rotary_factor`, `rope_parameters`, `dtype`.

A key or a value that this model does not implement stops the load with its name, because a setting that is silently
ignored gives a model that runs and answers wrongly. How weights are stored (`quantization_config`, `expert_dtype`) is
decided per tensor when the weights are read, never here.
"""

from dataclasses import fields

import torch

from dsv4.model.config import CSA, DTYPES, HCA, SLIDING, ModelConfig, Yarn, integer, number, require

RATIO_TO_LAYER_TYPE = {0: SLIDING, 4: CSA, 128: HCA}

# Keys that choose between variants of the arithmetic, with the values this model implements. Absent means the first.
FIXED = {
    "scoring_func": ("sqrtsoftplus",),
    "topk_method": ("noaux_tc",),
    "norm_topk_prob": (True,),
    "n_group": (1, 0, None),  # no expert groups
    "topk_group": (1, 0, None),
    "n_shared_experts": (1,),
    "num_key_value_heads": (1,),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "tie_word_embeddings": (False,),
    "is_encoder_decoder": (False,),
}

# Keys that do not change what the model computes at inference.
IGNORED_KEYS = frozenset(
    {
        # how the weights are stored: decided per tensor
        "quantization_config",
        "compression_config",
        "expert_dtype",
        # multi-token prediction and DSpark blocks (`mtp.*` weights), which are skipped
        "num_nextn_predict_layers",
        "dspark_block_size",
        "dspark_noise_token_id",
        "dspark_target_layer_ids",
        "dspark_markov_rank",
        # training
        "initializer_range",
        "attention_dropout",
        "router_aux_loss_coef",
        "output_router_logits",
        "router_jitter_noise",
        # transformers' bookkeeping
        "architectures",
        "auto_map",
        "transformers_version",
        "use_cache",
        "pad_token_id",
        "_name_or_path",
        "_commit_hash",
        "attn_implementation",
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_experts_implementation",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "chunk_size_feed_forward",
        "problem_type",
        "id2label",
        "label2id",
        "tokenizer_class",
        "torchscript",
        "use_bfloat16",
        "tie_encoder_decoder",
    }
)

# Keys that are read below, besides those that are fields of ModelConfig under the same name.
READ_KEYS = frozenset(
    {
        "model_type",
        "layer_types",
        "compress_ratios",
        "compress_rates",
        "compress_rate_csa",
        "compress_rate_hca",
        "mlp_layer_types",
        "num_hash_layers",
        "partial_rotary_factor",
        "rope_scaling",
        "rope_parameters",
        "eos_token_id",
        "dtype",
        "torch_dtype",
        "num_local_experts",
        "intermediate_size",
    }
)

ROPE_KEYS = frozenset(
    {
        "type",
        "rope_type",
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "rope_theta",
        "partial_rotary_factor",
        "truncate",
    }
)

V41_KEY_PREFIXES = ("engram", "candidate_", "kv_source_layers", "index_source_layers", "gate_temp")

# Fields that config.json never has under the same name, and fields that need a rule of their own.
_RENAMED = {"csa_rate", "hca_rate", "yarn", "eos_token_ids"}
_OWN_RULE = {"layer_types", "mlp_layer_types", "dtype", "qk_rope_head_dim", "rope_theta", "compress_rope_theta"}
_OWN_RULE |= {"n_shared_experts"} | _RENAMED
_PLAIN_FIELDS = {field.name: field.type for field in fields(ModelConfig) if field.name not in _OWN_RULE}


def read(values: dict) -> dict:
    """Arguments of `ModelConfig` from the content of a `config.json`. ValueError for all that is not this model."""
    _refuse_other_models(values)
    out = {name: present(values, name) for name in _PLAIN_FIELDS}
    out |= {name: number(name, out[name]) for name, kind in _PLAIN_FIELDS.items() if kind is float}
    for alias, name in (("num_local_experts", "n_routed_experts"), ("intermediate_size", "moe_intermediate_size")):
        found = values.get(alias)
        require(found in (None, out[name]), alias, found, f"the same as {name} ({out[name]})")
    out |= _read_layers(values, integer("num_hidden_layers", out["num_hidden_layers"], at_least=1))
    out |= _read_rope(values, integer("head_dim", out["head_dim"], at_least=1))
    eos = present(values, "eos_token_id")
    out["eos_token_ids"] = tuple(eos) if isinstance(eos, list) else (eos,)
    names = [values[key] for key in ("dtype", "torch_dtype") if values.get(key) is not None]
    for name in names:
        require(isinstance(name, str) and name in DTYPES, "dtype", name, f"one of {', '.join(DTYPES)}")
        require(name == names[0], "torch_dtype", name, f"the same as dtype ({names[0]})")
    out["dtype"] = DTYPES[names[0]] if names else torch.bfloat16
    return out


def write(config: ModelConfig) -> dict:
    """`config.json` in the native spelling.

    Layer lists that it cannot express (rates other than 4 and 128; hash layers that are not the first ones) are
    written as `layer_types` with `compress_rates`, and as `mlp_layer_types`. transformers reads the result in any case.
    """
    out = {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4"}
    out |= {name: getattr(config, name) for name in _PLAIN_FIELDS}
    out |= {name: getattr(config, name) for name in ("qk_rope_head_dim", "rope_theta", "compress_rope_theta")}
    out |= {name: allowed[0] for name, allowed in FIXED.items() if None not in allowed and name != "is_encoder_decoder"}
    if (config.csa_rate, config.hca_rate) == (4, 128):
        out["compress_ratios"] = [config.rate(layer) for layer in range(config.num_hidden_layers)]
    else:
        out["layer_types"] = list(config.layer_types)
        out["compress_rates"] = {CSA: config.csa_rate, HCA: config.hca_rate}
    hash_layers = config.mlp_layer_types.count("hash_moe")
    if "moe" in config.mlp_layer_types[:hash_layers]:
        out["mlp_layer_types"] = list(config.mlp_layer_types)
    else:
        out["num_hash_layers"] = hash_layers
    if config.yarn is not None:
        out["rope_scaling"] = {"type": "yarn"} | {f.name: getattr(config.yarn, f.name) for f in fields(Yarn)}
    out["eos_token_id"] = config.eos_token_ids[0] if len(config.eos_token_ids) == 1 else list(config.eos_token_ids)
    out["torch_dtype"] = str(config.dtype).removeprefix("torch.")
    return out


def present(values: dict, name: str):
    """The value of a key that has no default; ValueError if it is absent or null."""
    if values.get(name) is None:
        raise ValueError(f"{name}: missing, and the model cannot be built without it")
    return values[name]


def _refuse_other_models(values: dict) -> None:
    """ValueError for another architecture, a variant outside FIXED, or a key that nothing here reads."""
    newer = sorted(key for key in values if key.startswith(V41_KEY_PREFIXES))
    ratios = values.get("compress_ratios")
    if isinstance(ratios, list) and (1 in ratios or 2 in ratios):
        newer.append("compress_ratios of 1 or 2")
    if newer:
        raise ValueError(f"this is DeepSeek-V4.1, another model that dsv4 does not run (found {', '.join(newer)})")
    require(values.get("model_type") == "deepseek_v4", "model_type", values.get("model_type"), "'deepseek_v4'")
    for name, allowed in FIXED.items():
        found = values.get(name, allowed[0])
        # the type counts too: 1 == True in Python
        known = any(type(found) is type(want) and found == want for want in allowed)
        require(known, name, found, repr(allowed[0]))
    known_keys = READ_KEYS | IGNORED_KEYS | set(FIXED) | set(_PLAIN_FIELDS) | (_OWN_RULE - _RENAMED)
    unknown = sorted(set(values) - known_keys)
    if unknown:
        raise ValueError(
            f"unknown keys: {', '.join(unknown)}; they may change what the model computes, so they are not ignored"
        )


def _read_layers(values: dict, layers: int) -> dict:
    """`layer_types`, `mlp_layer_types` and the two rates from either spelling."""
    rates = values.get("compress_rates") or {}
    require(isinstance(rates, dict) and set(rates) <= {CSA, HCA}, "compress_rates", rates, f"the keys {CSA}, {HCA}")
    rates = {CSA: 4, HCA: 128} | rates
    for key, kind in (("compress_rate_csa", CSA), ("compress_rate_hca", HCA)):
        if values.get(key) is not None:
            rates[kind] = values[key]

    layer_types, ratios = values.get("layer_types"), values.get("compress_ratios")
    if ratios is not None:
        require(isinstance(ratios, list), "compress_ratios", ratios, "a list")
        # releases append one entry for each MTP or DSpark block
        require(len(ratios) >= layers, "compress_ratios", f"{len(ratios)} entries", f"num_hidden_layers ({layers})")
        for ratio in ratios:
            require(type(ratio) is int and ratio in RATIO_TO_LAYER_TYPE, "compress_ratios", ratio, "0, 4 or 128")
        require(rates == {CSA: 4, HCA: 128}, "compress_rates", rates, "4 and 128, as compress_ratios says")
        from_ratios = [RATIO_TO_LAYER_TYPE[ratio] for ratio in ratios[:layers]]
        require(layer_types in (None, from_ratios), "layer_types", layer_types, "what compress_ratios says")
        layer_types = from_ratios
    mlp_layer_types, hash_layers = values.get("mlp_layer_types"), values.get("num_hash_layers")
    if hash_layers is not None:
        hash_layers = min(integer("num_hash_layers", hash_layers, at_least=0), layers)
        from_count = ["hash_moe"] * hash_layers + ["moe"] * (layers - hash_layers)
        require(mlp_layer_types in (None, from_count), "mlp_layer_types", mlp_layer_types, "what num_hash_layers says")
        mlp_layer_types = from_count
    for name, native, types in (
        ("layer_types", "compress_ratios", layer_types),
        ("mlp_layer_types", "num_hash_layers", mlp_layer_types),
    ):
        if types is None:
            raise ValueError(f"found neither {native} nor {name}, expected one of them")
        require(isinstance(types, list), name, types, "a list with one entry for each layer")
    return dict(
        layer_types=tuple(layer_types), mlp_layer_types=tuple(mlp_layer_types), csa_rate=rates[CSA], hca_rate=rates[HCA]
    )


def _read_rope(values: dict, head_dim: int) -> dict:
    """`qk_rope_head_dim`, the two thetas and YaRN from `rope_scaling` or from transformers' `rope_parameters`."""
    native, scaling = values.get("rope_scaling"), values.get("rope_parameters")
    both = native is not None and scaling is not None
    require(not both or native == scaling, "rope_parameters", scaling, f"only one of it and rope_scaling ({native})")
    scaling = (native if scaling is None else scaling) or {}
    require(isinstance(scaling, dict), "rope_parameters", scaling, "an object")
    nested = "main" in scaling or "compress" in scaling
    if nested:
        require(set(scaling) == {"main", "compress"}, "rope_parameters", sorted(scaling), "the keys main and compress")
    main, compress = (scaling["main"], scaling["compress"]) if nested else ({}, scaling)
    for part in (main, compress):
        require(isinstance(part, dict), "rope_parameters", part, "an object")
        unknown = sorted(set(part) - ROPE_KEYS)
        require(not unknown, "rope_parameters", unknown, f"only the keys {', '.join(sorted(ROPE_KEYS))}")
        for key in ("attention_factor", "mscale", "mscale_all_dim", "truncate"):
            require(part.get(key) in (None, 1), f"rope {key}", part.get(key), "1, the only value of this model")
    require(_rope_type(main) == "default", "rope_parameters.main.rope_type", _rope_type(main), "'default'")
    require(_rope_type(compress) in ("yarn", "default"), "rope type", _rope_type(compress), "'yarn' or 'default'")

    # transformers keeps top-level values next to the nested ones; where they differ, one of them is a mistake
    partial = [part.get("partial_rotary_factor") for part in (main, compress, values)]
    dims = [head_dim * number("partial_rotary_factor", factor) for factor in partial if factor is not None]
    for dim in dims:
        require(abs(dim - round(dim)) < 1e-3, "partial_rotary_factor", dim / head_dim, "whole rope dims of head_dim")
    dims = [round(dim) for dim in dims]
    dims += [values["qk_rope_head_dim"]] if values.get("qk_rope_head_dim") is not None else []
    if not dims:
        raise ValueError("found neither qk_rope_head_dim nor partial_rotary_factor, expected one of them")
    require(dims.count(dims[0]) == len(dims), "qk_rope_head_dim", dims, "head_dim times partial_rotary_factor")
    out = {"qk_rope_head_dim": dims[0], "yarn": None}
    nested_thetas = (main.get("rope_theta"), compress.get("rope_theta")) if nested else (scaling.get("rope_theta"), None)
    for name, inner in zip(("rope_theta", "compress_rope_theta"), nested_thetas, strict=True):
        thetas = [number(name, theta) for theta in (inner, values.get(name)) if theta is not None]
        out[name] = thetas[0] if thetas else present(values, name)
        require(thetas[0] == thetas[-1], name, thetas, "the same number at the top level and in rope_parameters")
    if _rope_type(compress) == "yarn":
        given = {field.name: compress[field.name] for field in fields(Yarn) if compress.get(field.name) is not None}
        for name in ("factor", "original_max_position_embeddings"):
            present(given, name)
        floats = {name: number(f"rope {name}", given[name]) for name in set(given) & {"factor", "beta_fast", "beta_slow"}}
        out["yarn"] = Yarn(**given | floats)
    return out


def _rope_type(part: dict):
    """`rope_type`, or `type` as older files spell it; "default" if neither is there."""
    return part.get("rope_type", part.get("type", "default"))

"""ModelConfig against transformers' DeepseekV4Config, and its refusals."""

import dataclasses
import json

import pytest
import torch
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RotaryEmbedding

from dsv4.model.config import CSA, HCA, SLIDING, ModelConfig, Yarn, flash, pro
from dsv4.model.config_json import FIXED, IGNORED_KEYS

RATES = {CSA: 4, HCA: 128}


def native_flash() -> dict:
    """`config.json` of V4-Flash as released: one more compress ratio than layers, for the MTP block."""
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "expert_dtype": "fp4",
        "hc_eps": 1e-06,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "head_dim": 512,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "index_head_dim": 128,
        "index_n_heads": 64,
        "index_topk": 512,
        "initializer_range": 0.02,
        "max_position_embeddings": 1048576,
        "model_type": "deepseek_v4",
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 64,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 43,
        "num_hash_layers": 3,
        "num_key_value_heads": 1,
        "num_nextn_predict_layers": 1,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "q_lora_rank": 1024,
        "qk_rope_head_dim": 64,
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 16,
            "original_max_position_embeddings": 65536,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 1.5,
        "scoring_func": "sqrtsoftplus",
        "sliding_window": 128,
        "swiglu_limit": 10.0,
        "tie_word_embeddings": False,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "transformers_version": "4.57.1",
        "use_cache": True,
        "vocab_size": 129280,
        "compress_rope_theta": 160000,
        "compress_ratios": [0, 0] + [4, 128] * 20 + [4, 0],
    }


def native_pro() -> dict:
    return native_flash() | {
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "o_groups": 16,
        "index_topk": 1024,
        "n_routed_experts": 384,
        "moe_intermediate_size": 3072,
        "routed_scaling_factor": 2.5,
        "compress_ratios": [128, 128] + [4, 128] * 29 + [4, 0],
    }


def tiny(**changes) -> ModelConfig:
    """A config whose layer lists the native spelling cannot express."""
    values = dict(
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        o_groups=2,
        head_dim=128,
        qk_rope_head_dim=16,
        layer_types=(SLIDING, CSA, HCA, CSA),
        csa_rate=2,
        hca_rate=8,
        mlp_layer_types=("moe", "hash_moe", "moe", "moe"),
        vocab_size=64,
        eos_token_ids=(1, 2),
        dtype=torch.float32,
    )
    return dataclasses.replace(flash(), **values | changes)


@pytest.mark.parametrize("native, built", [(native_flash, flash), (native_pro, pro)])
def test_native_config_is_the_released_model(native, built):
    assert ModelConfig.from_json(native()) == built()


@pytest.mark.parametrize("native", [native_flash, native_pro])
def test_both_spellings_agree_with_transformers(native):
    theirs = DeepseekV4Config(**native())
    ours = ModelConfig.from_json(native())
    assert ModelConfig.from_json(theirs.to_dict()) == ours
    for field in dataclasses.fields(ModelConfig):
        if field.name in ("csa_rate", "hca_rate", "yarn", "eos_token_ids", "dtype"):
            continue
        value = getattr(ours, field.name)
        assert getattr(theirs, field.name) == (list(value) if isinstance(value, tuple) else value), field.name
    assert theirs.compress_rates == {CSA: ours.csa_rate, HCA: ours.hca_rate}


@pytest.mark.parametrize("config", [flash(), pro(), tiny(), tiny(yarn=None), tiny(csa_rate=4, hca_rate=128)])
def test_json_round_trip_alone_and_through_transformers(config, tmp_path):
    assert ModelConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
    DeepseekV4Config(**config.to_json()).save_pretrained(tmp_path)
    assert ModelConfig.from_folder(tmp_path) == config


def test_layer_kinds():
    counts = {name: {kind: config.layer_types.count(kind) for kind in (SLIDING, CSA, HCA)} for name, config in
              (("flash", flash()), ("pro", pro()))}  # fmt: skip
    assert counts == {"flash": {SLIDING: 2, CSA: 21, HCA: 20}, "pro": {SLIDING: 0, CSA: 30, HCA: 31}}
    assert [flash().rate(layer) for layer in (0, 1, 2, 3, 41, 42)] == [0, 0, 4, 128, 128, 4]
    assert [pro().rate(layer) for layer in (0, 1, 2, 3, 59, 60)] == [128, 128, 4, 128, 128, 4]


def test_surplus_ratios_of_dspark_releases_are_dropped():
    config = native_flash() | {
        "compress_ratios": native_flash()["compress_ratios"] + [0, 0],
        "dspark_block_size": 5,
        "dspark_noise_token_id": 128799,
        "dspark_target_layer_ids": [40, 41, 42],
        "dspark_markov_rank": 256,
    }
    assert ModelConfig.from_json(config) == flash()


@pytest.mark.parametrize(
    "config",
    [
        flash(),
        pro(),
        tiny(),
        tiny(yarn=None),
        tiny(rope_theta=1234.5, compress_rope_theta=4321.0, yarn=Yarn(7.5, 300, 3.0, 2.0)),
        tiny(head_dim=96, qk_rope_head_dim=48, yarn=Yarn(40.0, 40)),  # low and high of the ramp are clamped
        tiny(yarn=Yarn(4.0, 4096, 8.0, 8.0)),
    ],
)
def test_inv_freq_has_the_bits_of_transformers(config):
    theirs = DeepseekV4RotaryEmbedding(DeepseekV4Config(**config.to_json()))
    assert theirs.compress_attention_scaling == 1.0
    for layer, kind in enumerate(config.layer_types):
        ours = config.inv_freq(layer)
        expected = theirs.main_inv_freq if kind == SLIDING else theirs.compress_inv_freq
        assert ours.dtype == torch.float32 and ours.shape == (config.qk_rope_head_dim // 2,)
        assert torch.equal(ours, expected)


def test_yarn_ramp_of_the_release():
    """Frequencies 0..15 are kept, 25..31 divided by 16, as in the official code."""
    config = flash()
    plain = dataclasses.replace(config, yarn=None).inv_freq(2)
    ratio = config.inv_freq(2) / plain
    assert torch.equal(ratio[:16], torch.ones(16)) and torch.allclose(ratio[25:], torch.tensor(1 / 16))
    assert torch.all(ratio[16:25].diff() < 0)


def test_inv_freq_ignores_the_default_device():
    with torch.device("meta"):
        assert flash().inv_freq(2).device.type == "cpu"


REFUSED = {
    "scoring_func": "softmax",
    "hidden_act": "gelu",
    "norm_topk_prob": False,
    "attention_bias": True,
    "mlp_bias": True,
    "tie_word_embeddings": True,
    "n_group": 8,
    "topk_group": 4,
    "num_key_value_heads": 2,
    "topk_method": "greedy",
    "model_type": "deepseek_v3",
    "n_shared_experts": 2,
    "num_local_experts": 8,
    "intermediate_size": 18432,
    "dtype": "float16",
    "torch_dtype": "int8",
    "index_topk": 0,
    "vocab_size": -1,
    "hidden_size": "4096",
    "head_dim": True,
    "sliding_window": 1.5,
    "hc_mult": None,
    "hc_eps": float("nan"),
    "swiglu_limit": 0,
    "rms_norm_eps": "1e-6",
    "rope_theta": 1.0,
    "compress_rope_theta": None,
    "num_attention_heads": 63,
    "num_experts_per_tok": 257,
    "qk_rope_head_dim": 63,
    "partial_rotary_factor": 0.5,
    "bos_token_id": 129280,
    "eos_token_id": [1, 129280],
    "num_hash_layers": -1,
    "layer_types": [SLIDING] * 43,
    "mlp_layer_types": ["moe"] * 43,
    "compress_ratios": [0] * 42,
    "compress_rates": {CSA: 8, HCA: 128},
    "compress_rate_csa": 8,
    "rope_scaling": {"type": "linear", "factor": 2},
}


@pytest.mark.parametrize("key", REFUSED)
def test_values_that_are_not_implemented_are_refused_by_name(key):
    named = {"torch_dtype": "dtype", "dtype": "torch_dtype", "partial_rotary_factor": "qk_rope_head_dim",
             "compress_rate_csa": "compress_rates", "rope_scaling": "rope type"}.get(key, key)  # fmt: skip
    with pytest.raises(ValueError, match=f"^config.json: .*{named}"):
        ModelConfig.from_json(native_flash() | {key: REFUSED[key]})


@pytest.mark.parametrize("key", [key for key in native_flash() if key not in FIXED and key not in IGNORED_KEYS])
def test_missing_keys_are_named(key):
    values = native_flash()
    del values[key]
    if key in ("torch_dtype", "rope_scaling"):  # bfloat16, and no YaRN
        ModelConfig.from_json(values)
    else:
        with pytest.raises(ValueError, match=key):
            ModelConfig.from_json(values)


@pytest.mark.parametrize(
    "scaling, message",
    [
        ({"factor": None}, "factor"),
        ({"attention_factor": 1.277}, "attention_factor"),
        ({"mscale": 0.707}, "mscale"),
        ({"beta_fast": 0}, "beta_fast"),
        ({"original_max_position_embeddings": 65536.5}, "original_max_position_embeddings"),
        ({"short_factor": [1.0]}, "short_factor"),
        ({"rope_theta": 20000}, "rope_theta"),
    ],
)
def test_rope_scaling_is_checked(scaling, message):
    values = native_flash()
    values["rope_scaling"] = values["rope_scaling"] | scaling
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_json(values)


@pytest.mark.parametrize(
    "part, change, message",
    [
        ("main", {"rope_type": "yarn"}, "main.rope_type"),
        ("main", {"rope_theta": 160000.0}, "rope_theta"),
        ("compress", {"rope_theta": 10000.0}, "compress_rope_theta"),
        ("compress", {"attention_factor": 1.277}, "attention_factor"),
        ("compress", {"partial_rotary_factor": 0.25}, "qk_rope_head_dim"),
        ("compress", {"partial_rotary_factor": 0.1251}, "partial_rotary_factor"),
        ("compress", {"rope_type": "longrope"}, "longrope"),
        ("other", {}, "main and compress"),
    ],
)
def test_rope_parameters_are_checked(part, change, message):
    values = DeepseekV4Config(**native_flash()).to_dict()
    values["rope_parameters"][part] = values["rope_parameters"].get(part, {}) | change
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_json(values)


@pytest.mark.parametrize(
    "name, types",
    [("layer_types", [CSA] * 42), ("layer_types", ["full_attention"] * 43), ("mlp_layer_types", ["x"] * 43)],
)
def test_layer_lists_are_checked(name, types):
    values = DeepseekV4Config(**native_flash()).to_dict() | {name: types}
    with pytest.raises(ValueError, match=f"{name}: found"):
        ModelConfig.from_json(values)


@pytest.mark.parametrize("ratio", [3, "4", 4.0, True, None, [4]])
def test_unknown_compress_ratio(ratio):
    message = "V4.1" if ratio is True else "compress_ratios: found"  # True equals 1
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_json(native_flash() | {"compress_ratios": [ratio, *native_flash()["compress_ratios"][1:]]})


def test_unknown_keys_are_listed():
    with pytest.raises(ValueError, match="unknown keys: attn_logit_softcap, zeta;"):
        ModelConfig.from_json(native_flash() | {"zeta": 1, "attn_logit_softcap": 30})
    with pytest.raises(ValueError, match="unknown keys: csa_rate"):  # our own names are not a third spelling
        ModelConfig.from_json(native_flash() | {"csa_rate": 8})


@pytest.mark.parametrize(
    "change",
    [{"engram_layer_ids": [1]}, {"kv_source_layers": [1, 3]}, {"compress_ratios": [0, 2] + [1] * 42}],
)
def test_v41_is_refused(change):
    with pytest.raises(ValueError, match=r"DeepSeek-V4\.1"):
        ModelConfig.from_json(native_flash() | change)


def test_direct_construction_is_checked():
    for change, message in [
        ({"layer_types": (SLIDING,) * 3}, "layer_types: found '3 entries'"),
        ({"hca_rate": 2}, "hca_rate"),
        ({"csa_rate": 1}, "csa_rate"),
        ({"head_dim": 8}, "at most head_dim"),
        ({"index_head_dim": 8}, "at most index_head_dim"),
        ({"eos_token_ids": ()}, "eos_token_id"),
        ({"dtype": torch.int8}, "dtype"),
    ]:
        with pytest.raises(ValueError, match=message):
            tiny(**change)


def test_files_are_named_in_errors(tmp_path):
    with pytest.raises(ValueError, match="nowhere: no such folder"):
        ModelConfig.from_folder(tmp_path / "nowhere")
    file = tmp_path / "config.json"
    with pytest.raises(ValueError, match=f"{file}: no such file"):
        ModelConfig.from_folder(tmp_path)
    for content in (b'{"vocab_size": 1,', b"\xff\xfe"):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=f"{file}: not valid JSON"):
            ModelConfig.from_folder(tmp_path)
    file.write_text("[1]")
    with pytest.raises(ValueError, match=f"{file}: .*JSON object"):
        ModelConfig.from_folder(tmp_path)
    file.write_text(json.dumps(native_flash()))
    assert ModelConfig.from_folder(tmp_path) == flash()

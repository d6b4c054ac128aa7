"""Tensor names against transformers' real key lists, in both directions, and the ways in which such maps go wrong."""

import pytest
import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from dsv4.model import formats, names, stacks
from tests.model.checkpoints import expert_shapes, inventory, plain_tensors


def small_hf_model():
    config = DeepseekV4Config(
        vocab_size=8,
        hidden_size=8,
        num_hidden_layers=12,  # 1 and 10, 11 are different layers
        num_attention_heads=2,
        head_dim=8,
        qk_rope_head_dim=4,
        q_lora_rank=4,
        n_routed_experts=12,
        num_experts_per_tok=2,
        moe_intermediate_size=4,
        index_n_heads=2,
        index_head_dim=8,
        o_groups=2,
        o_lora_rank=2,
        num_hash_layers=2,
        compress_ratios=[0, 0, *[4, 128] * 5],
    )
    return DeepseekV4ForCausalLM(config)


@pytest.fixture(scope="module")
def hf_model():
    return small_hf_model()


def flash_names() -> list[str]:
    """All names of the native Flash checkpoint, without its draft head."""
    norms = ["attn_norm.weight", "ffn_norm.weight", "attn.q_norm.weight", "attn.kv_norm.weight"]
    plain = [f"hc_{site}_{part}" for site in ("attn", "ffn") for part in ("fn", "base", "scale")] + ["attn.attn_sink"]
    compressor = ["wkv.weight", "wgate.weight", "ape", "norm.weight"]
    quantised = [f"attn.{name}" for name in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b")]
    quantised += [f"ffn.shared_experts.w{i}" for i in (1, 2, 3)]
    quantised += [f"ffn.experts.{e}.w{i}" for e in range(256) for i in (1, 2, 3)]
    out = ["embed.weight", "head.weight", "norm.weight", "hc_head_fn", "hc_head_base", "hc_head_scale"]
    for layer in range(43):
        csa, compressed = layer >= 2 and layer % 2 == 0, layer >= 2
        names_here = norms + plain + ["ffn.gate.weight", "ffn.gate.tid2eid" if layer < 3 else "ffn.gate.bias"]
        names_here += [f"attn.compressor.{name}" for name in compressor if compressed]
        names_here += [f"attn.indexer.compressor.{name}" for name in compressor if csa]
        names_here += ["attn.indexer.weights_proj.weight"] if csa else []
        scaled = quantised + (["attn.indexer.wq_b"] if csa else [])
        names_here += [f"{name}.{suffix}" for name in scaled for suffix in ("weight", "scale")]
        out += [f"layers.{layer}.{name}" for name in names_here]
    return out


def test_all_names_of_flash_map_one_to_one():
    native = flash_names()
    assert len(native) == 69_187 - 1575  # the published count, less the draft head's
    assert names.recognise(native) is names.NATIVE
    for naming in names.NAMINGS:
        theirs = [naming.from_native(name) for name in native]
        assert len(set(theirs)) == len(native)
        assert [naming.to_native(name) for name in theirs] == native
        assert names.recognise(theirs) is naming


def test_hf_names_are_those_of_transformers(hf_model):
    keys = list(hf_model.state_dict())
    assert names.recognise(keys) is names.HF
    for key in keys:
        assert names.native_to_hf(names.hf_to_native(key)) == key


def test_hf_original_names_are_those_of_save_pretrained(hf_model):
    keys = list(revert_weight_conversion(hf_model, hf_model.state_dict()))
    native = [names.HF_ORIGINAL.to_native(key) for key in keys]
    assert names.recognise(keys) is names.HF_ORIGINAL
    assert [names.HF_ORIGINAL.from_native(name) for name in native] == keys
    # The same model under hf names: the same native names, once the stacked experts are unstacked.
    hf = {names.hf_to_native(key) for key in hf_model.state_dict()}
    stacked = {name for name in hf if ".experts." in name and name.endswith("_proj")}
    assert {name for name in native if ".ffn.experts." not in name} == hf - stacked
    assert len(stacked) == 2 * 12 and len([name for name in native if ".ffn.experts." in name]) == 3 * 12 * 12


@pytest.mark.parametrize(
    ("native", "hf"),
    [
        ("norm.weight", "model.norm.weight"),
        ("layers.1.attn.kv_norm.weight", "model.layers.1.self_attn.kv_norm.weight"),
        ("layers.1.attn.compressor.norm.weight", "model.layers.1.self_attn.compressor.kv_norm.weight"),
        ("layers.1.attn.indexer.compressor.norm.weight", "model.layers.1.self_attn.compressor.indexer.kv_norm.weight"),
        ("layers.1.attn.compressor.ape", "model.layers.1.self_attn.compressor.position_bias"),
        ("layers.1.attn.indexer.compressor.ape", "model.layers.1.self_attn.compressor.indexer.position_bias"),
        ("layers.1.attn.wq_b.weight", "model.layers.1.self_attn.q_b_proj.weight"),
        ("layers.1.attn.indexer.wq_b.weight", "model.layers.1.self_attn.compressor.indexer.q_b_proj.weight"),
        ("layers.10.attn.wq_a.scale", "model.layers.10.self_attn.q_a_proj.weight_scale_inv"),
        ("layers.10.ffn.experts.2.w1.weight_scale_2", "model.layers.10.mlp.experts.2.gate_proj.weight_scale_2"),
        ("layers.10.ffn.experts.20.w3.input_scale", "model.layers.10.mlp.experts.20.up_proj.input_scale"),
        ("layers.3.ffn.gate.bias", "model.layers.3.mlp.gate.e_score_correction_bias"),
        ("layers.3.ffn.gate.weight", "model.layers.3.mlp.gate.weight"),
        ("layers.0.ffn.gate.tid2eid", "model.layers.0.mlp.gate.tid2eid"),
        ("hc_head_scale", "model.hc_head.hc_scale"),
        ("layers.0.hc_ffn_scale", "model.layers.0.ffn_hc.scale"),
    ],
)
def test_names_one_by_one(native, hf):
    assert names.native_to_hf(native) == hf
    assert names.hf_to_native(hf) == native


@pytest.mark.parametrize(
    ("other", "native"),
    [
        (
            "model.layers.2.self_attn.compressor.indexer.weights_proj.weight_scale",
            "layers.2.attn.indexer.weights_proj.weight_scale",
        ),
        (
            "model.layers.2.self_attn.compressor.indexer.scorer.weights_proj.weight",
            "layers.2.attn.indexer.weights_proj.weight",
        ),
        ("model.layers.2.mlp.experts.7.w1.weight", "layers.2.ffn.experts.7.w1.weight"),
        ("model.layers.2.mlp.experts.7.down_proj.weight", "layers.2.ffn.experts.7.w2.weight"),
        ("model.layers.2.mlp.experts.gate_up_proj", "layers.2.ffn.experts.gate_up_proj"),
        ("model.layers.2.mlp.experts.down_proj_weight_scale_2", "layers.2.ffn.experts.down_proj_weight_scale_2"),
        ("model.layers.2.mlp.experts.down_proj.weight_packed", "layers.2.ffn.experts.down_proj.weight_packed"),
        ("model.layers.2.mlp.experts.gate_up_proj_scale_inv", "layers.2.ffn.experts.gate_up_proj_scale_inv"),
        ("model.layers.2.mlp.experts.gate_up_proj.weight_scale_inv", "layers.2.ffn.experts.gate_up_proj.scale"),
    ],
)
def test_other_spellings_are_read(other, native):
    assert names.hf_to_native(other) == native


@pytest.mark.parametrize(
    "name",
    [
        "layers.0.norm.weight",
        "layers.0.attn.norm.weight",
        "attn.wq_a.weight",
        "xlayers.0.attn.wq_a.weight",
        "layers.0.attn.wq_a",
        "layers.0.attn.wq_a.weight.extra",
        "layers.0.attn.wq_a.0",
        "layers.x.attn.wq_a.weight",
        "layers.0.ffn.experts.w1.weight",
        "layers.0.ffn.experts.0.w4.weight",
        "layers.0.ffn.experts.0.w11.weight",
        "layers.0.attn.indexer.kv_norm.weight",
        "mtp.0.attn.wq_a.weight",
        "model.layers.0.self_attn.q_a_proj.weight",
    ],
)
def test_near_misses_have_no_hf_name(name):
    with pytest.raises(ValueError, match="not a native tensor name"):
        names.native_to_hf(name)


def test_transformers_45930_expert_weights_do_not_match_their_scales():
    """An expert weight's pattern also matched the scales beside it.
    https://github.com/huggingface/transformers/pull/45930"""
    suffixes = ("weight", "weight_scale", "weight_scale_2", "input_scale", "scale")
    keys = [f"{module}.{suffix}" for module in expert_shapes() for suffix in suffixes]
    hf = [names.native_to_hf(key) for key in keys]
    assert len(set(hf)) == len(keys)
    for key, theirs in zip(keys, hf, strict=True):
        assert theirs.endswith(".weight") == key.endswith(".weight")
        assert names.hf_to_native(theirs) == key


def test_the_miniature_of_these_tests_is_known_in_all_namings():
    keys = list(plain_tensors())
    assert len(keys) == len(inventory()) + len(expert_shapes())
    for naming in names.NAMINGS:
        assert names.recognise([naming.from_native(key) for key in keys]) is naming


def test_mixed_namings_are_refused():
    keys = list(plain_tensors())
    hf = "model.layers.0.self_attn.wq_a.weight", "model.layers.1.self_attn.q_a_proj.weight"
    with pytest.raises(ValueError, match=r"mixed naming.*q_a_proj.weight' a hf name"):
        names.recognise([*keys, *hf])


def test_unknown_names_do_not_disturb_recognition():
    assert names.recognise([*plain_tensors(), "layers.0.attn.k_proj.weight", "rotary.inv_freq"]) is names.NATIVE


@pytest.mark.parametrize("keys", [[], ["model.layers.0.self_attn.k_proj.weight", "wte.weight"]])
def test_another_model_is_refused(keys):
    with pytest.raises(ValueError, match="another model"):
        names.recognise(keys)


def test_draft_heads_are_skipped_and_nothing_else():
    assert names.is_skipped("mtp.0.ffn.experts.3.w1.weight")
    assert names.is_skipped("model.mtp.0.norm.weight")
    assert not names.is_skipped("layers.0.mtp.weight")
    assert not any(names.is_skipped(name) for name in plain_tensors(torch.float32))


@pytest.mark.parametrize(
    ("keys", "kind"),
    [
        (["mtp.0.e_proj.weight", "mtp.0.h_proj.weight"], "MTP"),
        (["model.mtp.0.e_proj.weight_packed"], "MTP"),
        (["mtp.2.norm.weight", "mtp.0.main_proj.weight"], "DSpark"),
        (["mtp.0.attn.wkv.weight"], "unknown kind"),
        (["layers.0.main_proj.weight"], None),
        ([], None),
    ],
)
def test_kinds_of_draft_heads(keys, kind):
    assert names.draft_kind(["layers.0.attn.wq_a.weight", *keys]) == kind


def test_every_ending_of_a_fused_tensor_is_known():
    """What the loader looks for has a name in each naming, so that it is never left over as unknown."""
    for suffix in formats.SUFFIXES:
        for ending in stacks.fused_endings(suffix):
            for leaf in stacks.FUSED:
                name = f"layers.3.ffn.experts.{leaf}{ending}"
                one_in_hf = name.replace(".weight_scale_inv", ".scale")
                for naming in names.NAMINGS:
                    assert naming.to_native(naming.from_native(name)) in (name, one_in_hf)

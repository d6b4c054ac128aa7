"""save_nvfp4_experts: names, dtypes, shapes and values of a written checkpoint, read back from its files."""

import json

import pytest
import torch
from safetensors import safe_open

from dsv4.model.export import save_nvfp4_experts
from dsv4.ops.fp8 import dequantize_fp8_block
from dsv4.ops.nvfp4 import dequantize_nvfp4

H, I, E = 128, 64, 3  # noqa: E741 (the equations' names)
CONFIG = {"model_type": "deepseek_v4", "num_hidden_layers": 2, "hidden_size": H}


def native_tensors(seed=0):
    """A checkpoint's tensors, two layers (hash then top-k routing; the second with CSA), in small shapes."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return 0.1 * torch.randn(*shape, generator=generator)

    out = {
        "embed.weight": normal(32, H),
        "head.weight": normal(32, H),
        "norm.weight": normal(H),
        "hc_head_fn": normal(4, 4 * H),
        "hc_head_base": normal(4),
        "hc_head_scale": normal(1),
    }
    for i in range(2):
        p = f"layers.{i}."
        for site in ("attn", "ffn"):
            out |= {
                f"{p}hc_{site}_fn": normal(24, 4 * H),
                f"{p}hc_{site}_base": normal(24),
                f"{p}hc_{site}_scale": normal(3),
                f"{p}{site}_norm.weight": normal(H),
            }
        out |= {
            p + "attn.attn_sink": normal(4),
            p + "attn.wq_a.weight": normal(130, H),
            p + "attn.wq_b.weight": normal(256, 130),
            p + "attn.wkv.weight": normal(64, H),
            p + "attn.wo_a.weight": normal(64, 128),
            p + "attn.wo_b.weight": normal(H, 64),
            p + "attn.q_norm.weight": normal(130),
            p + "attn.kv_norm.weight": normal(64),
            p + "ffn.gate.weight": normal(E, H),
        }
        for w, shape in (("w1", (I, H)), ("w2", (H, I)), ("w3", (I, H))):
            out[f"{p}ffn.shared_experts.{w}.weight"] = normal(*shape)
            for e in range(E):
                out[f"{p}ffn.experts.{e}.{w}.weight"] = normal(*shape)
    c = "layers.1.attn.compressor."
    x = "layers.1.attn.indexer."
    out |= {
        "layers.0.ffn.gate.tid2eid": torch.randint(E, (32, 2), generator=generator),
        "layers.1.ffn.gate.bias": normal(E),
        c + "wkv.weight": normal(128, H),
        c + "wgate.weight": normal(128, H),
        c + "ape": normal(4, 128),
        c + "norm.weight": normal(64),
        x + "wq_b.weight": normal(256, 130),
        x + "weights_proj.weight": normal(16, H),
        x + "compressor.wkv.weight": normal(32, H),
        x + "compressor.wgate.weight": normal(32, H),
        x + "compressor.ape": normal(4, 32),
        x + "compressor.norm.weight": normal(16),
    }
    return out


def read(folder):
    out = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            out |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no iterator)
    return out


def is_expert(name):
    return ".ffn.experts." in name


def is_fp8(name):
    return (
        name.endswith((".wq_a.weight", ".wq_b.weight", "attn.wkv.weight", ".wo_a.weight", ".wo_b.weight"))
        or ".shared_experts." in name
    )


def test_names_and_dtypes(tmp_path):
    tensors = native_tensors()
    save_nvfp4_experts(tmp_path, CONFIG, tensors)
    got = read(tmp_path)
    expected = {}
    for name in tensors:
        base = name.removesuffix("weight")
        if is_expert(name):
            expected |= {
                name: torch.uint8,
                base + "weight_scale": torch.float8_e4m3fn,
                base + "weight_scale_2": torch.float32,
                base + "input_scale": torch.float32,
            }
        elif is_fp8(name):
            expected |= {name: torch.float8_e4m3fn, base + "scale": torch.float8_e8m0fnu}
        elif name.endswith("tid2eid"):
            expected[name] = torch.int64
        elif "hc_" in name or name.endswith(("attn_sink", ".ape", "gate.bias")):
            expected[name] = torch.float32
        else:
            expected[name] = torch.bfloat16
    assert {name: value.dtype for name, value in got.items()} == expected
    expert = "layers.1.ffn.experts.2."
    assert got[expert + "w1.weight"].shape == (I, H // 2) and got[expert + "w1.weight_scale"].shape == (I, H // 16)
    assert got[expert + "w1.weight_scale_2"].shape == () and got[expert + "w1.input_scale"].shape == ()
    assert got["layers.0.attn.wq_a.scale"].shape == (2, 1)


def test_round_trip(tmp_path):
    tensors = native_tensors()
    save_nvfp4_experts(tmp_path, CONFIG, tensors)
    got = read(tmp_path)
    for name, value in tensors.items():
        base = name.removesuffix("weight")
        if is_expert(name):
            back = dequantize_nvfp4(got[name], got[base + "weight_scale"], got[base + "weight_scale_2"])
            # Half of E2M1's widest step (2 of a maximum of 6), plus the rounding of the group's scale.
            group = value.unflatten(-1, (-1, 16)).abs().amax(-1, keepdim=True).expand(-1, -1, 16).flatten(-2)
            assert ((back - value).abs() <= group * (1 / 6 + 1 / 16)).all()
        elif is_fp8(name):
            back = dequantize_fp8_block(got[name], got[base + "scale"])
            torch.testing.assert_close(back, value, rtol=1 / 16, atol=value.abs().max().item() * 2**-9)
        elif value.is_floating_point():
            torch.testing.assert_close(got[name].float(), value, rtol=1 / 256, atol=0)
        else:
            assert torch.equal(got[name], value)


def test_gate_and_up_share_scales(tmp_path):
    tensors = native_tensors()
    tensors["layers.0.ffn.experts.0.w3.weight"] *= 7
    save_nvfp4_experts(tmp_path, CONFIG, tensors)
    got = read(tmp_path)
    for i in range(2):
        for e in range(E):
            p = f"layers.{i}.ffn.experts.{e}."
            amax = max(tensors[f"{p}{w}.weight"].abs().max() for w in ("w1", "w3"))
            for w in ("w1", "w3"):
                torch.testing.assert_close(got[f"{p}{w}.weight_scale_2"], amax / 2688)
            assert torch.equal(got[p + "w1.input_scale"], got[p + "w3.input_scale"])


def test_config_is_the_mixed_format(tmp_path):
    save_nvfp4_experts(tmp_path, CONFIG, native_tensors())
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["hidden_size"] == H
    quant = config["quantization_config"]
    assert (quant["quant_method"], quant["moe_quant_algo"], quant["quant_algo"]) == ("fp8", "NVFP4", "MIXED_PRECISION")
    assert quant["weight_block_size"] == [128, 128] and quant["group_size"] == 16
    assert set(quant["quantized_layers"]) == {"layers.0.ffn.experts", "layers.1.ffn.experts"}


def test_shards_and_overwrite(tmp_path):
    tensors = native_tensors()
    save_nvfp4_experts(tmp_path, CONFIG, tensors, shard_bytes=200_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = {path.name for path in tmp_path.glob("*.safetensors")}
    assert len(files) > 1 and set(index["weight_map"].values()) == files
    sharded = read(tmp_path)
    assert set(index["weight_map"]) == set(sharded)
    assert index["metadata"]["total_size"] == sum(v.numel() * v.element_size() for v in sharded.values())
    save_nvfp4_experts(tmp_path, CONFIG, tensors)  # one file now: the shards and their index must not linger
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    whole = read(tmp_path)
    assert all(torch.equal(whole[n].view(torch.uint8), sharded[n].view(torch.uint8)) for n in whole if whole[n].dim())


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t.pop("layers.1.ffn.experts.0.w2.weight"), "lacks w2"),
        (
            lambda t: t.update({"layers.0.attn.wkv.weight": torch.full((64, H), torch.nan)}),
            "layers.0.attn.wkv.weight.*not finite",
        ),
        (
            lambda t: t.update({"layers.0.mlp.up_proj.weight": torch.zeros(2, 2)}),
            "layers.0.mlp.up_proj.weight: not a tensor",
        ),
        (lambda t: t.update({"layers.2.attn_norm.weight": torch.zeros(H)}), "do not match num_hidden_layers 2"),
        (lambda t: t.update({"norm.weight": torch.zeros(H, dtype=torch.int32)}), "norm.weight: expected a float"),
        (lambda t: t.update({"layers.0.ffn.experts.0.w1.weight": torch.zeros(I, 40)}), "divisible by 16"),
    ],
)
def test_errors_name_the_tensor_and_leave_nothing(tmp_path, change, message):
    tensors = native_tensors()
    change(tensors)
    with pytest.raises(ValueError, match=message):
        save_nvfp4_experts(tmp_path / "out", CONFIG, tensors)
    assert not (tmp_path / "out").exists()

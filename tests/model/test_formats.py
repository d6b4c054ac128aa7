"""Tensors that do not fit: wrong shapes, dtypes, scales, values and formats, each refused by name."""

import pytest
import torch
from torch import Tensor

from dsv4.model import names
from dsv4.ops.fp8 import decode_e8m0, encode_e8m0
from tests.model import checkpoints as mini
from tests.model.checkpoints import (
    build,
    edited,
    linear,
    load,
    mxfp4,
    nvfp4,
    plain_tensors,
    reciprocal_nvfp4,
    refused,
    same,
    write,
)

WQ_A = "layers.1.attn.wq_a"
W1 = "layers.1.ffn.experts.1.w1"


def test_unknown_tensors_are_fatal(tmp_path):
    extra = {f"layers.{i}.attn.k_proj.weight": torch.ones(1) for i in range(7)}
    refused(write(tmp_path, edited(extra)), "7 of", "layers.4.attn.k_proj.weight and 2 more", "no place in this model")


def test_more_experts_than_the_config_says_are_fatal(tmp_path):
    extra = nvfp4(f"layers.1.ffn.experts.{mini.EXPERTS}.w1", torch.randn(mini.INTER, mini.HIDDEN))
    refused(write(tmp_path, edited(extra)), "4 of", f"layers.1.ffn.experts.{mini.EXPERTS}.w1.input_scale")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("norm.weight", torch.ones(mini.HIDDEN + 1), ["[161]", "expected [160]"]),
        ("layers.0.ffn.gate.weight", torch.ones(mini.HIDDEN, mini.EXPERTS), ["[160, 3]", "expected [3, 160]"]),
        ("head.weight", torch.ones(mini.HIDDEN, mini.VOCAB), ["[160, 40]", "expected [40, 160]"]),
        (f"{WQ_A}.weight", torch.zeros(80, 80).to(torch.float8_e4m3fn), ["[80, 80]", "expected [80, 160]"]),
        (f"{WQ_A}.scale", torch.ones(1, 1), ["FP8 block scale", "[1, 1]", "expected [1, 2]"]),
        (f"{W1}.weight", torch.zeros(48, 160, dtype=torch.uint8), ["NVFP4 weight", "[48, 160]", "expected [48, 80]"]),
        (
            f"{W1}.weight_scale",
            torch.ones(48, 5).to(torch.float8_e4m3fn),
            ["NVFP4 scale", "[48, 5]", "expected [48, 10]"],
        ),
        (f"{W1}.weight_scale_2", torch.ones(48), ["NVFP4 scale_2", "[48]", "expected []"]),
        # Dtypes
        ("norm.weight", torch.ones(mini.HIDDEN, dtype=torch.int32), ["I32", "expected BF16 or F16 or F32"]),
        ("norm.weight", torch.ones(mini.HIDDEN, dtype=torch.float64), ["F64", "expected BF16 or F16 or F32"]),
        ("norm.weight", torch.ones(mini.HIDDEN).to(torch.float8_e4m3fn), ["F8_E4M3", "expected BF16"]),
        ("layers.0.ffn.gate.tid2eid", torch.ones(mini.VOCAB, 2), ["F32", "expected I64 or I32"]),
        ("head.weight", torch.ones(mini.VOCAB, mini.HIDDEN, dtype=torch.int64), ["I64", "U8 (NVFP4)", "not read"]),
        (f"{WQ_A}.scale", torch.ones(1, 2).bfloat16(), ["BF16", "expected F8_E8M0 or F32"]),
        (f"{WQ_A}.weight", torch.ones(80, 160).to(torch.float8_e5m2), ["F8_E5M2", "F8_E4M3 (FP8 block)"]),
        (f"{W1}.weight_scale", torch.ones(48, 10), ["F32", "expected F8_E4M3"]),
        (f"{W1}.weight_scale_2", torch.ones((), dtype=torch.bfloat16), ["BF16", "expected F32"]),
        # Scales and weights that do not go together
        (f"{W1}.weight_scale", None, [f"{W1}.weight is U8 (NVFP4) without its scale, expected .weight_scale beside"]),
        (f"{W1}.weight_scale_2", None, [f"{W1}.weight is U8 (NVFP4) without its scale, expected .weight_scale_2"]),
        (f"{WQ_A}.weight", torch.ones(80, 160), ["F32 (plain)", f"beside it is {WQ_A}.scale"]),
        (f"{WQ_A}.weight_scale_inv", torch.ones(1, 2), ["FP8 block", f"beside it is {WQ_A}.weight_scale_inv"]),
        ("head.input_scale", torch.ones(()), ["BF16 (plain)", "beside it is head.input_scale"]),
    ],
)
def test_wrong_tensor(tmp_path, name, value, words):
    refused(write(tmp_path, edited({name: value})), "model.safetensors: tensor", name.rpartition(".")[0], *words)


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        (f"{WQ_A}.scale", torch.tensor([[120, 255]], dtype=torch.uint8).view(torch.float8_e8m0fnu)),
        (f"{WQ_A}.scale", torch.tensor([[1.0, float("nan")]])),
        (f"{WQ_A}.scale", torch.tensor([[1.0, float("inf")]])),
        (f"{WQ_A}.scale", torch.tensor([[1.0, -1.0]])),
        (f"{W1}.weight_scale", torch.tensor([0x38, 0x7F] * 240, dtype=torch.uint8).view(torch.float8_e4m3fn)),
        (f"{W1}.weight_scale", torch.tensor([0x38, 0xFF] * 240, dtype=torch.uint8).view(torch.float8_e4m3fn)),
        (f"{W1}.weight_scale", torch.tensor([0x38, 0x81] * 240, dtype=torch.uint8).view(torch.float8_e4m3fn)),
        (f"{W1}.weight_scale_2", torch.tensor(float("nan"))),
        (f"{W1}.weight_scale_2", torch.tensor(float("inf"))),
        (f"{W1}.weight_scale_2", torch.tensor(-0.5)),
    ],
)
def test_bad_scale_values(tmp_path, name, bad):
    bad = bad.view(48, 10) if name.endswith("weight_scale") else bad
    position = "0" if bad.ndim == 0 else "1"
    refused(write(tmp_path, edited({name: bad})), f"tensor {name}: element {position} of this scale", headers=False)


def test_extreme_but_good_scale_values(tmp_path):
    """Zeros of both signs and the ends of each range are scales like any other."""
    ends = torch.tensor([0x00, 0x01, 0x7E, 0x80] * 120, dtype=torch.uint8).view(torch.float8_e4m3fn).view(48, 10)
    block = torch.tensor([[0, 254]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    changes = {f"{W1}.weight_scale": ends, f"{W1}.weight_scale_2": torch.zeros(()), f"{WQ_A}.scale": block}
    given, _ = load(write(tmp_path, edited(changes)))
    assert given[WQ_A].scale.tolist() == [[2.0**-127, 2.0**127]]
    assert same(given["layers.1.ffn.experts"].gate_up_scale[1, :48], ends)


def test_mxfp4_that_e4m3_cannot_hold(tmp_path):
    """18 binades between the scales of one tensor: no NVFP4 scale_2 brings both ends into E4M3's range."""
    tensors = mxfp4("head", 4, 64)
    tensors["head.weight"] += 0x11
    tensors["head.scale"].view(torch.uint8)[2, 1] = 102
    words = "model.safetensors: tensor head.scale", "NVFP4 holds at most 17", "span 18 binades, 2^-25 to 2^-7"
    refused(write(tmp_path, tensors), *words, request=linear("head", 4, 64), headers=False)


def test_byte_255_in_mxfp4(tmp_path):
    tensors = mxfp4("head", 4, 64)
    tensors["head.scale"].view(torch.uint8)[2, 1] = 255
    words = "tensor head.scale: element 5 of this scale is nan", "expected a finite number"
    refused(write(tmp_path, tensors), *words, request=linear("head", 4, 64), headers=False)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf"), 1e-40])
def test_reciprocal_scales_are_above_zero(tmp_path, bad):
    """1e-40 is a number, but its reciprocal is not a float32."""
    tensors = reciprocal_nvfp4("head", torch.randn(4, 32)) | {"head.weight_global_scale": torch.tensor([bad])}
    words = "tensor head.weight_global_scale: element 0 of this scale is", "expected a finite number above zero"
    refused(write(tmp_path, tensors), *words, request=linear("head", 4, 32), headers=False)


def test_two_kinds_of_nvfp4_in_one_weight(tmp_path):
    tensors = reciprocal_nvfp4("head", torch.randn(4, 32)) | {"head.weight_scale_2": torch.ones(())}
    words = "head.weight_packed is U8 (NVFP4 (compressed-tensors)), but beside it is head.weight_scale_2"
    refused(write(tmp_path, tensors), words, request=linear("head", 4, 32))


def test_nvfp4_needs_whole_groups(tmp_path):
    folder = write(tmp_path, nvfp4("head", torch.randn(4, 32)))
    refused(folder, "divisible by 16", "asks for 40", request=linear("head", 4, 40))


def test_experts_of_one_layer_in_two_formats(tmp_path):
    changes = {f"{W1}.{suffix}": None for suffix in ("weight_scale", "weight_scale_2", "input_scale")}
    folder = write(tmp_path, edited(changes | {f"{W1}.weight": torch.ones(mini.INTER, mini.HIDDEN)}))
    refused(folder, f"{W1}.weight is plain", "layers.1.ffn.experts.0.w1.weight is NVFP4")


def hf_stacked() -> dict[str, Tensor]:
    tensors = {names.native_to_hf(name): value for name, value in plain_tensors().items() if ".ffn.experts." not in name}
    for layer in range(len(mini.RATIOS)):
        prefix = f"model.layers.{layer}.mlp.experts."
        tensors[prefix + "gate_up_proj"] = torch.zeros(mini.EXPERTS, 2 * mini.INTER, mini.HIDDEN)
        tensors[prefix + "down_proj"] = torch.zeros(mini.EXPERTS, mini.HIDDEN, mini.INTER)
    return tensors


@pytest.mark.parametrize(
    ("leaf", "value", "words"),
    [
        ("down_proj", None, ["no tensor model.layers.1.mlp.experts.down_proj"]),
        ("gate_up_proj", torch.zeros(3, 160, 96), ["stacked experts", "[3, 160, 96]", "expected [3, 96, 160]"]),
        (
            "gate_up_proj",
            torch.zeros(3, 96, 160).to(torch.float8_e4m3fn),
            ["gate_up_proj is F8_E4M3 (FP8 block) without its scale"],
        ),
        (
            "gate_up_proj_scale_inv",
            torch.ones(3, 1, 2),
            ["gate_up_proj is F32 (plain)", "beside it is", "gate_up_proj_scale_inv"],
        ),
        ("0.gate_proj.weight", torch.ones(48, 160), ["experts.0.gate_proj.weight", "no place in this model"]),
    ],
)
def test_wrong_stacked_experts(tmp_path, leaf, value, words):
    tensors = hf_stacked() | {f"model.layers.1.mlp.experts.{leaf}": value}
    refused(write(tmp_path, {name: value for name, value in tensors.items() if value is not None}), *words)


def test_mixed_naming(tmp_path):
    refused(write(tmp_path, edited({"model.norm.weight": torch.ones(mini.HIDDEN)})), "mixed naming", "model.norm.weight")


def test_another_model(tmp_path):
    refused(write(tmp_path, {"wte.weight": torch.ones(1)}), "wte.weight", "another model")


def test_two_names_of_one_tensor(tmp_path):
    indexer = "model.layers.1.self_attn.compressor.indexer."
    refused(
        write(tmp_path, hf_stacked() | {indexer + "weights_proj.weight": torch.ones(6, 160)}), "two names of one tensor"
    )


def test_a_weight_has_one_place(tmp_path):
    def twice(source):
        build(source)
        source.tensor("norm.weight", (mini.HIDDEN,), torch.float32)

    refused(write(tmp_path, plain_tensors()), "norm.weight was asked for twice", request=twice)


def test_requests_for_other_dtypes_are_refused(tmp_path):
    def request(source):
        source.tensor("norm.weight", (mini.HIDDEN,), torch.uint8)

    refused(write(tmp_path, plain_tensors()), "norm.weight", "torch.uint8", request=request)


def test_block_scales_survive_the_round_trip():
    """What the builders of these tests write and what the loader decodes are converses."""
    scale = torch.exp2(torch.arange(-126.0, 127.0))
    assert decode_e8m0(encode_e8m0(scale)).equal(scale)

"""Fused experts: which tensors belong to one, its scalars, and what is wrong with one, by expert and projection."""

import pytest
import torch

from dsv4.model.checkpoint import FolderSource
from dsv4.model.stacks import ExpertStack, split_scalars
from tests.model.checkpoints import refused, same, write
from tests.model.format_checkpoints import nvfp4, plain
from tests.ops.cases import quantize_fp8_experts

E, INTER, HIDDEN = 3, 48, 160


def fused_nvfp4(**changes) -> dict:
    """The fused NVFP4 experts of one layer under dsv4's own names, some tensors changed or (None) left out."""
    tensors = {}
    for leaf, shape in (("gate_up_proj", (2 * INTER, HIDDEN)), ("down_proj", (HIDDEN, INTER))):
        each = [nvfp4(torch.randn(shape))[0] for _ in range(E)]
        tensors[f"experts.{leaf}"] = torch.stack([one["weight"] for one in each])
        for suffix in ("weight_scale", "weight_scale_2"):
            tensors[f"experts.{leaf}_{suffix}"] = torch.stack([one[suffix] for one in each])
    tensors = {f"layers.0.ffn.{name}": value for name, value in tensors.items()}
    changes = {f"layers.0.ffn.experts.{name}": value for name, value in changes.items()}
    return {name: value for name, value in (tensors | changes).items() if value is not None}


def ask(source):
    return source.at("layers").at("0").at("ffn").experts("experts", E, HIDDEN, INTER)


@pytest.mark.parametrize("halves", [1, 2])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (E,), (E, 1), (E, 1, 1), (E, 2), (E, 2, 1)])
def test_scalars_of_any_layout(shape, halves):
    values = torch.arange(torch.Size(shape).numel()).view(shape) + 1.0
    if values.numel() == 2 * E and halves == 1:
        return
    got = [[one.item() for one in row] for row in split_scalars(values, E, halves)]
    assert all(one.shape == () for row in split_scalars(values, E, halves) for one in row)
    if values.numel() == 1:
        assert got == [[1.0] * halves] * E
    elif values.numel() == E:
        assert got == [[float(e + 1)] * halves for e in range(E)]
    else:
        assert got == [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]


def test_two_scalars_of_one_expert_are_its_halves():
    assert [[one.item() for one in row] for row in split_scalars(torch.tensor([[1.0, 2.0]]), 1, 2)] == [[1.0, 2.0]]


def test_stack_puts_w1_above_w3():
    stack = ExpertStack(2, 2, torch.device("cpu"))
    for expert in range(2):
        for half in range(2):
            stack.put(expert, half, {"weight": torch.full((3, 4), 2.0 * expert + half), "scale_2": torch.tensor(half)})
    tensors = stack.tensors()
    assert tensors["weight"].shape == (2, 6, 4) and not stack.is_complete
    assert tensors["weight"][:, :, 0].tolist() == [[0.0] * 3 + [1.0] * 3, [2.0] * 3 + [3.0] * 3]
    assert tensors["scale_2"].tolist() == [[0, 1], [0, 1]]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"down_proj": None}, ["no tensor layers.0.ffn.experts.down_proj in"]),
        ({"gate_up_proj_weight_scale": None}, ["gate_up_proj is U8 (NVFP4) without its scale", ".weight_scale beside"]),
        ({"gate_up_proj.weight": torch.zeros(E, 96, 80, dtype=torch.uint8)}, ["two names of one tensor"]),
        ({"down_proj_weight_scale_2": torch.ones(E + 1)}, ["NVFP4 scale_2 of stacked experts", "[4]", "expected []"]),
        ({"down_proj_weight_scale_2": torch.ones(E, 2)}, ["NVFP4 scale_2 of stacked experts", "[3, 2]"]),
        ({"down_proj": torch.zeros(E, 24, 160, dtype=torch.uint8)}, ["[3, 24, 160]", "expected [3, 160, 24]"]),
        ({"down_proj_scale_inv": torch.ones(E, 2, 1)}, ["is U8 (NVFP4)", "down_proj_scale_inv"]),
        (
            {"down_proj": torch.zeros(E, HIDDEN, INTER), "down_proj_weight_scale": None, "down_proj_weight_scale_2": None},
            ["down_proj is plain, but", "gate_up_proj is NVFP4"],
        ),
    ],
)
def test_wrong_headers(changes, words, tmp_path):
    refused(write(tmp_path, fused_nvfp4(**changes)), *words, request=ask)


@pytest.mark.parametrize(("row", "which"), [(47, "expert 2, w1"), (48, "expert 2, w3")])
def test_bad_values_are_named_by_expert_and_projection(row, which, tmp_path):
    tensors = fused_nvfp4()
    key = "layers.0.ffn.experts.gate_up_proj_weight_scale"
    tensors[key].view(torch.uint8)[2, row, 0] = 0x7F
    element = row % INTER * 10
    refused(write(tmp_path, tensors), f"{key} ({which}): element {element} of this scale", request=ask, headers=False)


def test_fp8_blocks_that_w1_and_w3_share(tmp_path):
    """48 rows each in one block of 128: transformers could mean one scale for both, or two; it is not guessed."""
    codes, scale, down, down_scale = quantize_fp8_experts(torch.randn(E, 2 * INTER, HIDDEN), torch.randn(E, HIDDEN, INTER))
    prefix = "layers.0.ffn.experts."
    tensors = {f"{prefix}gate_up_proj": codes, f"{prefix}gate_up_proj_scale_inv": scale[:, :1].contiguous()}
    tensors |= {f"{prefix}down_proj": down, f"{prefix}down_proj_scale_inv": down_scale}
    refused(write(tmp_path, tensors), "rows divisible by 128", "asks for 48", request=ask)


def apart_nvfp4(fused: dict) -> dict:
    """The same experts as one tensor for each expert and projection."""
    apart, prefix = {}, "layers.0.ffn.experts."
    for expert in range(E):
        for suffix in ("weight", "weight_scale", "weight_scale_2"):
            ending = "" if suffix == "weight" else f"_{suffix}"
            both, down = fused[f"{prefix}gate_up_proj{ending}"][expert], fused[f"{prefix}down_proj{ending}"][expert]
            w1, w3 = both.chunk(2) if both.ndim else (both, both)
            for name, value in (("w1", w1), ("w2", down), ("w3", w3)):
                apart[f"{prefix}{expert}.{name}.{suffix}"] = value.clone()
    return apart


def test_fused_and_apart_are_the_same(tmp_path):
    fused = fused_nvfp4()
    one, other = (
        ask(FolderSource(write(tmp_path / name, tensors), "cpu", torch.bfloat16))
        for name, tensors in (("fused", fused), ("apart", apart_nvfp4(fused)))
    )
    for ours, theirs in zip(one.buffers(), other.buffers(), strict=True):
        assert same(ours, theirs)


def ask_with_shared(source):
    return source.at("layers").at("0").at("ffn").experts("experts", E, HIDDEN, INTER, "shared_experts")


def shared_expert(form=nvfp4) -> dict:
    shapes = {"w1": (INTER, HIDDEN), "w2": (HIDDEN, INTER), "w3": (INTER, HIDDEN)}
    return {
        f"layers.0.ffn.shared_experts.{name}.{suffix}": value
        for name, shape in shapes.items()
        for suffix, value in form(torch.randn(shape))[0].items()
    }


@pytest.mark.parametrize("apart", [False, True])
def test_a_shared_expert_of_the_same_format_is_the_last(apart, tmp_path):
    experts, shared = fused_nvfp4(), shared_expert()
    experts = apart_nvfp4(experts) if apart else experts
    alone = ask(FolderSource(write(tmp_path / "alone", experts), "cpu", torch.bfloat16))
    folder = write(tmp_path / "both", experts | shared)
    FolderSource.check(folder, ask_with_shared, torch.bfloat16)
    source = FolderSource(folder, "cpu", torch.bfloat16)
    joined = ask_with_shared(source)
    source.finish()  # nothing is left
    assert joined.shared_last and not alone.shared_last
    for ours, theirs in zip(joined.buffers(), alone.buffers(), strict=True):
        assert same(ours[:E], theirs) and len(ours) == E + 1
    prefix = "layers.0.ffn.shared_experts."
    for suffix, name in (("weight", ""), ("weight_scale", "_scale"), ("weight_scale_2", "_scale_2")):
        both = [shared[f"{prefix}{part}.{suffix}"] for part in ("w1", "w3")]
        both = torch.stack(both) if both[0].ndim == 0 else torch.cat(both)
        assert same(getattr(joined, f"gate_up{name}")[E], both)
        assert same(getattr(joined, f"down{name}")[E], shared[f"{prefix}w2.{suffix}"])


def test_a_shared_expert_of_another_format_stays_apart(tmp_path):
    """Even if only one of its weights is."""
    mixed = shared_expert() | {k: v for k, v in shared_expert(plain).items() if ".w2." in k}
    mixed = {k: v for k, v in mixed.items() if ".w2." not in k or k.endswith("w2.weight")}
    source = FolderSource(write(tmp_path, fused_nvfp4() | mixed), "cpu", torch.bfloat16)
    experts = ask_with_shared(source)
    assert not experts.shared_last and len(experts.down) == E
    for name, size in (("w1", (INTER, HIDDEN)), ("w3", (INTER, HIDDEN)), ("w2", (HIDDEN, INTER))):
        source.at("layers").at("0").at("ffn").at("shared_experts").linear(name, *size)
    source.finish()

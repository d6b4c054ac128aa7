"""activation="nvfp4": the model as W4A4 kernels would compute it, against transformers with its inputs quantised."""

import pytest
import torch
from torch import nn

import dsv4
from dsv4 import cli
from dsv4.model.linear import Nvfp4Experts, Nvfp4Linear
from tests.model import format_checkpoints
from tests.model.format_checkpoints import NAME, VARIANTS, in_transformers
from tests.model.random_checkpoints import VOCAB
from tests.model.tiny_oracle import TINY
from tests.ops.oracles import hf, nearest_nvfp4

LENGTH = 24  # 6 blocks of 4 tokens
NOT_QUANTISED = ("lm_head", "mlp.gate")  # in no format


def load(path, **settings):
    settings = dict(max_context=64, prefill_chunk=20, compile=False) | settings
    return dsv4.load(path, "cpu", torch.float32, **settings)


def quantise_inputs(model: nn.Module, linears: bool) -> None:
    """transformers' model as a W4A4 engine would run it: inputs of both products of its experts, and of its linears."""
    for name, module in model.named_modules():
        if isinstance(module, hf.DeepseekV4Experts):
            module.register_forward_pre_hook(lambda _, args: (nearest_nvfp4(args[0]), *args[1:]))
            module._apply_gate = lambda both, apply=module._apply_gate: nearest_nvfp4(apply(both))
        elif linears and isinstance(module, nn.Linear) and not name.endswith(NOT_QUANTISED):
            module.register_forward_pre_hook(lambda _, args: (nearest_nvfp4(args[0]), *args[1:]))


@pytest.mark.parametrize("kind", ["nvfp4 experts", "all nvfp4"])
def test_logits(kind, tmp_path, draw):
    """A value beside a midpoint goes either way in two float32 computations, and all that follows from it with it. So
    not every prompt agrees to the last digits; some do, and none would if a single module were left out."""
    theirs = in_transformers(format_checkpoints.write(tmp_path, VARIANTS[kind]))
    quantise_inputs(theirs, linears=kind == "all nvfp4")
    plain, emulated = load(tmp_path), load(tmp_path, activation="nvfp4")
    distances = []
    for _ in range(6):
        ids = draw.integers(2, VOCAB[NAME], LENGTH).tolist()
        wanted = theirs(torch.tensor([ids]), use_cache=False).logits[0]
        effect = (plain.logits([ids])[0] - wanted).norm()
        assert effect > 0.02 * wanted.norm()
        distances.append(((emulated.logits([ids])[0] - wanted).norm() / effect).item())
    assert sorted(distances)[2] < 1e-4, distances
    assert "activations of 4-bit weights: nvfp4, emulated" in str(emulated.load_report)


def test_every_nvfp4_module_takes_part(tmp_path):
    format_checkpoints.write(tmp_path, VARIANTS["all nvfp4"])
    for activation in (None, "nvfp4"):
        modules = load(tmp_path, activation=activation).model.modules()
        found = [module.activation for module in modules if isinstance(module, (Nvfp4Linear, Nvfp4Experts))]
        assert len(found) > 20 and set(found) == {activation}


def test_refusals(tmp_path, capsys):
    format_checkpoints.write(tmp_path, VARIANTS["bf16"])
    with pytest.raises(ValueError, match="activation must be None or \"nvfp4\", found 'fp8'"):
        load(TINY, activation="fp8")
    with pytest.raises(ValueError, match="the checkpoint has no NVFP4 or MXFP4 weights"):
        load(tmp_path, activation="nvfp4")
    assert cli.main(["generate", "--model", str(TINY), "--prompt", "x", "--activation", "int4"]) == 2
    assert "--activation" in capsys.readouterr().err


def test_command(capsys):
    """On the trained model the first words stay what they were, and the report says what was emulated."""
    command = ["generate", "--model", str(TINY), "--device", "cpu", "--no-compile", "--greedy", "--max-new-tokens", "4"]
    assert cli.main([*command, "--prompt", "The river", "--activation", "nvfp4"]) == 0
    out, err = capsys.readouterr()
    assert out.strip() and "emulated" in err

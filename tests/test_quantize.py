"""dsv4 quantize: values, bytes and refusals; sources are one random checkpoint stored in every format that is read."""

import errno
import fcntl
import functools
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import dsv4
from dsv4 import cli
from dsv4.model import conversion
from dsv4.model.config import ModelConfig
from dsv4.model.export import shared_scale_2
from dsv4.model.inventory import all_nvfp4_release, nvfp4_experts_release
from dsv4.model.linear import Fp8BlockLinear, Nvfp4Linear, PlainLinear
from dsv4.model.names import HF, HF_ORIGINAL
from dsv4.model.shards import TORCH_DTYPES
from dsv4.ops.fp8 import dequantize_fp8_block, encode_e8m0, quantize_fp8_block
from dsv4.ops.mxfp4 import dequantize_mxfp4
from dsv4.ops.nvfp4 import dequantize_nvfp4, encode_e2m1, pack_nibbles, quantize_nvfp4
from dsv4.quantize import FORMATS
from tests.model import format_checkpoints
from tests.model.checkpoints import same
from tests.model.format_checkpoints import VARIANTS
from tests.model.random_checkpoints import clear_tokens, dequantised_oracle, folder, nvfp4_folder

FP8_WRITERS = {variant.linears for variant in VARIANTS.values() if variant.linears.__name__ == "write"}
FP8_WRITERS |= {variant.experts for variant in VARIANTS.values() if variant.experts.__name__ == "write"}


def run(*arguments) -> int:
    return cli.main(["quantize", *map(str, arguments)])


def tensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder, of however many files."""
    return {name: value for file in sorted(path.glob("*.safetensors")) for name, value in load_file(file).items()}


@functools.cache
def native() -> dict[str, torch.Tensor]:
    """The tiny checkpoint in float32 under native names, one name for each expert."""
    stored = {HF_ORIGINAL.to_native(name): value for name, value in tensors(folder("tiny")).items()}
    assert not any("gate_up_proj" in name for name in stored)
    return stored


def experts() -> list[str]:
    return [name.removesuffix(".weight") for name in native() if ".ffn.experts." in name]


def write(path: Path, stored: dict[str, torch.Tensor], **config) -> Path:
    path.mkdir()
    save_file({name: value.contiguous() for name, value in stored.items()}, path / "model.safetensors")
    values = ModelConfig.from_folder(folder("tiny")).to_json() | config
    (path / "config.json").write_text(json.dumps(values))
    return path


def with_experts(store) -> dict[str, torch.Tensor]:
    """The native tensors with each expert's weight replaced by `store(module, weight)`."""
    stored = dict(native())
    for module in experts():
        stored |= store(module, stored.pop(f"{module}.weight"))
    return stored


def mxfp4(module: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    groups = weight.unflatten(-1, (-1, 32))
    scale = torch.exp2(torch.ceil(torch.log2(groups.abs().amax(-1) / 6)))
    codes = encode_e2m1((groups / scale[..., None]).flatten(-2))
    return {f"{module}.weight": pack_nibbles(codes).view(torch.int8), f"{module}.scale": encode_e8m0(scale)}


def fp8(module: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    return dict(zip((f"{module}.weight", f"{module}.scale"), quantize_fp8_block(weight), strict=True))


def reciprocal(module: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """As compressed-tensors stores it. w1 and w3 of one expert have the same global scale here."""
    packed, scale, scale_2 = quantize_nvfp4(weight, torch.tensor(2.0**-10))
    names = ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale")
    values = (packed, scale, (1 / scale_2).reshape(1), torch.tensor([8.0]))
    return {f"{module}.{name}": value for name, value in zip(names, values, strict=True)}


def values_of(stored: dict[str, torch.Tensor], module: str) -> torch.Tensor:
    parts = ("weight", "weight_scale", "weight_scale_2")
    return dequantize_nvfp4(*(stored[f"{module}.{part}"] for part in parts))


def source_of(variant: format_checkpoints.Variant, key: str):
    """How the source stores a weight of this native name."""
    if ".ffn.experts." in key:
        return variant.experts
    return variant.others if format_checkpoints.OTHERS.search(key) else variant.linears


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", VARIANTS)
def test_every_format(tmp_path, name, form):
    """The result stands for the weights of its source: the same ones where they were NVFP4 or MXFP4 of one scale, or FP8
    or plain as here; else as near as the formats allow."""
    variant = VARIANTS[name]
    meant = format_checkpoints.write(tmp_path / "in", variant)
    assert run(tmp_path / "in", tmp_path / "out", "--quiet", "--format", form) == 0
    out, config = tensors(tmp_path / "out"), format_checkpoints.config()
    release = nvfp4_experts_release(config, draft=None) if form == "nvfp4-experts" else all_nvfp4_release(config)
    expected = {tensor.name: tensor for tensor in release}
    f32_scales = {name for name in out if name.endswith(".scale") and out[name].dtype == torch.float32}
    assert out.keys() == expected.keys()
    for key, tensor in expected.items():
        assert tuple(out[key].shape) == tensor.shape
        assert key in f32_scales or out[key].dtype == TORCH_DTYPES[tensor.dtype]
    quantization = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert quantization["quant_method"] == {"nvfp4-experts": "fp8", "all-nvfp4": "modelopt"}[form]
    assert ("scale_fmt" in quantization) == (form == "nvfp4-experts" and not f32_scales)
    if form == "all-nvfp4":
        out = {HF.to_native(key): value for key, value in out.items()}
    for key, value in meant.items():
        found, module = out[key], key.removesuffix(".weight")
        if found.dtype == torch.uint8:
            result, allowed, source = values_of(out, module), 0.12, source_of(variant, key)
            paired = module.endswith((".w1", ".w3"))  # in the source each may have a scale_2 of its own
            one_scale = not paired or (variant.scale_2 != "each" and ".experts." in key)
            exact = source is format_checkpoints.mxfp4 or ("nvfp4" in source.__name__ and one_scale)
        elif found.dtype == torch.float8_e4m3fn:
            result, allowed = dequantize_fp8_block(found, out[f"{module}.scale"]), 0.04
            exact = variant.linears in FP8_WRITERS
        else:
            result, allowed, exact = found, 0.005, source_of(variant, key) is format_checkpoints.plain
            exact = exact and not (form == "all-nvfp4" and key.endswith(".ape"))  # BF16 there
        error = (result.float() - value.float()).norm() / value.float().norm().clamp(min=1e-9)
        assert error <= (1e-6 if exact else allowed), f"{key}: {error}"


@pytest.mark.parametrize("name", ["bf16, fused", "native", "nvfp4 experts"])
def test_logits_of_all_nvfp4(tmp_path, draw, name):
    """From plain, MXFP4 and NVFP4 experts: it loads, every linear but router and head is NVFP4, and the logits are those
    of transformers on the values that the file holds."""
    format_checkpoints.write(tmp_path / "in", VARIANTS[name])
    assert run(tmp_path / "in", tmp_path / "out", "--quiet", "--format", "all-nvfp4") == 0
    stored = {HF.to_native(key): value for key, value in tensors(tmp_path / "out").items()}
    meant = {}
    for key, value in stored.items():
        module = key.removesuffix(".weight")
        if value.dtype == torch.uint8:
            scale = stored[f"{module}.weight_scale"].float().repeat_interleave(16, -1)
            meant[key] = format_checkpoints.values_of(value) * scale * stored[f"{module}.weight_scale_2"]
        elif not key.endswith(("weight_scale", "weight_scale_2", "input_scale")):
            meant[key] = value.float() if value.is_floating_point() else value
    theirs = format_checkpoints.in_transformers(meant)
    ids = clear_tokens(format_checkpoints.NAME, 45, draw, theirs)
    engine = dsv4.load(tmp_path / "out", "cpu", torch.float32, max_context=64, compile=False)
    wanted = theirs(torch.tensor([ids]), use_cache=False).logits[0]
    assert (engine.logits([ids])[0] - wanted).abs().max() <= 1e-4
    linears = [
        type(module) for module in engine.model.modules() if type(module) in (Nvfp4Linear, Fp8BlockLinear, PlainLinear)
    ]
    assert linears.count(PlainLinear) == 1 and set(linears) == {PlainLinear, Nvfp4Linear}  # the head


def test_fp32_source(tmp_path, capsys, draw):
    """From transformers' own file: the bytes that the in-memory writer gives, and the logits of the dequantised weights."""
    source = folder("tiny")
    capsys.readouterr()  # of transformers
    assert run(source, tmp_path / "out", "--quiet") == 0
    assert capsys.readouterr() == ("", "")
    ours, theirs = tensors(tmp_path / "out"), tensors(nvfp4_folder("tiny"))
    assert ours.keys() == theirs.keys() and all(same(ours[name], theirs[name]) for name in ours)
    engine = dsv4.load(tmp_path / "out", "cpu", torch.float32, max_context=192, compile=False)
    ids = clear_tokens("tiny", 150, draw)
    expected = dequantised_oracle("tiny")(torch.tensor([ids]), use_cache=False).logits[0]
    assert (engine.logits([ids])[0] - expected).abs().max() < 2e-4
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (folder("tiny") / "tokenizer.json").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.quantize.json"]


def test_report(tmp_path, capsys):
    assert run(folder("tiny"), tmp_path / "out") == 0
    out, err = capsys.readouterr()
    assert "quantised to NVFP4" in out and "cast to BF16" in out and "/s" in err
    report = json.loads((tmp_path / "out.quantize.json").read_text())
    rows = {row["name"]: row for row in report["tensors"]}
    weights = {name for name in native()}
    assert rows.keys() == weights and report["dropped_tensors"] == []
    assert report["bytes"] == sum(value.nbytes for value in tensors(tmp_path / "out").values())
    name = f"{experts()[0]}.weight"
    error = values_of(tensors(tmp_path / "out"), experts()[0]) - native()[name]
    assert rows[name]["relative_rms"] == pytest.approx(float(error.norm() / native()[name].norm()), rel=1e-4)
    assert rows[name]["max_error"] == pytest.approx(float(error.abs().max()), rel=1e-4)
    assert 0.05 < rows[name]["relative_rms"] < 0.15


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("form", FORMATS)
def test_same_bytes_on_a_gpu(tmp_path, form):
    for device in ("cpu", "cuda"):
        assert run(folder("tiny"), tmp_path / device, "--quiet", "--format", form, "--device", device) == 0
    assert (tmp_path / "cpu" / "model.safetensors").read_bytes() == (tmp_path / "cuda" / "model.safetensors").read_bytes()


def test_w1_and_w3_too_far_apart_for_one_scale_2(tmp_path):
    """Each loads on its own; together they are quantised again, and the report says so."""
    stored, module = with_experts(mxfp4), experts()[0].rpartition(".")[0]
    stored[f"{module}.w1.scale"].view(torch.uint8).sub_(20)
    assert run(write(tmp_path / "in", stored), tmp_path / "out", "--quiet") == 0
    again = {row["name"] for row in report_rows(tmp_path, ".experts.") if row["how"] == "quantised to NVFP4"}
    assert again == {f"{module}.w1.weight", f"{module}.w3.weight"}


def test_mxfp4_source_keeps_its_values(tmp_path):
    stored = with_experts(mxfp4)
    assert run(write(tmp_path / "in", stored), tmp_path / "out", "--quiet") == 0
    out = tensors(tmp_path / "out")
    for module in experts():
        assert values_of(out, module).equal(dequantize_mxfp4(stored[f"{module}.weight"], stored[f"{module}.scale"]))
        assert out[f"{module}.weight"].equal(stored[f"{module}.weight"].view(torch.uint8))
        if module.endswith("w1"):
            assert out[f"{module}.weight_scale_2"].equal(out[f"{module[:-1]}3.weight_scale_2"])
    assert {row["how"] for row in report_rows(tmp_path, ".experts.")} == {"MXFP4 scales recast"}


def test_mxfp4_scales_that_e4m3_cannot_hold(tmp_path):
    stored, module = with_experts(mxfp4), experts()[0]
    stored[f"{module}.scale"].view(torch.uint8)[0, :2] = torch.tensor([100, 127], dtype=torch.uint8)
    stored[f"{module}.weight"][0] = 0x22  # ones, so that no group is all zeros
    assert run(write(tmp_path / "in", stored), tmp_path / "out", "--quiet") == 2  # a load refuses it as well


def report_rows(path: Path, part: str) -> list[dict]:
    rows = json.loads((path / "out.quantize.json").read_text())["tensors"]
    return [row for row in rows if part in row["name"]]


def test_fp8_source(tmp_path):
    stored = with_experts(fp8)
    stored |= {name: value.bfloat16() for name, value in stored.items() if value.dtype == torch.float32}
    assert run(write(tmp_path / "in", stored), tmp_path / "out", "--quiet") == 0
    out = tensors(tmp_path / "out")
    for module in experts()[:6]:
        pair = [f"{module[:-1]}{i}" for i in ("13" if module[-1] != "2" else "2")]
        values = {name: dequantize_fp8_block(stored[f"{name}.weight"], stored[f"{name}.scale"]) for name in pair}
        expected = quantize_nvfp4(values[module], shared_scale_2(*values.values()))
        for part, value in zip(("weight", "weight_scale", "weight_scale_2"), expected, strict=True):
            assert same(out[f"{module}.{part}"], value)


def test_compressed_tensors_source_is_renamed_only(tmp_path):
    stored = with_experts(reciprocal)
    assert run(write(tmp_path / "in", stored), tmp_path / "out", "--quiet") == 0
    out = tensors(tmp_path / "out")
    for module in experts():
        assert out[f"{module}.weight"].equal(stored[f"{module}.weight_packed"])
        assert float(out[f"{module}.weight_scale_2"]) == 2.0**-10 and float(out[f"{module}.input_scale"]) == 1 / 8
    assert {row["how"] for row in report_rows(tmp_path, ".experts.")} == {"copied"}


def test_fused_experts(tmp_path):
    """transformers' stacked experts give the same files as one tensor for each."""
    stored = {HF.from_native(name): value for name, value in native().items() if ".experts." not in name}
    count = ModelConfig.from_folder(folder("tiny")).n_routed_experts
    for layer in range(4):
        every = [[native()[f"layers.{layer}.ffn.experts.{e}.w{i}.weight"] for i in (1, 3, 2)] for e in range(count)]
        prefix = f"model.layers.{layer}.mlp.experts."
        stored[f"{prefix}gate_up_proj"] = torch.stack([torch.cat(ws[:2]) for ws in every])
        stored[f"{prefix}down_proj"] = torch.stack([ws[2] for ws in every])
    assert run(write(tmp_path / "in", stored), tmp_path / "out", "--quiet") == 0
    ours, theirs = tensors(tmp_path / "out"), tensors(nvfp4_folder("tiny"))
    assert ours.keys() == theirs.keys() and all(same(ours[name], theirs[name]) for name in ours)


def test_w1_and_w3_of_different_scales_get_one(tmp_path):
    stored = tensors(nvfp4_folder("tiny"))
    module = experts()[0].rpartition(".")[0]
    stored[f"{module}.w1.weight_scale_2"] *= 1.7
    before = {part: values_of(stored, f"{module}.{part}") for part in ("w1", "w3")}
    assert run(write(tmp_path / "in", stored), tmp_path / "out", "--quiet") == 0
    out = tensors(tmp_path / "out")
    assert out[f"{module}.w1.weight_scale_2"].equal(out[f"{module}.w3.weight_scale_2"])
    for part, value in before.items():
        assert (values_of(out, f"{module}.{part}") - value).norm() < 0.1 * value.norm()
    again = [row["name"] for row in report_rows(tmp_path, "") if row["how"] != "copied"]
    assert again == [f"{module}.w1.weight", f"{module}.w3.weight"]


@pytest.mark.parametrize("drop", [False, True])
def test_draft_head(tmp_path, capsys, drop):
    stored = dict(native()) | mxfp4("mtp.0.ffn.experts.0.w1", torch.randn(32, 64)) | {"mtp.0.e_proj.weight": torch.ones(2)}
    source = write(tmp_path / "in", stored, num_nextn_predict_layers=1)
    assert run(source, tmp_path / "out", *(["--drop-mtp"] if drop else [])) == 0
    out = tensors(tmp_path / "out")
    mtp = {name for name in stored if name.startswith("mtp.")}
    assert {name for name in out if name.startswith("mtp.")} == (set() if drop else mtp)
    assert drop or all(same(out[name], stored[name]) for name in mtp)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == (0 if drop else 1)
    assert ("3 tensors have no place" in capsys.readouterr().out) == drop


def test_interrupted_run_goes_on(tmp_path, monkeypatch, capsys):
    """Ctrl-C leaves only the work folder; the next run does the rest, and the bytes are those of an undisturbed run."""
    options = ("--shard-size", "0.00008", "--quiet")
    assert run(folder("tiny"), tmp_path / "whole", *options) == 0
    calls = []

    def interrupted(item, *rest, convert=conversion.convert):
        calls.append(item)
        if len(calls) == 90:
            raise KeyboardInterrupt
        return convert(item, *rest)

    monkeypatch.setattr(conversion, "convert", interrupted)
    assert run(folder("tiny"), tmp_path / "out", *options) == 130
    assert "goes on" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"whole", "whole.quantize.json", "out.work"}
    assert len(list((tmp_path / "out.work" / "out").iterdir())) > 2
    assert run(folder("tiny"), tmp_path / "out", "--quiet") == 2  # other options: another set of shards
    assert "other options" in capsys.readouterr().err
    assert run(folder("tiny"), tmp_path / "out", *options) == 0
    total = len({item.outputs[0].name for item in calls})
    assert len(calls) < total + 60, "the second run began again"
    files = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "out").iterdir()) and len(files) > 6
    for name in files:
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "out" / name).read_bytes(), name
    reports = [json.loads((tmp_path / f"{name}.quantize.json").read_text()) for name in ("whole", "out")]
    assert reports[0] == reports[1]
    assert not (tmp_path / "out.work").exists()


def test_bad_values_stop_with_the_tensor_and_leave_no_output(tmp_path, capsys):
    stored = dict(native())
    name = f"{experts()[3]}.weight"
    stored[name] = stored[name].clone()
    stored[name][1, 2] = torch.nan
    assert run(write(tmp_path / "in", stored), tmp_path / "out", "--quiet") == 2
    error = capsys.readouterr().err
    assert name in error and "not finite" in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def refusals(path: Path):
    tiny = folder("tiny")
    (path / "there").mkdir()
    (path / "foreign.work").mkdir()
    (path / "foreign.work" / "thesis.txt").touch()
    broken = path / "broken"
    shutil.copytree(tiny, broken)
    (broken / "model.safetensors").write_bytes((broken / "model.safetensors").read_bytes()[:-1])
    yield (tiny, path / "there"), "exists"
    yield (tiny, tiny), "exists"
    yield (tiny, path / "no" / "where"), "no such folder"
    yield (path / "nothing", path / "out"), "no such folder"
    yield (broken, path / "out"), "truncated"
    yield (write(path / "less", {k: v for k, v in native().items() if k != "norm.weight"}), path / "out"), "norm.weight"
    yield (tiny, path / "out", "--format", "int4"), "nvfp4-experts or all-nvfp4"
    yield (tiny, path / "out", "--shard-size", "0"), "--shard-size"
    yield (tiny, path / "out", "--shard-size", "nan"), "--shard-size"
    yield (tiny, path / "out", "--device", "tpu"), "--device"
    yield (tiny, path / "foreign"), "foreign.work"
    yield (tiny,), "DST"
    if not torch.cuda.is_available():
        yield (tiny, path / "out", "--device", "cuda"), "no CUDA device"


def test_refusals(tmp_path, capsys):
    for arguments, words in refusals(tmp_path):
        before = sorted(tmp_path.rglob("*"))
        assert run(*arguments) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1
        assert sorted(tmp_path.rglob("*")) == before, "a refusal leaves nothing behind"


def test_a_full_disk_and_another_process(tmp_path, capsys, monkeypatch):
    source = folder("tiny")
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage)
        assert run(source, tmp_path / "out") == 2
        assert "0.0 GB are free" in capsys.readouterr().err
    work = tmp_path / "out.work"
    with (work / "lock").open() as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        assert run(source, tmp_path / "out") == 2
        assert "another process" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        assert run(source, tmp_path / "out", "--quiet") == 2
        error = capsys.readouterr().err
        assert "No space left" in error and "goes on" in error and error.count("\n") == 1
    assert run(source, tmp_path / "out", "--quiet") == 0 and not work.exists()


def fail(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_same_definition_as_torchao():
    nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(5))
    packed, scale, scale_2 = quantize_nvfp4(weight)
    theirs = nvfp4.NVFP4Tensor.to_nvfp4(weight, per_tensor_scale=nvfp4.per_tensor_amax_to_scale(weight.abs().max()))
    assert theirs.per_tensor_scale.equal(scale_2)
    assert theirs.scale.view(torch.uint8).reshape(64, 6).equal(scale.view(torch.uint8))
    assert theirs.dequantize(torch.float32).equal(dequantize_nvfp4(packed, scale, scale_2))
    assert theirs.qdata.view(torch.uint8).equal(packed)

"""dsv4 inspect: what it says of the tiny checkpoint, of the releases' inventories and of folders that do not load."""

import json
import math
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import dsv4
from dsv4 import cli
from dsv4.model.config import flash, pro
from dsv4.model.inventory import Expected, native_release, nvfp4_experts_release
from dsv4.model.shards import BITS
from tests.model import format_checkpoints

TINY = Path(__file__).resolve().parents[1] / "examples" / "tiny"


def inspect(capsys, *arguments) -> tuple[int, dict]:
    status = cli.main(["inspect", *map(str, arguments), "--json"])
    out, err = capsys.readouterr()
    assert err == "" and out.count("\n") == 1
    return status, json.loads(out)


def sparse(path: Path, config, tensors: list[Expected], shards: int = 2) -> Path:
    """A folder of files that have headers, and holes for data."""
    path.mkdir()
    weight_map = {}
    for shard in range(shards):
        file, header, end = path / f"model-{shard + 1:05}-of-{shards:05}.safetensors", {}, 0
        for tensor in tensors[shard::shards]:
            nbytes = math.prod(tensor.shape) * BITS[tensor.dtype] // 8
            offsets = [end, end + nbytes]
            header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets}
            weight_map[tensor.name] = file.name
            end += nbytes
        raw = json.dumps(header).encode()
        with file.open("wb") as stream:
            stream.write(struct.pack("<Q", len(raw)) + raw)
            stream.truncate(8 + len(raw) + end)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (path / "config.json").write_text(json.dumps(config.to_json() | {"num_nextn_predict_layers": 1}))
    return path


def altered(path: Path, change) -> Path:
    """The tiny checkpoint with `change` done to its tensors."""
    shutil.copytree(TINY, path)
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")
    return path


def test_tiny(capsys):
    status, out = inspect(capsys, TINY, "--max-context", 600, "--max-batch", 2)
    assert status == 0 and out["would_load"] and out["verdict"] == "would load"
    assert out["warnings"] == [] and out["problems"] == [] and out["naming"] == "native"
    assert out["layers"] == {"count": 5, "types": {"sliding": 1, "CSA": 2, "HCA": 2}, "hash_routing": 2}
    parts = {part["name"]: part for part in out["parts"]}
    assert list(parts["routed experts"]["formats"]) == ["NVFP4"] and list(parts["head"]["formats"]) == ["BF16"]
    assert parts["attention"]["formats"].keys() == {"FP8 block", "BF16", "F32"}
    assert sum(part["tensors"] for part in out["parts"]) == out["tensors"] == 1141
    assert sum(part["bytes"] for part in out["parts"]) == out["bytes"]
    engine = dsv4.load(TINY, "cpu", max_batch=2, max_context=600, compile=False)
    assert out["memory"]["weights"] == engine.load_report.weight_bytes
    assert out["memory"]["cache"] == engine.load_report.cache_bytes
    assert [step["batch"] for step in out["steps"]] == [1, 2]


def test_formats_of_the_cache(capsys):
    """As an engine has them; "auto" by the context that is asked for."""
    status, out = inspect(capsys, TINY, "--max-context", 601, "--kv", "fp8", "--index", "fp4")
    engine = dsv4.load(TINY, "cpu", max_context=601, compile=False, kv="fp8", index="fp4")
    assert status == 0 and (out["cache"]["kv"], out["cache"]["index"]) == ("fp8", "fp4")
    assert out["memory"]["cache"] == engine.load_report.cache_bytes == out["cache"]["per_sequence"]["601"]
    _, plain = inspect(capsys, TINY, "--max-context", 601)
    assert (plain["cache"]["kv"], plain["cache"]["index"]) == ("bf16", "bf16")
    assert plain["memory"]["cache"] > 1.2 * out["memory"]["cache"] and plain["steps"][0]["bytes"] > out["steps"][0]["bytes"]
    assert cli.main(["inspect", str(TINY), "--kv", "fp8"]) == 0
    assert "rows in fp8 and index keys in bf16" in capsys.readouterr().out
    assert cli.main(["inspect", str(TINY), "--kv", "int8"]) == 2 and "--kv" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "config", "make", "tensors", "active", "read"),
    [
        ("Flash", flash(), nvfp4_experts_release, 135_235, 13.27e9, 11.43e9),
        ("Pro", pro(), native_release, 145_116, 48.85e9, 40.44e9),
    ],
)
def test_releases(tmp_path, capsys, name, config, make, tensors, active, read):
    """The published counts; bytes a token within 1 % of the sums made by hand (which have 584-byte cache rows)."""
    folder = sparse(tmp_path / name, config, list(make(config)))
    status, out = inspect(capsys, folder)
    assert status == 0 and out["model"] == f"DeepSeek-V4-{name}" and out["tensors"] == tensors
    assert out["active_parameters"] == pytest.approx(active, rel=1e-3)
    assert out["steps"][0]["bytes"] == pytest.approx(read, rel=0.01)
    assert out["steps"][0]["floor_seconds"] == pytest.approx(out["steps"][0]["bytes"] / 4.25e12)
    experts = next(part for part in out["parts"] if part["name"] == "routed experts")
    assert list(experts["formats"]) == ["MXFP4" if make is native_release else "NVFP4"]
    draft = next(part for part in out["parts"] if part["name"] == "draft head (mtp)")
    assert draft["tensors"] == {"Flash": 1575, "Pro": 2343}[name]
    assert any(f"{draft['tensors']} tensors of the draft head" in warning for warning in out["warnings"])
    assert out["cache"]["per_sequence"]["1048576"] / 2**30 == pytest.approx({"Flash": 3.45, "Pro": 4.94}[name], abs=0.01)
    assert (out["cache"]["kv"], list(out["cache"]["longest_formats"])) == ("bf16", ["fp8", "fp4"])
    if name == "Pro":
        return  # it takes seconds
    status, out = inspect(capsys, folder, "--gpus", 8, "--memory", 40)
    assert out["fit"]["longest_context"] == 1048576 and out["memory"]["weights"] < 40 * 2**30
    assert status == 1 and "1 GPU today" in out["verdict"]


@pytest.mark.parametrize("name", format_checkpoints.VARIANTS)
def test_every_format(tmp_path, capsys, name):
    """Whatever the format, layout and names, the folder loads and has the parameters of the one model."""
    format_checkpoints.write(tmp_path / "in", format_checkpoints.VARIANTS[name])
    capsys.readouterr()  # of transformers
    status, out = inspect(capsys, tmp_path / "in")
    assert status == 0, out["verdict"]
    weights = format_checkpoints.weights()
    floats = sum(value.numel() for value in weights.values() if value.is_floating_point())
    assert out["parameters"] == floats and "unknown" not in {part["name"] for part in out["parts"]}
    assert out["weights_as_loaded"] and not any("several formats" in warning for warning in out["warnings"])


def test_text(capsys):
    assert cli.main(["inspect", str(TINY), "--memory", "40"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for words in ("5 layers (1 sliding, 2 CSA, 2 HCA; 2 with hash", "routed experts", "at batch 1, context 4096",
                  "cache of 2 CSA layers", "the longest context that fits is 8192", "\nverdict: would load\n"):  # fmt: skip
        assert words in out


def test_what_does_not_fit(capsys):
    status, out = inspect(capsys, TINY, "--memory", 0.5)
    assert status == 1 and "do not fit 0.5 GiB" in out["verdict"] and not out["fit"]["fits"]
    assert out["fit"]["lacking"] == out["memory"]["total"] - 2**29 and out["fit"]["longest_context"] == 0


def missing_scale(tensors):
    del tensors["layers.0.attn.wq_a.scale"]


def missing_tensor(tensors):
    del tensors["layers.3.attn.kv_norm.weight"]


def another_tensor(tensors):
    tensors["layers.0.attn.engram.weight"] = torch.zeros(3)


def wrong_shape(tensors):
    tensors["norm.weight"] = tensors["norm.weight"][:-1].clone()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (missing_scale, ("layers.0.attn.wq_a.weight", "without its scale")),
        (missing_tensor, ("layers.3.attn.kv_norm.weight", "no tensor")),
        (another_tensor, ("layers.0.attn.engram.weight", "no place")),
        (wrong_shape, ("norm.weight", "shape")),
    ],
)
def test_what_a_load_would_raise_is_the_verdict(tmp_path, capsys, change, words):
    folder = altered(tmp_path / "tiny", change)
    status, out = inspect(capsys, folder)
    assert status == 1 and all(word in out["verdict"] for word in words)
    assert out["memory"]["total"] > 0 and len(out["parts"]) >= 10  # and the rest is there all the same
    with pytest.raises(ValueError) as caught:
        dsv4.load(folder, "cpu", compile=False)
    assert out["verdict"] == f"would not load: {caught.value}"


def test_oddities_are_warnings(tmp_path, capsys):
    def change(tensors):
        tensors["layers.1.attn.compressor.ape"] = tensors["layers.1.attn.compressor.ape"].bfloat16()
        weight = tensors["layers.2.attn.wkv.weight"].float().bfloat16()
        del tensors["layers.2.attn.wkv.scale"]
        tensors["layers.2.attn.wkv.weight"] = weight
        tensors["mtp.0.enorm.weight"] = torch.ones(4, dtype=torch.bfloat16)

    folder = altered(tmp_path / "tiny", change)
    (folder / "tokenizer.json").unlink()
    shutil.copy(folder / "model.safetensors", folder / "old.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {"expert_dtype": "fp8"}
    config["quantization_config"]["moe_quant_algo"] = "MXFP4"
    (folder / "config.json").write_text(json.dumps(config))
    status, out = inspect(capsys, folder)
    assert status == 0
    every = "\n".join(out["warnings"])
    for words in ("layers.*.attn.wkv.weight is stored in several formats: FP8 block in 4, BF16 in 1",
                  "layers.*.attn.compressor.ape are BF16, where the releases have F32",
                  "files not used: old.safetensors", "1 tensors of the draft head", "no tokenizer.json",
                  "num_nextn_predict_layers 0", "moe_quant_algo MXFP4", "expert_dtype fp8"):  # fmt: skip
        assert words in every


def broken_folders(path: Path):
    whole = altered(path / "whole", lambda tensors: None)
    for name in ("truncated", "no config", "bad config", "no weights", "other model"):
        shutil.copytree(whole, path / name)
    data = (whole / "model.safetensors").read_bytes()
    (path / "truncated" / "model.safetensors").write_bytes(data[:-1])
    yield "truncated", "truncated"
    (path / "no config" / "config.json").unlink()
    yield "no config", "no config.json"
    (path / "bad config" / "config.json").write_text("{")
    yield "bad config", "not valid JSON"
    (path / "no weights" / "model.safetensors").unlink()
    yield "no weights", "no *.safetensors"
    save_file({"transformer.h.0.weight": torch.zeros(2)}, path / "other model" / "model.safetensors")
    yield "other model", "another model"


def test_broken_folders_get_a_verdict(tmp_path, capsys):
    for name, words in broken_folders(tmp_path):
        status, out = inspect(capsys, tmp_path / name)
        assert status == 1 and words in out["verdict"], name
        assert cli.main(["inspect", str(tmp_path / name)]) == 1
        assert capsys.readouterr().out.splitlines()[-1] == f"verdict: {out['verdict']}"


def test_a_missing_shard_does_not_hide_the_others(tmp_path, capsys):
    whole = [t for t in native_release(flash(), draft=None) if ".ffn.experts." not in t.name]
    folder = sparse(tmp_path / "flash", flash(), whole, shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    status, out = inspect(capsys, folder)
    assert status == 1 and "model-00002-of-00003.safetensors is missing" in out["verdict"]
    assert out["model"] == "DeepSeek-V4-Flash" and out["tensors"] > len(whole) / 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no/such/folder"], "no such folder"),
        ([TINY, "--gpus", 0], "--gpus"),
        ([TINY, "--gpus", 3], "3 GPUs do not divide"),
        ([TINY, "--memory", 0], "--memory"),
        ([TINY, "--memory", "nan"], "--memory"),
        ([TINY, "--bandwidth", -1], "--bandwidth"),
        ([TINY, "--max-batch", 0], "--max-batch"),
        ([TINY, "--max-context", 8193], "--max-context 8193"),
        ([TINY, "--max-context", "x"], "--max-context"),
        ([], "FOLDER"),
    ],
)
def test_refusals(arguments, words, capsys):
    assert cli.main(["inspect", *map(str, arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and words in err and err.count("\n") == 1

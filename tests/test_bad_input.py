"""Input that cannot be used, end to end: one clear ValueError of one line from `dsv4.load` and from the engine, and
exit status 2 with one line on stderr from the command. The loader's many errors have their own tests in tests/model;
here is one of each kind, on a whole checkpoint, through the front door."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file

import dsv4
from dsv4.cli import main
from tests.model.random_checkpoints import engine, folder, nvfp4_folder

W1 = "model.layers.1.ffn.experts.3.w1.weight"
WKV = "model.layers.2.attn.wkv.weight"


def refused(call: Callable, *words: str) -> str:
    """`call` raises ValueError with one line that holds all words."""
    with pytest.raises(ValueError) as caught:
        call()
    message = str(caught.value)
    assert message and "\n" not in message and len(message) < 500, message
    for word in words:
        assert word in message, f"{word!r} not in {message!r}"
    return message


def command_refused(capsys, path: Path, *args: str) -> str:
    """`dsv4 generate` with these arguments exits with 2 and writes one line on stderr, which is returned."""
    args = ("--device", "cpu", "--max-context", "64", "--no-compile", "--quiet", "--max-new-tokens", "2", *args)
    status = main(["generate", "--model", str(path), *args])
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    [line] = err.splitlines()
    assert line.startswith("dsv4: error: ")
    return line


def load(path: Path | str | None = None, **settings):
    settings = {"device": "cpu", "max_context": 64, "compile": False} | settings
    return dsv4.load(folder("tiny") if path is None else path, **settings)


# --- folders ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """A copy of the tiny checkpoint to damage."""
    return shutil.copytree(folder("tiny"), tmp_path / "checkpoint")


def edit(path: Path, change: Callable[[dict], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def shard(path: Path) -> None:
    """The same checkpoint in two files with an index."""
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for number, part in ((1, names[::2]), (2, names[1::2])):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, path / file)
        weight_map |= dict.fromkeys(part, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def missing_folder(path):
    shutil.rmtree(path)


def missing_config(path):
    (path / "config.json").unlink()


def broken_config(path):
    (path / "config.json").write_text('{"model_type": ')


def another_model(path):
    (path / "config.json").write_text('{"model_type": "llama"}')


def missing_shard(path):
    shard(path)
    (path / "model-00002-of-00002.safetensors").unlink()


def truncated(path):
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def truncated_in_the_header(path):
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:300])


def empty_file(path):
    (path / "model.safetensors").write_bytes(b"")


def missing_tensor(path):
    edit(path, lambda tensors: tensors.pop(WKV))


def extra_tensor(path):
    edit(path, lambda tensors: tensors.update({"model.layers.2.attn.bias": torch.zeros(3)}))


def misshapen_tensor(path):
    edit(path, lambda tensors: tensors.update({WKV: tensors[WKV].T.contiguous()}))


def wrong_dtype(path):
    edit(path, lambda tensors: tensors.update({W1: tensors[W1].to(torch.int32)}))


def float8_without_scale(path):
    edit(path, lambda tensors: tensors.update({WKV: tensors[WKV].to(torch.float8_e4m3fn)}))


def a_layer_too_many(path):
    values = json.loads((path / "config.json").read_text())
    values["num_hidden_layers"] = 5
    values["layer_types"].append("sliding_attention")
    values["mlp_layer_types"].append("moe")
    (path / "config.json").write_text(json.dumps(values))


def broken_tokenizer(path):
    (path / "tokenizer.json").write_text("{}")


DAMAGES = [
    (missing_folder, ("no such folder",)),
    (missing_config, ("config.json", "no such file")),
    (broken_config, ("config.json", "not valid JSON")),
    (another_model, ("config.json", "model_type", "'llama'", "'deepseek_v4'")),
    (missing_shard, ("model-00002-of-00002.safetensors", "missing")),
    (truncated, ("model.safetensors", "truncated")),
    (truncated_in_the_header, ("model.safetensors", "truncated")),
    (empty_file, ("model.safetensors", "truncated")),
    (missing_tensor, (WKV, "the model needs it")),
    (extra_tensor, ("model.layers.2.attn.bias", "no place")),
    (misshapen_tensor, (WKV, "[64, 128]", "[128, 64]")),
    (wrong_dtype, (W1, "I32")),
    (float8_without_scale, (WKV, "F8_E4M3", "without its scale")),
    (a_layer_too_many, ("model.layers.4.", "the model needs it")),
    (broken_tokenizer, ("tokenizer.json",)),
]


@pytest.mark.parametrize("damage, words", DAMAGES, ids=lambda value: getattr(value, "__name__", ""))
def test_damaged_checkpoints(checkpoint, damage, words, capsys):
    load(checkpoint)  # the copy is good before
    damage(checkpoint)
    message = refused(lambda: load(checkpoint), *words)
    assert str(checkpoint) in message
    line = command_refused(capsys, checkpoint, "--prompt-ids", "5,6")
    assert all(word in line for word in words)


@pytest.mark.parametrize(
    "name, value",
    [
        ("layers.1.ffn.experts.2.w2.weight_scale", torch.nan),
        ("layers.1.ffn.experts.2.w2.weight_scale_2", torch.nan),
        ("layers.2.attn.wq_b.scale", torch.nan),
        ("layers.3.ffn.experts.0.w3.weight_scale_2", torch.inf),
        ("layers.3.ffn.experts.0.w1.weight_scale", -1.0),
    ],
)
def test_bad_scales(tmp_path, name, value, capsys):
    """Of the tiny checkpoint in NVIDIA's experts-only format. Only reading the data can find these."""
    path = shutil.copytree(nvfp4_folder("tiny"), tmp_path / "copy")
    load(path)  # the copy is good before

    def change(tensors):
        scale = tensors[name].float()
        scale.view(-1)[-1] = value
        tensors[name] = scale.to(tensors[name].dtype)

    edit(path, change)
    refused(lambda: load(path), str(path), name, "expected a finite number that is not negative")
    assert name in command_refused(capsys, path, "--prompt-ids", "5,6")


# --- arguments of load ------------------------------------------------------------------------------------------------

LOAD = [
    ({"device": "gpu7"}, ("device", "gpu7")),
    ({"device": "meta"}, ("device", "meta")),
    ({"device": "mps"}, ("device", "mps")),
    ({"device": 5.5}, ("device", "5.5")),
    ({"dtype": "fp16"}, ("dtype", "fp16")),
    ({"dtype": "float32 "}, ("dtype",)),
    ({"dtype": torch.float64}, ("dtype", "torch.float64")),
    ({"dtype": torch.int8}, ("dtype", "torch.int8")),
    ({"dtype": 16}, ("dtype", "16")),
    ({"max_batch": 0}, ("max_batch", "0")),
    ({"max_batch": -1}, ("max_batch", "-1")),
    ({"max_batch": 1.5}, ("max_batch", "1.5")),
    ({"max_batch": True}, ("max_batch", "True")),
    ({"max_batch": "2"}, ("max_batch", "'2'")),
    ({"max_context": 0}, ("max_context", "0")),
    ({"max_context": None}, ("max_context", "None")),
    ({"max_context": 4097}, ("max_context", "4097", "4096")),
    ({"prefill_chunk": 0}, ("prefill_chunk", "0")),
    ({"prefill_chunk": -5}, ("prefill_chunk", "-5")),
    ({"kv": "fp4"}, ("kv", "auto, bf16, fp8", "'fp4'")),
    ({"kv": None}, ("kv", "None")),
    ({"kv": "fp8"}, ('kv="fp8"', "multiple of 64", "128 of which 16", 'kv="bf16"')),
    ({"index": "int8"}, ("index", "auto, bf16, fp8, fp4", "'int8'")),
]


@pytest.mark.parametrize("settings, words", LOAD, ids=str)
def test_arguments_of_load(settings, words, monkeypatch):
    """Before any weight is read."""
    monkeypatch.setattr("dsv4.model.shards.Reader.read", lambda *_: pytest.fail("read a tensor"))
    refused(lambda: load(**settings), *words)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("device", ["cuda", "cuda:3"])
def test_cuda_without_cuda(device, capsys):
    refused(lambda: load(device=device), f"device {device} was asked for", "no CUDA device", "device='cpu'")
    assert "no CUDA device" in command_refused(capsys, folder("tiny"), "--device", device, "--prompt-ids", "5")


@pytest.mark.parametrize(
    "args, words",
    [
        (("--device", "gpu7"), ("device", "gpu7")),
        (("--dtype", "fp16"), ("--dtype", "fp16")),
        (("--max-batch", "0"), ("max_batch", "0")),
        (("--max-context", "0"), ("--max-context 0",)),
        (("--max-context", "5000"), ("max_context 5000", "4096")),
        (("--prefill-chunk", "0"), ("prefill_chunk", "0")),
        (("--temperature", "-1"), ("temperature", "-1")),
        (("--temperature", "nan"), ("temperature", "nan")),
        (("--temperature", "1e39"), ("temperature",)),
        (("--top-p", "0"), ("top_p",)),
        (("--top-p", "1.5"), ("top_p", "1.5")),
        (("--min-p", "-0.5"), ("min_p", "-0.5")),
        (("--top-k", "-7"), ("top_k", "-7")),
        (("--repetition-penalty", "0"), ("repetition_penalty", "0")),
        (("--seed", "-1"), ("seed", "-1")),
        (("--max-new-tokens", "0"), ("max_new_tokens", "0")),
        (("--max-new-tokens", "63"), ("max-context", "63")),
        (("--logprobs", "65"), ("logprobs", "65")),
        (("--stop", ""), ("stop",)),
        (("--prompt-ids", "5,448"), ("token id 448", "0..447")),
        (("--prompt-ids", "-1"), ("token id -1", "0..447")),
        (("--prompt-ids", ",".join(["5"] * 70)), ("70 tokens", "64")),
    ],
    ids=lambda value: " ".join(value)[:30],
)
def test_arguments_of_the_command(args, words, capsys):
    prompt = () if "--prompt-ids" in args else ("--prompt-ids", "5,6")
    line = command_refused(capsys, folder("tiny"), *prompt, *args)
    assert all(word in line for word in words), line


# --- prompts ----------------------------------------------------------------------------------------------------------

PROMPTS = [
    ([[]], ("prompt 0 is empty",)),
    ([""], ("prompt 0 is empty",)),
    ("", ("prompt 0 is empty",)),
    ([[5], []], ("prompt 1 is empty",)),
    ([[5, 448]], ("prompt 0", "token id 448", "0..447")),
    ([[5], [-1]], ("prompt 1", "token id -1")),
    ([[2**70]], ("prompt 0", "token id")),
    ([[5] * 385], ("prompt 0", "385 tokens", "max_context is 384")),
    (["x\ud800y"], ("'\\ud800'", "position 1")),
    ([None], ("prompt 0", "NoneType")),
    (None, ("prompts", "NoneType")),
    (5, ("prompts", "int")),
    ({"text": 1}, ("prompts", "dict")),
    (torch.tensor([5, 6]), ("prompts", "Tensor")),
    (numpy.array([[5, 6]]), ("prompts", "ndarray")),
    ([torch.tensor([5, 6])], ("prompt 0", "Tensor")),
    (b"text", ("prompt 0", "bytes")),
]


@pytest.mark.parametrize("prompts, words", PROMPTS, ids=lambda value: str(value)[:30])
def test_prompts(prompts, words):
    shared = engine("tiny")
    refused(lambda: shared.generate(prompts, 2), *words)
    if isinstance(prompts, list):
        refused(lambda: shared.logits(prompts), *words)
        assert len(prompts) == 2 or refused(lambda: shared.stream(prompts[0], 2), *words)
        assert len(prompts) == 2 or refused(lambda: shared.prefill(prompts[0]), *words)


@pytest.mark.parametrize("bad", ["a", 5.0, True, None], ids=repr)
def test_what_is_wrong_inside_a_list_of_ids_is_named(bad):
    """And not that a list was found where a list is expected."""
    for call in (lambda: engine("tiny").generate([[5, bad]], 2), lambda: engine("tiny").logits([[5, bad]])):
        refused(call, "prompt 0", "token id", repr(bad))


def test_nothing_runs_if_any_prompt_is_bad(monkeypatch):
    shared = engine("tiny")
    for step in ("prefill", "decode"):
        monkeypatch.setattr(shared.runner, step, lambda *_: pytest.fail("a step ran"))
    for bad in ([], [448], [5] * 385):
        refused(lambda bad=bad: shared.generate([[5, 6], bad], 2), "prompt 1")
        refused(lambda bad=bad: shared.logits([[5, 6], bad]), "prompt 1")


@pytest.mark.parametrize(
    "length, new, words",
    [
        (380, 5, ("380 tokens", "5 new", "max_context is 384")),
        (384, None, ("384 tokens", "max_context is 384")),
        (1, 384, ("1 tokens", "384 new", "max_context is 384")),
    ],
)
def test_more_tokens_than_the_context_holds(length, new, words):
    refused(lambda: engine("tiny").generate([[5] * length], new), *words)
    refused(lambda: engine("tiny").stream([5] * length, new), *words)


@pytest.mark.parametrize(
    "settings, word",
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": 2}, "min_p"),
        ({"top_k": -2}, "top_k"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"logprobs": -1}, "logprobs"),
        ({"stop": ""}, "stop"),
        ({"stop_token_ids": list(range(2, 20))}, "stop token ids"),
    ],
    ids=str,
)
def test_sampling_settings(settings, word):
    """The whole list of values is in tests/compile/test_sampling.py."""
    for call in (engine("tiny").generate, engine("tiny").stream):
        refused(lambda call=call: call([5, 6], **({"max_new_tokens": 2} | settings)), word)


def test_a_setting_that_does_not_exist():
    with pytest.raises(TypeError, match="temprature"):
        engine("tiny").generate([[5]], 2, temprature=0.5)


def test_the_engine_works_after_all_this():
    [completion] = engine("tiny").generate([[5, 6]], 2, temperature=0.0, ignore_eos=True)
    assert len(completion.token_ids) == 2

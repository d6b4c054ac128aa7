"""transformers' model on a folder's dequantised weights, against the oracles of other tests, which are made otherwise."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsv4 import eval_transformers
from dsv4.cli import main
from dsv4.eval_parity import parse_side
from tests.model import random_checkpoints
from tests.model.tiny_oracle import TINY, tiny_in_transformers

TEXTS = TINY.parents[1] / "examples" / "eval" / "texts.jsonl"
CPU = torch.device("cpu")


def assert_same_weights(model, oracle):
    got, expected = model.state_dict(), oracle.state_dict()
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name


def test_weights_of_the_shipped_checkpoint():
    for dtype in (torch.float32, torch.bfloat16):
        assert_same_weights(eval_transformers.load(TINY, dtype, CPU), tiny_in_transformers(dtype))


def test_weights_under_other_names():
    folder = random_checkpoints.folder("pro")  # as save_pretrained writes it
    assert_same_weights(eval_transformers.load(folder, torch.float32, CPU), random_checkpoints.oracle("pro"))


def test_scores_are_those_of_the_logits():
    model = random_checkpoints.oracle("pro")
    contexts, continuations = ([5, 6, 7], [8, 9, 10]), ([11, 12, 13], [14])
    scores = eval_transformers.score(model, list(zip(contexts, continuations, strict=True)))
    for context, continuation, score in zip(contexts, continuations, scores, strict=True):
        logits = random_checkpoints.expected("pro", context + continuation).double().log_softmax(-1)
        rows = logits[len(context) - 1 : -1]
        each = [row[token].item() for row, token in zip(rows, continuation, strict=True)]
        assert score.token_logprobs == pytest.approx(each, abs=1e-5) and score.logprob == pytest.approx(sum(each), abs=1e-5)
        assert list(score.best_tokens) == rows.argmax(-1).tolist()
        assert score.greedy == (list(score.best_tokens) == continuation)


@pytest.mark.parametrize("change, words", [("lacks", "lacks tensors for model.layers.1.mlp"), ("more", "no place for")])
def test_a_folder_that_does_not_fit(tmp_path, change, words):
    shutil.copytree(random_checkpoints.nvfp4_folder("small"), tmp_path / "x")
    file = tmp_path / "x" / "model.safetensors"
    tensors = load_file(file)
    if change == "lacks":
        tensors = {name: t for name, t in tensors.items() if not name.startswith("layers.1.ffn.experts.3.w2")}
    else:
        tensors["layers.2.attn_norm.weight"] = tensors["layers.1.attn_norm.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=words):
        eval_transformers.load(tmp_path / "x", torch.float32, CPU)


def test_parity_with_the_engine(capsys):
    sides = [f"{TINY},transformers,dtype=fp32,device=cpu", f"{TINY},dtype=fp32,device=cpu,compile=False"]
    assert main(["eval", "--parity", *sides, "--texts", str(TEXTS), "--items", "2", "--window", "200", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["texts"], report["tokens"], report["agreement"]) == (2, 400, 1.0)
    assert report["max_difference"] < 1e-4


def test_its_side_of_a_comparison():
    assert parse_side("a,transformers,dtype=bf16") == ("a", {"transformers": True, "dtype": "bf16"})
    with pytest.raises(ValueError, match="transformers takes only device, dtype"):
        parse_side("a,compile=False,transformers")

"""dsv4 eval --parity: its arithmetic by hand, and two real configurations of examples/tiny."""

import json
import math

import pytest

from dsv4.cli import main
from dsv4.compile.scoring import Score
from dsv4.eval_parity import compare, parse_side
from tests.model.tiny_oracle import TINY

TEXTS = TINY.parents[1] / "examples" / "eval" / "texts.jsonl"


def score(logprobs, best):
    return Score(sum(logprobs), False, tuple(logprobs), tuple(best))


def test_figures_by_hand():
    a = [score([-1.0, -2.0], [5, 6]), score([-3.0, -1.0], [7, 8])]
    b = [score([-1.0, -2.5], [5, 6]), score([-2.75, -1.0], [7, 9])]
    report = compare(a, b)
    assert (report.texts, report.tokens, report.agreement, report.first_divergence) == (2, 4, 0.75, (1, 1))
    assert (report.mean_difference, report.max_difference) == (0.75 / 4, 0.5)
    assert report.perplexity_a == pytest.approx(math.exp(7 / 4))
    assert report.perplexity_ratio == pytest.approx(report.perplexity_b / report.perplexity_a)
    low, high = report.interval  # both texts twice are the extremes
    assert (low, high) == pytest.approx((math.exp(-0.25 / 2), math.exp(0.5 / 2)))
    assert "most likely token the same  75.0000%" in str(report) and "text 1, token 1" in str(report)
    same = compare(a, a)
    assert (same.agreement, same.max_difference, same.interval, same.first_divergence) == (1, 0, (1, 1), None)


def test_other_tokens_cannot_be_compared():
    with pytest.raises(ValueError, match="different tokens"):
        compare([score([-1.0], [1])], [score([-1.0, -1.0], [1, 2])])


def test_sides():
    assert parse_side("a/b") == ("a/b", {})
    assert parse_side("x,dtype=fp32,compile=False,prefill_chunk=64") == (
        "x", {"dtype": "fp32", "compile": False, "prefill_chunk": 64},
    )  # fmt: skip
    assert parse_side("x,kv=fp8,index=fp4") == ("x", {"kv": "fp8", "index": "fp4"})
    for bad in ("x,dtyp=fp32", "x,compile=no", "x,prefill_chunk=a"):
        with pytest.raises(ValueError, match="--parity"):
            parse_side(bad)


def test_fp32_and_bf16_of_the_shipped_checkpoint(capsys):
    side = f"{TINY},device=cpu,compile=False,prefill_chunk=64"
    command = ["eval", "--parity", f"{side},dtype=fp32", f"{side},dtype=bf16", "--texts", str(TEXTS), "--items", "3"]
    assert main([*command, "--window", "48", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["texts"], report["tokens"]) == (3, 144) and report["agreement"] > 0.9
    assert 0 < report["mean_difference"] < 0.05 and report["perplexity_ratio"] == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--parity", "a", "b"], "--parity needs --texts FILE"),
        (["--parity", "a", "b", "--texts", "nowhere.txt"], "nowhere.txt: No such file"),
        (["--parity", "a", "b", "--texts", __file__, "--items", "0"], "at least 1"),
        (["--parity", "a", "b", "--texts", __file__, "--tasks", "x"], "--parity goes with"),
        (["--parity", "a", "b", "--texts", __file__], "a: no such folder"),
        (["--tasks", "x"], "give --model FOLDER, or --parity A B"),
        (["--model", "a", "--json"], "belong to --parity"),
    ],
)
def test_bad_input_is_one_line(arguments, words, capsys):
    assert main(["eval", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_files_of_texts_that_cannot_be_used(tmp_path, capsys):
    for content in ("{}\n", "", '{"text": ""}\n', "no json"):
        (tmp_path / "x.jsonl").write_text(content)
        assert main(["eval", "--parity", "a", "b", "--texts", str(tmp_path / "x.jsonl")]) == 2
        assert "x.jsonl: expected" in capsys.readouterr().err

"""Whole models: dsv4's own steps, and transformers' with the cache that grows."""

from pathlib import Path

import pytest

from dsv4.compile.explain.model import from_folder
from dsv4.compile.explain.run import explain_callable, explain_model

TINY = str(Path(__file__).parents[3] / "examples" / "tiny")
EXAMPLE = str(Path(__file__).parents[3] / "examples" / "explain_your_own.py")


def test_tiny_is_one_graph_a_step_and_compiles_once():
    prefill, decode = explain_model(TINY, {1, 2, 3}, device="cpu", max_context=512)
    assert prefill.subject.endswith("(prefill)") and decode.subject.endswith("(decode)")
    for report in (prefill, decode):
        assert report.findings() == []
        assert report.verdict.startswith("1 graph, 0 breaks, 0 recompiles over")
        assert [call["compiled"] for call in report.stage(3).data["sweep"]].count(True) == 1
        [graph] = report.stage(2).data["graphs"]
        assert graph["ops"] > 100 and any(path.startswith("layers.*") for path in graph["modules"])
        layers = report.stage(2).data["layers"]
        assert [layer["name"] for layer in layers] == [f"layers.{i}" for i in range(len(layers))] and len(layers) > 1
        assert all(layer["graphs"] == [0] and layer["breaks"] == 0 for layer in layers)
        ops = report.stage(1).data["ops"]
        assert len(ops) >= 8 and all(op["name"].startswith("dsv4::") for op in ops)
        assert all({"CPU", "CUDA"} <= set(op["kernels"]) for op in ops) and any(op["mutates"] for op in ops)
    assert len(decode.stage(3).data["sweep"]) > 8


def test_bad_folder_and_option():
    with pytest.raises(ValueError, match="config"):
        explain_model("/nowhere", {2})
    with pytest.raises(ValueError, match="max_context"):
        from_folder(TINY, max_context=0, device="cpu")
    with pytest.raises(ValueError, match="stages must be some of"):
        explain_model(TINY, {0})


def test_transformers_compiles_again_for_every_length():
    growing = "tests.compile.explain.growing"
    [report] = explain_callable(f"{growing}:decode", f"{growing}:inputs", {3})
    assert all(call["compiled"] for call in report.stage(3).data["sweep"])
    rows = report.findings("recompile")
    assert sum(row.count for row in rows) == 3
    grows = [row for row in rows if row.title == "size changed"]
    assert grows and all(row.source.startswith("def decode") for row in rows)
    assert all("cache.layers[" in row.reason and "index_copy_" in row.hint for row in grows)


def test_the_example():
    """What its docstring says."""
    [broken] = explain_callable(f"{EXAMPLE}:attend", f"{EXAMPLE}:inputs", {2, 3})
    [better] = explain_callable(f"{EXAMPLE}:attend_better", f"{EXAMPLE}:inputs", {2, 3})
    assert [row.title for row in broken.findings("break")] == [
        "tensor value read on the host",
        "branch on a tensor's value",
    ]
    assert "length of a list changed" in [row.title for row in broken.findings("recompile")]
    assert better.findings() == []

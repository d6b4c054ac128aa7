"""The stages of `dsv4 explain` that need a device: capture and the running step, on callables with one fault each and on
the shipped checkpoint."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dsv4.compile.explain.report import Finding, Stage
from dsv4.compile.explain.run import explain_model
from dsv4.compile.explain.subject import Call, Subject
from dsv4.compile.explain.worker import look

TINY = str(Path(__file__).parents[2] / "examples" / "tiny")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def stage_of(number: int, function, *args) -> Stage:
    [stage] = look(Subject("test", function, lambda: [Call(args)], context=torch.no_grad), 0, [number], lambda _: None)
    return stage


def vector() -> Tensor:
    return torch.ones(1024, device="cuda")


def at(finding: Finding, mark: str) -> bool:
    return finding.file == __file__ and mark in finding.source


def plain(x: Tensor) -> Tensor:
    return (x * 2 + 1).relu().sum()


def scaled_by_cpu_scalar(x: Tensor) -> Tensor:
    return x * SCALE  # CPU scalar


SCALE = torch.tensor(3.0)


def copied_every_time(x: Tensor) -> Tensor:
    table = TABLE.to(x.device)  # CPU copy
    return x * table


TABLE = torch.arange(1024.0)


def reads(x: Tensor) -> Tensor:
    n = x.sum().item()  # sync
    return x * n


def changes(x: Tensor) -> Tensor:
    x.add_(1)  # in place
    return x * 2


class Hoard(nn.Module):
    """Keeps all that it makes. It cannot be captured, for a replay would keep nothing."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def forward(self, x: Tensor) -> Tensor:
        self.kept.append(x * 2)
        return x * x.sum().item()


class Stack(nn.Module):
    """Layers that look alike."""

    def __init__(self):
        super().__init__()
        # Drawn on the CPU: a capture that another test has seen fail leaves the device's generator unusable.
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4)).cuda()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def test_plain_function_is_captured():
    stage = stage_of(4, plain, vector())
    assert (stage.status, stage.data["captured"]) == ("ok", True), stage
    assert stage.data["copied_bytes"] == 4096 and stage.data["static_bytes"] == 0


def test_plain_function_runs_clean():
    stage = stage_of(5, plain, vector())
    assert stage.status == "ok" and stage.data["ran"] == "replayed", stage
    assert [stage.data[key] for key in ("syncs", "copies", "allocations")] == [0, 0, 0]
    assert 1 <= stage.data["nodes"] <= 3 and stage.data["kernels"][0]["origin"] == "inductor"
    assert stage.data["ms"] > 0 and len(stage.data["timeline"]) == stage.data["nodes"]


def test_cpu_scalar_in_a_cuda_graph():
    """It is captured, with the value of that moment."""
    stage = stage_of(4, scaled_by_cpu_scalar, vector())
    rows = [finding for finding in stage.findings if finding.title == "CPU tensor"]
    assert len(rows) == 1 and at(rows[0], "# CPU scalar"), stage


@pytest.mark.parametrize("number", [4, 5])
def test_cpu_tensor_in_a_cuda_graph(number):
    stage = stage_of(number, copied_every_time, vector())
    rows = [finding for finding in stage.findings if finding.title in ("CPU tensor", "copy between host and device")]
    assert len(rows) == 1 and at(rows[0], "# CPU copy"), stage
    if number == 5:
        assert stage.data["copies"] >= 1


def test_sync_stops_the_capture():
    stage = stage_of(4, reads, vector())
    assert stage.data["captured"] is False, stage
    assert any(at(finding, "# sync") for finding in stage.findings)


def test_sync_has_its_line():
    stage = stage_of(5, reads, vector())
    rows = [finding for finding in stage.findings if finding.kind == "sync"]
    assert len(rows) == 1 and at(rows[0], "# sync"), stage
    assert stage.data["syncs"] == 1 and stage.data["ran"] == "compiled"


def test_changed_argument():
    stage = stage_of(4, changes, vector())
    assert [finding.title for finding in stage.findings] == ["argument changed in place"], stage
    assert at(stage.findings[0], "# in place")


def test_memory_that_grows():
    stage = stage_of(5, Hoard(), vector())
    assert "memory that grows" in [finding.title for finding in stage.findings], stage


def test_kernels_by_layer():
    stage = stage_of(5, Stack(), torch.ones(8, 64, device="cuda"))
    assert stage.data["nodes_per_layer"] >= 1, stage.data
    assert {row["module"].split(".")[0] for row in stage.data["kernels"]} == {"layers"}


@pytest.mark.parametrize("number, key", [(6, "pairs"), (7, "rungs")])
def test_replayed_step_is_compared_and_timed(number, key):
    stage = stage_of(number, plain, vector())
    assert stage.status == "ok", stage
    names = [row.get("name") or row["b"] for row in stage.data[key]]
    assert names[-1] in ("inductor + CUDA graph", "replayed")


def test_tiny_is_one_graph_and_one_cuda_graph():
    prefill, decode = explain_model(TINY, {2, 3, 4, 5}, time_limit=300)
    print(prefill.verdict, decode.verdict, sep="\n")
    for report in (prefill, decode):
        assert not report.findings("break", "recompile", "sync", "alloc", "copy", "error"), report.findings()
        assert len(report.stage(2).data["graphs"]) == 1
        assert report.stage(4).data["captured"] is True
    step = decode.stage(5).data
    assert step["ran"] == "replayed" and (step["syncs"], step["copies"], step["allocations"]) == (0, 0, 0)
    assert 5 < step["nodes_per_layer"] < 40
    known = [row for row in step["timeline"] if row["module"]]
    assert len(known) > 0.8 * step["nodes"], "kernels without a module"  # the head and sampling lie outside
    assert {row["origin"] for row in step["kernels"]} >= {"dsv4", "inductor"}
    assert not decode.findings("skip")

"""explain end to end, in processes of its own: what it explains can neither end it nor disturb it."""

import torch

import dsv4
from dsv4.compile.explain.report import Report
from dsv4.compile.explain.run import explain_callable
from dsv4.compile.explain.subject import Call, Subject
from dsv4.compile.explain.worker import look
from tests.compile.explain import gallery_ops, hostile  # noqa: F401

HOSTILE = "tests.compile.explain.hostile"


def report_of(name: str, stages: set[int], **limits) -> Report:
    [report] = explain_callable(f"{HOSTILE}:{name}", f"{HOSTILE}:inputs", stages, **limits)
    assert [stage.number for stage in report.stages] == sorted(stages)
    return report


def test_clean_callable():
    report = report_of("fine", {1, 2, 3, 4, 5})
    assert report.subject == f"{HOSTILE}:fine" and report.findings() == []
    assert report.verdict.startswith("1 graph, 0 breaks, 0 recompiles over 4 calls; ")
    assert [stage.status for stage in report.stages[:3]] == ["ok", "ok", "ok"]
    assert report.environment["torch"] == torch.__version__
    assert report.stage(2).data["graphs"][0]["ops"] == 1
    assert Report.from_json(report.to_json()) == report
    if not torch.cuda.is_available():
        assert [stage.summary for stage in report.stages[3:]] == ["skipped: no CUDA device"] * 2


def test_output_of_the_callable_does_not_get_into_ours(capfd):
    assert [finding.title for finding in report_of("prints", {2}).findings()][:1] == ["print"]
    assert capfd.readouterr() == ("", "")


def test_crash_is_a_row():
    report = report_of("crashes", {1, 2})
    [row] = report.findings()
    assert (row.kind, row.title) == ("error", "crash") and "SIGSEGV" in row.reason and "# crashes" in row.source
    assert [stage.status for stage in report.stages] == ["error", "skipped"]
    assert report.verdict == "failed: ops"


def test_hang_is_a_row():
    report = report_of("hangs", {2, 3}, time_limit=1.0)
    [row] = report.findings()
    assert (row.kind, row.title) == ("error", "hang") and "after 1 s" in row.reason
    assert row.source in ("while True:", "pass  # hangs")


def test_input_finds_nobody_to_ask():
    report = report_of("asks", {1, 2})
    [row] = report.findings()
    assert "EOFError" in row.reason and "# asks" in row.source
    assert report.stage(2).status == "skipped"


def test_exit_is_a_row():
    messages = []
    first, second = look(Subject("exits", hostile.exits, lambda: [Call(hostile.inputs())]), 0, [1, 2], messages.append)
    [row] = first.findings
    assert "SystemExit: bye" in row.reason and "# exits" in row.source
    assert (first.status, second.status) == ("error", "skipped") and messages == [{"begin": [0, 1]}]


def test_the_stages_after_a_crash_go_on():
    """Each stage that ends its process is lost alone: here the third, for which the callable is called too often."""
    report = report_of("dies_later", {1, 3, 4})
    assert [stage.status for stage in report.stages][0::2] == ["ok", "skipped" if not torch.cuda.is_available() else "ok"]
    [row] = report.findings()
    assert row.title == "crash" and "exit status 7" in row.reason and report.stage(3).status == "error"


def test_what_does_not_compile_is_told_once():
    [report] = explain_callable("tests.compile.explain.gallery_breaks:tries", f"{HOSTILE}:inputs", {2, 3, 6})
    assert [row.title for row in report.findings()] == ["compilation fails"]
    assert [stage.status for stage in report.stages] == ["found", "skipped", "skipped"]
    assert "0 graphs, 1 break" in report.verdict


def test_explain_from_python_disturbs_nothing():
    """A closure over a module, which no other process could import; what is compiled and random here stays as it is."""
    weight = torch.nn.Parameter(torch.ones(4))
    calls = []

    def closure(x):
        calls.append(1)
        return torch.ops.gallery.double(x), weight

    seed, counters = torch.random.get_rng_state(), {k: dict(v) for k, v in torch._dynamo.utils.counters.items()}
    report = dsv4.explain(closure, torch.ones(4))
    assert [stage.number for stage in report.stages] == [1, 2, 3, 4, 5, 6, 7]
    assert "test_explain_from_python_disturbs_nothing.<locals>.closure" in report.subject
    assert report.stage(3).findings[0].title == "length of a list changed"
    assert calls == [] and torch.equal(torch.random.get_rng_state(), seed)
    assert {k: dict(v) for k, v in torch._dynamo.utils.counters.items()} == counters

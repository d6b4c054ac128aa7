"""Old against new: what is worse, what is better, what cannot be compared."""

from dataclasses import replace

import pytest

from dsv4.compile.explain.baseline import compare, comparison_text
from dsv4.compile.explain.report import Report, Stage
from tests.compile.explain.reports import broken, clean, on_cpu


def with_stage(report: Report, stage: Stage) -> Report:
    return replace(report, stages=tuple(stage if old.number == stage.number else old for old in report.stages))


def with_data(report: Report, number: int, **changes) -> Report:
    stage = report.stage(number)
    return with_stage(report, replace(stage, data=stage.data | changes))


def told(old: Report, new: Report) -> list[tuple[str, str, str]]:
    return [(change.direction, change.kind, change.text) for change in compare([old], [new])]


@pytest.mark.parametrize("make", [broken, clean, on_cpu])
def test_nothing_changes_against_itself(make):
    assert compare([make()], [make()]) == []
    assert comparison_text([]) == "against the baseline: 0 worse, 0 better, 0 not compared"


def test_findings_come_go_and_multiply():
    new = broken()
    breaks = new.stage(2)
    once = replace(breaks.findings[0], count=45)
    old = with_stage(new, replace(breaks, findings=(once,)))
    first = "break: branch on the value of a tensor in layers.*.attn at my_model/attention.py:88 (x46, was x45)"
    second = "break: call of print in layers.3.ffn at my_model/moe.py:31"
    assert told(old, new) == [("worse", "break", first), ("worse", "break", second)]
    assert [line[0] for line in told(new, old)] == ["better", "better"]
    assert told(new, old)[1][2] == f"gone: {second}"


def test_findings_are_known_again_after_an_edit_and_in_another_folder():
    new = broken()
    breaks = new.stage(2)
    moved = tuple(
        replace(f, line=f.line + 9, file=f"/ci/build/{f.file}", source="    " + f.source) for f in breaks.findings
    )
    assert told(new, with_stage(new, replace(breaks, findings=moved))) == []


def test_notes_are_no_findings():
    new = clean()
    assert told(with_stage(new, replace(new.stage(1), findings=())), new) == []


@pytest.mark.parametrize(
    "number, name, factor, text",
    [
        (5, "nodes", 2, "kernels a step: 1124, was 562"),
        (5, "bytes", 1.1, "bytes of a step: 12.6 GB, was 11.4 GB"),
        (5, "ms", 1.06, "a step: 4.33 ms, was 4.09 ms (more than 5% apart)"),
    ],
)
def test_numbers(number, name, factor, text):
    old = clean()
    new = with_data(old, number, **{name: old.stage(number).data[name] * factor})
    assert told(old, new) == [("worse", "number", text)]
    assert [line[0] for line in told(new, old)] == ["better"]


def test_more_graphs_and_copies():
    old = clean()
    more = with_data(old, 2, graphs=[{"id": i, "ops": 3, "modules": []} for i in range(3)])
    assert told(old, more) == [("worse", "number", "3 graphs, were 1")]
    assert told(old, with_data(old, 4, copied_bytes=4096)) == [
        ("worse", "number", "copied before each replay: 4.1 KB, was 0 B")
    ]


def test_times_have_a_tolerance_and_need_the_same_device():
    old = clean()
    slower = with_data(old, 5, ms=old.stage(5).data["ms"] * 1.04)
    assert told(old, slower) == []
    elsewhere = replace(with_data(old, 5, ms=99.0), environment=old.environment | {"device": "NVIDIA H100"})
    assert told(old, elsewhere) == [("not compared", "note", "times: now on NVIDIA H100, the baseline was on NVIDIA H200")]


def test_a_rung_that_fails():
    old = clean()
    rungs = [dict(rung) for rung in old.stage(7).data["rungs"]]
    rungs[2] |= {"ok": False, "error": "RuntimeError: no"}
    new = with_data(old, 7, rungs=rungs)
    assert told(old, new) == [("worse", "number", "the rung inductor fails: RuntimeError: no")]
    assert told(new, old) == [("better", "number", "the rung inductor runs")]


def test_stages_that_only_one_of_them_ran():
    whole, cpu = clean(), on_cpu()
    assert ("not compared", "note", "stage 5 (step): skipped, was ok") in told(whole, cpu)
    assert ("not compared", "note", "stage 4 (capture): ok, was skipped") in told(cpu, whole)
    failed = with_stage(whole, Stage(2, "error", "the stage met an exception"))
    assert told(whole, failed) == [("worse", "error", "stage 2 (graphs): error, was ok")]
    only_two = replace(whole, stages=(whole.stage(2),))
    assert told(whole, only_two) == []  # the stages that were not asked for


def test_other_subjects():
    other = replace(clean(), subject="other:step")
    with pytest.raises(ValueError, match=r"reports on other:step, and not on models/V4-Flash \(decode\)"):
        compare([other], [clean()])
    changes = compare([clean()], [clean(), other])
    assert [(change.subject, change.direction) for change in changes] == [("other:step", "not compared")]


def test_text_begins_with_the_bad_news():
    old = clean()
    new = with_data(with_data(old, 5, nodes=500), 4, copied_bytes=10)
    assert comparison_text(compare([old], [new])).splitlines() == [
        "against the baseline: 1 worse, 1 better, 0 not compared",
        f"  worse: {old.subject}: copied before each replay: 10 B, was 0 B",
        f"  better: {old.subject}: kernels a step: 500, was 562",
    ]

"""Reports as data: to JSON and back, refusals, and what is worked out from them."""

import json
from dataclasses import replace

import pytest

from dsv4.compile.explain.report import KINDS, STAGES, Finding, Report, Stage
from dsv4.compile.explain.summary import facts, fold, gaps, kernel_groups, part, time_text, where
from dsv4.model.sizes import size_text
from tests.compile.explain.reports import KERNELS, broken, clean, on_cpu, step_data


@pytest.mark.parametrize("make", [broken, clean, on_cpu])
def test_json_and_back(make, tmp_path):
    report = make()
    file = tmp_path / "report.json"
    file.write_text(json.dumps({"reports": [report.to_json(), report.to_json()]}))
    assert Report.load(str(file)) == [report, report]


@pytest.mark.parametrize(
    "content",
    ["", "[1]", "{}", '{"reports": 3}', '{"reports": [{"subject": "x"}]}', '{"reports": [{"stages": [{"number": 1}]}]}'],
)
def test_other_files_are_refused(content, tmp_path):
    file = tmp_path / "report.json"
    file.write_text(content)
    with pytest.raises(ValueError, match="--json wrote"):
        Report.load(str(file))


def test_findings_by_kind():
    report = broken()
    assert [finding.title for finding in report.findings("sync", "alloc")] == [
        ".item() waits for the device",
        "allocates 2.0 MB in each step",
    ]
    assert {finding.kind for finding in report.findings()} <= set(KINDS)
    assert report.stage(4).name == "capture" and report.stage(8) is None
    assert [stage.number for stage in report.stages] == list(STAGES)


def test_facts_of_a_good_and_a_bad_step():
    assert {fact.good for fact in facts(clean())} == {True}
    said = {fact.text: fact.good for fact in facts(broken())}
    bad = (
        "47 graphs",
        "2 breaks in 47 places",
        "3 recompiles in 5 calls",
        "not captured",
        "1 sync",
        "2 copies",
        "1 allocation",
    )
    for text in (*bad, "1 op at fault", "agreement failed", "3 of 4 rungs run"):
        assert said[text] is False, said
    assert said["601 kernels"] is True
    skipped = [fact for fact in facts(on_cpu()) if fact.good is None]
    assert [(fact.text, fact.stage) for fact in skipped] == [("capture skipped", 4), ("step skipped", 5)]


def test_a_stage_without_data_still_has_facts():
    report = Report("x", "", tuple(Stage(number, "found", "") for number in STAGES))
    assert {fact.stage for fact in facts(report)} == set(STAGES) - {5, 7}  # without numbers these say nothing


@pytest.mark.parametrize(
    "module, folded, grouped",
    [
        ("layers.3.attn.wq_b", "layers.*.attn.wq_b", "layers.*.attn"),
        ("layers.3.ffn.experts.17.w1", "layers.*.ffn.experts.*.w1", "layers.*.ffn"),
        ("model.layers.12", "model.layers.*", "model.layers.*"),
        ("layers.*.attn.wq_b", "layers.*.attn.wq_b", "layers.*.attn"),
        ("conv2d.weight_1", "conv2d.weight_1", "conv2d.weight_1"),
        ("", "", "outside any module"),
    ],
)
def test_folding(module, folded, grouped):
    assert fold(module) == folded
    assert part(module) == grouped


def test_kernels_add_up_over_layers():
    one_by_one = [
        {"name": name, "module": f"layers.{i}.{module}", "origin": origin, "count": 1, "us": us}
        for i in range(5)
        for name, module, origin, us in KERNELS
    ]
    groups = kernel_groups(one_by_one)
    assert [group.name for group in groups] == ["layers.*.ffn", "layers.*.attn", "layers.*.attn_hc", "layers.*.ffn_hc"]
    assert sum(group.count for group in groups) == 5 * len(KERNELS)
    assert groups[0].us == pytest.approx(5 * (3.0 + 21.5 + 12.1 + 1.6))
    assert groups[0].kernels[0] == pytest.approx(
        {"name": "moe_gate_up_kernel", "module": "layers.*.ffn.experts", "origin": "dsv4", "count": 5, "us": 107.5}
    )
    folded = [row for row in step_data(5)["kernels"] if row["module"].startswith("layers")]
    assert [group.name for group in kernel_groups(folded)] == [group.name for group in groups]


def test_kernels_without_modules_are_grouped_by_origin():
    rows = [{"name": f"k{i}", "module": "", "origin": "ab"[i % 2], "count": 1, "us": 1.0 + i} for i in range(4)]
    assert [(group.name, group.us) for group in kernel_groups(rows)] == [("b", 6.0), ("a", 4.0)]


def test_gaps():
    """Two streams: what ends last counts, and a kernel inside another ends no gap."""
    times = [("a", 0, 10), ("b", 2, 3), ("c", 14, 1), ("a", 15, 1), ("c", 18, 1)]
    line = [{"name": name, "module": "", "start_us": float(start), "us": float(us)} for name, start, us in times]
    [gap] = gaps(line, 5)
    assert (gap.before, gap.after, gap.count, gap.us) == ("a", "c", 2, 6.0)
    assert gaps(line[:2], 5) == [] and gaps([], 5) == []


def test_places(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    finding = Finding("break", "", file=str(tmp_path / "a" / "b.py"), line=7)
    assert where(finding) == "a/b.py:7"
    assert where(replace(finding, file="/elsewhere/b.py")) == "/elsewhere/b.py:7"
    assert where(Finding("break", "")) == ""


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0.0, "0.0 us"),
        (1.25e-6, "1.2 us"),
        (5e-4, "500.0 us"),
        (1.234e-3, "1.23 ms"),
        (0.0412, "41.2 ms"),
        (12.34, "12.3 s"),
        (600, "600 s"),
    ],
)
def test_times(seconds, text):
    assert time_text(seconds) == text


def test_sizes():
    assert [size_text(n) for n in (0, 999, 65_536, 11.43e9, 2e12)] == ["0 B", "999 B", "65.5 KB", "11.4 GB", "2.00 TB"]

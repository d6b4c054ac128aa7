"""The text: all of the report is in it, in 100 columns, verdict first."""

import re

import pytest

from dsv4.compile.explain.report import Finding, Report, Stage
from dsv4.compile.explain.text import WIDTH, text
from tests.compile.explain.reports import HOSTILE, broken, clean, on_cpu


def words(said: str) -> str:
    """Without the line breaks that wrapping made."""
    return re.sub(r"\s+", " ", said)


@pytest.mark.parametrize("make", [broken, clean, on_cpu])
def test_complete(make):
    report = make()
    said = text([report])
    assert said.startswith(f"{report.subject}: {report.verdict[:40]}")
    assert max(map(len, said.splitlines())) <= WIDTH
    flat = words(said)
    for stage in report.stages:
        assert f"{stage.number} {stage.name}" in said and words(stage.summary) in flat
    for finding in report.findings():
        for part in (finding.title, finding.reason, finding.hint, finding.source, finding.module):
            assert words(part) in flat
        assert not finding.file or f"{finding.file}:{finding.line}" in said
    for value in report.environment.values():
        assert isinstance(value, dict) or str(value) in flat


def test_folded_counts_and_numbers():
    said = text([broken()])
    assert "break x46: branch on the value of a tensor in layers.*.attn" in said
    assert "layers.3: graphs 3 to 4, 2 breaks" in said and "layers.4 to layers.45: graphs 4 to 46, 1 break each" in said
    assert "reused tokens [1, 128] x2" in words(said)
    assert "compiled tokens [1, 130], tokens [1, 131], tokens [1, 200]" in words(said)
    assert "65.5 KB copied before each replay" in said
    assert "601 kernels, 13 a layer; 720.0 us between kernels" in said
    assert re.search(r"989\.0 +27\.1% +46 +dsv4 +moe_gate_up_kernel +experts", said)
    assert re.search(r"inductor with a CUDA graph +failed: RuntimeError: capture failed", said)
    assert words(HOSTILE) in words(said)
    said = text([clean()])
    assert "layers.0 to layers.42: graph 0" in said
    assert "eager against compiled: at most 0.0019 (relative 0.0042)" in said
    assert "compiled against replayed: equal bit for bit" in said


def test_verdicts_come_first():
    lines = text([on_cpu(), broken()]).splitlines()
    assert lines[0].startswith(on_cpu().subject) and lines[1].startswith("my_model:step: 47 graphs")


def test_colours_only_when_asked():
    assert "\x1b" not in text([broken()])
    plain = re.sub(r"\x1b\[\d+m", "", text([broken()], colour=True))
    assert plain == text([broken()])


def test_code_in_a_hint_keeps_its_lines():
    finding = Finding("op", "no fake", hint="Register one:\n  @register_fake('a::b')\n  def _(x):\n      return x")
    said = text([Report("x", "1 op", (Stage(1, "found", "", findings=(finding,)),))])
    assert "            @register_fake('a::b')\n" in said.replace("              @", "            @")
    assert said.count("\n") > 6


def test_a_report_of_nothing():
    assert text([Report("x", "nothing", ())]).strip() == "x: nothing"


def test_long_details_are_cut_and_say_so():
    finding = Finding("break", "x", details={"torch": "\n".join(f"line {i}" for i in range(20)), "modules": ["a.0", "a.1"]})
    said = text([Report("x", "1 break", (Stage(2, "found", "", findings=(finding,)),))])
    assert "line 4\n" in said and "line 5" not in said and "(15 more lines: --json, --html)" in said
    assert "modules: a.*\n" in said + "\n"

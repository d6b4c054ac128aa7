"""`dsv4 explain` through the front door, with an analysis that gives reports made by hand."""

import json
from dataclasses import replace

import pytest

from dsv4 import cli, explain_command
from dsv4.compile.explain import run
from dsv4.compile.explain.report import STAGES, Report, Stage
from tests.compile.explain.reports import broken, clean, on_cpu


@pytest.fixture
def explain(monkeypatch, capsys, tmp_path):
    """Runs the command in an empty folder on given reports: (status, stdout, stderr). `explain.asked` is what it ran."""

    def command(*arguments: str, reports=None):
        def answer(*args, **kwargs):
            command.asked = (args, kwargs)
            return [clean()] if reports is None else list(reports)

        monkeypatch.setattr(run, "explain_callable", answer)
        monkeypatch.setattr(run, "explain_model", answer)
        status = cli.main(["explain", *arguments])
        return status, *capsys.readouterr()

    monkeypatch.chdir(tmp_path)
    return command


def save(path, *reports: Report) -> str:
    path.write_text(json.dumps({"reports": [report.to_json() for report in reports]}))
    return str(path)


def test_text(explain):
    status, out, err = explain("my_model:step")
    assert (status, err) == (0, "") and out.startswith(clean().subject) and "7 ladder" in out
    assert explain.asked == (("my_model:step", None, set(STAGES)), {"time_limit": 600.0})


def test_what_is_passed_on(explain):
    explain("my_model.py:step", "--inputs", "data:inputs", "--stages", "1,3", "--time-limit", "5")
    assert explain.asked == (("my_model.py:step", "data:inputs", {1, 3}), {"time_limit": 5.0})
    explain("--model", "folder")
    assert explain.asked == (("folder", set(STAGES)), {"time_limit": 600.0})
    explain("--model", "folder", "--device", "cpu", "--dtype", "fp32", "--max-context", "64", "--max-batch", "2")
    options = {"device": "cpu", "dtype": "fp32", "max_context": 64, "max_batch": 2}
    assert explain.asked == (("folder", set(STAGES)), {"time_limit": 600.0, **options})


def test_json_instead_of_text_and_beside_it(explain, tmp_path):
    status, out, _ = explain("my_model:step", "--json", reports=(broken(), clean()))
    assert status == 0 and [Report.from_json(report) for report in json.loads(out)["reports"]] == [broken(), clean()]
    status, out, _ = explain("my_model:step", "--json", "out.json", "--html", "out.html", reports=(broken(),))
    assert status == 0 and out.startswith("my_model:step: 47 graphs")
    assert Report.load("out.json") == [broken()]
    html = (tmp_path / "out.html").read_text(encoding="utf-8")
    assert html.startswith("<!doctype html>") and html.rstrip().endswith("</html>")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.html", "out.json"]  # nothing is left aside


def test_files_are_written_before_the_text(explain, monkeypatch, tmp_path):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(explain_command, "text", interrupted)
    assert explain("my_model:step", "--json", "out.json", "--html", "out.html")[0] == 130
    assert Report.load("out.json") == [clean()] and (tmp_path / "out.html").exists()


def test_a_link_stays_a_link(explain, tmp_path):
    (tmp_path / "real").mkdir()
    link = tmp_path / "out.json"
    link.symlink_to(tmp_path / "real" / "report.json")
    assert explain("my_model:step", "--json", "out.json")[0] == 0
    assert link.is_symlink() and Report.load(str(tmp_path / "real" / "report.json")) == [clean()]


@pytest.mark.parametrize(
    "kinds, status, reason",
    [
        ("break", 1, "break found, 47 in all"),
        ("recompile", 1, "recompile found, 3 in all"),
        ("skip", 1, "skip found, 46 in all"),
        ("sync", 1, "sync found, 1 in all"),
        ("alloc", 1, "alloc found, 1 in all"),
        ("sync,break", 1, "break found, 47 in all"),
    ],
)
def test_fail_on(explain, kinds, status, reason):
    found, _, err = explain("my_model:step", "--fail-on", kinds, reports=(broken(),))
    assert found == status and f"dsv4: failed: my_model:step: {reason}" in err
    assert explain("my_model:step", "--fail-on", kinds, reports=(clean(),))[0] == 0


def test_without_fail_on_findings_fail_nothing(explain):
    assert explain("my_model:step", reports=(broken(),))[0] == 0


def test_fail_on_when_nobody_looked(explain):
    """A failed stage fails; a skipped one warns."""
    status, _, err = explain("my_model:step", "--fail-on", "sync", reports=(on_cpu(),))
    assert status == 0 and "--fail-on sync was not checked: needs a CUDA device" in err
    failed = replace(on_cpu(), stages=(Stage(2, "error", "the stage met an exception"),))
    status, _, err = explain("my_model:step", "--fail-on", "break", reports=(failed,))
    assert status == 1 and "break is not known, since stage 2 did not run" in err
    raises = Stage(1, "error", "the callable itself raises"), Stage(2, "skipped", "skipped: the callable itself raises")
    for stages in ((), raises):
        assert explain("my_model:step", "--fail-on", "break", reports=(replace(failed, stages=stages),))[0] == 1


def test_baseline(explain, tmp_path):
    new = broken()
    breaks = new.stage(2)
    fewer = replace(breaks, findings=breaks.findings[:1])
    old = replace(new, stages=tuple(fewer if stage.number == 2 else stage for stage in new.stages))
    file = save(tmp_path / "old.json", old)
    status, out, err = explain("my_model:step", "--baseline", file, reports=(new,))
    assert status == 1 and "worse: my_model:step: break: call of print" in out and "dsv4: failed:" in err
    assert explain("my_model:step", "--baseline", file, reports=(old,))[0] == 0  # as many breaks as before
    status, out, err = explain("my_model:step", "--baseline", file, "--json", reports=(new,))
    assert status == 1 and "worse:" in err and json.loads(out)


def test_slower_is_shown_and_fails_nothing(explain, tmp_path):
    old = clean()
    slow = replace(old.stage(5), data=old.stage(5).data | {"ms": 99.0})
    new = replace(old, stages=tuple(slow if stage.number == 5 else stage for stage in old.stages))
    status, out, _ = explain("my_model:step", "--baseline", save(tmp_path / "old.json", old), reports=(new,))
    assert status == 0 and "worse: models/V4-Flash (decode): a step: 99.0 ms, was 4.09 ms" in out


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], "expected MODULE:CALLABLE or --model FOLDER"),
        (["--json", "my_model:step"], "so put --json last"),
        (["my_model"], "a module or file, a colon and a name"),
        ([":step"], "a module or file, a colon and a name"),
        (["my_model:"], "a module or file, a colon and a name"),
        (["my_model:step", "--inputs", "data"], "--inputs"),
        (["my_model:step", "--model", "folder"], "expected one of them"),
        (["--model", "folder", "--inputs", "a:b"], "--inputs belongs to"),
        (["my_model:step", "--device", "cpu"], "--device belongs to"),
        (["my_model:step", "--max-batch", "2"], "--max-batch belongs to"),
        (["my_model:step", "--stages", "1,8"], "from 1 to 7"),
        (["my_model:step", "--stages", ""], "from 1 to 7"),
        (["my_model:step", "--fail-on", "breaks"], "expected some of break,recompile,skip,sync,alloc"),
        (["my_model:step", "--fail-on", ""], "expected some of"),
        (["my_model:step", "--stages", "1,2", "--fail-on", "sync"], "needs stage 5"),
        (["my_model:step", "--time-limit", "0"], "--time-limit"),
        (["my_model:step", "--time-limit", "nan"], "--time-limit"),
        (["my_model:step", "--html", "no/such/folder.html"], "does not exist"),
        (["my_model:step", "--json", "no/such/folder.json"], "does not exist"),
        (["my_model:step", "--html", "/dev/null"], "no regular file"),
        (["my_model:step", "--baseline", "none.json"], "No such file"),
        (["my_model:step", "--baseline", "page.html"], "is not JSON"),
        (["my_model:step", "--nonsense"], "unrecognized arguments"),
    ],
)
def test_refusals(explain, tmp_path, arguments, words):
    (tmp_path / "page.html").write_text("<!doctype html>")
    status, out, err = explain(*arguments)
    assert (status, out) == (2, "") and words in err and err.count("\n") == 1
    assert not hasattr(explain, "asked")  # before anything runs


def test_another_baseline_is_refused_after_the_report_is_out(explain, tmp_path):
    file = save(tmp_path / "old.json", broken())
    status, out, err = explain("my_model:step", "--baseline", file, "--json", "new.json")
    assert status == 2 and out.startswith(clean().subject) and "baseline reports on my_model:step" in err
    assert Report.load("new.json") == [clean()]


def test_for_real(monkeypatch, capsys, tmp_path):
    """The analysis itself, on a step with one break and on a name that is not there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_model.py").write_text(
        "import torch\n\n\ndef step(x):\n    if x.sum() > 0:\n        x = x * 2\n    return x + 1\n\n\n"
        "def inputs():\n    return (torch.ones(3),)\n"
    )
    command = ["explain", "my_model.py:step", "--inputs", "my_model.py:inputs", "--stages", "2"]
    assert cli.main([*command, "--fail-on", "break", "--html", "out.html", "--json", "out.json"]) == 1
    out, err = capsys.readouterr()
    assert "1 break" in out.splitlines()[0] and "at    my_model.py:5\n            if x.sum() > 0:" in out
    assert "dsv4: failed: my_model.py:step: break found" in err
    assert "my_model.py:5" in (tmp_path / "out.html").read_text(encoding="utf-8")
    [report] = Report.load("out.json")
    assert [(finding.kind, finding.line) for finding in report.findings()] == [("break", 5)]
    assert cli.main([*command[:1], "my_model.py:stop", *command[2:]]) == 2
    assert capsys.readouterr().err.count("\n") == 1

"""The gallery: each broken callable has exactly its row, at its line, with the hint by which its twin is written; and the
twin has none. All run in one other process, since torch's caches belong to the tests around."""

import functools
import inspect
import json
import subprocess
import sys

import pytest
from torch import nn

from tests.compile.explain import gallery  # noqa: F401
from tests.compile.explain.gallery_case import CASES, Case


@functools.cache
def found() -> dict:
    done = subprocess.run([sys.executable, "-m", "tests.compile.explain.gallery"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def marked_line(one: Case) -> tuple[str, int]:
    """File and line of the `# row` in a case's broken callable."""
    function = one.broken if inspect.isroutine(one.broken) else type(one.broken)
    if one.name == "print in each layer":
        function = type(one.broken.layers[0]["attn"])
    if isinstance(one.broken, nn.Sequential):
        function = type(one.broken[0])
    lines, first = inspect.getsourcelines(function)
    [line] = [first + i for i, text in enumerate(lines) if "# row" in text]
    return inspect.getsourcefile(function), line


def test_it_is_large_enough():
    assert len([one for one in CASES.values() if one.broken is not None]) >= 20
    assert set(found()) == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_broken_has_its_row_and_twin_has_none(name):
    one, rows = CASES[name], found()[name]
    assert rows["fixed"] == []
    if one.broken is None:
        return
    [row] = rows["broken"]
    assert (row["kind"], row["title"]) == (one.kind, one.title)
    assert (row["file"], row["line"]) == marked_line(one)
    assert "# row" in row["source"] and row["reason"].endswith(".")
    assert one.hint in row["hint"]


def test_repeated_layers_are_one_row():
    [row] = found()["print in each layer"]["broken"]
    assert (row["module"], row["count"]) == ("layers.*.attn", 3)


def test_the_first_module_that_differs_is_named():
    [row] = found()["change that gets lost in a layer"]["broken"]
    assert row["module"] == "1" and "first in 1" in row["reason"]


def test_a_value_that_changes_at_every_call_is_one_row():
    [row] = found()["counter in a module"]["broken"]
    assert row["count"] == 3 and "self.calls" in row["reason"]

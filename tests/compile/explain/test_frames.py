"""Whose line it is, and which module runs it."""

import inspect
import os
import traceback

import pytest
import torch
from torch import nn

from dsv4.compile.explain import graphs
from dsv4.compile.explain.frames import (
    Place,
    Visits,
    definition,
    fold,
    innermost,
    is_library,
    parse_stack,
    place_of_error,
    place_of_function,
)

HERE = __file__


def test_libraries_are_not_the_users_code():
    for file in (torch.__file__, os.__file__, graphs.__file__, "<string>", ""):
        assert is_library(file), file
    for file in (HERE, pytest.__file__, "/somewhere/model.py"):
        assert not is_library(file), file


def test_innermost_line_below_our_own():
    """What called explain is not explained; a library that the code calls is not its line."""
    stack = [
        Place("/app/main.py", 3),
        Place(graphs.__file__, 90),
        Place("/app/model.py", 7),
        Place(os.__file__, 5),
    ]
    assert innermost(stack) == Place("/app/model.py", 7)
    assert innermost(stack[:2]) is None and innermost([]) is None
    assert innermost(stack[3:]) == Place(os.__file__, 5)  # better than nothing


def test_stacks_in_text():
    ordinary = 'Traceback:\n  File "/a/b.py", line 3, in f\n    f(x)\n  File "/a/c.py", line 4, in <module>\n'
    assert parse_stack(ordinary) == [Place("/a/b.py", 3, "f"), Place("/a/c.py", 4, "<module>")]
    dumped = 'Current thread 0x1 (most recent call first):\n  File "/a/c.py", line 4 in g\n  File "/a/b.py", line 3 in f\n'
    assert parse_stack(dumped) == [Place("/a/b.py", 3, "f"), Place("/a/c.py", 4, "g")]
    assert parse_stack("nothing of the kind") == []


def test_place_of_an_error():
    try:
        torch.ones(2) + torch.ones(3)
    except RuntimeError as error:
        line = traceback.extract_tb(error.__traceback__)[0].lineno
        assert place_of_error(error) == Place(HERE, line, "test_place_of_an_error")


@torch.no_grad()
def decorated(x):
    return x


def test_place_of_a_function_is_its_def_line():
    assert place_of_function(decorated).source == "def decorated(x):"
    assert place_of_function(nn.Linear(1, 1)).source.startswith("def forward")
    assert place_of_function(print) is None
    assert definition(Place("/no/such/file.py", 5)) == Place("/no/such/file.py", 5)


class Member(nn.Module):
    def __init__(self, loud: bool):
        super().__init__()
        self.loud = loud

    def forward(self, x):
        if self.loud:
            x = x + 1  # visited
        return x


def test_visits_count_modules_that_run_a_line():
    model = nn.Sequential(Member(True), Member(False), Member(True))
    names = {id(module): path for path, module in model.named_modules()}
    lines, first = inspect.getsourcelines(Member)
    [place] = [Place(HERE, first + i) for i, text in enumerate(lines) if "# visited" in text]
    with Visits([place], names) as visits:
        model(torch.ones(1))
        model(torch.ones(1))
    assert visits.counts == {(HERE, place.line): {"0": 2, "2": 2}}


@pytest.mark.parametrize(
    "paths, folded",
    [
        (["layers.0.attn", "layers.1.attn"], "layers.*.attn"),
        (["layers.3.attn"], "layers.3.attn"),
        (["layers.0.attn", "layers.0.ffn"], "layers.0.attn, layers.0.ffn"),
        (["a.0.b.1", "a.0.b.2"], "a.0.b.*"),
        (["head", "head"], "head"),
        ([], ""),
    ],
)
def test_fold(paths, folded):
    assert fold(paths) == folded

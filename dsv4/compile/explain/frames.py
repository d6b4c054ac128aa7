"""Whose code a stack is in: the file and line that a user can change, and the module that runs there."""

import inspect
import linecache
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FrameType

import torch
from torch import nn

_HERE = os.path.dirname(os.path.abspath(__file__))
_TORCH = os.path.dirname(os.path.abspath(torch.__file__))
_STDLIB = sysconfig.get_path("stdlib")
_PACKAGES = sysconfig.get_path("purelib")


@dataclass(frozen=True)
class Place:
    """One line of one file, inside one function."""

    file: str
    line: int
    function: str = ""

    @property
    def source(self) -> str:
        """The line's text, "" if the file cannot be read."""
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def where(place: Place | None) -> tuple[str, int, str]:
    """A place as the file, line and source of a finding."""
    return (place.file, place.line, place.source) if place is not None else ("", 0, "")


def is_library(file: str) -> bool:
    """Whether a file belongs to torch, the standard library or this package, or is no file at all."""
    if not file or file.startswith("<"):
        return True
    if os.path.dirname(file) == _HERE or file.startswith(_TORCH + os.sep):
        return True
    # Installed packages often lie inside the standard library's folder; they are as good as the user's own code.
    return file.startswith(_STDLIB + os.sep) and not file.startswith(_PACKAGES + os.sep)


def user_places(places: Iterable[Place]) -> list[Place]:
    """Of a stack, outermost first, the frames of the explained code: those below this package's own, without libraries."""
    places = list(places)
    own = [i for i, place in enumerate(places) if os.path.dirname(place.file) == _HERE]
    inside = places[own[-1] + 1 :] if own else places
    return [place for place in inside if not is_library(place.file)] or inside[-1:]


def innermost(places: Iterable[Place]) -> Place | None:
    """The innermost line of the explained code in a stack, None for an empty stack."""
    found = user_places(places)
    return found[-1] if found else None


def places_of(stack: Iterable[traceback.FrameSummary]) -> list[Place]:
    """A stack of the traceback module as places."""
    return [Place(frame.filename, frame.lineno or 0, frame.name) for frame in stack]


def parse_stack(text: str) -> list[Place]:
    """The places in text that has the form of a traceback, or of a dump by faulthandler (innermost first)."""
    found = [
        Place(file, int(line), function)
        for file, line, function in re.findall(r'^\s*File "(.+?)", line (\d+),? in (.+?)\s*$', text, re.MULTILINE)
    ]
    return found[::-1] if "most recent call first" in text else found


def place_of_error(error: BaseException) -> Place | None:
    """Where in the explained code an exception comes from. What torch.compile raises while tracing carries the traced
    code's stack, which is not Python's."""
    traced = getattr(error, "real_stack", None)
    if traced:
        return innermost(places_of(traced))
    raised = places_of(traceback.extract_tb(error.__traceback__))
    return innermost(raised)


def current_place() -> Place | None:
    """The innermost line of the explained code that is running, None where only libraries run."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and os.path.dirname(frame.f_code.co_filename) == _HERE:
        frame = frame.f_back
    while frame is not None and os.path.dirname(frame.f_code.co_filename) != _HERE:  # there the explained code ends
        if not is_library(frame.f_code.co_filename):
            return Place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return None


def place_of_function(function: Callable) -> Place | None:
    """Where a callable is defined: its `def` line, or that of forward or __call__."""
    if isinstance(function, nn.Module):
        function = function.forward
    function = getattr(function, "func", function)  # functools.partial
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    if code is None and callable(function):
        code = getattr(type(function).__call__, "__code__", None)
    return definition(Place(code.co_filename, code.co_firstlineno, code.co_name)) if code else None


def definition(place: Place) -> Place:
    """The `def` line below the decorators at which a function's code begins for Python."""
    line = place.line
    while linecache.getline(place.file, line).lstrip().startswith("@"):
        line += 1
    return Place(place.file, line, place.function)


def module_at(frame: FrameType | None, names: dict[int, str]) -> str | None:
    """Path of the innermost module whose method is running in this frame or a caller; names: id(module) -> path."""
    while frame is not None:
        code = frame.f_code
        owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(owner, nn.Module) and id(owner) in names:
            return names[id(owner)]
        frame = frame.f_back
    return None


class Visits:
    """Counts, while it is active, in how many calls of a function a line is run, and by which modules. Python's own
    tracing: not for compiled code."""

    def __init__(self, places: Iterable[Place], names: dict[int, str]):
        self._lines: dict[str, set[int]] = {}
        for place in places:
            self._lines.setdefault(place.file, set()).add(place.line)
        self._names = names
        self.counts: dict[tuple[str, int], dict[str, int]] = {}

    def __enter__(self) -> "Visits":
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *_) -> None:
        sys.settrace(self._before)

    def _call(self, frame: FrameType, event: str, _) -> Callable | None:
        file = frame.f_code.co_filename
        if file not in self._lines:
            return None
        seen: set[int] = set()  # Python comes by some lines twice, such as those of a with statement

        def line(frame: FrameType, event: str, _) -> Callable:
            number = frame.f_lineno
            if event == "line" and number in self._lines[file] and number not in seen:
                seen.add(number)
                modules = self.counts.setdefault((file, number), {})
                module = module_at(frame, self._names) or ""
                modules[module] = modules.get(module, 0) + 1
            return line

        return line


def fold(paths: Iterable[str]) -> str:
    """One name for many module paths: the numbers in which they differ become `*`; "a, b" where they do not fit."""
    shapes: dict[tuple[str, ...], list[list[str]]] = {}
    for path in dict.fromkeys(paths):
        parts = path.split(".")
        shapes.setdefault(tuple("*" if part.isdigit() else part for part in parts), []).append(parts)
    folded = []
    for members in shapes.values():
        columns = zip(*members, strict=True)
        folded.append(".".join(column[0] if len(set(column)) == 1 else "*" for column in columns))
    return ", ".join(folded)

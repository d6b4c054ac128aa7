"""Stage 2: into how many graphs a call is compiled, and what breaks it apart.

The graphs run uncompiled behind torch.compile, so the stage is quick and says what the tracing alone does.
"""

import re
import sys
from collections.abc import Callable
from types import FrameType

import torch
from torch import fx

from dsv4.compile.explain import nodes
from dsv4.compile.explain.breaks import finding_of, findings_of
from dsv4.compile.explain.frames import Visits, fold, innermost, is_library, place_of_error, place_of_function, where
from dsv4.compile.explain.report import Finding, Stage
from dsv4.compile.explain.subject import Subject
from dsv4.compile.explain.summary import plural
from dsv4.compile.explain.trace import Trace


class Recorder:
    """A backend that compiles nothing and records the graphs, and which modules each ran for."""

    def __init__(self, names: dict[int, str]):
        self._names = names
        self.graphs: list[fx.GraphModule] = []
        self.runs: list[tuple[int, tuple[str, ...]]] = []  # number of the graph, paths of its modules

    def __call__(self, graph: fx.GraphModule, _inputs: list) -> Callable:
        number = len(self.graphs)
        self.graphs.append(graph)
        expressions = list(dict.fromkeys((key, text) for _, key, text in nodes.calls(graph) if text))

        def run(*args):
            self.runs.append((number, tuple(self._paths(expressions))))
            return graph.forward(*args)

        return run

    def _paths(self, expressions: list[tuple[str, str]]) -> dict[str, None]:
        """Paths of the modules in a graph that is about to run. The graph may be shared by layers that look alike, so
        the expressions are read in the function that runs it now: its `self` tells the layers apart."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and is_library(frame.f_code.co_filename):
            frame = frame.f_back
        paths: dict[str, None] = {}
        for key, expression in expressions:
            path = nodes.resolve(expression, frame, self._names)
            if path is None and key.isdigit():  # torch keys a module by its id
                path = self._names.get(int(key))
            if path is not None:
                paths[path] = None
        return paths


def run(subject: Subject) -> Stage:
    """The stage's report on a subject."""
    torch._dynamo.reset()
    names = subject.module_names()
    recorder, failure = Recorder(names), None
    [call, *_] = subject.calls()
    with Trace() as trace, subject.context():
        try:
            call.run(subject.compile(subject.function, recorder))
        except Exception as error:  # whatever stops the compilation is what this stage looks for
            failure = error
    places = [place for one in trace.breaks if (place := innermost(one.stack)) is not None]
    if failure is not None and (place := place_of_error(failure)) is not None:
        places.append(place)
    with Visits(places, names) as visits, subject.context():
        subject.calls()[0].run(subject.function)
    findings = findings_of(trace.breaks, visits.counts)
    if failure is not None:
        findings = [*findings, failed(failure, visits)]
    elif not recorder.graphs and not findings:
        findings = [nothing_compiled(subject)]
    text = f"{plural(len(recorder.graphs), 'graph')}, {plural(len(findings), 'break')}"
    hits = sum(finding.count for finding in findings)
    if hits > len(findings) or len(recorder.runs) > len(recorder.graphs):
        text += f"; in one call {plural(len(recorder.runs), 'graph run')} and {plural(hits, 'break')}"
    return Stage(
        2,
        "found" if findings else "ok",
        text,
        findings=tuple(findings),
        data=data_of(subject, recorder, findings) | {"failed": failure is not None},
    )


def failed(error: Exception, visits: Visits) -> Finding:
    """A compilation that raised, where the function alone does not."""
    place = place_of_error(error)
    message = str(getattr(error, "msg", None) or error).strip()
    known = finding_of(message, place, visits.counts.get((place.file, place.line)) if place else None)
    if known.title != message.splitlines()[0]:
        return known
    fake = re.search(r"got (\w+)\(['\"](.+?)['\"]\)", message)
    what = f"{fake[1]}: {fake[2]}" if fake else f"{type(error).__name__}: {message.splitlines()[0]}"
    return Finding(
        "break",
        "compilation fails",
        f"Compiling raises ({what}), while the function alone runs. An exception that the function catches is raised "
        "already while tracing, and is not caught there."
        if fake
        else f"Compiling raises {what}.",
        "Decide by shape or dtype (if x.shape[0] % 3 == 0) instead of trying an operation and catching its error."
        if fake
        else "See torch's message in the details.",
        *where(place),
        known.module,
        known.count,
        {"torch": message},
    )


def nothing_compiled(subject: Subject) -> Finding:
    """torch.compile left the function alone and recorded no reason."""
    place = place_of_function(subject.function)
    code = getattr(subject.function, "__code__", None)
    generator = code is not None and code.co_flags & 0x20
    return Finding(
        "break",
        "generator function" if generator else "nothing was compiled",
        "A function that yields is not compiled at all: every operation in it runs by itself."
        if generator
        else "torch.compile found no tensor operation to compile, or left the function alone.",
        "Return a tuple or a stacked tensor instead of yielding, or compile a function that consumes the generator."
        if generator
        else "Name a callable that works on tensors in its own code.",
        *where(place),
    )


def data_of(subject: Subject, recorder: Recorder, findings: list[Finding]) -> dict:
    """Graphs with their operations and modules, and for each repeated layer its graphs and breaks."""
    modules: dict[int, dict[str, None]] = {}
    for number, paths in recorder.runs:
        modules.setdefault(number, {}).update(dict.fromkeys(paths))
    graphs = [
        {"id": i, "ops": len(nodes.calls(graph)), "modules": [p for p in fold(modules.get(i, ())).split(", ") if p]}
        for i, graph in enumerate(recorder.graphs)
    ]
    layers = []
    for layer in subject.layers():

        def inside(path: str, layer: str = layer) -> bool:
            return path == layer or path.startswith(f"{layer}.")

        layers.append(
            {
                "name": layer,
                "graphs": [i for i, paths in modules.items() if any(inside(path) for path in paths)],
                "breaks": sum(any(inside(path) for path in f.details.get("modules", ())) for f in findings),
            }
        )
    return {"graphs": graphs, "calls": [number for number, _ in recorder.runs], "layers": layers}

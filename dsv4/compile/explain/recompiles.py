"""Stage 3: which calls of a sweep compile again, and which assumption failed.

The graphs run uncompiled behind torch.compile: what is guarded, and when it fails, does not depend on the backend.
"""

import re
from collections.abc import Callable

import torch

from dsv4.compile.explain.frames import Place, definition, is_library, place_of_function, where
from dsv4.compile.explain.guards import Cause, cause_of
from dsv4.compile.explain.report import Finding, Stage
from dsv4.compile.explain.subject import Call, Subject, bind
from dsv4.compile.explain.summary import plural
from dsv4.compile.explain.trace import Recompile, Trace

REPEATS = 4  # calls where there is nothing to sweep over: state that a call leaves behind shows from the second on


def run(subject: Subject) -> Stage:
    """The stage's report on a subject."""
    torch._dynamo.reset()
    calls = subject.calls()
    # The sweep goes round twice: in the second round nothing is new, so nothing may compile.
    calls = calls * 2 if len(calls) > 1 else calls * REPEATS
    sweep = []
    with Trace() as trace, subject.context():
        compiled = subject.compile(subject.function, uncompiled)
        for call in calls:
            before = trace.compiles
            label = call.describe(subject.function)
            call.run(compiled)
            sweep.append({"shape": label, "compiled": trace.compiles > before})
    findings = findings_of(trace.recompiles, subject, calls[0])
    findings += [limit_reached(function) for function in dict.fromkeys(trace.limits)]
    count = len(trace.recompiles)
    text = f"{plural(count, 'recompile')} over {plural(len(calls), 'call')}, {plural(trace.guards, 'guard')}"
    return Stage(3, "found" if findings else "ok", text, findings=tuple(findings), data={"sweep": sweep})


def uncompiled(graph: torch.fx.GraphModule, _inputs: list) -> Callable:
    """The backend: a graph as it is."""
    return graph.forward


def findings_of(recompiles: list[Recompile], subject: Subject, call: Call) -> list[Finding]:
    """One finding for each thing that changed, however often."""
    groups: dict[tuple, list[tuple[Cause, Recompile]]] = {}
    for one in recompiles:
        if is_library(one.file):
            one = undecorated(one, subject, call)
        # The latest compilation is the one that fitted last time.
        cause = cause_of(one.reasons[0], one.file)
        groups.setdefault((one.file, one.line, cause.title, numberless(cause.name)), []).append((cause, one))
    return [finding_of(members) for members in groups.values()]


def undecorated(one: Recompile, subject: Subject, call: Call) -> Recompile:
    """A recompilation of the wrapper that a decorator such as torch.no_grad puts around the callable, told of the callable
    itself. The wrapper knows the arguments by their numbers."""
    place = place_of_function(subject.function)
    if place is None:
        return one
    names = list(bind(subject.function, call.args, {}))

    def named(match: re.Match) -> str:
        index = int(match[1])
        return names[index] if index < len(names) else match[0]

    reasons = (re.sub(r"\bargs\[(\d+)\]", named, reason) for reason in one.reasons)
    return Recompile(place.function, place.file, place.line, tuple(reasons))


def numberless(name: str) -> str:
    """A name without its numbers, so that the members of a list are one thing."""
    return re.sub(r"\d+", "*", name)


def finding_of(members: list[tuple[Cause, Recompile]]) -> Finding:
    """Recompilations for one reason as a finding, told by the first of them."""
    cause, first = members[0]
    place = cause.place or definition(Place(first.file, first.line, first.function))
    times, again = (f" {len(members)} times", " (and so on)") if len(members) > 1 else ("", "")
    name = re.sub(r"^torch_dynamo_resume_in_(\w+)_at_\d+$", r"\1", first.function)
    return Finding(
        "recompile",
        cause.title,
        f"{name} was compiled again{times}: {cause.reason}{again}.",
        cause.hint,
        *where(place),
        count=len(members),
        details={"guards": [cause.guard for cause, _ in members]},
    )


def limit_reached(function: str) -> Finding:
    """torch.compile gave a function up: "'name' (file:line)"."""
    match = re.match(r"'(.+)' \((.+):(\d+)\)", function)
    place = Place(match[2], int(match[3]), match[1]) if match else Place("", 0, function)
    limit = torch._dynamo.config.recompile_limit
    return Finding(
        "recompile",
        "limit of recompiles reached",
        f"{place.function} was compiled {limit} times, which is the limit; then it runs without a graph, in silence.",
        "Fix what makes it compile again; raising torch._dynamo.config.recompile_limit only hides it.",
        *where(place),
    )

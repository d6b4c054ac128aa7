"""Stage 7: the same call in ever more compiled ways, from eager to a CUDA graph: where does it stop working, and what
does each step gain?"""

import statistics
import time
from collections.abc import Callable

import torch

from dsv4.compile.explain.capture import Replay, uses_cuda
from dsv4.compile.explain.frames import place_of_error, where
from dsv4.compile.explain.report import Finding, Stage
from dsv4.compile.explain.state import Snapshot
from dsv4.compile.explain.subject import Call, Subject

BUDGET = 0.5  # seconds spent on timing a rung
CUDA_GRAPH = "inductor + CUDA graph"


def run(subject: Subject) -> Stage:
    """The stage's report on a subject."""
    [call, *_] = subject.calls()
    names = ["eager", "aot_eager", "inductor", *([CUDA_GRAPH] if uses_cuda(subject, call) else [])]
    rungs, findings = [], []
    with subject.context():
        for name in names:
            snapshot = Snapshot(subject, call)
            rung, error = climb(subject, call, name)
            snapshot.restore()
            rungs.append(rung)
            # The rungs above meet the same error again.
            if error is not None and not findings:
                findings.append(stops_at(name, error))
    works = [rung for rung in rungs if rung["ok"]]
    text = ", ".join(f"{rung['name']} {rung['seconds'] * 1e3:.3g} ms" for rung in works)
    text += "".join(f", {rung['name']} fails" for rung in rungs if not rung["ok"])
    return Stage(7, "found" if findings else "ok", text, findings=tuple(findings), data={"rungs": rungs})


def climb(subject: Subject, call: Call, name: str) -> tuple[dict, Exception | None]:
    """One rung: whether it works, the seconds of its first run, which compiles, and of a later one."""
    rung = {"name": name, "ok": False, "seconds": None, "first_seconds": None, "error": ""}
    try:
        start = time.perf_counter()
        function = function_at(subject, call, name)
        once(function)
        rung["first_seconds"] = time.perf_counter() - start
        rung["seconds"] = later(function)
        rung["ok"] = True
    except Exception as error:  # a rung that does not hold is what this stage looks for
        rung["error"] = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
        return rung, error
    return rung, None


def function_at(subject: Subject, call: Call, name: str) -> Callable[[], object]:
    """The call as it is on a rung."""
    if name == "eager":
        return lambda: call.run(subject.function)
    if name == CUDA_GRAPH:
        replay = Replay(subject, call)
        return lambda: call.run(lambda *_, **__: replay())
    function = subject.compiled() if name == "inductor" else subject.compile(subject.function, name)
    return lambda: call.run(function)


def once(function: Callable[[], object]) -> float:
    """Seconds of one call, with the device's work."""
    start = time.perf_counter()
    function()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def later(function: Callable[[], object]) -> float:
    """Median seconds of as many calls as fit the budget, at least three."""
    times: list[float] = []
    while len(times) < 3 or (sum(times) < BUDGET and len(times) < 50):
        times.append(once(function))
    return statistics.median(times)


def stops_at(name: str, error: Exception) -> Finding:
    """The first rung that does not hold."""
    place = place_of_error(error)
    lines = str(error).strip().splitlines() or [""]
    before = {
        "eager": "The callable itself fails.",
        "aot_eager": "It fails already without a code generator: while tracing, or in an op's fake.",
        "inductor": "It can be traced, but inductor cannot generate or run code for it.",
        CUDA_GRAPH: "It runs compiled, but not as one CUDA graph; stage 4 says why.",
    }[name]
    return Finding(
        "error",
        f"{name} fails",
        f"{before} {type(error).__name__}: {lines[0]}.",
        "Fix what the stages before this one report." if name != "inductor" else "See torch's message in the details.",
        *where(place),
        details={"error": str(error)},
    )

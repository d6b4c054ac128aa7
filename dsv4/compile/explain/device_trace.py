"""One step on the device, read from the profiler's trace: kernels in order, what launched them, copies and waits."""

import json
import os
import tempfile
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from dsv4.compile.explain.provenance import Launch

_WINDOW = "dsv4 explain: one step"
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class Kernel:
    """One node of work on the device. `op`: the op that launched it, "" for a kernel of inductor's; `launch` numbers the
    launching calls, so that the kernels of one op are known as such."""

    name: str
    start_us: float
    us: float
    op: str = ""
    launch: int = -1
    module: str = ""
    origin: str = ""


@dataclass(frozen=True)
class Step:
    """What one step did. Times in microseconds, from its first kernel."""

    kernels: tuple[Kernel, ...]
    waits: tuple[str, ...]  # calls of the CUDA runtime in which the host waits for the device
    copies: tuple[str, ...]  # between host and device

    @property
    def gap_us(self) -> float:
        """Time between the first and the last kernel in which nothing runs."""
        end, idle = 0.0, 0.0
        for kernel in self.kernels:
            idle += max(0.0, kernel.start_us - end)
            end = max(end, kernel.start_us + kernel.us)
        return idle


def traced(step: Callable[[], object]) -> Step:
    """Run a step under the profiler."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiler:
        with record_function(_WINDOW):
            step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        profiler.export_chrome_trace(path)
        with open(path) as file:
            return read(json.load(file)["traceEvents"])


def read(events: Iterable[dict]) -> Step:
    """The step in a trace's events."""
    events = [event for event in events if event.get("ph") == "X"]
    [window, *_] = [e for e in events if e["name"] == _WINDOW and e.get("cat") == "user_annotation"]
    start, end = window["ts"], window["ts"] + window["dur"]
    runtime = {}
    waits = []
    for event in events:
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and start <= event["ts"] <= end:
            runtime[event["args"].get("correlation")] = event
            if "Synchronize" in event["name"]:
                waits.append(event["name"])
    ops = Ops([event for event in events if event.get("cat") == "cpu_op" and "::" in event["name"]])
    device = sorted((e for e in events if e.get("cat") in _ON_DEVICE and e["ts"] >= start), key=lambda e: e["ts"])
    kernels = []
    for event in device:
        call = runtime.get(event["args"].get("correlation"))
        if call is None:  # not launched by the step
            continue
        launch, op = ops.around(call)
        kernels.append(Kernel(event["name"], event["ts"] - device[0]["ts"], event["dur"], op, launch))
    copies = [kernel.name for kernel in kernels if "HtoD" in kernel.name or "DtoH" in kernel.name]
    return Step(tuple(kernels), tuple(waits), tuple(copies))


class Ops:
    """The outermost ops that ran on each thread."""

    def __init__(self, events: Sequence[dict]):
        self._by_thread: dict[object, list[dict]] = defaultdict(list)
        for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
            known = self._by_thread[event["tid"]]
            if not known or event["ts"] >= known[-1]["ts"] + known[-1]["dur"]:
                known.append(event)
        self._starts = {thread: [e["ts"] for e in known] for thread, known in self._by_thread.items()}

    def around(self, call: dict) -> tuple[int, str]:
        """(number, name) of the op in which a call of the runtime was made, (-1, "") if in none."""
        thread = call["tid"]
        index = bisect_right(self._starts.get(thread, []), call["ts"]) - 1
        if index < 0:
            return -1, ""
        op = self._by_thread[thread][index]
        return (index, op["name"]) if call["ts"] <= op["ts"] + op["dur"] else (-1, "")


def with_modules(kernels: Sequence[Kernel], launches: Sequence[Launch]) -> list[Kernel]:
    """Kernels of a step that was not replayed, with the module and origin of the launch that each belongs to: the n-th
    launch of a name is the n-th of that name in the generated code."""
    queues: dict[str, list[Launch]] = defaultdict(list)
    for launch in reversed(launches):
        queues[launch.name].append(launch)
    found: list[Kernel] = []
    current: tuple[str, int] | None = None
    match: Launch | None = None
    for kernel in kernels:
        key = (kernel.op, kernel.launch)
        if not kernel.op or key != current:
            queue = queues.get(kernel.op or kernel.name)
            match = queue.pop() if queue else None
        current = key
        namespace = kernel.op.partition("::")[0]
        guess = "library" if namespace == "aten" else namespace or ("inductor" if "triton" in kernel.name else "library")
        found.append(replace(kernel, module=match.module if match else "", origin=match.origin if match else guess))
    return found


def as_in(kernels: Sequence[Kernel], known: Sequence[Kernel]) -> list[Kernel]:
    """Kernels of a replayed step, with what is known of the same step when it was launched one by one: the n-th kernel of
    a name is the n-th of that name."""
    counts: Counter[str] = Counter()
    by_name: dict[str, list[Kernel]] = defaultdict(list)
    for kernel in known:
        by_name[kernel.name].append(kernel)
    found = []
    for kernel in kernels:
        same = by_name.get(kernel.name, [])
        index = counts[kernel.name]
        counts[kernel.name] += 1
        if index < len(same):
            kernel = replace(kernel, module=same[index].module, origin=same[index].origin, op=same[index].op)
        found.append(kernel)
    return found

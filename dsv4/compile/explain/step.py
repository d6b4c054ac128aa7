"""Stage 5: the running step on the device: kernels by module and origin, gaps, waits, copies, allocations, time against
the time that its bytes need."""

import statistics
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import torch

from dsv4.compile.explain.capture import Replay, why_not
from dsv4.compile.explain.device_trace import Kernel, as_in, traced, with_modules
from dsv4.compile.explain.frames import Place, current_place, fold, where
from dsv4.compile.explain.report import Finding, Stage
from dsv4.compile.explain.state import Snapshot
from dsv4.compile.explain.subject import Call, Subject
from dsv4.compile.explain.summary import plural
from dsv4.compile.explain.watch import Use, Watch

REPEATS = 20  # of the step, for times and allocations


def run(subject: Subject) -> Stage:
    """The stage's report on a subject."""
    [call, *_] = subject.calls()
    call.ready()
    with subject.context(), Watch() as watch:
        call.bare(subject.function)
    uses = list(watch.uses.values())
    why = why_not(uses)
    if why:
        return Stage(5, "skipped", f"skipped: {why}")
    snapshot = Snapshot(subject, call)
    with subject.context():
        function, how = runnable(subject, call)

        def step() -> object:
            return call.bare(function)

        run_it: Callable[[], object] = step
        call.ready()
        shown = traced(step)
        kernels = with_modules(shown.kernels, subject.launches() if how == "compiled" else [])
        syncs = waits(step, call)
        if how == "compiled":
            try:
                run_it, how = Replay(subject, call), "replayed"
            except Exception:  # stage 4 tells why; this one looks at the step as it runs then
                torch.cuda.synchronize()
        if how == "replayed":
            call.ready()
            shown = traced(run_it)
            kernels = as_in(shown.kernels, kernels)
        allocations, kept = allocated(run_it, call, how == "replayed")
        milliseconds = timed(run_it, call)
    snapshot.restore()
    findings = [*sync_findings(syncs), *copy_findings(uses, shown.copies), *alloc_findings(allocations, kept, how)]
    data = numbers(subject, call, kernels) | {
        "ran": how,
        "gap_us": shown.gap_us,
        "ms": milliseconds,
        "syncs": sum(syncs.values()) + (len(shown.waits) if not syncs else 0),
        "copies": len(shown.copies),
        "allocations": allocations,
    }
    layer = f", {data['nodes_per_layer']:.1f} a layer" if data["nodes_per_layer"] else ""
    text = (
        f"{how} in {milliseconds:.3f} ms (its bytes: {data['floor_ms']:.3f}), {plural(data['nodes'], 'kernel')}{layer}, "
        f"{data['gap_us']:.0f} us of gaps, {plural(data['syncs'], 'sync')}, "
        f"{plural(data['copies'], 'copy')} between host and device, {plural(allocations, 'allocation')}"
    )
    return Stage(5, "found" if findings else "ok", text, findings=tuple(findings), data=data)


def runnable(subject: Subject, call: Call) -> tuple[Callable, str]:
    """The compiled function, warm, and "compiled"; the plain one and "eager" where it cannot be compiled."""
    try:
        function = subject.compiled()
        for _ in range(3):
            call.run(function)
    except Exception:  # stage 2 tells why
        call.run(subject.function)
        return subject.function, "eager"
    return function, "compiled"


def waits(step: Callable[[], object], call: Call) -> Counter[Place | None]:
    """Where the host waits for the device in a step, and how often."""
    found: Counter[Place | None] = Counter()

    def note(message, *_args, **_kwargs) -> None:
        if "synchronizing CUDA operation" in str(message):
            found[current_place()] += 1

    call.ready()
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return found


def allocated(step: Callable[[], object], call: Call, replayed: bool) -> tuple[int, int]:
    """(allocations of one step, bytes that each step keeps). Where a step is not replayed its results are allocated anew
    each time by PyTorch's cache, which is no fault: only what the cache has to ask of the driver counts."""
    counter = "allocation.all.allocated" if replayed else "num_device_alloc"
    count, kept = 0, 0
    for repeat in range(-2, REPEATS):  # the first two fill the cache
        call.ready()
        torch.cuda.synchronize()
        before, memory = torch.cuda.memory_stats().get(counter, 0), torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        if repeat >= 0:
            count += torch.cuda.memory_stats().get(counter, 0) - before
            kept += torch.cuda.memory_allocated() - memory
    return -(-count // REPEATS), max(0, kept) // REPEATS


def timed(step: Callable[[], object], call: Call) -> float:
    """Median milliseconds of a step on the device."""
    times = []
    for _ in range(REPEATS):
        call.ready()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        marks[0].record()
        step()
        marks[1].record()
        torch.cuda.synchronize()
        times.append(marks[0].elapsed_time(marks[1]))
    return statistics.median(times)


def numbers(subject: Subject, call: Call, kernels: Sequence[Kernel]) -> dict:
    """Kernels by name and module, the timeline, kernels a layer, and the bytes that the step reads."""
    groups: dict[tuple[str, str, str], list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        groups[(kernel.name, fold_numbers(kernel.module), kernel.origin)].append(kernel)
    table = [
        {
            "name": name,
            "module": fold(dict.fromkeys(kernel.module for kernel in members)),
            "origin": origin,
            "op": members[0].op,
            "count": len(members),
            "us": sum(kernel.us for kernel in members),
        }
        for (name, _, origin), members in groups.items()
    ]
    layers = subject.layers()
    inside = [k for k in kernels if any(k.module == layer or k.module.startswith(f"{layer}.") for layer in layers)]
    nbytes = subject.nbytes(call)
    return {
        "kernels": sorted(table, key=lambda row: -row["us"]),
        "timeline": [{"name": k.name, "module": k.module, "start_us": k.start_us, "us": k.us} for k in kernels],
        "nodes": len(kernels),
        "nodes_per_layer": len(inside) / len(layers) if layers and inside else None,
        "bytes": nbytes,
        "floor_ms": nbytes / bandwidth() * 1e3,
    }


def fold_numbers(path: str) -> str:
    """A module path with its numbers as `*`."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def bandwidth() -> float:
    """Bytes a second of a large device copy, read and written."""
    free, _ = torch.cuda.mem_get_info()
    source = torch.empty(min(2**30, free // 4), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / (timed(lambda: target.copy_(source), Call()) / 1e3)


def sync_findings(places: Counter[Place | None]) -> list[Finding]:
    """One finding for each line that waits."""
    return [
        Finding(
            "sync",
            "host waits for the device",
            "The host stops here until the device has caught up, so the device idles while the next kernels are launched.",
            "Keep the value on the device; copy with pinned memory and non_blocking=True, and read it some steps later.",
            *where(place),
            count=count,
        )
        for place, count in places.items()
    ]


def copy_findings(uses: Sequence[Use], copies: Sequence[str]) -> list[Finding]:
    """One finding for each line that copies between host and device, where the step really does."""
    if not copies:
        return []
    lines = [use for use in uses if {"cpu", "cuda"} <= use.devices]
    found = [
        Finding(
            "copy",
            "copy between host and device",
            f"{use.name} moves data between the host and the device in every step.",
            "Make it on the device, or copy it once outside of the step.",
            *where(use.place),
            count=use.count,
        )
        for use in lines
    ]
    return found or [Finding("copy", "copy between host and device", f"The step makes {len(copies)}: {copies[0]}.")]


def alloc_findings(allocations: int, kept: int, how: str) -> list[Finding]:
    """Memory that a step takes."""
    found = []
    if allocations:
        found.append(
            Finding(
                "alloc",
                "allocation in a step",
                f"Each {how} step allocates device memory {allocations} times, which waits for the device.",
                "Allocate once, outside of the step, and write in place.",
            )
        )
    if kept:
        found.append(
            Finding(
                "alloc",
                "memory that grows",
                f"Each step keeps {kept} bytes more on the device: something holds on to its results.",
                "Write into memory that was allocated once; detach what is kept from the graph of gradients.",
            )
        )
    return found

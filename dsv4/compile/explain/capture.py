"""Stage 4: does a call fit into one CUDA graph, and what has to be copied into it before each replay?

Without a GPU it still says what would keep torch.compile from using CUDA graphs, as far as an uncompiled call shows it.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dsv4.compile.explain.frames import Place, innermost, parse_stack, place_of_error, where
from dsv4.compile.explain.report import Finding, Stage
from dsv4.compile.explain.state import Snapshot
from dsv4.compile.explain.subject import Call, Subject, bind, compile_callable, tensors_of
from dsv4.compile.explain.summary import plural
from dsv4.compile.explain.trace import Trace
from dsv4.compile.explain.watch import Use, Watch, storage
from dsv4.compile.graphs import CapturedStep

NO_DEVICE = "no CUDA device"
NO_TENSOR = "nothing of it is on a CUDA device"


def run(subject: Subject) -> Stage:
    """The stage's report on a subject."""
    [call, *_] = subject.calls()
    arguments = named_tensors(subject, call)
    before = {storage(tensor): name for name, tensor in reversed(arguments.items())}
    call.ready()
    with subject.context(), Watch() as watch:
        call.bare(subject.function)
    uses = list(watch.uses.values())
    findings = [*changed_arguments(uses, before), *unsafe_ops(uses)]
    data = {"captured": None, "why": why_not(uses)} | sizes(subject, call)
    if data["why"]:
        text = f"skipped: {data['why']}" + (f"; but {plural(len(findings), 'obstacle')} can be seen" if findings else "")
        return Stage(4, "found" if findings else "skipped", text, findings=tuple(findings), data=data)
    findings += cpu_tensors(uses)
    reserved = torch.cuda.memory_reserved()
    try:
        with subject.context():
            Replay(subject, call)
        data |= {"captured": True, "why": "", "pool_bytes": torch.cuda.memory_reserved() - reserved}
    except Exception as error:  # what stops the capture is what this stage looks for
        findings.append(capture_fails(error))
        data |= {"captured": False, "why": findings[-1].title}
    if subject.compile is compile_callable:
        findings += skipped_by_inductor(subject, call, findings)
    text = "captured into one CUDA graph" if data["captured"] else f"not captured: {data['why']}"
    text += f"; {data['static_bytes']} bytes stay in place, {data['copied_bytes']} are copied in before each replay"
    return Stage(4, "found" if findings else "ok", text, findings=tuple(findings), data=data)


class Replay:
    """A call of the compiled function as a captured CUDA graph, with the call's state in place for a first replay. Raises
    what the capture raises."""

    def __init__(self, subject: Subject, call: Call):
        compiled = subject.compiled()
        call.ready()  # which is no part of the graph
        snapshot = Snapshot(subject, call)
        call.run(compiled)

        def step() -> None:
            self.result: Any = call.bare(compiled)

        self._replay = CapturedStep(step)
        snapshot.restore()

    def __call__(self) -> Any:
        """Replay the graph; its result lies where the capture put it."""
        self._replay()
        return self.result


def named_tensors(subject: Subject, call: Call) -> dict[str, Tensor]:
    """The tensors among the arguments by name; those of modules, and those marked with mark_static_address, keep their
    place and are not counted."""
    found = {}
    for name, value in bind(subject.function, call.args, call.kwargs).items():
        for path, leaf in pytree.tree_leaves_with_path(value):
            if isinstance(leaf, Tensor) and not hasattr(leaf, "_dynamo_static_input_type"):
                found[name + pytree.keystr(path)] = leaf
    return found


def sizes(subject: Subject, call: Call) -> dict[str, int]:
    """Bytes that keep their address from call to call, and of arguments, which a caller has to copy in."""
    modules = {id(t): t for module in subject.roots().values() for _, t in tensors_of(module)}
    modules |= {id(t): t for module in subject.changes or () for _, t in tensors_of(module)}
    copied = [t for t in named_tensors(subject, call).values() if id(t) not in modules]
    return {"static_bytes": sum(t.nbytes for t in modules.values()), "copied_bytes": sum(t.nbytes for t in copied)}


def uses_cuda(subject: Subject, call: Call) -> bool:
    """Whether a call has any tensor on a CUDA device."""
    return torch.cuda.is_available() and any(t.is_cuda for t in subject.tensors(call).values())


def why_not(uses: Iterable[Use]) -> str:
    """Why there is nothing to capture, "" if there is."""
    if not torch.cuda.is_available():
        return NO_DEVICE
    return "" if any("cuda" in use.devices for use in uses) else NO_TENSOR


def finding(title: str, reason: str, hint: str, place: Place | None, **details: Any) -> Finding:
    """An obstacle to CUDA graphs."""
    return Finding("skip", title, reason, hint, *where(place), details=details)


def changed_arguments(uses: Iterable[Use], names: dict[int, str]) -> list[Finding]:
    """Arguments that the call changes: names maps their storage."""
    found: dict[str, Finding] = {}
    for use in uses:
        for name in {names[key] for key in use.written if key in names}:
            found.setdefault(
                name,
                finding(
                    "argument changed in place",
                    f"{name} is changed by {use.name}. torch.compile copies arguments into its CUDA graphs, so it gives "
                    "the graph up rather than lose the change.",
                    f"Make {name} a registered buffer of a module, or mark it once with "
                    "torch._dynamo.mark_static_address; or return a new tensor.",
                    use.place,
                ),
            )
    return list(found.values())


def unsafe_ops(uses: Iterable[Use]) -> list[Finding]:
    """Ops whose results have a size that depends on values, or that give a value to the host."""
    found = []
    for use in uses:
        sized = use.sized
        if sized or torch.Tag.data_dependent_output in use.op.tags:
            what = "returns a tensor whose size depends on values" if sized else "brings a value to the host"
            found.append(
                finding(
                    "result of data-dependent size" if sized else "tensor value read on the host",
                    f"{use.name} {what}: the host must wait for the device, which a CUDA graph cannot.",
                    "Give the result a fixed size (torch.where, torch.nonzero_static, topk)."
                    if sized
                    else "Keep the value on the device.",
                    use.place,
                )
            )
    return found


def cpu_tensors(uses: Iterable[Use]) -> list[Finding]:
    """Operations that mix devices."""
    found = []
    for use in uses:
        if {"cpu", "cuda"} <= use.devices and torch.Tag.data_dependent_output not in use.op.tags:
            effect = (
                "the graph keeps the value that it had at the capture"
                if use.scalar
                else "the copy waits for the device and has no place in a graph"
            )
            found.append(
                finding(
                    "CPU tensor",
                    f"{use.name} works on a CPU tensor among CUDA tensors: {effect}.",
                    "Make it on the device, once, outside: a registered buffer, or torch.tensor(..., device=x.device).",
                    use.place,
                )
            )
    return found


def capture_fails(error: BaseException) -> Finding:
    """What stopped a capture."""
    while error.__context__ is not None:  # that the capture is broken off is an error too, the second
        error = error.__context__
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return finding(
        "capture fails",
        f"Capturing the call raises {type(error).__name__}: {lines[0]}.",
        "A captured call may not wait for the device (item(), copies to or from ordinary host memory), and may not work on "
        "CPU tensors.",
        place_of_error(error),
        error=str(error),
    )


def skipped_by_inductor(subject: Subject, call: Call, known: list[Finding]) -> list[Finding]:
    """Why torch.compile(mode="reduce-overhead") would not use a CUDA graph, if it says a reason that is not known yet."""
    torch._dynamo.reset()
    compiled = torch.compile(subject.function, mode="reduce-overhead")
    snapshot = Snapshot(subject, call)
    with Trace() as trace, subject.context():
        for _ in range(3):  # warm-up, recording, replay
            torch.compiler.cudagraph_mark_step_begin()
            call.run(compiled)
    snapshot.restore()
    found = []
    for message in dict.fromkeys(trace.cudagraph_skips):
        first = message.strip().splitlines()[0]
        if "mutated inputs" in first and any(one.title == "argument changed in place" for one in known):
            continue
        if "cpu device" in first and any(one.title == "CPU tensor" for one in known):
            continue
        place = innermost(parse_stack(message))
        reason = f'torch.compile(mode="reduce-overhead") says: {first}.'
        found.append(finding("torch.compile skips CUDA graphs", reason, "", place, torch=message))
    return found

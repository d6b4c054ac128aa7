"""Listens to what torch.compile records about itself: graph breaks, recompilations and their reasons.

The source is torch's structured trace, the record behind TORCH_TRACE and tlparse. It tells of every graph break with the
stack of the traced code, also of those that other interfaces leave out or raise on.
"""

import json
import logging
import re
from dataclasses import dataclass

from dsv4.compile.explain.frames import Place, parse_stack

_RESUMED = re.compile(r"^torch_dynamo_resume_in_(.+)_at_(\d+)$")  # the part of a function that follows a break


@dataclass(frozen=True)
class Break:
    """One graph break. `text` is torch's message; `skipped`: the whole function then runs without a graph."""

    text: str
    stack: tuple[Place, ...]  # outermost first
    skipped: bool = False


@dataclass(frozen=True)
class Recompile:
    """One recompilation: the function that was compiled again, and why what had been compiled did not fit."""

    function: str
    file: str
    line: int  # of the function's definition
    reasons: tuple[str, ...]  # the failed guard of each compilation that there was, the latest first


class Trace(logging.Handler):
    """A context manager that collects; its lists grow while it is active."""

    def __init__(self):
        super().__init__()
        self.breaks: list[Break] = []
        self.recompiles: list[Recompile] = []
        self.compiles = 0  # of any function
        self.guards = 0
        self.limits: list[str] = []  # functions given up after too many compilations
        self.cudagraph_skips: list[str] = []
        self._reasons: dict[tuple, list[str]] = {}

    # The logger of the structured trace, and those of two warnings that are in no structured record.
    _LOGGERS = ("torch.__trace", "torch._dynamo", "torch._inductor.cudagraph_utils.__cudagraphs")

    def __enter__(self) -> "Trace":
        for name in self._LOGGERS:
            logging.getLogger(name).addHandler(self)
        return self

    def __exit__(self, *_) -> None:
        for name in self._LOGGERS:
            logging.getLogger(name).removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """One record of any of the loggers."""
        metadata = getattr(record, "metadata", None)
        if metadata is None:
            self._warning(record.getMessage())
            return
        compilation = (metadata.get("frame_id"), metadata.get("frame_compile_id"))
        artifact = (metadata.get("artifact") or {}).get("name")
        if artifact == "dynamo_graph_break_reason":
            self.breaks.append(parse_break(payload(record)))
        elif artifact == "recompile_reasons":
            reasons = json.loads(payload(record)) if payload(record).startswith("[") else [payload(record)]
            self._reasons[compilation] = [str(reason).removeprefix('"').removesuffix('"') for reason in reasons]
        elif "compilation_metrics" in metadata:
            self._compiled(compilation, metadata["compilation_metrics"])

    def _warning(self, message: str) -> None:
        if "hit config." in message and "limit" in message:
            self.limits += re.findall(r"function: (.*)", message)[:1] or [message]
        elif "cudagraph" in message:
            self.cudagraph_skips.append(message)

    def _compiled(self, compilation: tuple, metrics: dict) -> None:
        if metrics.get("co_name") is None:  # nothing was compiled: the limit was reached
            return
        self.compiles += 1
        self.guards += metrics.get("guard_count") or 0
        if metrics.get("cudagraph_skip_reason"):
            self.cudagraph_skips.append(metrics["cudagraph_skip_reason"])
        reasons = self._reasons.pop(compilation, None)
        if reasons is not None:
            name, line = metrics.get("co_name") or "", metrics.get("co_firstlineno") or 0
            resumed = _RESUMED.match(name)
            if resumed:
                name, line = resumed[1], int(resumed[2])
            self.recompiles.append(Recompile(name, metrics.get("co_filename") or "", line, tuple(reasons)))


def payload(record: logging.LogRecord) -> str:
    """The text that belongs to a structured record."""
    value = getattr(record, "payload", None)
    value = value() if callable(value) else value
    return value if isinstance(value, str) else json.dumps(value)


def parse_break(text: str) -> Break:
    """A graph break from its record: a reason, the traced code's stack, and the stack inside torch, which is cut off."""
    text = text.split("\nTraceback (most recent call last)")[0].removesuffix("\nNoneType: None\n")
    reason, _, stack = text.rpartition("User code traceback:")
    if not reason:  # the frame as a whole could not be compiled
        reason, stack = text, text
    skipped = "Skipping the function" in reason or "skip tracing the frame" in reason
    return Break(reason_of(reason), tuple(parse_stack(stack)), skipped)


def reason_of(text: str) -> str:
    """torch's message without what is said before it about where and when it happened."""
    text = text.partition("Graph Break Reason: ")[2] or text
    for lead in ("Graph break encountered:\n\n", "a function call, e.g. f(x, y):\n\n"):
        text = text.rpartition(lead)[2]
    first, blank, rest = text.partition(":\n\n")  # "Encountered graph break when attempting to trace OPCODE: ..."
    text = rest if blank and first.startswith("Encountered graph break") else text
    return text.partition("\nStack variable source attribution:")[0].strip()

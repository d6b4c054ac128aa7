"""What the text and the page both show, worked out from a report: facts, folded modules, kernels by module, gaps."""

import os
import re
from collections import Counter
from dataclasses import dataclass

from dsv4.compile.explain.report import Finding, Report, Stage

NO_MODULE = "outside any module"
COUNTED = {"syncs": "sync", "copies": "copy", "allocations": "allocation"}  # in the data of stage 5


@dataclass(frozen=True)
class Fact:
    """A few words of the verdict, and whether they are good news (None: not known)."""

    text: str
    good: bool | None
    stage: int


@dataclass(frozen=True)
class Group:
    """Kernels that belong together, the most expensive first."""

    name: str
    count: int
    us: float
    kernels: tuple[dict, ...]

    def below(self, kernel: dict) -> str:
        """The module of one of its kernels, as seen from the group's own."""
        return kernel["module"].removeprefix(self.name).lstrip(".")


@dataclass(frozen=True)
class Gap:
    """Time in which the device waits between two kernels, over all places where they follow each other."""

    before: str
    after: str
    count: int
    us: float


def facts(report: Report) -> list[Fact]:
    """What each stage comes to, in the order of the stages."""
    return [fact for stage in report.stages for fact in stage_facts(stage)]


def stage_facts(stage: Stage) -> list[Fact]:
    """What a stage comes to: its counts, or that it was skipped or failed."""
    if stage.status == "skipped":
        return [Fact(f"{stage.name} skipped", None, stage.number)]
    if stage.status == "error":
        return [Fact(f"{stage.name} failed", False, stage.number)]
    return [Fact(text, good, stage.number) for text, good in _FACTS[stage.number](stage, stage.data)]


def _ops(stage: Stage, data: dict) -> list[tuple[str, bool]]:
    wrong = len({finding.details.get("op", finding.title) for finding in stage.findings if finding.kind != "note"})
    return [(f"{plural(wrong, 'op')} at fault" if wrong else "ops sound", not wrong)]


def _graphs(stage: Stage, data: dict) -> list[tuple[str, bool]]:
    graphs, breaks, hits = len(data.get("graphs", ())), total(stage, "break", False), total(stage, "break")
    times = f" in {hits:,} places" if hits > breaks else ""
    return [(plural(graphs, "graph"), graphs == 1), (plural(breaks, "break") + times, not breaks)]


def _recompiles(stage: Stage, data: dict) -> list[tuple[str, bool]]:
    again = total(stage, "recompile")
    return [(f"{plural(again, 'recompile')} in {plural(len(data.get('sweep', ())), 'call')}", not again)]


def _capture(stage: Stage, data: dict) -> list[tuple[str, bool | None]]:
    captured, obstacles = data.get("captured"), len(stage.findings)
    if captured is None and obstacles:  # without a GPU, what can be seen all the same
        return [(f"{plural(obstacles, 'obstacle')} to a CUDA graph", False)]
    return [({True: "captured", False: "not captured", None: "capture not checked"}[captured], captured)]


def _step(stage: Stage, data: dict) -> list[tuple[str, bool]]:
    found = [(plural(data[name], one), not data[name]) for name, one in COUNTED.items() if name in data]
    if data.get("nodes"):
        found.append((plural(data["nodes"], "kernel"), True))
    if data.get("ms"):
        found.append((f"{time_text(data['ms'] / 1e3)} a step", True))
    return found


def _agreement(stage: Stage, data: dict) -> list[tuple[str, bool | None]]:
    if not data.get("pairs"):
        return [("agreement not known", None)]
    worst = max(pair["max_abs"] for pair in data["pairs"])
    return [(f"agrees to {worst:.1g}" if worst else "agrees bit for bit", not total(stage, "difference"))]


def _ladder(stage: Stage, data: dict) -> list[tuple[str, bool]]:
    rungs = data.get("rungs", ())
    good = sum(rung["ok"] for rung in rungs)
    return [(f"{good} of {plural(len(rungs), 'rung')} run", good == len(rungs))] if rungs else []


_FACTS = {1: _ops, 2: _graphs, 3: _recompiles, 4: _capture, 5: _step, 6: _agreement, 7: _ladder}


def total(stage: Stage, kind: str, folded: bool = True) -> int:
    """How many findings of a kind, each as often as it was folded or once."""
    return sum(finding.count if folded else 1 for finding in stage.findings if finding.kind == kind)


def stage_text(stage: Stage) -> str:
    """The summary, without the status that stands beside it."""
    return stage.summary.removeprefix(f"{stage.status}: ")


def where(finding: Finding) -> str:
    """`file:line`, the file as seen from the working directory if it lies below it; empty without a file."""
    if not finding.file:
        return ""
    inside = os.path.relpath(finding.file) if os.path.isabs(finding.file) else finding.file
    file = finding.file if inside.startswith(os.pardir) else inside
    return f"{file}:{finding.line}" if finding.line else file


def details(finding: Finding) -> list[tuple[str, str]]:
    """The details as (name, text), without those that only repeat the module."""
    texts = [(name, detail_text(value)) for name, value in finding.details.items()]
    return [(name, text) for name, text in texts if text != finding.module]


def detail_text(value) -> str:
    """The value of a detail as text; of a list, the members that differ in more than the layer."""
    if not isinstance(value, list | tuple):
        return str(value).strip()
    members = list(dict.fromkeys(fold(str(member)) for member in value))
    return (", " if sum(map(len, members)) < 80 else "\n").join(members)


def fold(module: str) -> str:
    """`layers.3.attn` -> `layers.*.attn`, so that repeated layers add up."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", module)


def layer(module: str) -> str:
    """`layers.3.attn.wq` -> `layers.3`: the outermost repeated block that a module path lies in, or the path itself."""
    match = re.match(r".*?(?<![^.])(\d+|\*)(?![^.])", module)
    return match.group() if match else module


def part(module: str) -> str:
    """`layers.3.attn.wq` -> `layers.*.attn`: the folded path, one name below the repeated block."""
    block = layer(module)
    below = module.removeprefix(block).lstrip(".").split(".")[0]
    return fold(f"{block}.{below}" if below else block) or NO_MODULE


def kernel_groups(kernels: list[dict]) -> list[Group]:
    """Kernels by part of the model (by origin where no kernel has a module), equal ones of repeated layers added up; the
    most expensive first."""
    added: dict[tuple, dict] = {}
    for kernel in kernels:
        module = fold(kernel["module"])
        row = {"name": kernel["name"], "module": module, "origin": kernel["origin"], "count": 0, "us": 0.0}
        row = added.setdefault((module, kernel["name"], kernel["origin"]), row)
        row["count"] += kernel["count"]
        row["us"] += kernel["us"]
    named = any(row["module"] for row in added.values())
    by_part: dict[str, list[dict]] = {}
    for row in sorted(added.values(), key=lambda row: -row["us"]):
        by_part.setdefault(part(row["module"]) if named else row["origin"], []).append(row)
    groups = [
        Group(name, sum(r["count"] for r in rows), sum(r["us"] for r in rows), tuple(rows))
        for name, rows in by_part.items()
    ]
    return sorted(groups, key=lambda group: -group.us)


def op_facts(op: dict) -> dict[str, str]:
    """What is registered for an op that is not torch's own: kernels, arguments that it changes, tags that say something."""
    tags = [tag for tag in op["tags"] if tag != "pt2_compliant_tag"]
    facts = {"kernels": op["kernels"] or ["none"], "changes": op["mutates"], "tags": tags}
    return {name: ", ".join(values) for name, values in facts.items()}


def distinct_pairs(pairs: list[dict]) -> list[tuple[dict, int]]:
    """Comparisons, equal ones once with their number."""
    times = Counter((p["a"], p["b"], p["max_abs"], p["max_rel"], p["first_module"]) for p in pairs)
    return [(dict(zip(("a", "b", "max_abs", "max_rel", "first_module"), key, strict=True)), n) for key, n in times.items()]


def distinct_calls(sweep: list[dict]) -> list[tuple[str, bool, int]]:
    """Calls of a sweep as (shape, whether it compiled), equal ones once with their number."""
    times = Counter((str(call["shape"]), call["compiled"]) for call in sweep)
    return [(*key, n) for key, n in times.items()]


def gaps(timeline: list[dict], most: int) -> list[Gap]:
    """Where the device waits longest between two kernels, equal pairs of kernels added up."""
    added: dict[tuple[str, str], list[float]] = {}
    end, last = 0.0, None
    for kernel in sorted(timeline, key=lambda kernel: kernel["start_us"]):
        if last is not None and kernel["start_us"] > end:
            added.setdefault((last["name"], kernel["name"]), []).append(kernel["start_us"] - end)
        if last is None or kernel["start_us"] + kernel["us"] >= end:  # on several streams the last to end counts
            end, last = kernel["start_us"] + kernel["us"], kernel
    found = [Gap(before, after, len(times), sum(times)) for (before, after), times in added.items()]
    return sorted(found, key=lambda gap: -gap.us)[:most]


def plural(count: int, one: str) -> str:
    """`1 break`, `2 breaks`, `2 copies`."""
    many = one[:-1] + "ies" if one.endswith("y") else one + "s"
    return f"{count:,} {one if count == 1 else many}"


def clipped(said: str, width: int) -> str:
    """`said` in at most `width` columns."""
    return said if len(said) <= width else said[: width - 3] + "..."


def time_text(seconds: float) -> str:
    """`12.3 us`, `1.23 ms`, `4.5 s`: three digits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.{max(0, 2 - len(str(int(seconds / size))) + 1)}f} {unit}"
    return f"{seconds * 1e6:.1f} us"


def environment_text(environment: dict) -> list[tuple[str, str]]:
    """The environment as pairs of words, versions of packages among the rest."""
    pairs = []
    for name, value in environment.items():
        if isinstance(value, dict):
            pairs += environment_text(value)
        elif value not in (None, ""):
            pairs.append((str(name), str(value)))
    return pairs

"""Reports as plain text for a terminal of 100 columns: the verdicts first, then each stage with all that it found."""

import itertools
import re
import textwrap

from dsv4.compile.explain.report import Finding, Report, Stage
from dsv4.compile.explain.summary import (
    COUNTED,
    clipped,
    details,
    distinct_calls,
    distinct_pairs,
    environment_text,
    fold,
    gaps,
    kernel_groups,
    op_facts,
    plural,
    stage_text,
    time_text,
    where,
)
from dsv4.model.sizes import size_text

WIDTH = 100
COLOURS = {"ok": 32, "found": 33, "error": 31, "skipped": 2}
GAPS_SHOWN = 5
DETAIL_LINES = 6  # of torch's own words and of stacks, which go on for pages


def text(reports: list[Report], colour: bool = False) -> str:
    """Everything in the reports, but for the single kernels of the timeline and the ends of long quotations. colour: with
    ANSI escapes."""
    lines = [line for report in reports for line in wrapped(f"{report.subject}: {report.verdict}")]
    for report in reports:
        lines += ["", f"{clipped(report.subject, WIDTH - 4)} ".ljust(WIDTH, "-"), ""] if len(reports) > 1 else [""]
        for stage in report.stages:
            lines += stage_lines(stage, colour)
    environments = [report.environment for report in reports if report.environment]
    if environments:
        pairs = dict(pair for environment in environments for pair in environment_text(environment))
        lines += ["", *wrapped(", ".join(f"{name} {value}" for name, value in pairs.items()))]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines))


def stage_lines(stage: Stage, colour: bool) -> list[str]:
    """One line for the stage, then its findings and its numbers."""
    status = f"{stage.status:<8}"
    if colour:
        status = f"\x1b[{COLOURS[stage.status]}m{status}\x1b[0m"
    taken = f"{stage.seconds:.1f} s" if stage.seconds else ""
    first, *rest = textwrap.wrap(stage_text(stage), WIDTH - 33) or [""]
    lines = [f"{stage.number} {stage.name:<11} {status} {first:<{WIDTH - 33}} {taken:>8}".rstrip()]
    lines += [" " * 23 + line for line in rest]
    body = [finding_lines(finding) for finding in stage.findings]
    body.append(_NUMBERS[stage.number](stage.data))
    for block in filter(None, body):
        lines += ["", *block]
    return [*lines, ""] if any(body) else lines


def finding_lines(finding: Finding) -> list[str]:
    """What, where, the source line, why, and what to do."""
    module = f" in {finding.module}" if finding.module else ""
    lines = wrapped(f"{finding.kind}{times_text(finding.count)}: {finding.title}{module}", 2, 6)
    if finding.file:
        lines += wrapped(f"at    {where(finding)}", 6, 12)
    if finding.source:
        lines += wrapped(f"      {finding.source.strip()}", 6, 12)
    for word, said in (("why", finding.reason), ("fix", finding.hint)):
        if said:
            first, *rest = said.splitlines()
            lines += wrapped(f"{word:<5} {first}", 6, 12)
            lines += [line for part in rest for line in wrapped(part, 12, 12)]
    for name, value in details(finding):
        first, *rest = value.splitlines() or [""]
        lines += wrapped(f"{name}: {first}", 6, 12)
        shown = rest if len(rest) <= DETAIL_LINES else rest[: DETAIL_LINES - 2]
        lines += [line for part in shown for line in wrapped(part, 12, 12)]
        if shown is not rest:
            lines.append(f"{'':12}({len(rest) - len(shown)} more lines: --json, --html)")
    return lines


def wrapped(said: str, first: int = 0, rest: int = 2) -> list[str]:
    """`said` in lines of at most WIDTH columns, the first and the others indented."""
    lead = len(said) - len(said.lstrip())
    return textwrap.wrap(
        said.strip(), WIDTH, initial_indent=" " * (first + lead), subsequent_indent=" " * rest, break_on_hyphens=False
    )


def times_text(count: int) -> str:
    """` x3`, and nothing for 1."""
    return f" x{count}" if count > 1 else ""


def op_lines(data: dict) -> list[str]:
    """The ops that are not torch's own."""
    lines = []
    for op in data.get("ops", ()):
        facts = "; ".join(f"{name} {value}" for name, value in op_facts(op).items() if value)
        lines += wrapped(f"{op['name']:<34} {op['calls']:>5} x  {facts}", 2, 45)
    return lines


def graph_lines(data: dict) -> list[str]:
    lines = []
    alike = itertools.groupby(data.get("graphs", ()), key=lambda g: (g["ops"], [fold(name) for name in g["modules"]]))
    for (ops, folded), run in alike:
        run = list(run)
        which = f"graph {run[0]['id']}" if len(run) == 1 else f"graphs {run[0]['id']} to {run[-1]['id']}"
        modules = ", ".join(run[0]["modules"] if len(run) == 1 else dict.fromkeys(folded))
        lines += wrapped(f"{which:<18} {plural(ops, 'op')}{' each' if len(run) > 1 else ''}  {modules}", 2, 22)
    for breaks, run in itertools.groupby(data.get("layers", ()), key=lambda layer: layer["breaks"]):
        run = list(run)
        which = run[0]["name"] if len(run) == 1 else f"{run[0]['name']} to {run[-1]['name']}"
        inside = sorted({graph for layer in run for graph in layer["graphs"]})
        graphs = f"graph{'s' if len(inside) > 1 else ''} {' to '.join(map(str, dict.fromkeys((inside[0], inside[-1]))))}"
        broken = f", {plural(breaks, 'break')}{' each' if len(run) > 1 else ''}" if breaks else ""
        lines += wrapped(f"{which}: {graphs if inside else 'no graph'}{broken}", 2, 4)
    return lines


def sweep_lines(data: dict) -> list[str]:
    lines = []
    for word, compiled in (("compiled", True), ("reused", False)):
        calls = [
            f"{shape}{times_text(n)}" for shape, again, n in distinct_calls(data.get("sweep", [])) if again == compiled
        ]
        lines += wrapped(f"{word:<9} {', '.join(calls)}", 2, 12) if calls else []
    return lines


def capture_lines(data: dict) -> list[str]:
    lines = wrapped(f"not captured: {data['why']}", 2, 4) if data.get("captured") is False else []
    if data.get("static_bytes") is not None:
        copied = size_text(data.get("copied_bytes") or 0)
        lines += wrapped(f"inputs: {size_text(data['static_bytes'])} read in place, {copied} copied before each replay", 2)
    return lines


def step_lines(data: dict) -> list[str]:
    lines = []
    if data.get("ms"):
        floor = (
            f", floor {time_text(data['floor_ms'] / 1e3)} ({data['floor_ms'] / data['ms']:.0%})"
            if data.get("floor_ms")
            else ""
        )
        moved = f" for {size_text(data['bytes'])}" if data.get("bytes") else ""
        lines += wrapped(f"{time_text(data['ms'] / 1e3)} a step{floor}{moved}", 2)
    if data.get("nodes"):
        each = f", {data['nodes_per_layer']:.3g} a layer" if data.get("nodes_per_layer") else ""
        idle = f"; {time_text(data['gap_us'] / 1e6)} between kernels" if data.get("gap_us") is not None else ""
        lines += wrapped(f"{plural(data['nodes'], 'kernel')}{each}{idle}", 2)
    counts = [plural(data[name], one) for name, one in COUNTED.items() if name in data]
    lines += wrapped(", ".join(counts), 2)
    groups = kernel_groups(data.get("kernels", ()))
    if groups:
        whole = sum(group.us for group in groups) or 1.0
        lines += ["", f"  {'us':>10} {'share':>6} {'count':>6}  kernel"]
        for group in groups:
            lines.append(
                f"  {group.us:>10.1f} {group.us / whole:>6.1%} {group.count:>6}  {clipped(group.name, WIDTH - 28)}"
            )
            for row in group.kernels:
                named = f"{row['origin']:<9} {clipped(row['name'], 42):<42} {group.below(row)}".rstrip()
                lines.append(
                    f"  {row['us']:>10.1f} {row['us'] / whole:>6.1%} {row['count']:>6}    {clipped(named, WIDTH - 30)}"
                )
    waits = gaps(data.get("timeline", ()), GAPS_SHOWN)
    if waits:
        lines += ["", "  where the device waits longest between two kernels"]
    for gap in waits:
        names = f"after {clipped(gap.before, 34)}, before {clipped(gap.after, 34)}"
        lines += wrapped(f"{gap.us:>8.1f} us in {gap.count:>4}  {names}", 2, 22)
    return lines


def agreement_lines(data: dict) -> list[str]:
    lines = []
    for pair, count in distinct_pairs(data.get("pairs", [])):
        first = f", first in {pair['first_module']}" if pair["first_module"] else ""
        largest = (
            f"at most {pair['max_abs']:.2g} (relative {pair['max_rel']:.2g})" if pair["max_abs"] else "equal bit for bit"
        )
        lines += wrapped(f"{pair['a']} against {pair['b']}{times_text(count)}: {largest}{first}", 2)
    return lines


def ladder_lines(data: dict) -> list[str]:
    lines = []
    for rung in data.get("rungs", ()):
        if rung["ok"]:
            lines.append(
                f"  {rung['name']:<28} {time_text(rung['seconds']):>9}, first call {time_text(rung['first_seconds'])}"
            )
        else:
            lines += wrapped(f"{rung['name']:<28}    failed: {rung['error']}", 2, 31)
    return lines


_NUMBERS = {
    1: op_lines,
    2: graph_lines,
    3: sweep_lines,
    4: capture_lines,
    5: step_lines,
    6: agreement_lines,
    7: ladder_lines,
}

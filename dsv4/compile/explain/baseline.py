"""What got worse and what got better between an old report and a new one of the same callables."""

from collections import Counter
from dataclasses import dataclass

from dsv4.compile.explain.report import Finding, Report, Stage
from dsv4.compile.explain.summary import plural, time_text, where
from dsv4.model.sizes import size_text

TIME_TOLERANCE = 0.05  # a step has to be slower by more than this share to count as slower
DIRECTIONS = ("worse", "better", "not compared")
# Of the data of a stage, what should not grow: (stage, name, words, how to show it).
NUMBERS = (
    (4, "copied_bytes", "copied before each replay", size_text),
    (5, "nodes", "kernels a step", str),
    (5, "bytes", "bytes of a step", size_text),
    (5, "ms", "a step", lambda ms: time_text(ms / 1e3)),
)


@dataclass(frozen=True)
class Change:
    """One thing that differs. kind: that of the finding, or "number"."""

    subject: str
    kind: str
    text: str
    direction: str  # one of DIRECTIONS


def comparison_text(changes: list[Change]) -> str:
    """A line for each change, the bad ones first."""
    counts = Counter(change.direction for change in changes)
    lines = ["against the baseline: " + ", ".join(f"{counts[direction]} {direction}" for direction in DIRECTIONS)]
    for change in sorted(changes, key=lambda change: DIRECTIONS.index(change.direction)):
        lines.append(f"  {change.direction}: {change.subject}: {change.text}")
    return "\n".join(lines)


def compare(old: list[Report], new: list[Report]) -> list[Change]:
    """All that differs between reports of the same subject. ValueError if there is none."""
    before = {report.subject: report for report in old}
    if not any(report.subject in before for report in new):
        known, found = ", ".join(before) or "nothing", ", ".join(report.subject for report in new)
        raise ValueError(f"the baseline reports on {known}, and not on {found}; expected an older report of the same")
    changes = []
    for report in new:
        if report.subject in before:
            changes += report_changes(before[report.subject], report)
        else:
            changes.append(Change(report.subject, "note", "not in the baseline", "not compared"))
    return changes


def report_changes(old: Report, new: Report) -> list[Change]:
    """All that differs between two reports of the same subject."""
    same_device = device(old) == device(new)
    changes = []
    for stage in new.stages:
        past = old.stage(stage.number)
        if past is not None and ran(past) and ran(stage):
            found = finding_changes(past, stage) + number_changes(past, stage, same_device)
            changes += [Change(new.subject, *change) for change in found]
            if "ms" in stage.data and not same_device:
                words = f"times: now on {device(new)}, the baseline was on {device(old)}"
                changes.append(Change(new.subject, "note", words, "not compared"))
        elif ran(stage) or (past is not None and ran(past)):
            words = f"stage {stage.number} ({stage.name}): {stage.status}, was {past.status if past else 'not run'}"
            failed = stage.status == "error"
            change = ("error", words, "worse") if failed else ("note", words, "not compared")
            changes.append(Change(new.subject, *change))
    return changes


def ran(stage: Stage) -> bool:
    """Whether a stage came to a result."""
    return stage.status in ("ok", "found")


def device(report: Report) -> str:
    """What times depend on most."""
    return str(report.environment.get("device", "an unknown device"))


def finding_changes(old: Stage, new: Stage) -> list[tuple[str, str, str]]:
    """(kind, words, direction) of findings that came, went or changed their count. Line numbers do not tell findings
    apart, since any edit moves them; notes are no findings here."""
    before, now = count(old.findings), count(new.findings)
    found = []
    for key, finding in {identity(finding): finding for finding in (*old.findings, *new.findings)}.items():
        if before[key] != now[key] and finding.kind != "note":
            module = f" in {finding.module}" if finding.module else ""
            place = f" at {where(finding)}" if finding.file else ""
            times = f" (x{now[key]}, was x{before[key]})" if before[key] and now[key] else ""
            words = f"{'' if now[key] else 'gone: '}{finding.kind}: {finding.title}{module}{place}{times}"
            found.append((finding.kind, words, better_if(now[key] < before[key])))
    return found


def number_changes(old: Stage, new: Stage, same_device: bool) -> list[tuple[str, str, str]]:
    """(kind, words, direction) of graphs, bytes, kernels, times and rungs."""
    found = []
    before, now = (len(stage.data.get("graphs", ())) for stage in (old, new))
    if before != now:
        found.append(("number", f"{plural(now, 'graph')}, were {before:,}", better_if(now < before)))
    for number, name, words, shown in NUMBERS:
        before, now = old.data.get(name), new.data.get(name)
        if number != new.number or before is None or now is None or (name == "ms" and not same_device):
            continue
        tolerance = TIME_TOLERANCE if name == "ms" else 0.0
        if abs(now - before) > tolerance * before:
            beyond = f" (more than {tolerance:.0%} apart)" if tolerance else ""
            found.append(("number", f"{words}: {shown(now)}, was {shown(before)}{beyond}", better_if(now < before)))
    past = {rung["name"]: rung["ok"] for rung in old.data.get("rungs", ())}
    for rung in new.data.get("rungs", ()):
        if past.get(rung["name"], rung["ok"]) != rung["ok"]:
            words = f"the rung {rung['name']} {'runs' if rung['ok'] else 'fails: ' + rung['error']}"
            found.append(("number", words, better_if(rung["ok"])))
    return found


def better_if(better: bool) -> str:
    return "better" if better else "worse"


def count(findings: tuple[Finding, ...]) -> Counter:
    """How often each finding is there."""
    times = Counter()
    for finding in findings:
        times[identity(finding)] += finding.count
    return times


def identity(finding: Finding) -> tuple[str, ...]:
    """What makes a finding the same one in two versions of a program, in two places on disk."""
    file = finding.file.replace("\\", "/").rpartition("/")[2]
    return finding.kind, finding.title, finding.module, file, finding.source.strip()

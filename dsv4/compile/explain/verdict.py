"""The one line that says how a callable fares."""

from collections.abc import Iterable

from dsv4.compile.explain.report import Stage


def verdict(stages: Iterable[Stage]) -> str:
    """`1 graph, 0 breaks, 0 recompiles over 8 calls; one CUDA graph, 0 syncs, 0 allocations, 14.2 kernels a layer`."""
    by_number = {stage.number: stage for stage in stages}
    parts = [words for number in (1, 2, 3) if (words := _SAYS[number](by_number.get(number)))]
    device = [words for number in (4, 5) if (words := _SAYS[number](by_number.get(number)))]
    after = [words for number in (6, 7) if (words := _SAYS[number](by_number.get(number)))]
    failed = [stage.name for stage in by_number.values() if stage.status == "error"]
    ends = [f"failed: {', '.join(failed)}"] if failed else []
    groups = (", ".join(parts), ", ".join(device), *after, *ends)
    return "; ".join(group for group in groups if group) or "nothing was looked at"


def _ran(stage: Stage | None) -> bool:
    return stage is not None and stage.status in ("ok", "found")


def _ops(stage: Stage | None) -> str:
    """Only what is wrong: ops that are sound are not worth a word."""
    ops = {finding.details.get("op", finding.title) for finding in stage.findings} if _ran(stage) else ()
    return f"{len(ops)} unsound op{'' if len(ops) == 1 else 's'}" if ops else ""


def _graphs(stage: Stage | None) -> str:
    return stage.summary.split(";")[0] if _ran(stage) else ""


def _recompiles(stage: Stage | None) -> str:
    return stage.summary.rsplit(", ", 1)[0] if _ran(stage) else ""


def _capture(stage: Stage | None) -> str:
    if stage is None or stage.status == "error":
        return ""
    if stage.status == "skipped" or stage.data.get("captured") is None:
        return f"CUDA graph: not checked ({stage.data.get('why') or stage.summary.removeprefix('skipped: ')})"
    return "one CUDA graph" if stage.data["captured"] else f"no CUDA graph ({stage.data['why']})"


def _step(stage: Stage | None) -> str:
    if not _ran(stage):
        return ""
    data = stage.data
    words = [f"{data['syncs']} syncs", f"{data['allocations']} allocations"]
    if data.get("nodes_per_layer"):
        words.append(f"{data['nodes_per_layer']:.1f} kernels a layer")
    return ", ".join([*words, f"{data['ms']:.3f} ms"])


def _agreement(stage: Stage | None) -> str:
    return "compiled differs from eager" if _ran(stage) and stage.status == "found" else ""


def _ladder(stage: Stage | None) -> str:
    broken = [rung["name"] for rung in stage.data.get("rungs", ()) if not rung["ok"]] if _ran(stage) else []
    return f"does not run with {broken[0]}" if broken else ""


_SAYS = {1: _ops, 2: _graphs, 3: _recompiles, 4: _capture, 5: _step, 6: _agreement, 7: _ladder}

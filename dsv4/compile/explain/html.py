"""Reports as one HTML file that needs no network, and no JavaScript but for pointing at kernels."""

from importlib.resources import files
from string import Template

from dsv4.compile.explain.page.markup import Markup, join, prose, row, section, table, tag
from dsv4.compile.explain.page.step import step_sections
from dsv4.compile.explain.page.strip import graphs_section
from dsv4.compile.explain.report import Finding, Report, Stage
from dsv4.compile.explain.summary import (
    details,
    distinct_calls,
    distinct_pairs,
    environment_text,
    facts,
    op_facts,
    plural,
    stage_text,
    time_text,
    where,
)
from dsv4.model.sizes import size_text

LONG = 120  # characters of a detail that is folded away
STATE = {True: "good", False: "bad", None: "unknown"}


def page(reports: list[Report]) -> str:
    """The whole file."""
    here = files("dsv4.compile.explain.page")
    index = [tag("a", tag("b", report.subject), report.verdict, href=f"#r{place}") for place, report in enumerate(reports)]
    tagline = tag("span", "why a step is not one graph, not one CUDA graph, or not fast")
    body = [
        tag("header", tag("b", "dsv4 explain"), tagline, class_="top"),
        tag("nav", index, class_="index") if len(reports) > 1 else None,
        tag("main", [report_article(report, f"r{place}") for place, report in enumerate(reports)]),
        environment(reports),
    ]
    return Template((here / "page.html").read_text(encoding="utf-8")).substitute(
        title=join(["dsv4 explain: ", ", ".join(report.subject for report in reports)]),
        css=(here / "page.css").read_text(encoding="utf-8"),
        js=(here / "page.js").read_text(encoding="utf-8"),
        body=join(body),
    )


def report_article(report: Report, anchor: str) -> Markup:
    """Everything about one callable. Ids of its parts begin with anchor."""
    data = {stage.number: stage.data for stage in report.stages}
    step, links = step_sections(data.get(5, {}), anchor)
    return tag(
        "article",
        tag("p", report.subject, class_="subject"),
        tag("h1", report.verdict),
        tag("ul", chips(report, anchor), class_="chips"),
        graphs_section(data.get(2, {}), links),
        findings(report, anchor),
        step,
        tag("div", ladder(data.get(7, {})), agreement(data.get(6, {})), sweep(data.get(3, {})), class_="pair"),
        ops(data.get(1, {})),
        stages(report, anchor),
        id=anchor,
        class_="report",
    )


def chips(report: Report, anchor: str) -> list[Markup]:
    """The verdict in pieces; bad news leads to the findings, other news to its stage."""
    found = []
    for fact in facts(report):
        place = "findings" if fact.good is False else fact.stage
        found.append(tag("li", tag("a", fact.text, class_=STATE[fact.good], href=f"#{anchor}-{place}")))
    return found


def findings(report: Report, anchor: str) -> Markup:
    """All findings, in the order of the stages, the notes last."""
    found = sorted(report.findings(), key=lambda finding: finding.kind == "note")
    wrong = sum(finding.kind != "note" for finding in found)
    head = [("what", None), ("where", None), ("why, and what to do", None)]
    return section(
        "Findings",
        table(head, [finding_row(finding) for finding in found], "findings") if found else None,
        note=plural(wrong, "finding") if wrong else "nothing is wrong",
        id=f"{anchor}-findings",
    )


def finding_row(finding: Finding) -> Markup:
    """What, where, why."""
    what = [
        tag("span", finding.kind, class_=f"kind {'note' if finding.kind == 'note' else 'bad'}"),
        tag("span", f"×{finding.count}", class_="times") if finding.count > 1 else None,
        tag("h3", prose(finding.title)),
        tag("code", finding.module, class_="soft") if finding.module else None,
    ]
    place = [
        tag("code", where(finding)) if finding.file else None,
        tag("pre", finding.source.strip()) if finding.source else None,
    ]
    why = [
        tag("p", prose(finding.reason)) if finding.reason else None,
        tag("p", tag("b", "Fix"), prose(finding.hint), class_="fix") if finding.hint else None,
        [detail(name, text) for name, text in details(finding)],
    ]
    return row(what, place, why)


def detail(name: str, value: str) -> Markup:
    """Original words of PyTorch, stacks and the like: folded if they are long."""
    if "\n" in value or len(value) > LONG:
        return tag("details", tag("summary", name), tag("pre", value))
    return tag("p", f"{name} ", tag("code", value), class_="detail soft")


def ladder(data: dict) -> Markup | None:
    """A bar for each rung, as long as a call takes."""
    rungs = data.get("rungs", [])
    longest = max((rung["seconds"] for rung in rungs if rung["ok"]), default=0.0) or 1.0
    items = []
    for rung in rungs:
        if rung["ok"]:
            said = tag("b", time_text(rung["seconds"]), class_="number")
            bar = tag("div", class_="bar", style=f"width: {rung['seconds'] / longest:.2%}")
            first = tag("small", f"first call {time_text(rung['first_seconds'])}", class_="soft")
            items.append(tag("li", tag("p", rung["name"], first, said), bar))
        else:
            failed = tag("b", "failed", class_="failed")
            items.append(tag("li", tag("p", rung["name"], failed), tag("pre", rung["error"])))
    return section("The ladder", tag("ol", items, class_="ladder"), note="time of one call") if items else None


def agreement(data: dict) -> Markup | None:
    """Largest differences between the ways to run the same thing."""
    rows = [
        row(
            [f"{pair['a']} and {pair['b']}", tag("span", f" ×{count}", class_="soft") if count > 1 else None],
            (f"{pair['max_abs']:.2g}", "number"),
            (f"{pair['max_rel']:.2g}", "number"),
            tag("code", pair["first_module"]) if pair["first_module"] else "-",
        )
        for pair, count in distinct_pairs(data.get("pairs", []))
    ]
    head = [("", None), ("largest", "number"), ("relative", "number"), ("first in", None)]
    return section("Agreement", table(head, rows, "plain"), note="differences") if rows else None


def ops(data: dict) -> Markup | None:
    """The ops that are not torch's own, folded away."""
    rows = [
        row(
            tag("code", op["name"], title=op["schema"]),
            (f"{op['calls']:,}", "number"),
            *(tag("code", value) if value else None for value in op_facts(op).values()),
        )
        for op in data.get("ops", [])
    ]
    head = [("op", None), ("calls", "number"), ("kernels", None), ("changes", None), ("tags", None)]
    title = tag("summary", plural(len(rows), "op"), " outside of torch")
    return section("Ops", tag("details", title, table(head, rows, "plain ops"))) if rows else None


def sweep(data: dict) -> Markup | None:
    """The calls of the sweep over shapes; the first has to compile."""
    items = []
    for index, (shape, compiled, count) in enumerate(distinct_calls(data.get("sweep", []))):
        kind = ("bad" if index or count > 1 else "first") if compiled else None
        items.append(tag("li", shape, f" ×{count}" if count > 1 else None, " compiled" if compiled else None, class_=kind))
    return section("Calls", tag("ol", items, class_="sweep"), note="and which of them compiled") if items else None


def stages(report: Report, anchor: str) -> Markup:
    """What was looked at, and what came of it."""
    rows = [
        row(
            (stage.number, "number soft"),
            stage.name,
            tag("span", stage.status, class_=f"status {stage.status}"),
            [stage_text(stage), inputs_words(stage)],
            (f"{stage.seconds:.1f} s" if stage.seconds else "", "number soft seconds"),
            id=f"{anchor}-{stage.number}",
        )
        for stage in report.stages
    ]
    head = [("", "number"), ("stage", None), ("status", None), ("result", None), ("took", "number seconds")]
    return section("Stages", table(head, rows, "plain stages"))


def inputs_words(stage: Stage) -> Markup | None:
    """Stage 4 has no card of its own: why there is no CUDA graph, and what its inputs cost."""
    said = [stage.data["why"]] if stage.data.get("captured") is False else []
    if stage.data.get("static_bytes") is not None:
        said.append(f"{size_text(stage.data['static_bytes'])} of inputs read in place")
        said.append(f"{size_text(stage.data.get('copied_bytes') or 0)} copied before each replay")
    return tag("p", "; ".join(said), class_="soft") if said else None


def environment(reports: list[Report]) -> Markup:
    """Where this was measured."""
    pairs = dict(pair for report in reports for pair in environment_text(report.environment))
    return tag("footer", tag("dl", [tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs.items()]))

"""One running step: its numbers, where its time goes, its timeline, and its kernels by module."""

from dsv4.compile.explain.page import timeline
from dsv4.compile.explain.page.markup import Markup, row, section, table, tag
from dsv4.compile.explain.page.strip import COLOURS, swatch
from dsv4.compile.explain.page.timeline import micro
from dsv4.compile.explain.summary import COUNTED, Group, clipped, gaps, kernel_groups, plural, time_text
from dsv4.model.sizes import size_text

GAPS_SHOWN = 5
NAME_SHOWN = 100  # characters of a kernel's name


def step_sections(data: dict, anchor: str) -> tuple[list[Markup], dict[str, str]]:
    """The cards of stage 5, and links to the rows of its timeline by the layers' names."""
    if not data:
        return [], {}
    groups = kernel_groups(data.get("kernels", []))
    rows = timeline.rows(data.get("timeline", []))
    step = section(
        "One step",
        tag("dl", tiles(data), class_="tiles"),
        shares(data, groups),
        timeline_list(rows, groups, anchor),
        waits(data),
        class_="step",
    )
    links = {found.name: f"#{anchor}-row-{index}" for index, found in enumerate(rows)}
    return [step, *([kernels_section(groups)] if groups else [])], links


def tiles(data: dict) -> list[Markup]:
    """The numbers, large, with small print."""
    ms, floor = data.get("ms"), data.get("floor_ms")
    found = []
    if ms:
        found.append(("a step", time_text(ms / 1e3), ""))
    if floor:
        found.append(("bandwidth floor", time_text(floor / 1e3), f"{floor / ms:.0%} of it" if ms else ""))
    if data.get("bytes"):
        found.append(("bytes moved", size_text(data["bytes"]), ""))
    if data.get("nodes"):
        each = f"{data['nodes_per_layer']:.3g} a layer" if data.get("nodes_per_layer") else ""
        found.append(("kernels", f"{data['nodes']:,}", each))
    if data.get("gap_us") is not None:
        found.append(("between kernels", micro(data["gap_us"]), ""))
    made = [tag("div", tag("dt", words), tag("dd", number, tag("small", small))) for words, number, small in found]
    for name, one in COUNTED.items():
        if name in data:
            words = plural(data[name], one).partition(" ")[2]
            made.append(tag("div", tag("dt", words), tag("dd", f"{data[name]:,}", class_="bad" if data[name] else None)))
    return made


def shares(data: dict, groups: list[Group]) -> list[Markup]:
    """A bar of where the time goes, which is the legend of the timeline too."""
    if not groups:
        return []
    shown = [(f"c{index}", group.name, group.us) for index, group in enumerate(groups[:COLOURS])]
    if len(groups) > COLOURS:
        shown.append((f"c{COLOURS}", "the rest", sum(group.us for group in groups[COLOURS:])))
    if data.get("gap_us"):
        shown.append(("idle", "between kernels", data["gap_us"]))
    whole = sum(us for _, _, us in shown) or 1.0
    bar, legend = [], []
    for kind, name, us in shown:
        bar.append(tag("i", class_=kind, style=f"flex-grow: {us / whole:.5f}", title=f"{name}: {micro(us)}"))
        legend.append(tag("li", swatch(kind), name, tag("b", percent(us / whole))))
    return [tag("div", bar, class_="share"), tag("ul", legend, class_="legend")]


def timeline_list(rows: list[timeline.Row], groups: list[Group], anchor: str) -> Markup | None:
    """The rows of the timeline, all to one scale."""
    if not rows:
        return None
    span, colours, numbers = max(found.length for found in rows), timeline.colours(groups), kernel_numbers(groups)
    lines = [
        tag(
            "li",
            tag("span", found.name, class_="soft"),
            timeline.svg(found, span, colours, numbers),
            tag("span", micro(found.length), class_="soft number"),
            id=f"{anchor}-row-{index}",
        )
        for index, found in enumerate(rows)
    ]
    return tag("ol", lines, class_="timeline")


def waits(data: dict) -> list[Markup]:
    """The longest gaps."""
    rows = [
        row(
            (micro(gap.us), "number"),
            (f"{gap.count:,}", "number"),
            [name_code(gap.before), tag("span", " then ", class_="soft"), name_code(gap.after)],
        )
        for gap in gaps(data.get("timeline", []), GAPS_SHOWN)
    ]
    head = [("idle", "number"), ("times", "number"), ("between", None)]
    return [tag("h3", "Where the device waits longest", class_="small"), table(head, rows, "plain waits")] if rows else []


def kernels_section(groups: list[Group]) -> Markup:
    """Kernels by module, each module to be opened."""
    whole = sum(group.us for group in groups) or 1.0
    numbers = kernel_numbers(groups)
    head = [("kernel", None), ("origin", None), ("count", "number"), ("time", "number"), ("share", "number")]
    blocks = []
    for index, group in enumerate(groups):
        kind = f"c{min(index, COLOURS)}"
        rows = [
            row(
                [name_code(kernel["name"]), tag("code", group.below(kernel), class_="soft")],
                kernel["origin"],
                (f"{kernel['count']:,}", "number"),
                (micro(kernel["us"]), "number"),
                (f"{kernel['us'] / whole:.1%}", "number"),
                data_k=numbers[kernel["name"]],
            )
            for kernel in group.kernels
        ]
        title = tag(
            "summary",
            swatch(kind),
            tag("code", group.name),
            tag("div", class_=f"bar {kind}", style=f"width: {group.us / (groups[0].us or 1.0):.2%}"),
            tag("span", f"{group.count:,} ×", class_="number count soft"),
            tag("span", micro(group.us), class_="number"),
            tag("span", f"{group.us / whole:.1%}", class_="number soft"),
        )
        blocks.append(tag("details", title, table(head, rows, "plain"), class_="group", open="" if index == 0 else None))
    launches = sum(group.count for group in groups)
    return section("Kernels by module", blocks, note=f"{micro(whole)} in {plural(launches, 'kernel')}", class_="kernels")


def kernel_numbers(groups: list[Group]) -> dict[str, int]:
    """Kernel name -> a number that ties its bars and its rows together."""
    names = dict.fromkeys(kernel["name"] for group in groups for kernel in group.kernels)
    return {name: number for number, name in enumerate(names)}


def name_code(name: str) -> Markup:
    """The name of a kernel; those of templates go on for lines."""
    return tag("code", clipped(name, NAME_SHOWN), title=name)


def percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 else "<1%"

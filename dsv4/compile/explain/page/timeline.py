"""The kernels of one step as rows of an SVG: a row for each layer where there are layers, else for equal spans of time."""

import itertools
import math
from dataclasses import dataclass

from dsv4.compile.explain.page.markup import Markup, tag
from dsv4.compile.explain.page.strip import COLOURS
from dsv4.compile.explain.summary import Group, fold, layer, time_text

KERNELS_PER_ROW = 40
MOST_ROWS = 24
THINNEST = 1 / 1500  # of a row, so that a kernel of a microsecond can be seen


@dataclass(frozen=True)
class Row:
    """Kernels, or parts of them, from `start` on: (offset, length, kernel), in microseconds."""

    name: str
    start: float
    spans: tuple[tuple[float, float, dict], ...]

    @property
    def length(self) -> float:
        """Microseconds from the first to the last."""
        return max(offset + length for offset, length, _ in self.spans)


def rows(timeline: list[dict]) -> list[Row]:
    """The timeline in rows. By layer if each layer runs in one piece and there are several, by time otherwise."""
    kernels = sorted(timeline, key=lambda kernel: kernel["start_us"])
    runs = by_layer(kernels)
    layers = [name for name, _ in runs if layer(name) == name and fold(name) != name]
    if len(layers) > 1 and len(set(layers)) == len(layers):
        return [
            Row(name, run[0]["start_us"], tuple((k["start_us"] - run[0]["start_us"], k["us"], k) for k in run))
            for name, run in runs
        ]
    return by_time(kernels)


def by_layer(kernels: list[dict]) -> list[tuple[str, list[dict]]]:
    """Runs of kernels of the same layer; one without a module belongs to the layer before it."""
    names = list(itertools.accumulate((layer(k["module"]) for k in kernels), lambda before, name: name or before))
    runs = itertools.groupby(zip(names, kernels, strict=True), key=lambda pair: pair[0])
    return [(name, [kernel for _, kernel in run]) for name, run in runs]


def by_time(kernels: list[dict]) -> list[Row]:
    """Rows of an equal, round span of time; a kernel that goes on into the next row is cut."""
    if not kernels:
        return []
    first = kernels[0]["start_us"]
    end = max(k["start_us"] + k["us"] for k in kernels) - first
    count = min(MOST_ROWS, math.ceil(len(kernels) / KERNELS_PER_ROW))
    span = round_up(end / count) or 1.0
    spans: dict[int, list] = {}
    for kernel in kernels:
        start, stop = kernel["start_us"] - first, kernel["start_us"] - first + kernel["us"]
        for row in range(int(start // span), math.ceil(stop / span) or 1):
            left = max(start, row * span)
            spans.setdefault(row, []).append((left - row * span, min(stop, (row + 1) * span) - left, kernel))
    return [Row(micro(row * span), row * span, tuple(spans[row])) for row in sorted(spans)]


def round_up(value: float) -> float:
    """The next 1, 2, 2.5 or 5 times a power of ten."""
    if value <= 0:
        return 0.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= value * (1 - 1e-9))


def colours(groups: list[Group]) -> dict[tuple[str, str], str]:
    """(folded module, kernel name) -> class of its colour, the most expensive groups first."""
    return {
        (row["module"], row["name"]): f"c{min(index, COLOURS)}"
        for index, group in enumerate(groups)
        for row in group.kernels
    }


def micro(us: float) -> str:
    """A time, with the letter that a terminal may lack."""
    return time_text(us / 1e6).replace(" us", " µs")


def svg(row: Row, span: float, colour: dict[tuple[str, str], str], number: dict[str, int]) -> Markup:
    """One row, `span` microseconds wide. number: kernel name -> what ties it to its row in the table of kernels."""
    bars = []
    for offset, length, kernel in row.spans:
        module = f"\n{kernel['module']}" if kernel["module"] else ""
        title = f"{kernel['name']}{module}\n{micro(kernel['us'])} at {micro(kernel['start_us'])}"
        bars.append(
            tag(
                "rect",
                tag("title", title),
                class_=colour.get((fold(kernel["module"]), kernel["name"]), f"c{COLOURS}"),
                data_k=number.get(kernel["name"]),
                x=f"{offset:.2f}",
                width=f"{max(length, span * THINNEST):.2f}",
                height=1,
            )
        )
    return tag(
        "svg",
        bars,
        viewBox=f"0 0 {span:.2f} 1",
        preserveAspectRatio="none",
        role="img",
        aria_label=f"kernels of {row.name}",
    )

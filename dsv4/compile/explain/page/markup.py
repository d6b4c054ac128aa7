"""HTML as Python calls. A string that is not markup already gets escaped, so a finding may hold any text."""

import re
from html import escape


class Markup(str):
    """Text that is HTML."""

    __slots__ = ()


def tag(name: str, *children, **attributes) -> Markup:
    """`<name attributes>children</name>`. Children: Markup, strings (escaped), numbers, None (left out) or lists of these.

    An attribute that is None is left out; `class_` is class, and `_` is `-` elsewhere.
    """
    opened = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{opened}>{join(children)}</{name}>")


def join(children) -> Markup:
    """Children one after the other."""
    return Markup("".join(_child(child) for child in children))


def _child(child) -> str:
    if child is None or isinstance(child, Markup):
        return child or ""
    return join(child) if isinstance(child, list | tuple) else escape(str(child))


def prose(text: str) -> list:
    """Children for a sentence in which `backquotes` mean code."""
    parts = re.split(r"`([^`\n]+)`", text)
    return [tag("code", part) if index % 2 else part for index, part in enumerate(parts)]


def section(title: str, *children, note: str = "", **attributes) -> Markup:
    """A card with a heading and a small note beside it."""
    return tag("section", tag("h2", title, tag("small", note) if note else None), *children, **attributes)


def table(head: list[tuple[str, str | None]], rows: list[Markup], class_: str) -> Markup:
    """A table of rows that are made already; head: (words, class) of each column."""
    heads = tag("thead", tag("tr", [tag("th", words, class_=kind) for words, kind in head]))
    return tag("table", heads, tag("tbody", rows), class_=class_)


def row(*cells, **attributes) -> Markup:
    """A row of a table. A cell is (children, class) or children alone."""
    made = [tag("td", cell[0], class_=cell[1]) if isinstance(cell, tuple) else tag("td", cell) for cell in cells]
    return tag("tr", made, **attributes)

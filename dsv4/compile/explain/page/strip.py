"""The strip: one unbroken bar is one graph, and where the graph changes there is a notch."""

from dsv4.compile.explain.page.markup import Markup, section, tag
from dsv4.compile.explain.summary import plural

COLOURS = 7  # classes c0 to c6 of the page; c7 is for the rest
GRAPHS_NAMED = 6  # of more graphs the legend only gives the number
MOST_LABELS = 10  # so many fit a phone


def graphs_section(data: dict, links: dict[str, str]) -> Markup | None:
    """Layers coloured by graph or, without layers, the graphs by their size. links: layer -> link to its kernels."""
    graphs = data.get("graphs")
    if not graphs:
        return None
    layers = data.get("layers", [])
    breaks = sum(layer["breaks"] for layer in layers)
    notes = [plural(len(layers), "layer")] if layers else []
    notes += [plural(len(graphs), "graph")]
    notes += [f"a dot is a break, {breaks:,} in all"] if breaks else []
    legend = []
    for graph in graphs[:GRAPHS_NAMED]:
        legend.append(tag("li", swatch(colour(graph["id"])), f"graph {graph['id']}, {plural(graph['ops'], 'op')}"))
    if len(graphs) > GRAPHS_NAMED:
        legend.append(tag("li", f"and {len(graphs) - GRAPHS_NAMED} more"))
    return section(
        "Layers by graph" if layers else "Graphs",
        tag("ol", layer_cells(layers, links) if layers else graph_cells(graphs), class_="strip"),
        tag("ul", legend, class_="legend"),
        note=", ".join(notes),
    )


def layer_cells(layers: list[dict], links: dict[str, str]) -> list[Markup]:
    """One cell a layer, of one piece for each of its graphs; breaks part it even where no other graph is known."""
    every = -(-len(layers) // MOST_LABELS)
    found, before = [], None
    for index, layer in enumerate(layers):
        graphs = layer["graphs"] or [None]
        graphs = graphs + graphs[-1:] * (layer["breaks"] + 1 - len(graphs))
        cell = []
        for place, graph in enumerate(graphs):
            cut = place > 0 or (index > 0 and graph != before)
            cell.append(tag("i", class_=f"{colour(graph)} cut" if cut else colour(graph)))
            before = graph
        link = links.get(layer["name"])
        inside = ", ".join(map(str, layer["graphs"])) or "none"
        found.append(
            tag(
                "li",
                tag("a" if link else "span", cell, href=link),
                class_="broken" if layer["breaks"] else None,
                title=f"{layer['name']}: graph {inside}, {plural(layer['breaks'], 'break')}",
                data_label=layer["name"].rpartition(".")[2] if index % every == 0 else None,
            )
        )
    return found


def graph_cells(graphs: list[dict]) -> list[Markup]:
    """One cell a graph, as wide as it has ops."""
    return [
        tag(
            "li",
            tag("i", class_=f"{colour(graph['id'])} cut" if index else colour(graph["id"])),
            title=f"graph {graph['id']}: {plural(graph['ops'], 'op')} {', '.join(graph['modules'])}",
            style=f"flex-grow: {max(graph['ops'], 1)}",
        )
        for index, graph in enumerate(graphs)
    ]


def colour(graph: int | None) -> str:
    """The class of a graph's colour; neighbours differ."""
    return f"c{COLOURS if graph is None else graph % COLOURS}"


def swatch(kind: str) -> Markup:
    """A square of a colour, for legends."""
    return tag("span", class_=f"swatch {kind}")

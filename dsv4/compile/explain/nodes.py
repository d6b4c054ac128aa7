"""The calls in a traced graph, in order, and the modules that they come from.

A module is named by an expression, as torch writes it: L['self'].layers.0.attn, where L are the local variables of the
function that was traced.
"""

import re
from types import FrameType

from torch import fx, nn


def join(*parts: str) -> str:
    """A module path from its parts, of which some may be empty."""
    return ".".join(part for part in parts if part)


def module_of(node: fx.Node) -> tuple[str, str]:
    """(key, expression) of the innermost module that a node comes from, ("", "") if it comes from none."""
    stack = node.meta.get("nn_module_stack") or {}
    key = next(reversed(stack), "")
    return key, stack[key][0] if stack else ""


def is_region(node: fx.Node) -> bool:
    """Whether a node calls a region that is traced once and used by all layers that look alike."""
    return "invoke_subgraph" in str(node.target) and isinstance(node.args[0], fx.Node)


def calls(graph: fx.GraphModule) -> list[tuple[fx.Node, str, str]]:
    """(node, key, expression) of every call in order, with those of a region at each of its uses. A region's nodes know
    only the layer that was traced; at another use they get that layer's name, and no key."""
    found = []
    traced: dict[str, str] = {}  # region -> the layer whose nodes it holds
    for node in graph.graph.nodes:
        key, expression = module_of(node)
        if is_region(node):
            region = node.args[0].target
            first = traced.setdefault(region, expression)
            for inner, inner_key, inner_expression in calls(getattr(graph, region)):
                moved = inner_expression.startswith(first) and first != expression
                if moved:
                    inner_key, inner_expression = "", expression + inner_expression[len(first) :]
                found.append((inner, inner_key, inner_expression))
        elif node.op.startswith("call_"):
            found.append((node, key, expression))
    return found


def resolve(expression: str, frame: FrameType | None, names: dict[int, str]) -> str | None:
    """The path that `names` (id(module) -> path) gives the module of an expression, read with a frame's local variables."""
    match = re.match(r"L\['(\w+)'\](.*)$", expression)
    root = frame.f_locals.get(match[1]) if match and frame is not None else None
    if not isinstance(root, nn.Module) or id(root) not in names:
        return None
    return join(names[id(root)], *attributes(match[2]))


def attributes(expression: str) -> list[str]:
    """The names in an expression, as in a module's path."""
    return re.findall(r"\w+", re.sub(r"\._(?:modules|parameters|buffers)\b", "", expression))

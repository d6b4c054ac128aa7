"""Which module a compiled step's launches come from, in the order in which they are launched.

Inductor writes above every launch in the code that it generates which nodes of the traced graph it is made of, and those
nodes know their modules. Layers that look alike share one function of that code; its calls are told apart by counting.
"""

import itertools
import os
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from torch import fx
from torch._inductor.codecache import PyCodeCache
from torch._inductor.compile_fx import compile_fx

from dsv4.compile.explain import nodes

_SOURCE = re.compile(r"#.*Source Nodes: \[(.*?)\], Original ATen")
_CALLS = (
    (re.compile(r"\b(\w+)\.run\("), "inductor"),
    (re.compile(r"\b(cpp_fused\w*)\("), "inductor"),
    (re.compile(r"torch\.ops\.([\w.]+)\("), "op"),
    (re.compile(r"extern_kernels\.(\w+)\("), "library"),
)


@dataclass(frozen=True)
class Launch:
    """One launch: a generated kernel's name, or an op's as namespace::name."""

    name: str
    origin: str  # "inductor", "library" (PyTorch's own kernels), or the op's namespace
    module: str  # path from the root module of the traced function


class Inductor:
    """The backend "inductor" that also keeps what is needed to tell where its launches come from."""

    def __init__(self):
        self._compiled: list[tuple[str, fx.GraphModule]] = []  # generated code and the graph that it is made of

    def __call__(self, graph: fx.GraphModule, inputs: list) -> Callable:
        known = {id(module) for module in PyCodeCache.modules}
        compiled = compile_fx(graph, inputs)
        # A graph that is compiled a second time finds its code in the cache and adds none.
        new = [source_of(module) for module in PyCodeCache.modules if id(module) not in known]
        self._compiled += [(code, graph) for code in new if "def call(" in code]
        return compiled

    def launches(self) -> list[Launch]:
        """The launches of one call if it is one graph; else none, for their order is not known."""
        return launches(*self._compiled[0]) if len(self._compiled) == 1 else []


def source_of(module: ModuleType) -> str:
    """The text of a generated module, "" if it has gone."""
    path = getattr(module, "__file__", None)
    if not path or not os.path.exists(path):
        return ""
    with open(path) as file:
        return file.read()


def launches(code: str, graph: fx.GraphModule) -> list[Launch]:
    """The launches in generated code, in order."""
    functions = functions_of(code)
    origins = Origins(graph)
    found: list[Launch] = []

    def walk(name: str, use: int) -> None:
        uses: defaultdict[str, int] = defaultdict(int)
        sources: list[str] = []
        for line in functions[name]:
            comment = _SOURCE.search(line)
            if comment:
                sources = comment[1].split(", ")
                continue
            called = re.search(r"= (\w+)\(", line)
            if called and called[1] in functions and called[1] != name:
                counts = total if name == "call" else uses
                walk(called[1], counts[called[1]])
                counts[called[1]] += 1
                continue
            for pattern, origin in _CALLS:
                match = pattern.search(line)
                if match and not line.lstrip().startswith("#"):
                    found.append(launch_of(match[1], origin, origins.module(sources, use)))
                    break

    total: defaultdict[str, int] = defaultdict(int)
    walk("call", 0)
    return found


def functions_of(code: str) -> dict[str, list[str]]:
    """Name -> lines of the functions in generated code that take `args`."""
    functions: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in code.splitlines():
        match = re.match(r"\s*def (\w+)\((.*)\):", line)
        if match:
            lines = functions.setdefault(match[1], []) if match[2] in ("args", "self, args") else []
        lines.append(line)
    return functions


def launch_of(name: str, origin: str, module: str) -> Launch:
    """A launch by the name that a profiler gives it."""
    if origin == "op":
        namespace, op = name.split(".")[:2]
        return Launch(f"{namespace}::{op}", "library" if namespace == "aten" else namespace, module)
    return Launch(f"aten::{name}" if origin == "library" else name, origin, module)


class Origins:
    """Looks up nodes of a traced graph by the names that generated code gives."""

    def __init__(self, graph: fx.GraphModule):
        self._top: dict[str, str] = {}  # node -> expression
        self._region: dict[str, dict[str, str]] = {}  # node that uses a region -> the region's nodes
        self._uses: defaultdict[str, list[str]] = defaultdict(list)  # region -> expressions of its uses in order
        self._target: dict[str, str] = {}
        for node in graph.graph.nodes:
            _, self._top[node.name] = nodes.module_of(node)
            if nodes.is_region(node):
                region = node.args[0].target
                inside = getattr(graph, region).graph.nodes
                self._region[node.name] = {inner.name: nodes.module_of(inner)[1] for inner in inside}
                self._target[node.name] = region
                self._uses[region].append(self._top[node.name])

    def module(self, sources: list[str], use: int) -> str:
        """Path of the module that the nodes named `sources` have in common, at the use-th use of their region."""
        region = next((name for name in sources if name in self._region), None)
        inside = self._region[region] if region else {}
        # Nodes from outside of the region are there because a value of theirs is made again inside.
        known = [inside[name] for name in sources if inside.get(name)] or [self._top.get(name, "") for name in sources]
        paths = [nodes.attributes(expression.partition("]")[2]) for expression in known if expression]
        path = common(paths)
        if region:
            uses = [nodes.attributes(text.partition("]")[2]) for text in self._uses[self._target[region]]]
            first = uses[0]
            if path[: len(first)] == first and use < len(uses):
                path = uses[use] + path[len(first) :]
        return ".".join(path)


def common(paths: list[list[str]]) -> list[str]:
    """What paths have in common; those of which another is a continuation do not count. Where they part before the number
    of a layer, the last."""
    ends = [a for a in paths if not any(len(b) > len(a) and b[: len(a)] == a for b in paths)]
    prefix = [parts[0] for parts in itertools.takewhile(lambda p: len(set(p)) == 1, zip(*ends, strict=False))]
    numbered = any(part.isdigit() for part in prefix) or not any(part.isdigit() for path in ends for part in path)
    return prefix if numbered or not ends else ends[-1]

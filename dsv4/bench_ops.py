"""The ops of one decode step, each by itself: how long, how many bytes, how far from the bytes' floor.

The step runs once eagerly under a mode that writes down every call of a dsv4 op with its arguments. All calls of one op
are then captured into one graph and replayed: the layers' large weights follow one another and so are not in the L2 cache.
Those of routers and hyper-connections, a few MB a layer, may stay there. In the step itself launches overlap, so the step
takes less than the sum of this table.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True)
class OpTime:
    """One op at one set of shapes: calls a step, seconds a call, bytes a call that have to be read."""

    name: str
    shape: str
    calls: int
    seconds: float
    nbytes: float


class _Recorder(TorchDispatchMode):
    """Keeps (op name, arguments) of every call of a dsv4 op."""

    def __init__(self):
        super().__init__()
        self.calls: list[tuple[str, Callable, tuple]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        namespace, _, name = func.name().partition("::")
        if namespace == "dsv4":
            self.calls.append((name, func, args))
        return func(*args, **(kwargs or {}))


def record(step: Callable[[], None]) -> list[tuple[str, Callable, tuple]]:
    """(name, op, arguments) of every dsv4 op that `step` calls."""
    recorder = _Recorder()
    with recorder:
        step()
    return recorder.calls


def time_ops(step: Callable[[], None], context: int, time_replays: Callable[[Callable, int], list[float]]) -> list[OpTime]:
    """Time every op that `step` calls. `step` must leave its arguments usable for the same calls again, which a decode
    step does: what it writes, it writes again. `context` is the position of the timed tokens."""
    groups = defaultdict(list)
    for name, func, args in record(step):
        groups[name, _shape(name, args)].append((func, args))
    found = []
    for (name, shape), calls in groups.items():
        repeat = -(-24 // len(calls))

        def run(calls=calls, repeat=repeat) -> None:
            for _ in range(repeat):
                for func, args in calls:
                    func(*args)

        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        seconds = sorted(time_replays(graph.replay, 20))[10] / (repeat * len(calls))
        nbytes = sum(call_bytes(name, args, context) for _, args in calls) / len(calls)
        found.append(OpTime(name, shape, len(calls), seconds, nbytes))
    return sorted(found, key=lambda op: -op.seconds * op.calls)


def _shape(name: str, args: tuple) -> str:
    """What tells the calls of one op apart: the kind of attention; a linear's width (in NVFP4 its bytes) and rows."""
    if name == "attend":
        return "sliding" if args[3] is None else "HCA" if args[4] is None else "CSA"
    if name.startswith(("linear", "project")):
        return " -> ".join(str(size) for size in reversed(args[1].shape))
    return ""


def call_bytes(name: str, args: tuple, context: int) -> float:
    """Bytes that a call has to read: weights once, of experts and cache only what it looks at. Activations count only where
    an op reads little else: those that advance cache or state, and sampling."""
    tensors = [value for value in args if isinstance(value, Tensor)]
    tokens = next((len(value) for value in tensors), 0)
    if name == "route_moe_nvfp4":
        routing = torch.ops.dsv4.route_topk(*args[:6])
        return call_bytes("route_topk", args[:4], context) + call_bytes(
            "moe_nvfp4", (args[0], *routing, *args[6:]), context
        )
    if name.startswith("moe"):
        experts, shared_last = args[1], args[-1] is True
        stacks = args[3:9] if name == "moe_nvfp4" else tensors[3:]
        picked = (experts[experts >= 0].unique().numel() + shared_last) / stacks[0].shape[0]
        shared = sum(value.nbytes for value in args[10:] if isinstance(value, Tensor))
        return picked * sum(value.nbytes for value in stacks) + shared
    if name == "attend":
        ring, entries, indices, rate = args[2], args[3], args[4], args[9]
        rows = min(context + 1, ring.shape[1])
        if entries is not None:
            visible = (context + 1) // rate
            rows += visible if indices is None else min(visible, indices.shape[1])
        return tokens * rows * ring.shape[-1] * ring.element_size()
    if name == "index_topk":
        keys, rate = args[2], args[5]
        return tokens * ((context + 1) // rate) * keys.shape[-1] * keys.element_size()
    if name.startswith(("advance", "sample")):
        return sum(value.nbytes for value in tensors[: 3 if name.startswith("advance") else 1])
    # Linears, routers, hyper-connections: every argument but the activations in front is a weight.
    activations = 4 if name.startswith("hc_mix") else 1
    return sum(value.nbytes for value in tensors[activations:])


def table(ops: list[OpTime], bandwidth: float) -> list[str]:
    """The lines of the table."""
    lines = [f"{'op':<18} {'':<20} {'calls':>5} {'us':>8} {'MB':>9} {'floor us':>8} {'of floor':>8}"]
    for op in ops:
        floor = op.nbytes / bandwidth
        lines.append(
            f"{op.name:<18} {op.shape:<20} {op.calls:>5} {op.seconds * 1e6:>8.2f} {op.nbytes / 1e6:>9.3f} "
            f"{floor * 1e6:>8.2f} {floor / op.seconds:>8.0%}"
        )
    return lines


def plot(ops: list[OpTime], bandwidth: float, path: str) -> None:
    """Bars of the time of all calls of each op in a step, over bars of their floors, as an image at `path`."""
    from matplotlib.figure import Figure  # extra `plot`

    shown = [op for op in ops if op.seconds * op.calls > 0.005 * sum(o.seconds * o.calls for o in ops)]
    names = [f"{op.name} {op.shape}".strip() for op in shown]
    figure = Figure(figsize=(8, 1 + 0.35 * len(shown)), layout="constrained")
    axes = figure.subplots()
    axes.barh(names, [op.seconds * op.calls * 1e6 for op in shown], color="#c8d3e6", label="measured")
    axes.barh(names, [op.nbytes * op.calls / bandwidth * 1e6 for op in shown], color="#2f5aa8", height=0.4, label="floor")
    axes.invert_yaxis()
    axes.set_xlabel("us a decode step, each op by itself")
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=150)

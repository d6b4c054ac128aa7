"""From a step function to something that runs without surprises: one fullgraph compilation, and one CUDA graph."""

import functools
from collections.abc import Callable
from types import FunctionType

import torch

from dsv4 import ops


@functools.cache
def declare_ops() -> None:
    """Tell inductor that dsv4's ops are opaque calls.

    It decides so by itself, but torch 2.11 then writes the op's arguments into a log message, and the text of an argument
    contains the texts of all that it was computed from: exponential in the number of layers.
    """
    from torch._inductor.lowering import lowerings, make_fallback, tag_to_layout_constraint
    from torch._library.utils import get_layout_constraint_tag

    for name in ops.registered():
        overload = getattr(torch.ops.dsv4, name).default
        if overload not in lowerings:
            make_fallback(overload, tag_to_layout_constraint(get_layout_constraint_tag(overload)))


def compile_step(step: Callable, backend: str | Callable = "inductor") -> Callable:
    """`step` compiled as one graph of static shapes. Each call gives a compilation of its own.

    torch.compile keeps what it compiled with the function's code object and limits how much it keeps there; a copied
    code object gives each engine its own, so engines neither recompile for nor evict each other.
    """
    declare_ops()
    own = FunctionType(step.__code__.replace(), step.__globals__, step.__name__, step.__defaults__, step.__closure__)
    # Between the ops there are only small elementwise kernels. On a CPU they run on one thread: threads of their own
    # beside PyTorch's gain nothing, and on a busy machine they wait for each other most of the time.
    options = {"cpp.threads": 1} if backend == "inductor" else None
    return torch.compile(own, fullgraph=True, dynamic=False, backend=backend, options=options)


class CapturedStep:
    """A step without arguments, captured once into one CUDA graph; calling it is one replay.

    The step must read and write tensors of fixed address only. It runs twice before the capture, so that lazy
    initialisation stays out of the graph; the caller sees to it that those runs touch no state (all rows idle).
    Steps of one `pool` share the memory of their intermediate results, so nothing may be read from it after a replay.
    """

    def __init__(self, step: Callable[[], None], pool: tuple[int, int] | None = None):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            step()

    def __call__(self) -> None:
        self.graph.replay()

"""From a step function to something that runs without surprises: one fullgraph compilation, and one CUDA graph."""

from collections.abc import Callable
from types import FunctionType

import torch


def compile_step(step: Callable) -> Callable:
    """`step` compiled as one graph of static shapes. Each call gives a compilation of its own.

    torch.compile keeps what it compiled with the function's code object and limits how much it keeps there; a copied
    code object gives each engine its own, so engines neither recompile for nor evict each other.
    """
    own = FunctionType(step.__code__.replace(), step.__globals__, step.__name__, step.__defaults__, step.__closure__)
    # Between the ops there are only small elementwise kernels. On a CPU they run on one thread: threads of their own
    # beside PyTorch's gain nothing, and on a busy machine they wait for each other most of the time.
    return torch.compile(own, fullgraph=True, dynamic=False, options={"cpp.threads": 1})


class CapturedStep:
    """A step without arguments, captured once into one CUDA graph; calling it is one replay.

    The step must read and write tensors of fixed address only. It runs twice before the capture, so that lazy
    initialisation stays out of the graph; the caller sees to it that those runs touch no state (all rows idle).
    """

    def __init__(self, step: Callable[[], None]):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            step()

    def __call__(self) -> None:
        self.graph.replay()

"""One graph a step: compile_step, and how much of the model a step's graph compiles.

Capture into a CUDA graph is tested in tests/gpu.
"""

import re
from types import FunctionType

import pytest
import torch
from torch._inductor.graph import GraphLowering

from dsv4.compile.graphs import compile_step
from dsv4.compile.step import DecodeState, decode_step, prefill_step
from dsv4.model.cache import Cache
from dsv4.model.config import CSA, HCA, SLIDING
from dsv4.model.transformer import Transformer
from tests.model.random_checkpoints import MetaSource, config_of, engine


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1


def graphs_of(step, *args) -> list[torch.fx.GraphModule]:
    """The graphs that fullgraph compilation of a step makes, without the compiler behind it."""
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    own = FunctionType(step.__code__.replace(), step.__globals__)
    torch.compile(own, fullgraph=True, dynamic=False, backend=backend)(*args)
    return graphs


def test_each_call_compiles_for_itself():
    """Many engines in one process: each step keeps its own compilation, however many there are, and none is recompiled
    because of another (torch.compile keeps only a few for one function)."""
    steps = [compile_step(double) for _ in range(4)]
    with torch._dynamo.config.patch(recompile_limit=2):
        for size, step in enumerate(steps, start=2):
            assert torch.equal(step(torch.ones(size)), torch.full((size,), 3.0))
    with torch.compiler.set_stance("fail_on_recompile"):
        for size, step in enumerate(steps, start=2):
            assert torch.equal(step(torch.zeros(size)), torch.ones(size))
        with pytest.raises(RuntimeError):
            steps[0](torch.ones(50))  # shapes are static: another one would be another compilation


def test_a_graph_break_is_an_error():
    def broken(x):
        return x + 1 if x.sum() > 0 else x - 1

    with pytest.raises(Exception, match=r"[Dd]ata-dependent"):
        compile_step(broken)(torch.ones(2))


def regions(step: str, pairs: int) -> tuple[int, int]:
    """Calls of compiled-once regions in a step's one graph, and how many distinct regions those are, for a model of two
    sliding layers and `pairs` times CSA, HCA; the first three layers hashed."""
    layer_types = [SLIDING, SLIDING, *[CSA, HCA] * pairs]
    mlp_layer_types = ["hash_moe"] * 3 + ["moe"] * (2 * pairs - 1)
    config = config_of("tiny", layer_types=layer_types, mlp_layer_types=mlp_layer_types)
    with torch.device("meta"):
        model, cache = Transformer(config, MetaSource()), Cache(config, 2, 160, torch.float32, "meta")
        batch = [torch.zeros(7, dtype=torch.int64) for _ in range(3)]
        state = DecodeState(2, config.vocab_size, torch.device("meta"))
        if step == "prefill":
            [graph] = graphs_of(prefill_step, model, cache, *batch)
        else:
            [graph] = graphs_of(decode_step, model, cache, state)
    calls = [node for node in graph.graph.nodes if "invoke_subgraph" in str(node.target)]
    return len(calls), len({str(node.args[1]) for node in calls})


@pytest.mark.parametrize("step, pairs", [("prefill", 3), ("decode", 5)])
def test_layers_that_look_alike_are_compiled_once(step, pairs):
    """Two regions a layer. However many layers there are, there is one first region for each kind of attention and one
    second for each pair of attention and routing; the CSA layer with hash routing is the only one of its kind, and its
    second region is simply part of the graph, but for torch 2.11."""
    layers = 2 + 2 * pairs
    assert regions(step, pairs) in ((2 * layers - 1, 6), (2 * layers, 7))


def test_the_compiled_step_copies_no_cache(monkeypatch):
    """The cache is changed in place: what the compiler generates neither allocates nor copies anything of its size."""
    model = engine("tiny").model
    cache = Cache(model.config, 3, 1100, torch.float32)
    state = DecodeState(3, model.config.vocab_size, torch.device("cpu"))
    code = []
    # What inductor's own run_and_get_code does, without its reset of everything that other tests have compiled.
    monkeypatch.setattr(GraphLowering, "save_output_code", staticmethod(code.append))
    with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
        compile_step(decode_step)(model, cache, state)
    assert sum(text.count("torch.ops.dsv4.advance_") for text in code) > 0
    shapes = {tuple(buffer.shape) for buffer in cache.buffers()}
    calls = [match for text in code for match in re.findall(r"empty_strided\w*\(\(([\d, ]+)\)", text)]
    allocated = {tuple(int(size) for size in call.split(",") if size.strip()) for call in calls}
    assert allocated and not shapes & allocated

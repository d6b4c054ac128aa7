"""The compiled engine: equal to the eager one, one graph a step, nothing compiled after the load, and no growth over a
thousand steps. One engine is compiled for all tests; a second, small one shows that two live side by side."""

import functools
import gc
import os
import statistics
import sys
import time

import pytest
import torch

import dsv4
from dsv4.compile.engine import Engine
from tests.model.random_checkpoints import (
    assert_same_tokens,
    clear_tokens,
    compiled_engine,
    engine,
    expected,
    folder,
    graphs_compiled,
    graphs_of_compiled_engine,
    nvfp4_folder,
)

VOCAB = 448
GREEDY = dict(temperature=0.0, ignore_eos=True)


def eager_engine() -> Engine:
    return engine("tiny", max_batch=3, max_context=1200, prefill_chunk=96)


@functools.cache
def second_engine() -> Engine:
    """Another checkpoint (NVFP4 experts, FP8 linears), one prefill shape, compiled while the first engine lives."""
    compiled_engine()
    return dsv4.load(nvfp4_folder("small"), "cpu", torch.float32, max_batch=1, max_context=96, prefill_chunk=16)


def prompt(draw, length: int) -> list[int]:
    return draw.integers(2, VOCAB, length).tolist()


@pytest.fixture(autouse=True)
def nothing_compiles(request):
    """After the load, in every test of this file: a recompilation is an error, and no graph is added."""
    compiled_engine()
    if "second" in request.node.name:
        second_engine()
    before = graphs_compiled()
    with torch.compiler.set_stance("fail_on_recompile"):
        yield
    assert graphs_compiled() == before


def test_each_step_is_one_graph():
    assert compiled_engine().runner.prefill_sizes == [64, 96]
    assert graphs_of_compiled_engine() == 3  # two prefill shapes and the decode step


def test_load_report():
    report = compiled_engine().load_report
    assert report.compile_seconds > 0.5 and report.load_seconds > 0 and report.capture_seconds < 1e-3
    weights = sum(buffer.nbytes for buffer in compiled_engine().model.buffers())
    assert (report.weight_bytes, report.cache_bytes) == (weights, compiled_engine().cache.nbytes())
    assert report.checkpoint.formats.keys() == {"plain"}
    print(f"compiled 3 graphs of 4 layers in {report.compile_seconds:.1f} s")
    assert engine("tiny").load_report.compile_seconds < 0.1
    assert "loaded in" in str(report) and "compiled in" in str(report)
    assert "captured" not in str(report)  # there is no CUDA graph on the CPU


def test_compiling_leaves_no_trace_in_the_cache():
    """The runs that compile are of padding only: a new engine's cache is zero, and so it is after a load."""
    fresh = dsv4.load(folder("tiny"), "cpu", max_batch=2, max_context=64, compile=False)
    fresh.runner.decode()
    assert not any(buffer.any() for buffer in fresh.cache.buffers())
    assert (fresh.runner.state.slots == -1).all() and (fresh.runner.state.out[0] == -1).all()


@pytest.mark.parametrize("length", [1, 3, 64, 65, 97, 300])
def test_compiled_logits_are_the_eager_ones(length, draw):
    ids = clear_tokens("tiny", length, draw)
    [compiled], [eager] = compiled_engine().logits([ids]), eager_engine().logits([ids])
    torch.testing.assert_close(compiled, eager, rtol=0, atol=1e-4)
    torch.testing.assert_close(compiled, expected("tiny", ids), rtol=0, atol=1e-4)


def test_compiled_decode_is_the_eager_one(draw):
    """The decode step's logits and its whole state, token by token, with one row idle and one that stops on the way."""
    rows = [clear_tokens("tiny", 60, draw), clear_tokens("tiny", 60, draw)]
    both = (compiled_engine(), eager_engine())
    for one in both:
        state = one.runner.state
        state.slots.fill_(-1)
        state.positions.zero_()  # other tests' requests have left theirs
        state.seen.zero_()
        state.temperature.fill_(0)
        state.remaining[0], state.remaining[2] = 1000, 40
        state.slots[0], state.slots[2] = 0, 2
    for position in range(60):
        for one in both:
            state = one.runner.state
            for row, ids in ((0, rows[0]), (2, rows[1])):
                state.tokens[row], state.positions[row] = ids[position], position
            one.runner.decode()
        a, b = (dict(one.runner.state.named_buffers()) for one in both)
        torch.testing.assert_close(a["logits"][::2], b["logits"][::2], rtol=0, atol=1e-4)
        for name in ("slots", "positions", "remaining"):
            assert torch.equal(a[name], b[name]), name
        assert a["out"][0, 1] == b["out"][0, 1] == -1
        assert a["slots"][2] == (2 if position < 39 else -1)
    for one in both:
        one.runner.state.slots.fill_(-1)


@pytest.mark.parametrize("settings", [GREEDY, dict(temperature=1.0, ignore_eos=True)], ids=["greedy", "sampled"])
def test_compiled_tokens_are_the_eager_ones(settings, draw):
    rows = [prompt(draw, length) for length in (1, 40, 64, 65, 130)]
    compiled, eager = (one.generate(rows, 24, seed=50, **settings) for one in (compiled_engine(), eager_engine()))
    for i, (a, b) in enumerate(zip(compiled, eager, strict=True)):
        seed = None if settings is GREEDY else 50 + i
        assert_same_tokens("tiny", rows[i], a.token_ids, b.token_ids, seed)


def test_no_recompilation_for_any_length_or_filling(draw):
    """Prompts of 1 to 300 tokens, one to seven of them in three slots, all settings mixed, scored and generated."""
    for number in (1, 2, 3, 4, 7):
        rows = [prompt(draw, draw.random.choice((1, 2, 3, 4, 63, 64, 65, 96, 97, 128, 160, 300))) for _ in range(number)]
        settings = draw.random.choice(
            [
                GREEDY,
                dict(top_k=5),
                dict(top_p=0.5, min_p=0.1),
                dict(repetition_penalty=1.2, logprobs=3),
                dict(stop="e", stop_token_ids=[7]),
            ]
        )
        completions = compiled_engine().generate(rows, draw.random.randint(1, 6), **settings)
        assert len(completions) == number
    for logits, row in zip(compiled_engine().logits(rows), rows, strict=True):
        assert logits.shape == (len(row), VOCAB) and logits.isfinite().all()
    assert "".join(compiled_engine().stream(rows[0], 5, seed=1)) == compiled_engine().last.text
    assert compiled_engine().prefill(rows[0]).prefill_seconds > 0


def test_reused_slots_of_a_compiled_engine(draw):
    """Bitwise, with NaN left behind in the whole cache."""
    ids = prompt(draw, 70)
    [before] = compiled_engine().generate([ids], 20, logprobs=1, **GREEDY)
    for buffer in compiled_engine().cache.buffers():
        buffer.fill_(torch.nan)
    [after] = compiled_engine().generate([ids], 20, logprobs=1, **GREEDY)
    for buffer in compiled_engine().cache.buffers():
        buffer.zero_()
    assert (after.token_ids, after.logprobs) == (before.token_ids, before.logprobs)


def test_a_second_engine_does_not_disturb_the_first(draw):
    """Each has its own graphs, cache and state: their calls alternate, and each gives what it gives alone."""
    first, second = compiled_engine(), second_engine()
    a, b = prompt(draw, 50), draw.integers(2, 50, 30).tolist()
    wanted_a, wanted_b = first.generate([a], 8, **GREEDY)[0], second.generate([b], 8, **GREEDY)[0]
    [logits_a] = first.logits([a])
    for _ in range(2):
        assert second.generate([b], 8, **GREEDY)[0].token_ids == wanted_b.token_ids
        assert torch.equal(first.logits([a])[0], logits_a)
        assert first.generate([a], 8, **GREEDY)[0].token_ids == wanted_a.token_ids
    eager = dsv4.load(nvfp4_folder("small"), "cpu", torch.float32, max_context=96, prefill_chunk=16, compile=False)
    ids = b[:27]  # six blocks: all are picked, so there are no near ties
    torch.testing.assert_close(second.logits([ids])[0], eager.logits([ids])[0], rtol=0, atol=1e-4)
    # between two tokens of one engine the other may run
    stream = first.stream(a, 8, **GREEDY)
    text = next(stream)
    second.generate([b], 4, **GREEDY)
    assert text + "".join(stream) == wanted_a.text
    assert second.load_report.compile_seconds > 0
    addresses = [{buffer.data_ptr() for buffer in one.cache.buffers()} for one in (first, second)]
    assert not addresses[0] & addresses[1]


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_thousand_decode_steps(draw):
    """Through generate's own loop: no recompilation, memory flat, and the last steps take no longer than the first."""
    first = compiled_engine()
    first.generate([prompt(draw, 3)], 30, **GREEDY)  # whatever is set up lazily is set up
    requests = first._requests([prompt(draw, 5)], dsv4.SamplingParams(1000, logprobs=0, **GREEDY))
    times, sizes = [], []
    last = time.perf_counter()
    for step, _ in enumerate(first.scheduler.run(requests)):
        now = time.perf_counter()
        times.append(now - last)
        if step in (99, 999):
            gc.collect()
            sizes.append((resident_bytes(), sys.getallocatedblocks()))
        last = time.perf_counter()
    assert len(times) == 1000 and requests[0].finish_reason == "length"
    early, late = statistics.median(times[100:300]), statistics.median(times[800:])
    best = min(times[100:300]), min(times[800:])
    grown, blocks = (b - a for a, b in zip(*sizes, strict=True))
    print(
        f"step {1e3 * early:.2f} ms early, {1e3 * late:.2f} ms late; in 900 steps the process grew by "
        f"{grown / 2**20:.1f} MiB and Python by {blocks} objects"
    )
    assert best[1] < 1.3 * best[0]  # of the undisturbed steps, since the machine has other work
    assert grown < 8 * 2**20
    assert blocks < 900 * 10  # a token and its log-probability are kept for each step, and nothing else

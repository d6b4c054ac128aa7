"""The subjects of `dsv4 explain --model`: the model's prefill and decode steps, compiled as the engine compiles them."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from dsv4.compile.engine import load
from dsv4.compile.explain.subject import Call, Subject
from dsv4.compile.graphs import compile_step
from dsv4.compile.prefill import chunks
from dsv4.compile.runner import Runner
from dsv4.compile.step import decode_step, prefill_step
from dsv4.model.plan import Sizes, buffer_bytes, step_bytes

CONTEXT = 1024  # tokens of cache, unless the caller says otherwise
# Where the decode step is run: at the start, around the ends of compressed blocks (4 and 128 tokens), beyond the window.
POSITIONS = (0, 3, 4, 127, 128, 300)


def from_folder(folder: str, **options) -> list[Subject]:
    """The prefill and the decode step of the model in a checkpoint folder; options as in `dsv4.load`. Raises ValueError if
    the folder or an option is bad."""
    options = {"max_context": CONTEXT, **options, "compile": False}
    runner = load(folder, **options).runner
    return [prefill(folder, runner), decode(folder, runner)]


def prefill(folder: str, runner: Runner) -> Subject:
    """The step over the smallest chunk that the engine compiles, with prompts of several lengths and with padding."""
    size = runner.prefill_sizes[0]

    def call(length: int) -> Call:
        [chunk] = chunks([(0, [token % runner.model.config.vocab_size for token in range(1, length + 1)])], [size])
        batch = [runner.to_device(row) for row in (chunk.tokens, chunk.positions, chunk.slots)]
        return Call((runner.model, runner.cache, *batch), label=f"{length} tokens in a chunk of {size}")

    lengths = sorted({1, size // 2, size - 1, size} - {0})
    return _subject(f"{folder} (prefill)", prefill_step, runner, lambda: [call(length) for length in lengths])


def decode(folder: str, runner: Runner) -> Subject:
    """The step for a full batch, at several positions."""
    state, slots, last = runner.state, runner.cache.num_slots, runner.cache.max_context - 1

    def prepare(position: int) -> None:
        state.slots[:slots].copy_(torch.arange(slots))
        state.positions.fill_(position)
        state.remaining.fill_(2**40)
        state.stop_ids.fill_(-1)
        state.tokens.fill_(1)

    positions = sorted({min(position, last) for position in POSITIONS})
    arguments = (runner.model, runner.cache, state)

    def calls() -> list[Call]:
        return [Call(arguments, label=f"position {p}", prepare=partial(prepare, p)) for p in positions]

    weights, cache = buffer_bytes(runner.model), runner.cache
    sizes = Sizes(slots, positions[0] + 1, runner.model.embed.dtype, cache.kv, cache.index)
    return replace(
        _subject(f"{folder} (decode)", decode_step, runner, calls, state),
        read=lambda _: step_bytes(weights, runner.model.config, sizes),
    )


def _subject(
    name: str, step: Callable, runner: Runner, calls: Callable[[], list[Call]], *state: torch.nn.Module
) -> Subject:
    """A step of a runner. What it changes are the cache and the decode state, never the weights."""
    return Subject(
        name,
        step,
        calls,
        compile=compile_step,
        context=torch.no_grad,
        modules={"": runner.model},
        changes=(runner.cache, *state),
    )

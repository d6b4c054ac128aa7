"""Owns the device side of an engine: model, cache, decode state, the compiled and captured steps, and the copies
between host and device. Everything compiles in the constructor; afterwards nothing does.

Why a result may depend on what runs beside it, and what deterministic=True does about it: no row of a batch ever enters
the sums of another, but the order of a row's own sum can depend on the shape of the batch (kernels choose their plans by
it) and, at the ragged end of a batch, on the row's place (vector loops treat their last elements otherwise). So prompts get
chunks of their own, whose shapes follow from their lengths alone, and the decode batch, which always has one shape, is
made a multiple of ROWS rows. That equal rows then get equal bits is checked once, at load.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from dsv4.compile.graphs import CapturedStep, compile_step
from dsv4.compile.prefill import Chunk, PromptQueue, chunks
from dsv4.compile.sampling import MAX_LOGPROBS
from dsv4.compile.step import DecodeState, decode_step, prefill_step
from dsv4.model.cache import Cache
from dsv4.model.transformer import Transformer

SMALLER_CHUNKS = 64, 512  # further prefill shapes: short prompts do not pay for a full chunk
HEAD_ROWS = 64  # rows of hidden state that go through the output head at a time when many are scored
AHEAD = 2  # prefill chunks that the host may be ahead: an interrupt is answered soon, and progress is what was done
ROWS = 8  # of which the decode batch has a multiple if it has to be deterministic


class Clock:
    """Measures a stretch of work without waiting for it: device events on CUDA, the host's clock elsewhere."""

    def __init__(self, device: torch.device):
        self._events = None
        if device.type == "cuda":
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            self._events[0].record()
        self._start = time.perf_counter()

    def stop(self) -> None:
        """End the stretch."""
        self._end = time.perf_counter()
        if self._events:
            self._events[1].record()

    def seconds(self) -> float:
        """Length of the stretch; on CUDA the work must have completed."""
        return self._events[0].elapsed_time(self._events[1]) / 1e3 if self._events else self._end - self._start


class _ChunkStep:
    """The prefill step of one size, on a batch at fixed addresses: tokens, positions and slots, int64 [T] each; inert at
    first. `hidden` [T, H] is the result of the last run."""

    def __init__(self, step: Callable[[Tensor, Tensor, Tensor], Tensor], size: int, device: torch.device):
        self.batch = [torch.full((size,), value, dtype=torch.int64, device=device) for value in (0, 0, -1)]
        self.run: Callable[[], None] = self._step
        self._compute = step
        self.hidden: Tensor | None = None

    def _step(self) -> None:
        self.hidden = self._compute(*self.batch)

    def capture(self, pool: tuple[int, int]) -> None:
        """From now on a run is one replay. `hidden` is held, so no other graph of the pool takes its memory."""
        self.run = CapturedStep(self._step, pool)


class Runner:
    """Runs prefill chunks and decode steps. With compile=True each is one fullgraph compilation of static shape, and on
    CUDA each is one CUDA graph. `state` has a row for each slot of the cache, and with deterministic=True
    perhaps some more, which stay idle."""

    @torch.no_grad()
    def __init__(self, model: Transformer, cache: Cache, prefill_chunk: int, compile: bool, deterministic: bool = False):
        self.model, self.cache, self.deterministic = model, cache, deterministic
        self.device = model.embed.device
        rows = -(-cache.num_slots // ROWS) * ROWS if deterministic else cache.num_slots
        self.state = DecodeState(rows, model.config.vocab_size, self.device)
        self.prefill_sizes = sorted({min(size, prefill_chunk) for size in (*SMALLER_CHUNKS, prefill_chunk)})
        wrap = compile_step if compile else (lambda step: step)
        self._prefill = {}
        for size in self.prefill_sizes:
            self._prefill[size] = _ChunkStep(partial(wrap(prefill_step), model, cache), size, self.device)
        self._decode = partial(wrap(decode_step), model, cache, self.state)
        self._under_way: deque[torch.cuda.Event] = deque()  # ends of prefill chunks

        start = time.perf_counter()
        if compile:
            for size in self.prefill_sizes:
                self._prefill[size].run()
            self.decode()
            self.synchronize()
        self.compile_seconds = time.perf_counter() - start
        self.capture_seconds = 0.0
        if compile and self.device.type == "cuda":
            start = time.perf_counter()
            self.capture()
            self.capture_seconds = time.perf_counter() - start
        if deterministic:
            self._check_rows()

    @torch.no_grad()
    def capture(self) -> None:
        """From now on each step is a replay of one CUDA graph. Before any sequence is in the cache."""
        pool = torch.cuda.graph_pool_handle()  # one for all, since only one runs at a time
        for step in self._prefill.values():
            step.capture(pool)
        self._decode = CapturedStep(self._decode, pool)
        self.synchronize()
        torch.cuda.empty_cache()  # what the runs before the captures took

    def _check_rows(self) -> None:
        """ValueError unless equal rows get equal bits: a decode step's beside each other and alone, and the head's."""
        state, slots = self.state, self.cache.num_slots
        state.tokens.fill_(1)
        rows = [self.model.logits(self.model.embed[1].expand(HEAD_ROWS, -1).contiguous())]
        for count in (slots, 1):
            state.slots[:count].copy_(torch.arange(count))
            state.positions.fill_(0)
            self.decode()
            rows.append(state.logits[:count].clone())
            state.slots.fill_(-1)
            state.tokens.fill_(1)
        head, full, alone = rows
        if not (torch.equal(head, head[:1].expand_as(head)) and torch.equal(full, alone.expand_as(full))):
            raise ValueError(
                f"deterministic=True cannot be kept: on this {self.device.type} equal rows of a decode batch of "
                f"{len(state.slots)} or of the output head get different bits; try another max_batch, on a CPU one thread"
            )

    def prompt_queue(self) -> PromptQueue:
        """An empty queue for prompts on their way to `prefill`."""
        return PromptQueue(self.prefill_sizes, apart=self.deterministic)

    def chunks(self, prompts: list[tuple[int, list[int]]]) -> Iterator[Chunk]:
        """The chunks of prompts [(slot, token ids)]."""
        return chunks(prompts, self.prefill_sizes, apart=self.deterministic)

    @torch.no_grad()
    def prefill(self, chunk: Chunk) -> Tensor:
        """Run one chunk; returns its final hidden states [T, H], padding included. The next chunk may overwrite them."""
        step = self._prefill[len(chunk.tokens)]
        for place, values in zip(step.batch, (chunk.tokens, chunk.positions, chunk.slots), strict=True):
            place.copy_(self._staged(values), non_blocking=True)
        step.run()
        if self.device.type == "cuda":
            self._under_way.append(torch.cuda.Event())
            self._under_way[-1].record()
            if len(self._under_way) > AHEAD and not (oldest := self._under_way.popleft()).query():
                oldest.synchronize()
        return step.hidden

    @torch.no_grad()
    def decode(self) -> None:
        """One decode step on `state`."""
        self._decode()

    @torch.no_grad()
    def top_logprobs(self) -> tuple[Tensor, Tensor]:
        """The last step's MAX_LOGPROBS most likely tokens per row: log-probabilities and ids [B, n]. Always as many, since
        another number may order equal ones otherwise."""
        values, ids = self.state.logits.log_softmax(-1).topk(min(MAX_LOGPROBS, self.state.logits.shape[-1]))
        return values, ids

    def to_device(self, values: list) -> Tensor:
        """int64 tensor of host numbers, copied without waiting."""
        return self._staged(values).to(self.device, non_blocking=True)

    def _staged(self, values: list) -> Tensor:
        """int64 tensor of host numbers from which the device can copy while the host goes on."""
        tensor = torch.tensor(values, dtype=torch.int64)
        return tensor.pin_memory() if self.device.type == "cuda" else tensor

    def to_host(self, out: Tensor, top: tuple[Tensor, Tensor] | None):
        """Copies on their way to the host: (out, top, event that fires when they have arrived, or None)."""

        def fetch(tensor: Tensor) -> Tensor:
            if self.device.type != "cuda":
                return tensor.clone()
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            return host.copy_(tensor, non_blocking=True)

        out, top = fetch(out), tuple(fetch(part) for part in top) if top else None
        done = None
        if self.device.type == "cuda":
            done = torch.cuda.Event()
            done.record()
        return out, top, done

    def clock(self) -> Clock:
        """A running Clock."""
        return Clock(self.device)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

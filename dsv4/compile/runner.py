"""Owns the device side of an engine: model, cache, decode state, the compiled and captured steps, and the copies
between host and device. Everything compiles in the constructor; afterwards nothing does."""

import time
from functools import partial

import torch
from torch import Tensor

from dsv4.compile.graphs import CapturedStep, compile_step
from dsv4.compile.prefill import Chunk
from dsv4.compile.step import DecodeState, decode_step, prefill_step
from dsv4.model.cache import Cache
from dsv4.model.transformer import Transformer

SMALL_CHUNK = 64  # the second, smaller prefill shape: short prompts do not pay for a full chunk


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


class Runner:
    """Runs prefill chunks and decode steps. With compile=True each is one fullgraph compilation of static shape, and on
    CUDA the decode step is one CUDA graph."""

    @torch.no_grad()
    def __init__(self, model: Transformer, cache: Cache, prefill_chunk: int, compile: bool):
        self.model, self.cache = model, cache
        self.device = model.embed.device
        self.state = DecodeState(cache.num_slots, model.config.vocab_size, self.device)
        self.prefill_sizes = sorted({min(SMALL_CHUNK, prefill_chunk), prefill_chunk})
        wrap = compile_step if compile else (lambda step: step)
        self._prefill = {size: wrap(prefill_step) for size in self.prefill_sizes}
        self._decode = partial(wrap(decode_step), model, cache, self.state)

        start = time.perf_counter()
        if compile:
            for size in self.prefill_sizes:
                self.prefill(Chunk([0] * size, [0] * size, [-1] * size, []))
            self.decode()
            self.synchronize()
        self.compile_seconds = time.perf_counter() - start
        self.capture_seconds = 0.0
        if compile and self.device.type == "cuda":
            start = time.perf_counter()
            self._decode = CapturedStep(self._decode)
            self.synchronize()
            self.capture_seconds = time.perf_counter() - start

    @torch.no_grad()
    def prefill(self, chunk: Chunk) -> Tensor:
        """Run one chunk; returns its final hidden states [T, H], padding included."""
        tokens, positions, slots = (self.to_device(row) for row in (chunk.tokens, chunk.positions, chunk.slots))
        return self._prefill[len(chunk.tokens)](self.model, self.cache, tokens, positions, slots)

    @torch.no_grad()
    def decode(self) -> None:
        """One decode step on `state`."""
        self._decode()

    @torch.no_grad()
    def top_logprobs(self, count: int) -> tuple[Tensor, Tensor]:
        """The last step's `count` most likely tokens per row: log-probabilities and ids [B, count]."""
        values, ids = self.state.logits.log_softmax(-1).topk(min(count, self.state.logits.shape[-1]))
        return values, ids

    def to_device(self, values: list) -> Tensor:
        """int64 tensor of host numbers, copied without waiting."""
        tensor = torch.tensor(values, dtype=torch.int64)
        if self.device.type == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor

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

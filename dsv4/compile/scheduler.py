"""The serving loop: keep decode slots full, replay steps, read their tokens some steps behind.

A request takes the first row that is free. Its prompt runs in chunks between the decode steps of the others, and its row
joins the next step after its last chunk; nothing waits for the end of anything else.

On CUDA the loop never waits for the device: each step's result is copied to pinned memory behind an event, and the host
polls the event of a step several replays back. A row that stops inside the graph goes idle there by itself; the host
learns of it later and hands the slot to the next request. What a row produced after its request ended (a stop string is
only known on the host) is dropped.
"""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.compile.requests import Request
from dsv4.compile.runner import Runner
from dsv4.compile.sampling import MAX_STOP_IDS

LAG = 4  # replays in flight before the host looks at the oldest


@dataclass
class _InFlight:
    """One launched decode step: who was in which row, and where its results arrive."""

    rows: list[Request | None]
    out: Tensor  # int64 [2, B] on the host
    top: tuple[Tensor, Tensor] | None  # log-probabilities and ids [B, n] on the host
    done: torch.cuda.Event | None


class Scheduler:
    """Runs requests through a Runner's slots; use one `run` at a time."""

    def __init__(self, runner: Runner):
        self.runner = runner
        self.rows: list[Request | None] = [None] * runner.cache.num_slots
        self.decoding = list(self.rows)  # the same without those whose prompt is not through yet
        self.prompts = runner.prompt_queue()
        self.in_flight: deque[_InFlight] = deque()
        self.running = False

    def check_idle(self) -> None:
        """RuntimeError while a `run` is unfinished: its slots hold sequences that another call would overwrite."""
        if self.running:
            raise RuntimeError(
                "the engine does one thing at a time, and a stream is unfinished; exhaust it or close() it first"
            )

    @property
    def busy(self) -> int:
        """How many slots are taken."""
        return sum(row is not None for row in self.rows)

    def run(self, requests: list[Request]) -> Iterator[tuple[Request, str]]:
        """Yields (request, new text) for every generated token, until all requests are finished."""
        self.check_idle()
        self.running = True
        waiting = deque(requests)
        lag = LAG if self.runner.device.type == "cuda" else 0
        try:
            while waiting or any(self.rows):
                self._admit(waiting)
                self._prefill()
                wanted = any(row is not None and row.launched < row.max_new_tokens for row in self.decoding)
                if wanted:
                    self._launch()
                if self.in_flight and (len(self.in_flight) > lag or not wanted):
                    yield from self._collect(self.in_flight.popleft())
        finally:
            # Also when the caller stops early or an error passes through: nothing may keep running in a slot.
            self.running = False
            self.in_flight.clear()
            self.rows = [None] * len(self.rows)
            self.decoding = [None] * len(self.rows)
            self.prompts = self.runner.prompt_queue()
            self.runner.state.slots.fill_(-1)

    def _admit(self, waiting: deque[Request]) -> None:
        """Give free rows to waiting requests. All but the last token of a prompt are prefilled; that one goes into the
        first decode step."""
        for row, occupant in enumerate(self.rows):
            if occupant is None and waiting:
                request = self.rows[row] = waiting.popleft()
                request.prefill_clock = self.runner.clock()
                self.prompts.push(row, request.prompt[:-1])
                if len(request.prompt) == 1:
                    self._begin(row, request)

    def _prefill(self) -> None:
        """One chunk, or more until half of the rows decode: a step takes nearly as long for few rows as for all."""
        first = True
        while self.prompts and (first or 2 * sum(row is not None for row in self.decoding) < len(self.rows)):
            first = False
            chunk = self.prompts.pop()
            self.runner.prefill(chunk)
            for piece in chunk.pieces:
                request = self.rows[piece.slot]
                if piece.position + piece.count == len(request.prompt) - 1:
                    self._begin(piece.slot, request)

    def _begin(self, row: int, request: Request) -> None:
        request.prefill_clock.stop()
        self._fill_row(row, request)
        self.decoding[row] = request

    def _fill_row(self, row: int, request: Request) -> None:
        state, params = self.runner.state, request.params
        stops = sorted(request.stop_ids)
        state.stop_ids[row].copy_(self.runner.to_device(stops + [-1] * (MAX_STOP_IDS - len(stops))))
        state.seen[row].zero_().index_fill_(0, self.runner.to_device(request.prompt), True)
        values = {
            "tokens": request.prompt[-1],
            "positions": len(request.prompt) - 1,
            "remaining": request.max_new_tokens,
            # Below this a float32 softmax is the argmax, and dividing by it could overflow.
            "temperature": params.temperature if params.temperature >= 1e-6 else 0.0,
            "top_k": max(params.top_k, 0),
            "top_p": params.top_p,
            "min_p": params.min_p,
            "repetition_penalty": params.repetition_penalty,
            "seeds": params.seed,
            "slots": row,
        }
        # fill_ launches a kernel; assigning a number with [] = would copy it from the host and wait.
        for name, value in values.items():
            getattr(state, name)[row].fill_(value)

    def _launch(self) -> None:
        runner = self.runner
        runner.decode()
        wanted = any(row is not None and row.params.logprobs for row in self.decoding)
        top = runner.top_logprobs() if wanted else None
        out, top, done = runner.to_host(runner.state.out, top)
        self.in_flight.append(_InFlight(list(self.decoding), out, top, done))
        for request in self.decoding:
            if request is not None:
                request.launched += 1

    def _collect(self, step: _InFlight) -> Iterator[tuple[Request, str]]:
        while step.done is not None and not step.done.query():
            time.sleep(0)
        tokens = step.out[0].tolist()
        logprobs = step.out[1].to(torch.int32).view(torch.float32).tolist()
        for row, request in enumerate(step.rows):
            if request is None or request.finish_reason or tokens[row] < 0:
                continue
            top = {}
            if step.top is not None and request.params.logprobs:
                values, ids = (part[row, : request.params.logprobs].tolist() for part in step.top)
                top = dict(zip(ids, values, strict=True))
            piece = request.push(tokens[row], logprobs[row], top)
            if request.finish_reason:
                request.timing.prefill_seconds = request.prefill_clock.seconds()
                self._release(row)
            yield request, piece

    def _release(self, row: int) -> None:
        if self.rows[row] is not None:
            self.rows[row] = self.decoding[row] = None
            self.runner.state.slots[row].fill_(-1)

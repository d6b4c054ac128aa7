"""The serving loop: keep decode slots full, replay steps, read their tokens some steps behind.

A request takes the first row that is free. Its prompt runs in chunks between the decode steps of the others, and its row
joins the next step after its last chunk; nothing waits for the end of anything else.

On CUDA the loop never waits for the device: each step's result is copied to pinned memory behind an event, and the host
polls the event of a step several replays back. A row that stops inside the graph goes idle there by itself; the host
learns of it later and hands the slot to the next request. What a row produced after its request ended (a stop string is
only known on the host) is dropped.

A held slot takes only the requests that name it, and keeps its sequence between them: see dsv4.compile.sequences.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.compile.prefill import Chunk
from dsv4.compile.requests import Request
from dsv4.compile.runner import Runner
from dsv4.compile.sampling import MAX_STOP_IDS
from dsv4.compile.sequences import Sequence

LAG = 4  # replays in flight before the host looks at the oldest
GATHER = 8  # prompts wait until an eighth of the rows has one, if more are to come: a chunk costs as much as a few steps


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
        self.filling = False  # chunks of prompts are being run until there are none
        self.held: dict[int, Sequence] = {}  # by slot
        self.running = False

    def check_idle(self) -> None:
        """RuntimeError while a `run` is unfinished: its slots hold sequences that another call would overwrite."""
        if self.running:
            raise RuntimeError(
                "the engine does one thing at a time, and a stream is unfinished; exhaust it or close() it first"
            )
        if self.busy:
            self._clear()  # a second Ctrl-C came while the last run was ended

    def free_slots(self) -> list[int]:
        """The slots that are not held. ValueError if there is none."""
        free = [row for row in range(len(self.rows)) if row not in self.held]
        if not free:
            raise ValueError("every slot is held; name one with slot=, release one, or load with a larger max_batch")
        return free

    def sequence(self, slot: int) -> Sequence:
        """The sequence in a held slot; ValueError if it is not held."""
        if type(slot) is not int or slot not in self.held:
            held = ", ".join(str(row) for row in sorted(self.held)) or "none"
            raise ValueError(f"slot {slot!r} is not held (held: {held}); engine.hold() gives one")
        return self.held[slot]

    @property
    def busy(self) -> int:
        """How many slots are taken."""
        return sum(row is not None for row in self.rows)

    def run(
        self, requests: list[Request], prefilled: Callable[[Chunk], None] | None = None
    ) -> Iterator[tuple[Request, str]]:
        """Yields (request, new text) for every generated token, until all requests are finished. `prefilled` is called with
        each chunk of the prompts; what it raises, as KeyboardInterrupt, ends the run as an error does."""
        self.check_idle()
        for request in requests:  # slots may have been held or released since they were made: none may wait forever
            self.free_slots() if request.slot is None else self.sequence(request.slot)
        self.running = True
        waiting = deque(requests)
        lag = LAG if self.runner.device.type == "cuda" else 0
        try:
            while waiting or any(self.rows):
                self._admit(waiting)
                if self._prompts_are_due(more=bool(waiting)):
                    self._prefill(prefilled)
                wanted = any(row is not None and row.launched < row.max_new_tokens for row in self.decoding)
                if wanted:
                    self._launch()
                if self.in_flight and (len(self.in_flight) > lag or not wanted):
                    yield from self._collect(self.in_flight.popleft())
        finally:
            # Also when the caller stops early or an error passes through: nothing may keep running in a slot.
            self.running = False
            self._clear()

    def _clear(self) -> None:
        self.in_flight.clear()
        for row in self.held:
            self._keep(row)
        self.decoding = [None] * len(self.rows)
        self.prompts = self.runner.prompt_queue()
        self.runner.state.slots.fill_(-1)
        self.rows = [None] * len(self.rows)  # last: until then it is not done

    def _admit(self, waiting: deque[Request]) -> None:
        """Give free rows to waiting requests. All but the last token of a prompt are prefilled; that one goes into the
        first decode step."""
        for row, occupant in enumerate(self.rows):
            if occupant is None and waiting and waiting[0].slot == (row if row in self.held else None):
                request = self.rows[row] = waiting.popleft()
                request.prefill_clock = self.runner.clock()
                kept = self.held[row].begin(request.prompt) if row in self.held else 0
                request.timing.kept_tokens = kept
                self.prompts.push(row, request.prompt[kept:-1], kept)
                if kept == len(request.prompt) - 1:
                    self._begin(row, request)

    def _prompts_are_due(self, more: bool) -> bool:
        decoding = sum(row is not None for row in self.decoding)
        gathered = GATHER * (self.busy - decoding) >= len(self.rows)
        self.filling = bool(self.prompts) and (self.filling or gathered or not more or not decoding)
        return self.filling

    def _prefill(self, prefilled: Callable[[Chunk], None] | None) -> None:
        """One chunk, or more until half of the rows decode: a step takes nearly as long for few rows as for all."""
        first = True
        while self.prompts and (first or 2 * sum(row is not None for row in self.decoding) < len(self.rows)):
            first = False
            chunk = self.prompts.pop()
            for piece in chunk.pieces:
                if piece.slot in self.held:
                    self.held[piece.slot].writes(piece.count)
            self.runner.prefill(chunk)
            for piece in chunk.pieces:
                request = self.rows[piece.slot]
                if piece.slot in self.held:
                    self.held[piece.slot].ran(request.prompt[piece.position : piece.position + piece.count])
                if piece.position + piece.count == len(request.prompt) - 1:
                    self._begin(piece.slot, request)
            if prefilled is not None:
                prefilled(chunk)

    def _begin(self, row: int, request: Request) -> None:
        request.prefill_clock.stop()
        if row in self.held:
            self.held[row].mark()  # another answer may be wanted
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
        for request in self.decoding:
            if request is not None:
                request.launched += 1  # before it is: an interruption may come when a part of it was run
        runner.decode()
        wanted = any(row is not None and row.params.logprobs for row in self.decoding)
        top = runner.top_logprobs() if wanted else None
        out, top, done = runner.to_host(runner.state.out, top)
        self.in_flight.append(_InFlight(list(self.decoding), out, top, done))

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

    def _keep(self, row: int) -> None:
        """Note what the request in a held slot leaves there. Its last token was drawn, but not run."""
        request = self.decoding[row]
        if request is not None:
            self.held[row].writes(len(request.token_ids) if request.stopped_itself else request.launched)
            self.decoding[row] = None  # before they are noted: an interruption calls this again
            self.held[row].ran([*request.prompt[-1:], *request.token_ids][:-1])

    def _release(self, row: int) -> None:
        if row in self.held:
            self._keep(row)
        if self.rows[row] is not None:
            self.rows[row] = self.decoding[row] = None
            self.runner.state.slots[row].fill_(-1)

"""The serving loop against a fake device: who gets which token, also when the host looks at a step four steps late.

The fake has the real decode state and follows the same rules for it as the decode step, but it draws tokens from a
fixed function of the sequence, so that what each request must get is known. Its results arrive late, as on CUDA.
"""

import dataclasses
import random

import pytest
import torch

from dsv4.compile import scheduler
from dsv4.compile.prefill import PromptQueue
from dsv4.compile.requests import Request
from dsv4.compile.sampling import SamplingParams
from dsv4.compile.scheduler import LAG, Scheduler
from dsv4.compile.step import DecodeState

VOCAB = 1000


def following(history: list[int]) -> int:
    """The token after a sequence. Never 0."""
    return random.Random(str(history)).randrange(1, VOCAB)


def generated(prompt: list[int], count: int, stops: frozenset = frozenset()) -> list[int]:
    out = []
    while len(out) < count and not (out and out[-1] in stops):
        out.append(following(prompt + out))
    return out


class Event:
    """Done only once it has been asked some times, as copies take their time."""

    def __init__(self, polls: int):
        self.polls = polls

    def query(self) -> bool:
        self.polls -= 1
        return self.polls < 0


class Clock:
    def stop(self) -> None:
        self.stopped = True

    def seconds(self) -> float:
        return 0.5 if self.stopped else 0.0


class FakeRunner:
    """Slots hold token lists instead of a cache. With device "cuda" the scheduler looks LAG steps behind."""

    prefill_sizes = (4, 8)

    def __init__(self, slots: int, device: str, draw):
        self.device, self.draw = torch.device(device), draw
        self.cache = dataclasses.make_dataclass("Cache", ["num_slots"])(slots)
        self.state = DecodeState(slots, VOCAB, torch.device("cpu"))
        self.slots = [[] for _ in range(slots)]
        self.steps = self.idle_steps = self.tokens_run = 0

    def to_device(self, values: list) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64)

    def clock(self) -> Clock:
        return Clock()

    def prompt_queue(self) -> PromptQueue:
        return PromptQueue(self.prefill_sizes)

    def prefill(self, chunk) -> None:
        self._run(chunk.tokens, chunk.positions, chunk.slots)

    def _run(self, tokens, positions, slots) -> None:
        for token, position, slot in zip(tokens, positions, slots, strict=True):
            if slot >= 0:
                assert position <= len(self.slots[slot]), "a gap in the sequence"
                del self.slots[slot][position:]  # position 0 begins anew
                self.slots[slot].append(token)
                self.tokens_run += 1

    def decode(self) -> None:
        state = self.state
        active = (state.slots >= 0).tolist()
        assert all(slot in (-1, row) for row, slot in enumerate(state.slots.tolist()))
        self._run(state.tokens.tolist(), state.positions.tolist(), state.slots.tolist())
        self.steps += 1
        self.idle_steps += not any(active)
        state.out.fill_(-1)
        for row in range(len(active)):
            if active[row]:
                token = following(self.slots[row])
                state.out[0, row] = token
                state.out[1, row] = torch.tensor(-1.0 - row).view(torch.int32).long()
                state.logits[row] = torch.nn.functional.one_hot(torch.tensor(token), VOCAB)
                stopped = token in state.stop_ids[row].tolist() or state.remaining[row] <= 1
                state.tokens[row], state.positions[row] = token, state.positions[row] + 1
                state.remaining[row] -= 1
                state.slots[row] = -1 if stopped else row

    def top_logprobs(self):
        return self.state.logits.topk(64)

    def to_host(self, out, top):
        event = Event(self.draw.random.randint(0, 2)) if self.device.type == "cuda" else None
        return out.clone(), tuple(part.clone() for part in top) if top else None, event


@pytest.fixture(params=["cpu", "cuda"])
def device(request) -> str:
    return request.param


def request_for(prompt: list[int], count: int, stops: tuple = (), **params) -> Request:
    return Request(prompt, SamplingParams(**params), count, frozenset(stops), None)


def random_requests(draw, number: int) -> list[Request]:
    out = []
    for _ in range(number):
        prompt = draw.integers(1, VOCAB, draw.random.randint(1, 20)).tolist()
        count = draw.random.randint(1, 15)
        token = draw.random.choice(generated(prompt, count))
        out.append(request_for(prompt, count, (token,) if draw.random.random() < 0.4 else ()))
    return out


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_every_request_gets_its_own_tokens(slots, device, draw):
    for _ in range(6):
        requests = random_requests(draw, draw.random.randint(1, 14))
        runner = FakeRunner(slots, device, draw)
        yielded = [request for request, _ in Scheduler(runner).run(requests)]
        for request in requests:
            wanted = generated(request.prompt, request.max_new_tokens, request.stop_ids)
            assert request.token_ids == wanted
            assert request.finish_reason == ("stop" if wanted[-1] in request.stop_ids else "length")
            assert yielded.count(request) == len(wanted)
            assert request.timing.prefill_seconds == 0.5
        assert (runner.state.slots == -1).all()


def test_requests_begin_in_order(device, draw):
    requests = random_requests(draw, 9)
    first_seen = []
    for request, _ in Scheduler(FakeRunner(2, device, draw)).run(requests):
        if request not in first_seen:
            first_seen.append(request)
    begun = [requests.index(request) for request in first_seen]
    assert all(place <= i + 1 for i, place in enumerate(begun))  # two slots: at most one ahead of its turn


@pytest.mark.parametrize("slots", [1, 3])
def test_slots_stay_full(slots, device, draw):
    """Equal requests in a multiple of the slots take not one step more than needed, with and without the lag: the host
    knows their lengths, so it launches nothing for rows that have had all their steps."""
    requests = [request_for(draw.integers(1, VOCAB, 3).tolist(), 7) for _ in range(4 * slots)]
    runner = FakeRunner(slots, device, draw)
    list(Scheduler(runner).run(requests))
    assert runner.steps == 4 * 7
    assert runner.idle_steps == 0
    assert runner.tokens_run == 4 * slots * (2 + 7)


def timeline(runner):
    """What the runner is asked for from now on: "chunk", or how many rows a decode step works on."""
    ran, prefill, decode = [], runner.prefill, runner.decode

    def note_chunk(chunk):
        ran.append("chunk")
        prefill(chunk)

    def note_step():
        ran.append(int((runner.state.slots >= 0).sum()))
        decode()

    runner.prefill, runner.decode = note_chunk, note_step
    return ran


def test_a_long_prompt_holds_up_nobody(device, draw):
    """Its five chunks (of 8 and 4 rows) run between the steps of a row that decodes."""
    requests = [request_for([5, 6], 9), request_for(draw.integers(1, VOCAB, 38).tolist(), 2)]
    runner = FakeRunner(2, device, draw)
    ran = timeline(runner)
    list(Scheduler(runner).run(requests))
    assert ran[:11] == ["chunk", 1, "chunk", 1, "chunk", 1, "chunk", 1, "chunk", 2, 2]
    for request in requests:
        assert request.token_ids == generated(request.prompt, request.max_new_tokens)


def test_prompts_come_first_until_half_of_the_rows_decode(device, draw):
    requests = [request_for(draw.integers(1, VOCAB, 9).tolist(), 20) for _ in range(4)]
    runner = FakeRunner(4, device, draw)
    ran = timeline(runner)
    loop = Scheduler(runner)
    running = loop.run(requests)
    next(running)
    assert loop.busy == 4
    list(running)
    assert ran[:5] == ["chunk", "chunk", 2, "chunk", 3] and loop.busy == 0


def test_steps_after_a_stop_token_are_idle(device, draw):
    """A row that stops inside the graph does no more work, though the host launches some steps before it knows."""
    prompt = draw.integers(1, VOCAB, 5).tolist()
    tokens = generated(prompt, 20)
    stop = tokens[6]
    at = tokens.index(stop)
    runner = FakeRunner(1, device, draw)
    request = request_for(prompt, 20, (stop,))
    list(Scheduler(runner).run([request]))
    assert request.token_ids == tokens[: at + 1]
    assert runner.tokens_run == 4 + at + 1
    assert runner.steps <= at + 1 + (LAG if device == "cuda" else 0)


def test_what_comes_after_a_stop_on_the_host_is_dropped(device, draw):
    """Only the host knows of stop strings. The row runs on for some steps; their tokens go to nobody, also when the
    slot has its next request by then."""
    requests = [request_for(draw.integers(1, VOCAB, 4).tolist(), 12) for _ in range(5)]
    cut = {request: draw.random.randint(1, 11) for request in requests}

    def push(request, token, logprob, top):
        assert request.finish_reason is None, "a token after the end"
        request.token_ids.append(token)
        if len(request.token_ids) == cut[request]:
            request.finish_reason = "stop"
        return ""

    for request in requests:
        request.push = push.__get__(request)
    list(Scheduler(FakeRunner(2, device, draw)).run(requests))
    for request in requests:
        assert request.token_ids == generated(request.prompt, 12)[: cut[request]]


def test_logprobs_arrive_with_their_token(device, draw):
    prompts = [draw.integers(1, VOCAB, 4).tolist() for _ in range(5)]
    requests = [request_for(prompt, 6, logprobs=n) for prompt, n in zip(prompts, (None, 0, 1, 3, 0), strict=True)]
    list(Scheduler(FakeRunner(2, device, draw)).run(requests))
    for request in requests:
        count = request.params.logprobs
        assert len(request.logprobs) == (0 if count is None else 6)
        for token, entry in zip(request.token_ids, request.logprobs, strict=False):
            assert entry.token_id == token and entry.logprob in (-1.0, -2.0)
            assert list(entry.top)[:1] == ([token] if count else []) and len(entry.top) == count


@pytest.mark.parametrize("after", [1, 2, 9])
def test_stopping_early_frees_everything(after, device, draw):
    runner = FakeRunner(3, device, draw)
    loop = Scheduler(runner)
    running = loop.run(random_requests(draw, 12))
    for _ in range(after):
        next(running)
    running.close()
    assert loop.rows == [None] * 3 and not loop.in_flight and (runner.state.slots == -1).all()
    again = random_requests(draw, 5)
    list(loop.run(again))
    for request in again:
        assert request.token_ids == generated(request.prompt, request.max_new_tokens, request.stop_ids)


def test_an_error_frees_everything(device, draw, monkeypatch):
    runner = FakeRunner(2, device, draw)
    loop, steps = Scheduler(runner), iter(range(100))
    decode = runner.decode

    def failing():
        if next(steps) == 5:
            raise RuntimeError("lost")
        decode()

    monkeypatch.setattr(runner, "decode", failing)
    with pytest.raises(RuntimeError, match="lost"):
        list(loop.run(random_requests(draw, 2) + [request_for([5], 15) for _ in range(3)]))
    assert loop.rows == [None] * 2 and not loop.in_flight and (runner.state.slots == -1).all()
    again = random_requests(draw, 4)
    list(loop.run(again))
    assert all(request.finish_reason for request in again)


def test_rows_are_filled_with_the_requests_settings(draw):
    runner = FakeRunner(2, "cpu", draw)
    params = dict(temperature=0.5, top_k=7, top_p=0.75, min_p=0.25, repetition_penalty=1.5, seed=2**62 + 1)
    requests = [request_for([3, 4, 3], 5, (9, 8), **params), request_for([6], 2, top_k=-1)]
    next(Scheduler(runner).run(requests))
    state = runner.state
    for name, value in params.items():
        assert getattr(state, {"seed": "seeds"}.get(name, name))[0] == value
    assert state.top_k[1] == 0
    assert state.stop_ids[0].tolist() == [8, 9] + [-1] * (scheduler.MAX_STOP_IDS - 2)
    assert state.seen[0].nonzero().flatten().tolist() == [3, 4]
    assert state.seen[1].nonzero().flatten().tolist() == [6]


def test_no_requests():
    assert list(Scheduler(FakeRunner(2, "cpu", None)).run([])) == []

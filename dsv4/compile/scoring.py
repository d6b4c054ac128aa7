"""Log-probabilities of given continuations: what accuracy measurements on multiple-choice questions and on text need.

Contexts and continuations run through the prefill step, packed over the slots, so nothing is compiled for a length. Only
the rows that predict a continuation's tokens go through the output head, HEAD_ROWS at a time and always that many: memory
is bounded however large the vocabulary (33 MB of float32 logits at 129,280 tokens), and a row's result does not depend on
how many rows were waiting beside it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.compile.prefill import Chunk
from dsv4.compile.runner import HEAD_ROWS, Runner


@dataclass(frozen=True)
class Score:
    """Sum of the log-probabilities of a continuation's tokens, and whether greedy decoding would have produced it; and for
    each token its own log-probability and the most likely token in its place."""

    logprob: float
    greedy: bool
    token_logprobs: tuple[float, ...]
    best_tokens: tuple[int, ...]


@dataclass(frozen=True)
class _Target:
    """Row `position` of a sequence predicts `token` of request `owner`."""

    position: int
    token: int
    owner: int


def score(runner: Runner, slots: list[int], requests: Sequence[tuple[list[int], list[int]]]) -> list[Score]:
    """One Score for each (context ids, continuation ids), in order, using these slots. ValueError before anything runs if
    one is bad.

    Requests that differ in nothing but their last token run once: choices of one token cost one forward.
    """
    sequences = _sequences(requests, runner)
    head = _Head(runner)
    waiting = iter(sequences.items())
    while wave := dict(zip(slots, waiting, strict=False)):
        for chunk in runner.chunks([(slot, list(ids)) for slot, (ids, _) in wave.items()]):
            head.add(runner.prefill(chunk), *_wanted(chunk, {slot: targets for slot, (_, targets) in wave.items()}))
    logprobs: list[list[float]] = [[] for _ in requests]
    best: list[list[int]] = [[] for _ in requests]
    for target, logprob, token in head.finish():  # a request's tokens come in their order
        logprobs[target.owner].append(logprob)
        best[target.owner].append(token)
    return [
        Score(sum(each), tokens == list(continuation), tuple(each), tuple(tokens))
        for each, tokens, (_, continuation) in zip(logprobs, best, requests, strict=True)
    ]


def _sequences(requests: Sequence[tuple[list[int], list[int]]], runner: Runner) -> dict[tuple[int, ...], list[_Target]]:
    """Input ids -> what is wanted of them. The last token of a continuation is only predicted, not run."""
    vocab, limit = runner.model.config.vocab_size, runner.cache.max_context
    sequences: dict[tuple[int, ...], list[_Target]] = {}
    for owner, (context, continuation) in enumerate(requests):
        if not context or not continuation:
            empty = "continuation" if context else "context"
            raise ValueError(f"request {owner} has an empty {empty}; give at least one token, such as BOS")
        ids = (*context, *continuation)
        bad = next((i for i in ids if type(i) is not int or not 0 <= i < vocab), None)
        if bad is not None:
            raise ValueError(f"request {owner} has token id {bad!r}, but token ids are the integers 0..{vocab - 1}")
        if len(ids) - 1 > limit:
            raise ValueError(
                f"request {owner} has {len(context)} + {len(continuation)} tokens, but max_context is {limit} and the last "
                "token alone may lie beyond it; load with a larger one"
            )
        first = len(context) - 1
        sequences.setdefault(ids[:-1], []).extend(
            _Target(first + offset, token, owner) for offset, token in enumerate(continuation)
        )
    return sequences


def _wanted(chunk: Chunk, targets: dict[int, list[_Target]]) -> tuple[list[int], list[_Target]]:
    """Which rows of a chunk predict something, and what, given the targets in each slot; a row appears once for each of
    its targets."""
    rows, found = [], []
    for piece in chunk.pieces:
        shift = piece.start - piece.position
        for target in targets[piece.slot]:
            if piece.position <= target.position < piece.position + piece.count:
                rows.append(target.position + shift)
                found.append(target)
    return rows, found


class _Head:
    """Gathers hidden rows until there are HEAD_ROWS of them; results stay on the device until `finish`."""

    def __init__(self, runner: Runner):
        self.runner = runner
        self.hidden: list[Tensor] = []  # rows that wait, HEAD_ROWS at most after `add`
        self.count = 0
        self.targets: list[_Target] = []
        self.results: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def add(self, hidden: Tensor, rows: list[int], targets: list[_Target]) -> None:
        if not rows:
            return
        self.hidden.append(hidden.index_select(0, self.runner.to_device(rows)))
        self.count += len(rows)
        self.targets += targets
        if self.count >= HEAD_ROWS:
            waiting = torch.cat(self.hidden)
            whole = self.count // HEAD_ROWS * HEAD_ROWS
            done = len(self.targets) - self.count
            for start in range(0, whole, HEAD_ROWS):
                block = self.targets[done + start : done + start + HEAD_ROWS]
                self._run(waiting[start : start + HEAD_ROWS], block)
            # a copy, or the view would keep all the rows alive
            self.hidden, self.count = [waiting[whole:].clone()], self.count - whole

    @torch.no_grad()
    def finish(self) -> list[tuple[_Target, float, int]]:
        """(target, its log-probability, the most likely token there), all so far; waits for the device."""
        if self.count:
            waiting = torch.cat(self.hidden)
            padding = waiting.new_zeros(HEAD_ROWS - self.count, waiting.shape[1])
            self._run(torch.cat((waiting, padding)), self.targets[len(self.targets) - self.count :])
        if not self.results:
            return []
        logprobs, best = (torch.cat(parts).tolist() for parts in zip(*self.results, strict=True))
        return list(zip(self.targets, logprobs, best, strict=True))

    def _run(self, hidden: Tensor, targets: list[_Target]) -> None:
        logits = self.runner.model.logits(hidden)[: len(targets)]
        tokens = self.runner.to_device([target.token for target in targets])
        logprobs = logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(-1)
        self.results.append((logprobs, logits.argmax(-1)))

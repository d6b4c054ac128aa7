"""Packing prompts into the static chunks of the prefill step."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """Tokens of one prompt inside a chunk: chunk rows start.. hold prompt positions position.. of `slot`."""

    slot: int
    start: int
    position: int
    count: int


@dataclass(frozen=True)
class Chunk:
    """A static batch as host lists of equal length, padded with token 0 at position 0 of slot -1."""

    tokens: list[int]
    positions: list[int]
    slots: list[int]
    pieces: list[Piece]


class PromptQueue:
    """Prompts on their way into chunks, first come, first served.

    `sizes` are the compiled chunk lengths, ascending; each chunk takes the smallest that holds what is left, else the
    largest. A prompt may cross from one chunk to the next; within a chunk its tokens stand side by side. Prompts share
    chunks unless `apart`: then a prompt's chunks are the same whatever waits beside it.
    """

    def __init__(self, sizes: list[int], apart: bool = False):
        self._sizes, self._apart = sizes, apart
        self._waiting: deque[tuple[int, list[int], int]] = deque()
        self._done = 0  # tokens of the first one that are in chunks already
        self._left = 0

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def push(self, slot: int, ids: list[int], position: int = 0) -> None:
        """Put a prompt, or its part from `position` on, at the end. An empty one has nothing to run and is not kept."""
        if ids:
            self._waiting.append((slot, ids, position))
            self._left += len(ids)

    def pop(self) -> Chunk:
        """The next chunk; only while there is something in the queue."""
        left = len(self._waiting[0][1]) - self._done if self._apart else self._left
        size = next((size for size in self._sizes if size >= left), self._sizes[-1])
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        pieces: list[Piece] = []
        while self._waiting and len(tokens) < size and not (self._apart and pieces):
            slot, ids, position = self._waiting[0]
            start, part = position + self._done, ids[self._done : self._done + size - len(tokens)]
            pieces.append(Piece(slot, len(tokens), start, len(part)))
            tokens += part
            positions += range(start, start + len(part))
            slots += [slot] * len(part)
            self._done += len(part)
            if self._done == len(ids):
                self._waiting.popleft()
                self._done = 0
        self._left -= len(tokens)
        padding = size - len(tokens)
        return Chunk(tokens + [0] * padding, positions + [0] * padding, slots + [-1] * padding, pieces)


def chunks(prompts: list[tuple[int, list[int]]], sizes: list[int], apart: bool = False) -> Iterator[Chunk]:
    """All chunks of the prompts [(slot, token ids)], as PromptQueue makes them."""
    queue = PromptQueue(sizes, apart)
    for slot, ids in prompts:
        queue.push(slot, ids)
    while queue:
        yield queue.pop()

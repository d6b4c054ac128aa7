"""Packing prompts into the static chunks of the prefill step."""

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


def chunks(prompts: list[tuple[int, list[int]]], sizes: list[int]) -> Iterator[Chunk]:
    """Lay the prompts [(slot, token ids)] out one after another and cut them into chunks.

    `sizes` are the compiled chunk lengths, ascending; each chunk takes the smallest that holds what is left, else the
    largest. A prompt may cross from one chunk to the next; within a chunk its tokens stand side by side.
    """
    rows = [(slot, position, token) for slot, ids in prompts for position, token in enumerate(ids)]
    start = 0
    while start < len(rows):
        size = next((size for size in sizes if size >= len(rows) - start), sizes[-1])
        part = rows[start : start + size]
        pieces: list[Piece] = []
        for row, (slot, position, _) in enumerate(part):
            if pieces and pieces[-1].slot == slot:
                last = pieces[-1]
                pieces[-1] = Piece(slot, last.start, last.position, last.count + 1)
            else:
                pieces.append(Piece(slot, row, position, 1))
        padding = size - len(part)
        yield Chunk(
            [token for _, _, token in part] + [0] * padding,
            [position for _, position, _ in part] + [0] * padding,
            [slot for slot, _, _ in part] + [-1] * padding,
            pieces,
        )
        start += size

"""Packing prompts into chunks: every token once, at its place, in shapes that were compiled."""

import pytest

from dsv4.compile.prefill import Chunk, Piece, PromptQueue, chunks


def lengths(prompts: list[int], sizes: list[int]) -> list[int]:
    """Chunk lengths for prompts of these lengths."""
    return [len(chunk.tokens) for chunk in chunks([(i, [7] * n) for i, n in enumerate(prompts)], sizes)]


def test_one_chunk_by_hand():
    [chunk] = chunks([(2, [11, 12]), (0, [13])], [2, 5])
    assert chunk == Chunk([11, 12, 13, 0, 0], [0, 1, 0, 0, 0], [2, 2, 0, -1, -1], [Piece(2, 0, 0, 2), Piece(0, 2, 0, 1)])


def test_a_prompt_crosses_chunks():
    first, second = chunks([(1, [5, 6]), (0, [7, 8, 9])], [3])
    assert first == Chunk([5, 6, 7], [0, 1, 0], [1, 1, 0], [Piece(1, 0, 0, 2), Piece(0, 2, 0, 1)])
    assert second == Chunk([8, 9, 0], [1, 2, 0], [0, 0, -1], [Piece(0, 0, 1, 2)])


def test_prompts_apart():
    first, second, third = chunks([(1, [5, 6, 7, 8]), (0, [9]), (2, [])], [1, 3], apart=True)
    assert first == Chunk([5, 6, 7], [0, 1, 2], [1, 1, 1], [Piece(1, 0, 0, 3)])
    assert second == Chunk([8], [3], [1], [Piece(1, 0, 3, 1)])
    assert third == Chunk([9], [0], [0], [Piece(0, 0, 0, 1)])


def test_prompts_that_come_later_join_what_is_waiting():
    queue = PromptQueue([2, 4])
    queue.push(0, [1, 2, 3, 4, 5])
    assert queue.pop().pieces == [Piece(0, 0, 0, 4)]
    queue.push(1, [6, 7])
    queue.push(2, [])
    assert queue.pop() == Chunk([5, 6, 7, 0], [4, 0, 1, 0], [0, 1, 1, -1], [Piece(0, 0, 4, 1), Piece(1, 1, 0, 2)])
    assert not queue


@pytest.mark.parametrize(
    "prompts, sizes, wanted",
    [
        ([], [4, 8], []),
        ([0], [4, 8], []),  # a prompt of one token has nothing to prefill: its token goes into the first decode step
        ([0, 0, 3, 0], [4, 8], [4]),
        ([4], [4, 8], [4]),
        ([5], [4, 8], [8]),
        ([8], [4, 8], [8]),
        ([9], [4, 8], [8, 4]),
        ([4, 4, 4], [4, 8], [8, 4]),
        ([17], [4, 8], [8, 8, 4]),
        ([3], [1], [1, 1, 1]),
    ],
)
def test_the_smallest_shape_that_holds_the_rest(prompts, sizes, wanted):
    assert lengths(prompts, sizes) == wanted


def test_every_token_once_and_in_order(draw):
    for _ in range(200):
        sizes = sorted(draw.random.sample(range(1, 20), draw.random.randint(1, 3)))
        slots = draw.random.sample(range(8), draw.random.randint(1, 6))
        prompts = {slot: [draw.random.randrange(1, 99) for _ in range(draw.random.randint(0, 40))] for slot in slots}
        seen = {slot: [] for slot in slots}
        for chunk in chunks(list(prompts.items()), sizes):
            assert len(chunk.tokens) == len(chunk.positions) == len(chunk.slots) and len(chunk.tokens) in sizes
            assert chunk.pieces, "a chunk of padding only is wasted"
            rows = 0
            for piece in chunk.pieces:
                assert piece.start == rows and piece.count > 0  # side by side, in row order
                rows += piece.count
                part = slice(piece.start, rows)
                assert chunk.slots[part] == [piece.slot] * piece.count
                assert chunk.positions[part] == list(range(piece.position, piece.position + piece.count))
                assert piece.position == len(seen[piece.slot])
                seen[piece.slot] += chunk.tokens[part]
            assert chunk.slots[rows:] == [-1] * (len(chunk.slots) - rows)
            assert len({piece.slot for piece in chunk.pieces}) == len(chunk.pieces)  # one run of rows for each slot
        assert seen == prompts

"""advance_state against plain Python, row by row."""

import struct

import torch

from dsv4 import ops

NAMES = ("tokens", "positions", "slots", "remaining")


def state(draw, rows, vocab, stops=4):
    """Arguments: rows that go on, that are idle, that have one token left, and that draw one of their stop tokens."""
    logits, token = draw.normal(rows, vocab), draw.integers(0, vocab, rows)
    stop_ids = torch.where(draw.uniform(0, 1, rows, stops) < 0.5, -1, draw.integers(0, vocab, rows, stops))
    stop_ids[2::5, stops - 1] = token[2::5]
    slots = torch.where(draw.uniform(0, 1, rows) < 0.3, -1, torch.arange(rows))
    slots[:3] = torch.arange(3)
    remaining = torch.where(torch.arange(rows) % 4 == 1, 1, draw.integers(1, 2**40, rows))
    numbers = draw.integers(0, vocab, rows), draw.integers(0, 2**40, rows), slots, remaining
    flags = draw.integers(0, 2, rows, vocab).bool()
    out = torch.full((2, rows), 77)
    return token, draw.normal(rows), logits, stop_ids, *numbers, flags, draw.normal(rows, vocab), out


def advanced(args):
    """What the arguments that change become, by the rules, one row at a time."""
    token, logprob, logits, stop_ids, *numbers, seen, _, out = (a.clone() for a in args)
    columns = dict(zip(NAMES, (n.tolist() for n in numbers), strict=True))
    for row, new in enumerate(token.tolist()):
        (bits,) = struct.unpack("<i", struct.pack("<f", logprob[row].item()))
        out[1, row] = bits
        if columns["slots"][row] < 0:
            out[0, row] = -1
            continue
        out[0, row] = new
        seen[row, new] = True
        columns["tokens"][row] = new
        columns["positions"][row] += 1
        if new in stop_ids[row].tolist() or columns["remaining"][row] <= 1:
            columns["slots"][row] = -1
        columns["remaining"][row] -= 1
    return *(torch.tensor(columns[name]) for name in NAMES), seen, logits, out


def test_matches_rules(draw):
    args = state(draw, 60, 30)
    expected = advanced(args)
    assert ((args[6] >= 0) & (expected[2] < 0)).any() and (expected[2] >= 0).any() and (args[6] < 0).any()
    ops.advance_state(*args)
    for actual, wanted in zip(args[4:], expected, strict=True):
        assert torch.equal(actual, wanted)


def test_an_idle_row_keeps_its_state(draw):
    args = state(draw, 5, 12)
    args[6][:] = -1
    before = [a.clone() for a in args]
    ops.advance_state(*args)
    for number in (4, 5, 6, 7, 8):
        assert torch.equal(args[number], before[number])
    assert (args[10][0] == -1).all()


def test_out_may_be_wider(draw):
    args = state(draw, 4, 12)
    wide = torch.full((2, 9), 5)
    ops.advance_state(*args[:-1], wide)
    assert (wide[:, 4:] == 5).all() and (wide[0, :3] == args[0][:3]).all()

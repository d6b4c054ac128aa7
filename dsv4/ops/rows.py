"""Rings and flat token batches: how references read a sequence's recent past and write to its state.

A step carries a flat batch: `positions [T]` and `slots [T]` say which token of which sequence each row is. The tokens of
one slot stand side by side in ascending position; slot -1 marks padding that touches nothing. Per slot, a ring of R rows
holds the last R tokens (row = position mod R). So the token d places before row i is row i - d of the batch itself when
that row belongs to the same sequence, and otherwise row (position - d) mod R of the ring. Nothing here branches on
values or waits for the device, so the references can be captured into a CUDA graph.
"""

import torch
from torch import Tensor


def history(
    rows: Tensor, ring: Tensor, positions: Tensor, slots: Tensor, picks: Tensor, depth: int
) -> tuple[Tensor, Tensor]:
    """The `depth` tokens that end at each picked row, nearest first.

    rows [T, C]: this batch's values. ring [S, R, C]: earlier ones, R >= depth - 1. picks [M]: row numbers.
    Returns (values [M, depth, C], zero where absent; present [M, depth] bool). Absent means before position 0, or inert.
    """
    offsets = torch.arange(depth, device=rows.device)
    slot, position = slots[picks, None], positions[picks, None]  # [M, 1]
    past = position - offsets  # [M, depth]
    row = (picks[:, None] - offsets).clamp(min=0)
    in_batch = (picks[:, None] >= offsets) & (slots[row] == slot) & (positions[row] == past)
    from_ring = ring[slot.clamp(min=0), past % ring.shape[1]]
    present = (past >= 0) & (slot >= 0)
    values = torch.where(in_batch[..., None], rows[row], from_ring)
    return torch.where(present[..., None], values, 0), present


def write_rows_(buffer: Tensor, slot: Tensor, row: Tensor, rows: Tensor, valid: Tensor) -> None:
    """buffer [S, R, C] at (slot, row) [M] <- rows [M, C] where valid [M]; the others leave no trace.

    Without a data-dependent shape: an invalid row repeats the first valid write, and if there is none, the first row is
    rewritten with itself.
    """
    if valid.shape[0] == 0:
        return
    first = valid.int().argmax(0, keepdim=True)
    some = valid.any()
    slot, row = (torch.where(valid, i, torch.where(some, i[first], 0)) for i in (slot, row))
    rows = rows.to(buffer.dtype)
    rows = torch.where(valid[:, None], rows, torch.where(some, rows[first], buffer[0, :1]))
    buffer.index_put_((slot, row), rows)


def write_ring_(ring: Tensor, rows: Tensor, positions: Tensor, slots: Tensor) -> None:
    """Write rows [T, C] to ring [S, R, C] at (slot, position mod R). Of two tokens R apart only the later is written."""
    size, count = ring.shape[1], rows.shape[0]
    valid = slots >= 0
    if count > size:
        later = torch.arange(count, device=rows.device) + size
        inside = later < count
        later = later.clamp(max=count - 1)
        valid = valid & ~(inside & (slots[later] == slots) & (positions[later] == positions + size))
    write_rows_(ring, slots.clamp(min=0), positions % size, rows, valid)

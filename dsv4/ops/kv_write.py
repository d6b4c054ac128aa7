"""kv_write: put this batch's key/value rows into each sequence's window ring.

It runs after `attend`: a chunk of several tokens of one sequence still needs the ring rows that its later tokens
replace, so attention reads the ring as it was before the step and the batch's own rows beside it.
"""

import torch
from torch import Tensor

from dsv4.ops._register import op
from dsv4.ops.rows import write_ring_


@op(
    "kv_write(Tensor kv, Tensor positions, Tensor slots, Tensor(a!) ring) -> ()",
    fake=lambda kv, positions, slots, ring: None,
)
def kv_write_ref(kv: Tensor, positions: Tensor, slots: Tensor, ring: Tensor) -> None:
    """ring[slot, position mod window] = kv, for the last `window` tokens of each sequence in the batch."""
    write_ring_(ring, kv, positions, slots)


def kv_write(kv: Tensor, positions: Tensor, slots: Tensor, ring: Tensor) -> None:
    """kv [T, D]; positions, slots int64 [T] (-1: inert); ring [S, window, D] is changed in place."""
    torch.ops.dsv4.kv_write(kv, positions, slots, ring)

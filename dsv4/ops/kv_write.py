"""kv_write: put this batch's key/value rows into each sequence's window ring.

It runs after `attend`: a chunk of several tokens of one sequence still needs the ring rows that its later tokens
replace, so attention reads the ring as it was before the step and the batch's own rows beside it.

On CUDA bf16 rows run kernels/rope.cu; float32 rows, the oracle's precision, run the reference.
"""

import torch
from torch import Tensor

from dsv4.ops._register import op
from dsv4.ops.kernels.build import kernel
from dsv4.ops.kernels.checks import require, require_tensors
from dsv4.ops.row_formats import checked_format, rope_of, stored
from dsv4.ops.rows import write_ring_


def _kv_write_cuda(kv, positions, slots, ring):
    if kv.dtype == torch.float32:
        return kv_write_ref(kv, positions, slots, ring)
    tokens, dim = kv.shape
    kv = kv.contiguous()
    require_tensors("kv_write", torch.bfloat16, kv=kv)
    require_tensors("kv_write", torch.int64, positions=positions, slots=slots)
    require("kv_write", dim % 8 == 0, f"rows must be a multiple of 8 wide, found {dim}")
    rope = _rope(kv, ring)
    compact = checked_format("kv_write", "ring", ring, dim, rope)
    if tokens:
        launch = kernel("rope.cu", "kv_write", f"VECTORS={dim // 8}", *([f"ROPE={rope}"] if compact else []))
        launch(-(-tokens // 4), 128, kv, positions, slots, ring, tokens, ring.shape[1], pdl=True)


def _rope(kv: Tensor, ring: Tensor) -> int:
    """The channels with rope, which only a compact ring tells apart."""
    return rope_of(ring, kv.shape[1]) if ring.dtype == torch.uint8 else 0


@op(
    "kv_write(Tensor kv, Tensor positions, Tensor slots, Tensor(a!) ring) -> ()",
    fake=lambda kv, positions, slots, ring: None,
    cuda=_kv_write_cuda,
)
def kv_write_ref(kv: Tensor, positions: Tensor, slots: Tensor, ring: Tensor) -> None:
    """ring[slot, position mod window] = kv, for the last `window` tokens of each sequence in the batch."""
    for view, rows in stored(kv, ring, _rope(kv, ring)):
        write_ring_(view, rows, positions, slots)


def kv_write(kv: Tensor, positions: Tensor, slots: Tensor, ring: Tensor) -> None:
    """kv [T, D]; positions, slots int64 [T] (-1: inert); ring [S, window, D], or compact (see row_formats), is changed
    in place."""
    torch.ops.dsv4.kv_write(kv, positions, slots, ring)

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
from dsv4.ops.rows import write_ring_


def _kv_write_cuda(kv, positions, slots, ring):
    if kv.dtype == torch.float32:
        return kv_write_ref(kv, positions, slots, ring)
    tokens, dim = kv.shape
    kv = kv.contiguous()
    require_tensors("kv_write", torch.bfloat16, kv=kv, ring=ring)
    require_tensors("kv_write", torch.int64, positions=positions, slots=slots)
    require("kv_write", dim % 8 == 0, f"rows must be a multiple of 8 wide, found {dim}")
    require("kv_write", ring.shape[-1] == dim, f"ring rows must be {dim} wide, found {ring.shape[-1]}")
    if tokens:
        launch = kernel("rope.cu", "kv_write", f"VECTORS={dim // 8}")
        launch(-(-tokens // 4), 128, kv, positions, slots, ring, tokens, ring.shape[1], pdl=True)


@op(
    "kv_write(Tensor kv, Tensor positions, Tensor slots, Tensor(a!) ring) -> ()",
    fake=lambda kv, positions, slots, ring: None,
    cuda=_kv_write_cuda,
)
def kv_write_ref(kv: Tensor, positions: Tensor, slots: Tensor, ring: Tensor) -> None:
    """ring[slot, position mod window] = kv, for the last `window` tokens of each sequence in the batch."""
    write_ring_(ring, kv, positions, slots)


def kv_write(kv: Tensor, positions: Tensor, slots: Tensor, ring: Tensor) -> None:
    """kv [T, D]; positions, slots int64 [T] (-1: inert); ring [S, window, D] is changed in place."""
    torch.ops.dsv4.kv_write(kv, positions, slots, ring)

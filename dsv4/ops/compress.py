"""compress: pool finished blocks of tokens into one entry each (paper section 2.3.1 CSA, 2.3.2 HCA).

Per token the compressor projections give a candidate c and a gate z. At the last token of block w (r tokens each), per
channel,
    HCA  e_w = sum_j softmax_j(z_j + ape_j) c_j              over the r tokens of block w
    CSA  the same over 2r slots: the first halves of c, z of block w-1 and the second halves of block w
then RMSNorm, rope at the block's first position w*r, and the entry is appended. Block 0 of CSA has no predecessor: its
missing slots weigh nothing. A block is never pooled early; what is open stays in a ring of the last r (CSA: 2r) tokens.

Because ring rows are found by position, and only positions from 0 to the current one are read, a slot that is used
again needs no clearing.

On CUDA bf16 and compact entries (see row_formats) run kernels/compress.cu; float32 entries, the oracle's precision, run the
reference.
"""

import torch
from torch import Tensor

from dsv4.ops._register import op
from dsv4.ops.kernels.build import kernel
from dsv4.ops.kernels.checks import require, require_tensors
from dsv4.ops.rope import rms_norm, rope_angles, rotate
from dsv4.ops.row_formats import GROUP, KERNEL_NAMES, ROWS, checked_format, stored
from dsv4.ops.rows import history, write_ring_, write_rows_

THREADS = 256  # of a block

SCHEMA = (
    "compress(Tensor c, Tensor z, Tensor ape, Tensor norm_weight, Tensor inv_freq, Tensor positions, Tensor slots, "
    "Tensor(a!) c_ring, Tensor(b!) z_ring, Tensor(c!) entries, int rate, float eps) -> ()"
)


def _fake(c, z, ape, norm_weight, inv_freq, positions, slots, c_ring, z_ring, entries, rate, eps):
    return None


def parts_of(dim: int, overlap: bool, compact: bool) -> int:
    """How many blocks share the channels of a token: many where a block of tokens is long and, if entries are compact,
    none of their groups is split. ValueError for other widths."""
    parts = 8 if not overlap and dim % (8 * GROUP if compact else 32) == 0 else 1
    widest = 2 * THREADS * parts
    fits = dim % 4 == 0 and dim <= widest
    require("compress", fits, f"entries must be a multiple of 4 wide, at most {widest}, found {dim}")
    return parts


def share_of(tokens: int, rate: int, overlap: bool, single: bool) -> int:
    """How many neighbouring tokens a cluster of the kernels takes. One in `rate` tokens of a chunk completes a block. Where
    all are of different slots (`single`) any may, and a cluster pools one after another; but few do if blocks are long."""
    if not single:
        return max(rate, 1)
    return 4 if tokens > 16 and not overlap else 1


def check_compressor(op_name, ape, norm, inv_freq, c_ring, z_ring, entries, rate):
    """What the kernels require of a compressor's weights and state. Returns whether its blocks overlap, and the format of
    its entries (see row_formats)."""
    slots, dim, width = entries.shape[0], norm.shape[0], ape.shape[1]
    require(op_name, width in (dim, 2 * dim), f"ape must be {dim} or {2 * dim} wide, found {width}")
    overlap = width == 2 * dim
    format = checked_format(op_name, "entries", entries, dim, 2 * inv_freq.shape[0])
    require(op_name, format is None or dim % 8 == 0, f"compact entries must be a multiple of 8 wide, found {dim}")
    require(op_name, format in (None, ROWS) or dim <= 256, f"compact keys must be at most 256 wide, found {dim}")
    require_tensors(op_name, torch.float32, ape=ape, norm=norm, inv_freq=inv_freq, c_ring=c_ring, z_ring=z_ring)
    shape = (slots, rate * (1 + overlap), width)
    for name, ring in (("c_ring", c_ring), ("z_ring", z_ring)):
        require(op_name, ring.shape == shape, f"{name} must be {shape}, found {tuple(ring.shape)}")
    return overlap, format


def _cuda(c, z, ape, norm_weight, inv_freq, positions, slots, c_ring, z_ring, entries, rate, eps):
    if entries.dtype == torch.float32:
        return compress_ref(c, z, ape, norm_weight, inv_freq, positions, slots, c_ring, z_ring, entries, rate, eps)
    c, z, tokens, dim = c.contiguous(), z.contiguous(), c.shape[0], norm_weight.shape[0]
    require_tensors("compress", torch.float32, c=c, z=z)
    require_tensors("compress", torch.int64, positions=positions, slots=slots)
    require("compress", c.shape == z.shape == (tokens, ape.shape[1]), f"c and z must be {ape.shape[1]} wide")
    overlap, format = check_compressor("compress", ape, norm_weight, inv_freq, c_ring, z_ring, entries, rate)
    if tokens:
        parts = parts_of(dim, overlap, format is not None)
        sizes = f"DIM={dim}", f"OVERLAP={int(overlap)}", f"RATE={rate}", f"ROPE={2 * inv_freq.shape[0]}"
        launch = kernel(
            "compress.cu", "compress", *sizes, f"PARTS={parts}", f"THREADS={THREADS}", f"FORMAT={KERNEL_NAMES[format]}"
        )
        share = share_of(tokens, rate, overlap, False)
        state = c_ring, z_ring, entries, tokens, share, entries.shape[1], eps
        weights = ape, norm_weight, inv_freq
        cluster = parts if parts > 1 else None
        launch(-(-tokens // share), THREADS, c, z, *weights, positions, slots, *state, cluster=cluster, pdl=True)


@op(SCHEMA, fake=_fake, cuda=_cuda)
def compress_ref(
    c: Tensor,
    z: Tensor,
    ape: Tensor,
    norm_weight: Tensor,
    inv_freq: Tensor,
    positions: Tensor,
    slots: Tensor,
    c_ring: Tensor,
    z_ring: Tensor,
    entries: Tensor,
    rate: int,
    eps: float,
) -> None:
    """The equations above in float32; the pooled entry is rounded once to the entries' dtype before its norm, and a
    compact one to bf16 like what it is made from."""
    dtype = torch.bfloat16 if entries.dtype == torch.uint8 else entries.dtype
    at = positions, slots
    advance_compressor(c, z, ape, norm_weight, inv_freq, *at, c_ring, z_ring, entries, rate, eps, dtype)


def advance_compressor(
    c, z, ape, norm_weight, inv_freq, positions, slots, c_ring, z_ring, entries, rate, eps, dtype: torch.dtype
) -> None:
    """`compress` with the dtype that entries are rounded to, which those of a plain buffer have themselves."""
    (count, width), dim = c.shape, norm_weight.shape[0]
    num_slots, capacity, _ = entries.shape
    overlap = width == 2 * dim
    z = z + ape[positions % rate]
    # Rows that end a block come first; a batch of T tokens of S sequences ends at most T/r + S blocks.
    ends = (slots >= 0) & ((positions + 1) % rate == 0)
    picks = torch.argsort(ends.logical_not().int(), stable=True)[: min(count, count // rate + num_slots)]

    depth = 2 * rate if overlap else rate
    cs, present = history(c, c_ring, positions, slots, picks, depth)  # [M, depth, width]
    zs, _ = history(z, z_ring, positions, slots, picks, depth)
    if overlap:
        # Nearest first: the current block's second halves, then the previous block's first halves.
        cs = torch.cat((cs[:, :rate, dim:], cs[:, rate:, :dim]), dim=1)
        zs = torch.cat((zs[:, :rate, dim:], zs[:, rate:, :dim]), dim=1)
    zs = zs.masked_fill(~present[..., None], -torch.inf)
    # Rows that end no block may have no slot at all; offset 0 keeps their softmax finite, and they are not written.
    zs[:, 0] = torch.where(present[:, :1], zs[:, 0], 0)
    pooled = (zs.softmax(dim=1) * cs).sum(1)
    pooled = rms_norm(pooled.to(dtype), norm_weight, eps)
    block = positions[picks] // rate
    entry = rotate(pooled, rope_angles(block * rate, inv_freq)).to(dtype)

    slot, block = slots[picks].clamp(min=0), block.clamp(max=capacity - 1)
    for view, rows in stored(entry, entries, 2 * inv_freq.shape[0]):
        write_rows_(view, slot, block, rows, ends[picks])
    write_ring_(c_ring, c, positions, slots)
    write_ring_(z_ring, z, positions, slots)


def compress(
    c: Tensor,
    z: Tensor,
    ape: Tensor,
    norm_weight: Tensor,
    inv_freq: Tensor,
    positions: Tensor,
    slots: Tensor,
    c_ring: Tensor,
    z_ring: Tensor,
    entries: Tensor,
    rate: int,
    eps: float,
) -> None:
    """Advance a compressor by one flat batch; see the module docstring.

    c, z float32 [T, d] (HCA) or [T, 2d] (CSA); ape float32 [rate, same]; norm_weight float32 [d]; inv_freq float32
    [R/2]; positions, slots int64 [T]. Changed in place: c_ring, z_ring float32 [S, rate or 2*rate, width] and
    entries [S, blocks, d] or compact (see row_formats), where block w = position // rate is written at the token that
    completes it.
    """
    torch.ops.dsv4.compress(c, z, ape, norm_weight, inv_freq, positions, slots, c_ring, z_ring, entries, rate, eps)

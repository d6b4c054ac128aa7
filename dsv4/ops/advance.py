"""advance_csa, advance_hca, advance_window: from a layer's raw projections to what its attention reads, in one launch.

For every token of the batch: each query head divided by its root mean square and turned (q_rope), the indexer's queries
turned and its head weights scaled, the shared key and value normalised and turned (kv_rope), and the compressors
advanced (compress): state written, finished blocks pooled and appended. Nothing of it depends on anything else of it, so
these are the parts of q_rope, kv_rope, kv_write and compress side by side, with the projections read where they lie.

Ring, entries and index keys may be compact (see row_formats). Then they are written so, the row of a token comes back as
what will be read of it, and index queries are rotated as their keys are; fp4 keys get queries quantised like them.

With `write` the row also goes into the window ring. That is for decode, where no slot has two tokens in the batch: the
row that is replaced has just left the window, and `attend` takes the token's own row from `kv`. A chunk of a prompt still
needs the rows that its later tokens replace; it passes write=False and calls kv_write after `attend`.
"""

import torch
from torch import Tensor

from dsv4.ops._register import op
from dsv4.ops.compress import THREADS, advance_compressor, check_compressor, parts_of, share_of
from dsv4.ops.kernels.build import kernel
from dsv4.ops.kernels.checks import require, require_tensors
from dsv4.ops.kv_write import kv_write_ref
from dsv4.ops.rope import kv_rope_ref, q_rope_ref
from dsv4.ops.row_formats import (
    FP4_KEYS,
    KERNEL_NAMES,
    ROWS,
    are_compact,
    checked_format,
    format_of,
    hadamard,
    simulate_fp4,
    simulate_rows,
)


def index_scale(heads: int, dim: int) -> float:
    """What multiplies the indexer's head weights."""
    return dim**-0.5 * heads**-0.5


def _launch(op_name, q_all, y, z, at, state, index_state, heads, index_heads, rate, eps, write):
    """One launch of advance.cu for all three ops. `at`: kv_norm, inv_freq, positions, slots, ring. `state`,
    `index_state`: ape, norm, c_ring, z_ring, entries of a compressor, or None."""
    q_all, y, (kv_norm, inv_freq, positions, slots, ring) = q_all.contiguous(), y.contiguous(), at
    tokens, window, dim = q_all.shape[0], ring.shape[1], kv_norm.shape[0]
    index_dim = index_state[1].shape[0] if index_state else 0
    require_tensors(op_name, torch.bfloat16, q_all=q_all, y=y)
    require_tensors(op_name, torch.float32, kv_norm=kv_norm, inv_freq=inv_freq)
    require_tensors(op_name, torch.int64, positions=positions, slots=slots)
    rows, keys = checked_format(op_name, "ring", ring, dim, 2 * inv_freq.shape[0]), None
    widths = dim, index_dim, q_all.shape[1], y.shape[1]
    require(op_name, all(n % 8 == 0 for n in widths), f"widths must be multiples of 8, found {widths}")
    wanted = heads * dim + index_heads * index_dim
    require(op_name, q_all.shape[1] == wanted, f"q_all must be {wanted} wide, found {q_all.shape[1]}")
    require(op_name, y.shape[1] >= dim, f"y must be at least {dim} wide, found {y.shape[1]}")
    overlap = parts = z_width = 0
    if state:
        overlap, format = check_compressor(op_name, *state[:2], inv_freq, *state[2:], rate)
        require(op_name, format == rows, "ring and entries must have the same format")
        parts, z_width = parts_of(dim, overlap, format is not None), 2 * state[0].shape[1]
    if index_state:
        index_overlap, keys = check_compressor(op_name, *index_state[:2], inv_freq, *index_state[2:], rate)
        require(op_name, overlap and index_overlap, "both compressors must overlap")
        z_width += 2 * index_state[0].shape[1] + index_heads
    require(op_name, rows in (None, ROWS) and keys != ROWS, "ring and entries hold rows, the indexer's entries keys")
    if state:
        z = z.contiguous()
        require_tensors(op_name, torch.float32, z=z)
        fits = z.shape == (tokens, z_width) and z_width % 4 == 0
        require(op_name, fits, f"z must be {(tokens, z_width)} and rows of whole vectors of four, found {tuple(z.shape)}")
    q, kv = q_all.new_empty((tokens, heads, dim)), y.new_empty((tokens, dim))
    index_q = q_all.new_empty((tokens, index_heads, index_dim)) if index_state else None
    index_weights = z.new_empty((tokens, index_heads)) if index_state else None
    if tokens:
        sizes = f"DIM={dim}", f"ROPE={2 * inv_freq.shape[0]}", f"THREADS={THREADS}", f"RATE={rate}"
        sizes = *sizes, f"OVERLAP={int(overlap)}", f"PARTS={max(parts, 1)}", f"INDEX_DIM={index_dim}"
        each = heads_a_warp(tokens, heads, index_heads, index_dim)
        share = share_of(tokens, rate, overlap, write)
        formats = f"KV={KERNEL_NAMES[rows]}", f"KEYS={KERNEL_NAMES[keys]}"
        launch = kernel("advance.cu", "advance", *sizes, f"HEADS={each}", *formats)
        blocks = -(-tokens // share) * (parts + (1 if index_state else 0))
        blocks += _row_blocks(tokens, dim) + _row_blocks(tokens * heads // each, dim)
        blocks += _row_blocks(tokens * index_heads // each, index_dim)
        launch(
            -(-blocks // max(parts, 1)),
            THREADS,
            *(q_all, y, z, kv_norm, inv_freq, positions, slots, ring, q, kv, tokens, heads),
            *(q_all.shape[1] // 8, y.shape[1] // 8, (y.shape[1] - dim) // 8, z_width, window, eps, int(write), share),
            *_with_capacity(state),
            *_with_capacity(index_state),
            *(index_heads, index_scale(index_heads, index_dim) if index_state else 0.0, index_q, index_weights),
            cluster=parts if parts > 1 else None,
            pdl=True,
        )
    return (q, kv, index_q, index_weights) if index_state else (q, kv)


def heads_a_warp(tokens: int, heads: int, index_heads: int, index_dim: int) -> int:
    """Heads that a warp of advance.cu has one after another: with many tokens not all warps run at once anyway."""
    wanted = 1 if tokens <= 8 else 2 if tokens <= 32 else 4
    fits = (n for n in (4, 2) if heads % n == index_heads % n == 0 and (not index_heads or index_dim >= 8 * n))
    return next((n for n in fits if n <= wanted), 1)


def _row_blocks(rows: int, dim: int) -> int:
    """Blocks of advance.cu for so many rows of `dim` channels."""
    lanes = min(32, 1 << (max(dim // 8, 1) - 1).bit_length())
    return -(-rows * lanes // THREADS)


def _with_capacity(state):
    return (*state, state[4].shape[1]) if state else (None,) * 5 + (0,)


def _fake_window(q_all, y, kv_norm, inv_freq, positions, slots, ring, heads, eps, write):
    tokens, dim = q_all.shape[0], kv_norm.shape[0]
    return q_all.new_empty((tokens, heads, dim)), y.new_empty((tokens, dim))


def _window_cuda(q_all, y, kv_norm, inv_freq, positions, slots, ring, heads, eps, write):
    at = kv_norm, inv_freq, positions, slots, ring
    if q_all.dtype == torch.float32:
        return advance_window_ref(q_all, y, *at, heads, eps, write)
    return _launch("advance_window", q_all, y, None, at, None, None, heads, 0, 0, eps, write)


@op(
    "advance_window(Tensor q_all, Tensor y, Tensor kv_norm, Tensor inv_freq, Tensor positions, Tensor slots, "
    "Tensor(a!) ring, int heads, float eps, bool write) -> (Tensor, Tensor)",
    fake=_fake_window,
    cuda=_window_cuda,
)
def advance_window_ref(
    q_all: Tensor,
    y: Tensor,
    kv_norm: Tensor,
    inv_freq: Tensor,
    positions: Tensor,
    slots: Tensor,
    ring: Tensor,
    heads: int,
    eps: float,
    write: bool,
) -> tuple[Tensor, Tensor]:
    """q_rope, kv_rope and, with `write`, kv_write. What q_all holds after attention's heads is left to the caller."""
    dim, rope = kv_norm.shape[0], 2 * inv_freq.shape[0]
    q = q_rope_ref(q_all[:, : heads * dim].unflatten(-1, (heads, dim)), inv_freq, positions, eps)
    kv = kv_rope_ref(y[:, -dim:], kv_norm, inv_freq, positions, eps)
    if write:
        kv_write_ref(kv, positions, slots, ring)
    # What a token sees of itself is what later tokens will see of it.
    return q, simulate_rows(kv, rope) if are_compact(ring, dim, rope) else kv


def _fake_hca(
    q_all, y, z, kv_norm, inv_freq, positions, slots, ring, ape, norm, c_ring, z_ring, entries, heads, rate, eps, write
):
    return _fake_window(q_all, y, kv_norm, inv_freq, positions, slots, ring, heads, eps, write)


def _hca_cuda(
    q_all, y, z, kv_norm, inv_freq, positions, slots, ring, ape, norm, c_ring, z_ring, entries, heads, rate, eps, write
):
    at, state = (kv_norm, inv_freq, positions, slots, ring), (ape, norm, c_ring, z_ring, entries)
    if q_all.dtype == torch.float32:
        return advance_hca_ref(q_all, y, z, *at, *state, heads, rate, eps, write)
    return _launch("advance_hca", q_all, y, z, at, state, None, heads, 0, rate, eps, write)


@op(
    "advance_hca(Tensor q_all, Tensor y, Tensor z, Tensor kv_norm, Tensor inv_freq, Tensor positions, Tensor slots, "
    "Tensor(a!) ring, Tensor ape, Tensor norm, Tensor(b!) c_ring, Tensor(c!) z_ring, Tensor(d!) entries, int heads, "
    "int rate, float eps, bool write) -> (Tensor, Tensor)",
    fake=_fake_hca,
    cuda=_hca_cuda,
)
def advance_hca_ref(
    q_all: Tensor,
    y: Tensor,
    z: Tensor,
    kv_norm: Tensor,
    inv_freq: Tensor,
    positions: Tensor,
    slots: Tensor,
    ring: Tensor,
    ape: Tensor,
    norm: Tensor,
    c_ring: Tensor,
    z_ring: Tensor,
    entries: Tensor,
    heads: int,
    rate: int,
    eps: float,
    write: bool,
) -> tuple[Tensor, Tensor]:
    """advance_window, and compress on the two halves of z."""
    c, gates = z.split(ape.shape[1], dim=1)
    at = inv_freq, positions, slots
    advance_compressor(c, gates, ape, norm, *at, c_ring, z_ring, entries, rate, eps, q_all.dtype)
    return advance_window_ref(q_all, y, kv_norm, *at, ring, heads, eps, write)


def _fake_csa(
    q_all,
    y,
    z,
    kv_norm,
    inv_freq,
    positions,
    slots,
    ring,
    ape,
    norm,
    c_ring,
    z_ring,
    entries,
    index_ape,
    index_norm,
    index_c_ring,
    index_z_ring,
    index_entries,
    heads,
    index_heads,
    rate,
    eps,
    write,
):
    q, kv = _fake_window(q_all, y, kv_norm, inv_freq, positions, slots, ring, heads, eps, write)
    tokens, dim = q_all.shape[0], index_norm.shape[0]
    return q, kv, q_all.new_empty((tokens, index_heads, dim)), z.new_empty((tokens, index_heads))


def _csa_cuda(q_all, y, z, *rest):
    at, state, index_state, sizes = rest[:5], rest[5:10], rest[10:15], rest[15:]
    if q_all.dtype == torch.float32:
        return advance_csa_ref(q_all, y, z, *rest)
    return _launch("advance_csa", q_all, y, z, at, state, index_state, *sizes)


@op(
    "advance_csa(Tensor q_all, Tensor y, Tensor z, Tensor kv_norm, Tensor inv_freq, Tensor positions, Tensor slots, "
    "Tensor(a!) ring, Tensor ape, Tensor norm, Tensor(b!) c_ring, Tensor(c!) z_ring, Tensor(d!) entries, "
    "Tensor index_ape, Tensor index_norm, Tensor(e!) index_c_ring, Tensor(f!) index_z_ring, Tensor(g!) index_entries, "
    "int heads, int index_heads, int rate, float eps, bool write) -> (Tensor, Tensor, Tensor, Tensor)",
    fake=_fake_csa,
    cuda=_csa_cuda,
)
def advance_csa_ref(
    q_all: Tensor,
    y: Tensor,
    z: Tensor,
    kv_norm: Tensor,
    inv_freq: Tensor,
    positions: Tensor,
    slots: Tensor,
    ring: Tensor,
    ape: Tensor,
    norm: Tensor,
    c_ring: Tensor,
    z_ring: Tensor,
    entries: Tensor,
    index_ape: Tensor,
    index_norm: Tensor,
    index_c_ring: Tensor,
    index_z_ring: Tensor,
    index_entries: Tensor,
    heads: int,
    index_heads: int,
    rate: int,
    eps: float,
    write: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """advance_window, compress for the entries and for the index keys, and the indexer's queries and weights."""
    dim, widths = index_norm.shape[0], (ape.shape[1],) * 2 + (index_ape.shape[1],) * 2 + (index_heads,)
    c, gates, index_c, index_gates, weights = z.split(widths, dim=1)
    at = inv_freq, positions, slots
    advance_compressor(c, gates, ape, norm, *at, c_ring, z_ring, entries, rate, eps, q_all.dtype)
    index_state = index_c_ring, index_z_ring, index_entries
    advance_compressor(index_c, index_gates, index_ape, index_norm, *at, *index_state, rate, eps, q_all.dtype)
    index_q = q_all[:, -index_heads * dim :].unflatten(-1, (index_heads, dim))
    index_q = q_rope_ref(index_q, inv_freq, positions, norm=False)
    format = format_of(index_entries, dim, 2 * inv_freq.shape[0])
    if format is not None:
        index_q = hadamard(index_q)
    if format == FP4_KEYS:
        index_q = simulate_fp4(index_q)
    return (
        *advance_window_ref(q_all, y, kv_norm, *at, ring, heads, eps, write),
        index_q,
        weights * index_scale(index_heads, dim),
    )


def advance_window(
    q_all: Tensor,
    y: Tensor,
    kv_norm: Tensor,
    inv_freq: Tensor,
    positions: Tensor,
    slots: Tensor,
    ring: Tensor,
    heads: int,
    eps: float,
    write: bool,
) -> tuple[Tensor, Tensor]:
    """q_all [T, heads * D]: raw queries; y [T, rank + D]: the raw key/value in its last D columns; kv_norm float32 [D];
    inv_freq float32 [R/2]; positions, slots int64 [T] (-1: inert); ring [S, window, D] or compact, changed in place
    with `write`. Returns q [T, heads, D] and kv [T, D] in the dtypes of q_all and y."""
    return torch.ops.dsv4.advance_window(q_all, y, kv_norm, inv_freq, positions, slots, ring, heads, eps, write)


def advance_hca(
    q_all: Tensor,
    y: Tensor,
    z: Tensor,
    kv_norm: Tensor,
    inv_freq: Tensor,
    positions: Tensor,
    slots: Tensor,
    ring: Tensor,
    ape: Tensor,
    norm: Tensor,
    c_ring: Tensor,
    z_ring: Tensor,
    entries: Tensor,
    heads: int,
    rate: int,
    eps: float,
    write: bool,
) -> tuple[Tensor, Tensor]:
    """advance_window and a compressor without overlap: z float32 [T, D + D] holds its candidates and its gates; ape,
    norm, c_ring, z_ring, entries and rate are as in `compress`, the last three tensors changed in place."""
    state = ape, norm, c_ring, z_ring, entries
    at = kv_norm, inv_freq, positions, slots, ring
    return torch.ops.dsv4.advance_hca(q_all, y, z, *at, *state, heads, rate, eps, write)


def advance_csa(
    q_all: Tensor,
    y: Tensor,
    z: Tensor,
    kv_norm: Tensor,
    inv_freq: Tensor,
    positions: Tensor,
    slots: Tensor,
    ring: Tensor,
    ape: Tensor,
    norm: Tensor,
    c_ring: Tensor,
    z_ring: Tensor,
    entries: Tensor,
    index_ape: Tensor,
    index_norm: Tensor,
    index_c_ring: Tensor,
    index_z_ring: Tensor,
    index_entries: Tensor,
    heads: int,
    index_heads: int,
    rate: int,
    eps: float,
    write: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """advance_window and two compressors with overlap, of entries [S, blocks, D] and index keys [S, blocks, d] or compact.

    q_all [T, heads * D + index_heads * d]: attention's raw queries, then the indexer's. z float32 [T, 4 D + 4 d +
    index_heads]: candidates 2 D, gates 2 D, the indexer's candidates 2 d, gates 2 d, and its head weights. The rest is
    as in `compress`, for both. Returns q [T, heads, D], kv [T, D], the indexer's q [T, index_heads, d] and its weights
    float32 [T, index_heads], times d^-0.5 index_heads^-0.5.
    """
    state = ape, norm, c_ring, z_ring, entries, index_ape, index_norm, index_c_ring, index_z_ring, index_entries
    at = kv_norm, inv_freq, positions, slots, ring
    return torch.ops.dsv4.advance_csa(q_all, y, z, *at, *state, heads, index_heads, rate, eps, write)

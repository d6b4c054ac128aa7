"""attend: shared-KV attention over a window and compressed entries, with a sink (paper section 2.3).

For the token at position p the keys are the last `window` tokens including itself, and the compressed entries that it
may see: those chosen by the indexer (CSA), all complete blocks (HCA), or none (sliding layers). Key and value are the
same row, for all heads.
    o = sum_s softmax_s(q . k_s / sqrt(D), sink) k_s
The sink is one more logit per head that takes probability and adds nothing. Since values carry rope, the result is
turned back at the query's position.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.ops._register import op
from dsv4.ops.kernels import build, limits
from dsv4.ops.kernels.checks import require, require_tensors
from dsv4.ops.rope import rope_angles, rotate
from dsv4.ops.rows import history

TILE = 64  # tokens attended at a time, to bound the gathered keys


class Shape(NamedTuple):
    """How the kernel divides its work, see kernels/attend.cu. A block has 8 * nh heads and wd + 4 warps."""

    dim: int
    nh: int  # tiles of 8 heads a block
    wd: int  # warps over dim
    kt: int  # keys a tile
    stages: int  # tiles in flight
    cluster: int  # blocks that share the keys of a token

    @property
    def heads(self) -> int:
        return 8 * self.nh

    @property
    def shared(self) -> int:
        """Bytes of shared memory; the kernel asserts that they suffice."""
        heads, keys = self.heads, self.stages * self.kt
        logits = self.wd * heads * (self.kt + 4) * 4
        sums = self.cluster * -(-self.dim // (16 * self.cluster)) * self.nh * 512  # in the logits' place
        small = heads * (self.kt + 8) * 2 + self.cluster * heads * 8 + self.dim * 4 + heads * 8 + keys * 4
        return -(-(keys * (2 * self.dim + 16) + max(logits, sums) + small + 8 + keys) // 128) * 128

    @property
    def defines(self) -> tuple[str, ...]:
        names = ("DIM", "NH", "WD", "KT", "STAGES", "CLUSTER")
        return (*(f"{name}={value}" for name, value in zip(names, self, strict=True)), f"SHARED={self.shared}")


def shape_for(tokens: int, heads: int, dim: int, keys: int = 0) -> Shape:
    """The division for a batch: enough blocks to fill the GPU when there are few tokens, fewer reads of each key when
    there are many; the next tile on its way where a token can have many `keys`. ValueError if the kernel cannot take
    `dim`."""
    require("attend", dim % 16 == 0 and 16 <= dim <= 512, f"head dim {dim}, the kernel takes multiples of 16 up to 512")
    wd = next(n for n in (8, 4, 2, 1) if dim % (16 * n) == 0)
    work = tokens * -(-heads // 8)
    if work <= 16:
        return Shape(dim, 1, wd, 48, 2, 8) if keys > 2048 else Shape(dim, 1, wd, 80, 1, 8)
    if work <= 128:
        return Shape(dim, 4, wd, 64, 2, 4)
    return Shape(dim, 4, wd, 64, 2, 2 if work <= 512 else 1)


def attend_cuda(
    q,
    kv,
    ring,
    entries,
    indices,
    sinks,
    inv_freq,
    positions,
    slots,
    rate,
    shape: Shape | None = None,
    pdl: bool = True,
):
    """The kernel for bfloat16. float32 runs the reference: it is the precision of the oracle, not of inference."""
    if q.dtype == torch.float32:
        return attend_ref(q, kv, ring, entries, indices, sinks, inv_freq, positions, slots, rate)
    q, kv = q.contiguous(), kv.contiguous()
    require_tensors("attend", torch.bfloat16, q=q, kv=kv, ring=ring)
    if entries is not None:
        require_tensors("attend", torch.bfloat16, entries=entries)
    if indices is not None:
        indices = indices.contiguous()
        require_tensors("attend", torch.int32, indices=indices)
    tokens, heads, dim = q.shape
    if shape is None:
        blocks = entries.shape[1] if entries is not None else 0
        shape = shape_for(tokens, heads, dim, ring.shape[1] + (blocks if indices is None else indices.shape[1]))
    widths = [kv.shape[1], ring.shape[2]] + ([entries.shape[2]] if entries is not None else [])
    require("attend", all(width == dim for width in widths), f"widths of keys {widths}, those of q are {dim}")
    require("attend", sinks.shape == (heads,), f"sinks {tuple(sinks.shape)} for {heads} heads")
    require("attend", 2 * inv_freq.shape[0] <= dim, f"{inv_freq.shape[0]} rope frequencies for head dim {dim}")
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if tokens == 0:
        return out
    require_tensors("attend", torch.float32, sinks=sinks, inv_freq=inv_freq)
    require_tensors("attend", torch.int64, positions=positions, slots=slots)
    kernel = limits.raised(build.kernel("attend.cu", "attend", *shape.defines), shape.shared, shape.cluster)
    kernel(
        tokens * -(-heads // shape.heads),
        32 * (shape.wd + 4),
        q,
        kv,
        ring,
        entries,
        indices,
        sinks,
        inv_freq,
        positions,
        slots,
        out,
        tokens,
        heads,
        ring.shape[1],
        entries.shape[1] if entries is not None else 0,
        indices.shape[1] if indices is not None else 0,
        rate,
        inv_freq.shape[0],
        dim**-0.5 * 1.4426950408889634,  # the softmax is in powers of two
        shared=shape.shared,
        cluster=shape.cluster,
        pdl=pdl,
    )
    return out


@op(
    "attend(Tensor q, Tensor kv, Tensor ring, Tensor? entries, Tensor? indices, Tensor sinks, Tensor inv_freq, "
    "Tensor positions, Tensor slots, int rate) -> Tensor",
    fake=lambda q, kv, ring, entries, indices, sinks, inv_freq, positions, slots, rate: q.new_empty(q.shape),
    cuda=attend_cuda,
)
def attend_ref(
    q: Tensor,
    kv: Tensor,
    ring: Tensor,
    entries: Tensor | None,
    indices: Tensor | None,
    sinks: Tensor,
    inv_freq: Tensor,
    positions: Tensor,
    slots: Tensor,
    rate: int,
) -> Tensor:
    """Float32 throughout, one rounding at the end; a token without a slot yields zeros."""
    rows = torch.arange(q.shape[0], device=q.device)
    out = []
    for picks in rows.split(TILE):
        slot, position = slots[picks].clamp(min=0), positions[picks]
        keys, seen = history(kv, ring, positions, slots, picks, ring.shape[1])  # [t, window, D]
        if entries is not None:
            visible = torch.where(slots[picks] >= 0, (position + 1) // rate, 0)[:, None]
            if indices is None:
                chosen = torch.arange(entries.shape[1], device=q.device).expand(picks.shape[0], -1)
            else:
                chosen = indices[picks].long()
            allowed = (chosen >= 0) & (chosen < visible)
            entry = entries[slot[:, None], chosen.clamp(min=0)]
            keys = torch.cat((keys, torch.where(allowed[..., None], entry, 0)), dim=1)
            seen = torch.cat((seen, allowed), dim=1)
        keys = keys.float()
        logits = torch.einsum("tad,tsd->tas", q[picks].float(), keys) * q.shape[-1] ** -0.5
        logits = logits.masked_fill(~seen[:, None], -torch.inf)
        # The sink belongs to the maximum too: without it exp(sink - max) can overflow, or a row without keys be 0/0.
        sink = sinks.float()[:, None].expand(picks.shape[0], -1, 1)
        weights = torch.cat((logits, sink), dim=-1).softmax(-1)[..., :-1]
        attended = torch.einsum("tas,tsd->tad", weights, keys)
        out.append(rotate(attended, rope_angles(position, inv_freq)[:, None], inverse=True).to(q.dtype))
    return torch.cat(out)


def attend(
    q: Tensor,
    kv: Tensor,
    ring: Tensor,
    entries: Tensor | None,
    indices: Tensor | None,
    sinks: Tensor,
    inv_freq: Tensor,
    positions: Tensor,
    slots: Tensor,
    rate: int,
) -> Tensor:
    """q [T, heads, D]; kv [T, D]: this batch's rows; ring [S, window, D] as it was before this batch; entries
    [S, blocks, D] or None (sliding), already including this batch's; indices int32 [T, k] or None (all visible);
    sinks float32 [heads]; inv_freq float32 [R/2]; positions, slots int64 [T]. Returns [T, heads, D] in q's dtype."""
    return torch.ops.dsv4.attend(q, kv, ring, entries, indices, sinks, inv_freq, positions, slots, rate)

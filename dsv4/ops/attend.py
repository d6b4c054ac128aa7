"""attend: shared-KV attention over a window and compressed entries, with a sink (paper section 2.3).

For the token at position p the keys are the last `window` tokens including itself, and the compressed entries that it
may see: those chosen by the indexer (CSA), all complete blocks (HCA), or none (sliding layers). Key and value are the
same row, for all heads.
    o = sum_s softmax_s(q . k_s / sqrt(D), sink) k_s
The sink is one more logit per head that takes probability and adds nothing. Since values carry rope, the result is
turned back at the query's position.
"""

import torch
from torch import Tensor

from dsv4.ops._register import op
from dsv4.ops.kernels import build, limits
from dsv4.ops.kernels.attend_plans import Share, plan_for
from dsv4.ops.kernels.checks import require, require_tensors
from dsv4.ops.rope import rope_angles, rotate
from dsv4.ops.row_formats import are_compact, gather_rows, row_bytes, rows_of
from dsv4.ops.rows import history

TILE = 64  # tokens attended at a time, to bound the gathered keys


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
    shares: tuple[Share, ...] | None = None,
):
    """The kernel for bfloat16. float32 runs the reference: it is the precision of the oracle, not of inference."""
    if q.dtype == torch.float32:
        return attend_ref(q, kv, ring, entries, indices, sinks, inv_freq, positions, slots, rate)
    q, kv = q.contiguous(), kv.contiguous()
    require_tensors("attend", torch.bfloat16, q=q, kv=kv)
    stored = {"ring": ring} if entries is None else {"ring": ring, "entries": entries}
    require_tensors("attend", torch.uint8 if ring.dtype == torch.uint8 else torch.bfloat16, **stored)
    if indices is not None:
        indices = indices.contiguous()
        require_tensors("attend", torch.int32, indices=indices)
    tokens, heads, dim = q.shape
    rope = 2 * inv_freq.shape[0]
    coded = dim - rope if are_compact(ring, dim, rope) else 0
    widths = [rows.shape[2] for rows in stored.values()]
    expected = row_bytes(dim, rope) if coded else dim
    require("attend", kv.shape[1] == dim, f"kv has {kv.shape[1]} channels, q {dim}")
    require("attend", all(width == expected for width in widths), f"widths of keys {widths}, expected {expected}")
    whole = not coded or all(rows.shape[1] % 4 == 0 for rows in stored.values())
    require("attend", whole, f"compact rows of a slot must be a multiple of 4: {[t.shape for t in stored.values()]}")
    blocks = entries.shape[1] if entries is not None else 0
    picks = indices.shape[1] if indices is not None else 0
    require("attend", tokens * picks < 2**31, f"{tokens} tokens with {picks} picks each, fewer than 2^31 in all expected")
    require("attend", sinks.shape == (heads,), f"sinks {tuple(sinks.shape)} for {heads} heads")
    require("attend", rope <= dim, f"{inv_freq.shape[0]} rope frequencies for head dim {dim}")
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if tokens == 0:
        return out
    require_tensors("attend", torch.float32, sinks=sinks, inv_freq=inv_freq)
    require_tensors("attend", torch.int64, positions=positions, slots=slots)
    if shares is None:
        wide = dim == 512 and rope <= 128 and heads > 32 and torch.cuda.get_device_capability(q.device)[0] == 9
        shares = plan_for(tokens, heads, dim, ring.shape[1] + (picks or blocks), wide, coded)
    tensors = q, kv, ring, entries, indices, sinks, inv_freq, positions, slots, out
    sizes = tokens, heads, ring.shape[1], blocks, picks, rate, inv_freq.shape[0]
    scale = dim**-0.5 * 1.4426950408889634  # the softmax is in powers of two
    for plan, least, most in shares:
        shape, work = plan._replace(coded=coded), tokens * -(-heads // plan.heads)
        left = q.new_empty(work * shape.left_over, dtype=torch.float32) if shape.left_over else None
        limits.raised(build.kernel(*shape.kernel, *shape.defines), shape.shared, shape.cluster)(
            work * shape.clusters,
            shape.threads,
            *tensors,
            *sizes,
            scale,
            least,
            most,
            left,
            shared=shape.shared,
            cluster=shape.cluster,
            pdl=True,
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
    dim, rope, out = q.shape[-1], 2 * inv_freq.shape[0], []
    ring = rows_of(ring, dim, rope, kv.dtype)
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
            entry = gather_rows(entries, slot[:, None], chosen.clamp(min=0), dim, rope)
            keys = torch.cat((keys, torch.where(allowed[..., None], entry, 0)), dim=1)
            seen = torch.cat((seen, allowed), dim=1)
        keys = keys.float()
        logits = torch.einsum("tad,tsd->tas", q[picks].float(), keys) * dim**-0.5
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

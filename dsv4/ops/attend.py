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
from dsv4.ops.rope import rope_angles, rotate
from dsv4.ops.rows import history

TILE = 64  # tokens attended at a time, to bound the gathered keys


@op(
    "attend(Tensor q, Tensor kv, Tensor ring, Tensor? entries, Tensor? indices, Tensor sinks, Tensor inv_freq, "
    "Tensor positions, Tensor slots, int rate) -> Tensor",
    fake=lambda q, kv, ring, entries, indices, sinks, inv_freq, positions, slots, rate: q.new_empty(q.shape),
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

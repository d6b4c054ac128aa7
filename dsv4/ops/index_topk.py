"""index_topk: the lightning indexer's choice of compressed blocks (paper section 2.3.1, equations 14 to 17).

    score[t, s] = sum_h w[t, h] relu(q[t, h] . k[s])        for blocks s < (position[t] + 1) // rate
and the top k of them. ReLU comes before the weight, the weight is signed, and one key per block serves all heads.
Ties go to the lowest block. What is not visible is -1.
"""

import torch
from torch import Tensor

from dsv4.ops._register import op

TILE = 64  # tokens scored at a time, to bound the gathered keys


def _fake(q, weights, keys, positions, slots, rate, topk):
    return q.new_empty((q.shape[0], min(topk, keys.shape[1])), dtype=torch.int32)


@op(
    "index_topk(Tensor q, Tensor weights, Tensor keys, Tensor positions, Tensor slots, int rate, int topk) -> Tensor",
    fake=_fake,
)
def index_topk_ref(
    q: Tensor, weights: Tensor, keys: Tensor, positions: Tensor, slots: Tensor, rate: int, topk: int
) -> Tensor:
    """Float32 scores, a stable descending sort; a NaN score ranks last."""
    blocks = keys.shape[1]
    number = torch.arange(blocks, device=q.device)
    picked = []
    for start in range(0, q.shape[0], TILE):
        tile = slice(start, start + TILE)
        key = keys[slots[tile].clamp(min=0)].float()  # [t, blocks, d]
        dots = torch.einsum("thd,tsd->ths", q[tile].float(), key).relu()
        score = torch.einsum("ths,th->ts", dots, weights[tile].float())
        visible = torch.where(slots[tile] >= 0, (positions[tile] + 1) // rate, 0)[:, None]
        score = torch.where((number < visible) & ~score.isnan(), score, -torch.inf)
        best = score.sort(dim=-1, descending=True, stable=True).indices[:, :topk]
        picked.append(torch.where(best < visible, best, -1).int())
    return torch.cat(picked)


def index_topk(
    q: Tensor, weights: Tensor, keys: Tensor, positions: Tensor, slots: Tensor, rate: int, topk: int
) -> Tensor:
    """q [T, heads, d], weights float32 [T, heads] (already scaled), keys [S, blocks, d], positions and slots int64 [T].
    Returns int32 [T, min(topk, blocks)]: block numbers in no particular order, -1 where there are fewer."""
    return torch.ops.dsv4.index_topk(q, weights, keys, positions, slots, rate, topk)

"""index_topk: the lightning indexer's choice of compressed blocks (paper section 2.3.1, equations 14 to 17).

    score[t, s] = sum_h w[t, h] relu(q[t, h] . k[s])        for blocks s < (position[t] + 1) // rate
and the top k of them. ReLU comes before the weight, the weight is signed, and one key per block serves all heads.
Ties go to the lowest block. What is not visible is -1.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.ops._register import op
from dsv4.ops.kernels import build, limits
from dsv4.ops.kernels.checks import require, require_tensors
from dsv4.ops.kernels.stream import processors

TILE = 64  # tokens scored at a time, to bound the gathered keys


def _fake(q, weights, keys, positions, slots, rate, topk):
    return q.new_empty((q.shape[0], min(topk, keys.shape[1])), dtype=torch.int32)


LOCAL = 4096  # up to this many visible blocks the cluster that selects them also scores them
SCORES = 2**26  # scores kept at a time, when they are kept
MAXIMA = 1024  # and steps of 32 of them whose largest are kept, or up to twice as many
WARPS, SCORE_WARPS = 16, 8  # of a block of index_select and index_score


class Shape(NamedTuple):
    """How the kernels divide their work, see kernels/index.cu."""

    heads: int
    dim: int
    topk: int
    split: int  # warps that share the heads of a key
    cluster: int  # blocks of the GPU that share a token
    capacity: int  # index blocks that a sequence can have
    local: int

    @property
    def slice(self) -> int:
        return -(-self.capacity // (16 * self.cluster)) * 16

    @property
    def shared(self) -> int:
        """Bytes of shared memory; the kernel asserts that they suffice."""
        own = -(-self.local // (16 * self.cluster)) * 16
        scored_here = own * 8 + self.split * (own + 16) * 4
        return 12512 + self.cluster * (min(self.slice, self.topk) + 1) * 8 + 16 + max(scored_here, WARPS * 128 * 8)

    @property
    def defines(self) -> tuple[str, ...]:
        values = {"HEADS": self.heads, "D": self.dim, "TOPK": self.topk, "SPLIT": self.split, "CLUSTER": self.cluster}
        values |= {"SLICE": self.slice, "LOCAL": self.local, "SHARED": self.shared}
        return tuple(f"{name}={value}" for name, value in values.items())


def shape_for(tokens: int, heads: int, dim: int, capacity: int, topk: int) -> Shape:
    """The division for a batch; ValueError if the kernels cannot take these widths."""
    what = "index_topk"
    require(what, dim % 32 == 0 and 32 <= dim <= 128, f"head dim {dim}, the kernel takes multiples of 32 up to 128")
    require(what, heads <= 64, f"{heads} heads, the kernel takes at most 64")
    split = 4 if heads > 16 else 2 if heads > 8 else 1
    wanted = 16 if tokens == 1 else 8 if tokens <= 16 else 4 if tokens <= 24 else 2
    if capacity > LOCAL:
        wanted = max(wanted, 8)
    for cluster in (wanted, *(n for n in (8, 4, 2) if n < wanted)):
        shape = Shape(heads, dim, topk, split, cluster, capacity, min(LOCAL, capacity))
        if shape.shared <= limits.SHARED_BYTES:
            return shape
    raise ValueError(f"index_topk: {capacity} blocks with topk {topk} need more shared memory than a block can have")


def index_topk_cuda(q, weights, keys, positions, slots, rate, topk, shape: Shape | None = None, pdl: bool = True):
    """The kernel for bfloat16. float32 runs the reference: it is the precision of the oracle, not of inference."""
    if q.dtype == torch.float32:
        return index_topk_ref(q, weights, keys, positions, slots, rate, topk)
    q, weights = q.contiguous(), weights.contiguous()
    require_tensors("index_topk", torch.bfloat16, q=q, keys=keys)
    require_tensors("index_topk", torch.float32, weights=weights)
    require_tensors("index_topk", torch.int64, positions=positions, slots=slots)
    (tokens, heads, dim), capacity = q.shape, keys.shape[1]
    topk = min(topk, capacity)
    picks = torch.empty((tokens, topk), dtype=torch.int32, device=q.device)
    require("index_topk", keys.shape[2] == dim, f"width of keys {keys.shape[2]}, that of q is {dim}")
    if picks.numel() == 0:
        return picks
    if shape is None:
        shape = shape_for(tokens, heads, dim, capacity, topk)
    select = limits.raised(build.kernel("index.cu", "index_select", *shape.defines), shape.shared, shape.cluster)
    pitch = -(-capacity // 4) * 4
    step = tokens if capacity <= shape.local else max(1, SCORES // pitch)
    for start in range(0, tokens, step):
        rows = slice(start, min(start + step, tokens))
        count = rows.stop - start
        batch = (q[rows], weights[rows], keys, positions[rows], slots[rows])
        scores = maxima = None
        across = min(-(-capacity // (32 * SCORE_WARPS)), max(1, processors(q.device.index) // count))
        sets = -(-MAXIMA // (across * SCORE_WARPS))
        if capacity > shape.local:
            scores = torch.empty((count, pitch), dtype=torch.int32, device=q.device)
            maxima = torch.empty((count, sets * across * SCORE_WARPS * 4), dtype=torch.int32, device=q.device)
            build.kernel("index.cu", "index_score", *shape.defines)(
                (across, count), 32 * SCORE_WARPS, *batch, scores, maxima, rate, capacity, pitch, sets, pdl=pdl
            )
        select(
            count,
            32 * WARPS,
            *batch,
            scores,
            maxima,
            picks[rows],
            rate,
            capacity,
            pitch,
            across * SCORE_WARPS,
            sets,
            shared=shape.shared,
            cluster=shape.cluster,
            pdl=pdl,
        )
    return picks


@op(
    "index_topk(Tensor q, Tensor weights, Tensor keys, Tensor positions, Tensor slots, int rate, int topk) -> Tensor",
    fake=_fake,
    cuda=index_topk_cuda,
)
def index_topk_ref(
    q: Tensor, weights: Tensor, keys: Tensor, positions: Tensor, slots: Tensor, rate: int, topk: int
) -> Tensor:
    """Float32 scores, a stable descending sort; a NaN score ranks last."""
    blocks = keys.shape[1]
    number = torch.arange(blocks, device=q.device)
    picked = []
    for start in range(0, max(q.shape[0], 1), TILE):
        tile = slice(start, start + TILE)
        key = keys[slots[tile].clamp(min=0)].float()  # [t, blocks, d]
        dots = torch.einsum("thd,tsd->ths", q[tile].float(), key).relu()
        score = torch.einsum("ths,th->ts", dots, weights[tile].float())
        visible = torch.where(slots[tile] >= 0, (positions[tile] + 1) // rate, 0)[:, None]
        score = torch.where((number < visible) & ~score.isnan(), score, -torch.inf)
        best = score.sort(dim=-1, descending=True, stable=True).indices[:, :topk]
        picked.append(torch.where(best < visible, best, -1).int())
    return torch.cat(picked)


def index_topk(q: Tensor, weights: Tensor, keys: Tensor, positions: Tensor, slots: Tensor, rate: int, topk: int) -> Tensor:
    """q [T, heads, d], weights float32 [T, heads] (already scaled), keys [S, blocks, d], positions and slots int64 [T].
    Returns int32 [T, min(topk, blocks)]: block numbers in no particular order, -1 where there are fewer."""
    return torch.ops.dsv4.index_topk(q, weights, keys, positions, slots, rate, topk)

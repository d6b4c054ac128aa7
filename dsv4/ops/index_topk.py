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
from dsv4.ops.row_formats import FP4_KEYS, FP8_KEYS, format_of, keys_of

TILE, GATHERED = 64, 2**20  # tokens that the reference scores at a time, and keys that it gathers for them


def _fake(q, weights, keys, positions, slots, rate, topk):
    return q.new_empty((q.shape[0], min(topk, keys.shape[1])), dtype=torch.int32)


FORMATS = {None: "BF16", FP8_KEYS: "FP8", FP4_KEYS: "FP4"}  # in the order of kernels/index_scores.cuh
LOCAL = 3072, 1536  # visible blocks of one and of several tokens up to which those that select also score
FEW = 32  # tokens up to which blocks of the GPU share a token; beyond it tokens share blocks, see kernels/index_prefill.cu
THREADS = 512  # of a block of index_prefill
SCORE_THREADS, SCORE_KEYS = 256, 256  # of a block of index_score, and keys that it takes at a time
WORKSPACE = 12576  # bytes that selecting takes, see kernels/index_cut.cuh


def widths(shape) -> tuple[str, ...]:
    return f"HEADS={shape.heads}", f"D={shape.dim}", f"FORMAT={list(FORMATS.values()).index(shape.format)}"


class Shape(NamedTuple):
    """How the kernels for a few tokens divide their work, see kernels/index_score.cu and index_select.cu."""

    heads: int
    dim: int
    format: str
    topk: int
    cluster: int  # blocks of the GPU that share a token
    capacity: int  # index blocks that a sequence can have
    local: int  # blocks up to which the cluster that selects also scores
    threads: int  # of a block of index_select

    @property
    def slice(self) -> int:
        return -(-self.capacity // (16 * self.cluster)) * 16

    @property
    def shared(self) -> int:
        """Bytes of shared memory; the kernel asserts that they suffice."""
        own = -(-self.local // (16 * self.cluster)) * 16
        most = -(-min(self.slice, self.topk) // 16) * 16
        places = max(most, own)
        return 16384 + self.cluster * (places + 1) * 4 + 32 + own * 4 + most * 16 + places * 4 + 256 + WORKSPACE

    @property
    def score_defines(self) -> tuple[str, ...]:
        return *widths(self), f"TOPK={self.topk}", f"LOCAL={self.local}"

    @property
    def defines(self) -> tuple[str, ...]:
        own = f"CLUSTER={self.cluster}", f"SLICE={self.slice}", f"THREADS={self.threads}", f"SHARED={self.shared}"
        return *self.score_defines, *own


class Prefill(NamedTuple):
    """How the kernel for many tokens divides its work, see kernels/index_prefill.cu."""

    heads: int
    dim: int
    format: str
    topk: int
    tokens: int  # that a block of the GPU has
    room: int  # numbers that it keeps for each

    @property
    def shared(self) -> int:
        """Bytes of shared memory; the kernel asserts that they suffice."""
        return self.tokens * (-(-self.dim // 64) * 8192 + 8 * self.room + 280) + WORKSPACE

    @property
    def defines(self) -> tuple[str, ...]:
        each = f"TOKENS={self.tokens}", f"ROOM={self.room}", f"SHARED={self.shared}"
        return *widths(self), f"TOPK={self.topk}", *each


def check_widths(heads: int, dim: int) -> None:
    """ValueError if the kernels cannot take these widths."""
    what = "index_topk"
    require(what, dim % 32 == 0 and 32 <= dim <= 128, f"head dim {dim}, the kernel takes multiples of 32 up to 128")
    require(what, heads <= 64, f"{heads} heads, the kernel takes at most 64")


def local_blocks(tokens: int) -> int:
    """Visible blocks of each of so many tokens up to which no score leaves the chip."""
    return LOCAL[tokens > 1]


def shape_for(tokens: int, heads: int, dim: int, format: str, capacity: int, topk: int) -> Shape:
    """The division for up to FEW tokens; ValueError if the kernels cannot take these widths."""
    check_widths(heads, dim)
    wanted, local = 16 if tokens == 1 else 8 if tokens <= 16 else 4, local_blocks(tokens)
    for cluster in (wanted, *(n for n in (8, 4, 2) if n < wanted)):
        threads = 512 if tokens <= 8 else 256
        shape = Shape(heads, dim, format, topk, cluster, capacity, min(local, capacity), threads)
        if shape.shared <= limits.SHARED_BYTES:
            return shape
    raise ValueError(f"index_topk: {capacity} blocks with topk {topk} need more shared memory than a block can have")


def prefill_for(tokens: int, processors: int, heads: int, dim: int, format: str, topk: int) -> Prefill:
    """The division for more tokens; ValueError if the kernel cannot take these widths."""
    check_widths(heads, dim)
    wanted = next((n for n in (1, 2) if tokens <= n * processors), 4)
    for each in (n for n in (4, 2, 1) if n <= wanted):
        empty = Prefill(heads, dim, format, topk, each, 0)
        fitting = (limits.SHARED_BYTES - empty.shared) // (8 * each)
        room = min(fitting, max(8192, 2 * topk)) // 256 * 256
        if room >= 2 * topk:
            return empty._replace(room=room)
    raise ValueError(f"index_topk: topk {topk} needs more shared memory than a block can have")


def index_topk_cuda(q, weights, keys, positions, slots, rate, topk, shape: Shape | Prefill | None = None):
    """The kernels for bfloat16. float32 runs the reference: it is the precision of the oracle, not of inference."""
    if q.dtype == torch.float32:
        return index_topk_ref(q, weights, keys, positions, slots, rate, topk)
    q, weights = q.contiguous(), weights.contiguous()
    format = format_of(keys, q.shape[2], q.shape[2])
    require_tensors("index_topk", torch.bfloat16, q=q)
    require_tensors("index_topk", torch.bfloat16 if format is None else torch.uint8, keys=keys)
    require_tensors("index_topk", torch.float32, weights=weights)
    require_tensors("index_topk", torch.int64, positions=positions, slots=slots)
    (tokens, heads, dim), capacity = q.shape, keys.shape[1]
    topk = min(topk, capacity)
    picks = torch.empty((tokens, topk), dtype=torch.int32, device=q.device)
    if format is None:
        require("index_topk", keys.shape[2] == dim, f"width of keys {keys.shape[2]}, that of q is {dim}")
    else:
        require("index_topk", capacity % 4 == 0, f"compact keys need a multiple of 4 blocks a slot, found {capacity}")
    if picks.numel() == 0:
        return picks
    batch = (q, weights, keys, positions, slots)
    if shape is None:
        sizes = heads, dim, FORMATS[format]
        shape = (
            shape_for(tokens, *sizes, capacity, topk)
            if tokens <= FEW
            else prefill_for(tokens, processors(q.device.index), *sizes, topk)
        )
    if isinstance(shape, Prefill):
        kernel = limits.raised(build.kernel("index_prefill.cu", "index_prefill", *shape.defines), shape.shared)
        grid = -(-tokens // shape.tokens)
        kernel(grid, THREADS, *batch, picks, tokens, rate, capacity, shared=shape.shared, pdl=True)
        return picks
    scores = maxima = None
    pitch = -(-capacity // 4) * 4
    across = min(-(-capacity // SCORE_KEYS), max(1, processors(q.device.index) // tokens))
    groups = across * SCORE_THREADS // 128
    most = max(4 * groups, 4 * topk)
    if capacity > shape.local:
        scores = torch.empty((tokens, pitch), dtype=torch.int32, device=q.device)
        maxima = torch.empty((tokens, most), dtype=torch.int32, device=q.device)
        score = build.kernel("index_score.cu", "index_score", *shape.score_defines)
        score((across, tokens), SCORE_THREADS, *batch, scores, maxima, rate, capacity, pitch, most, pdl=True)
    select = build.kernel("index_select.cu", "index_select", *shape.defines)
    launch = {"shared": shape.shared, "cluster": shape.cluster, "pdl": True}
    limits.raised(select, shape.shared, shape.cluster)(
        tokens, shape.threads, *batch, scores, maxima, picks, rate, capacity, pitch, most, groups, **launch
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
    step = max(min(TILE, GATHERED // max(blocks, 1)), 1)
    for start in range(0, max(q.shape[0], 1), step):
        tile = slice(start, start + step)
        key = keys_of(keys[slots[tile].clamp(min=0)], q.shape[-1], torch.float32)  # [t, blocks, d]
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

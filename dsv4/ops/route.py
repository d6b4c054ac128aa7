"""route_topk, route_hash: which experts a token uses and with what weight (paper section 2.1).

    s = sqrt(softplus(W x))                          float32
    top-k layers:  the k experts with the largest s + bias (the bias selects only); hash layers: tid2eid[token]
    weight_e = scale * s_e / sum of s over the picked
Tokens without a slot get expert -1, which `moe` reads as none, so padding costs no expert weights.

On CUDA bf16 activations and gates run kernels/route.cu; float32, the oracle's precision, runs the references.
"""

import torch
from torch import Tensor

from dsv4.ops._register import op
from dsv4.ops.kernels.build import kernel
from dsv4.ops.kernels.checks import require, require_tensors
from dsv4.ops.kernels.limits import cluster_of, raised


def _weights(scores: Tensor, experts: Tensor, slots: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    picked = scores.gather(1, experts)
    weights = picked / (picked.sum(-1, keepdim=True) + 1e-20) * scale
    active = (slots >= 0)[:, None]
    return torch.where(active, experts, -1).int(), torch.where(active, weights, 0)


def _scores(x: Tensor, gate: Tensor) -> Tensor:
    return torch.nn.functional.softplus(torch.nn.functional.linear(x.float(), gate.float())).sqrt()


def _outputs(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    return x.new_empty((x.shape[0], k), dtype=torch.int32), x.new_empty((x.shape[0], k), dtype=torch.float32)


_CLUSTERS = 8  # up to which route_topk reads the gate itself; beyond, a matrix product
_THREADS, _TOKENS = 512, 8  # a block, a cluster


def check_route(op_name: str, x: Tensor, gate: Tensor, slots: Tensor, k: int) -> None:
    hidden, experts = x.shape[1], gate.shape[0]
    require_tensors(op_name, torch.bfloat16, x=x, gate=gate)
    require_tensors(op_name, torch.int64, slots=slots)
    require(op_name, hidden % 8 == 0 and hidden <= 16384, f"hidden must be a multiple of 8 up to 16384, found {hidden}")
    require(op_name, gate.shape[1] == hidden, f"gate must be {hidden} wide, found {gate.shape[1]}")
    require(op_name, experts <= 1024, f"at most 1024 experts, found {experts}")
    most = min(8, experts)
    require(op_name, 1 <= k <= most, f"1 to {most} experts a token, found {k}")


def topk_plan(hidden: int, experts: int) -> tuple[int, int, int]:
    """Blocks a cluster, clusters that share the experts, and quads of the gate that a thread has in shared memory."""
    cluster, spread = cluster_of(-(-experts // 16)), 1

    def quads() -> int:
        a_block = -(-experts // (cluster * spread))
        return -(-hidden // 512) * -(-a_block // 8)

    while quads() > 16 and cluster * spread * 8 < experts:
        spread += 1
    return cluster, spread, max(0, min(quads() - 4, 24))


def hash_split(hidden: int) -> int:
    """Warps that share a row, so that a lane holds at most 32 of its weights (past 4096 channels, more)."""
    return max(1, min(4, -(-hidden // 1024)))


def route_topk_cuda(x, gate, bias, slots, k, scale):
    if torch.float32 in (x.dtype, gate.dtype):
        return route_topk_ref(x, gate, bias, slots, k, scale)
    x, (tokens, hidden), count = x.contiguous(), x.shape, gate.shape[0]
    check_route("route_topk", x, gate, slots, k)
    require_tensors("route_topk", torch.float32, bias=bias)
    experts, weights = _outputs(x, k)
    cluster, spread, stored = topk_plan(hidden, count)
    sizes = f"H={hidden}", f"E={count}", f"TOP={k}"
    defines = *sizes, f"CLUSTER={cluster}", f"SPREAD={spread}", f"STORED={stored}"
    clusters = -(-tokens // _TOKENS) * spread
    if clusters > _CLUSTERS:
        logits = torch.mm(x, gate.t(), out_dtype=torch.float32)
        launch = kernel("route.cu", "route_select", *defines)
        launch(-(-tokens // 4), 128, logits, bias, slots, tokens, scale, experts, weights, pdl=True)
    elif tokens:
        shared = stored * _THREADS * 16
        launch = raised(kernel("route.cu", "route_topk", *defines), shared, cluster)
        all_scores = bias.new_empty(tokens * -(-count // (cluster * spread)) * cluster * spread if spread > 1 else 0)
        arguments = x, gate, bias, slots, tokens, scale, all_scores, experts, weights
        launch(clusters, _THREADS, *arguments, shared=shared, cluster=cluster, pdl=True)
    return experts, weights


def _route_hash_cuda(x, gate, tid2eid, tokens, slots, scale):
    if torch.float32 in (x.dtype, gate.dtype):
        return route_hash_ref(x, gate, tid2eid, tokens, slots, scale)
    x, k, hidden = x.contiguous(), tid2eid.shape[1], x.shape[1]
    check_route("route_hash", x, gate, slots, k)
    require_tensors("route_hash", torch.int64, tid2eid=tid2eid, tokens=tokens)
    experts, weights = _outputs(x, k)
    if x.shape[0]:
        split = hash_split(hidden)
        defines = f"H={hidden}", f"E={gate.shape[0]}", f"TOP={k}", "HASH=1", f"SPLIT={split}"
        launch = kernel("route.cu", "route_hash", *defines)
        launch(x.shape[0], 32 * k * split, x, gate, tid2eid, tokens, slots, scale, experts, weights, pdl=True)
    return experts, weights


@op(
    "route_topk(Tensor x, Tensor gate, Tensor bias, Tensor slots, int k, float scale) -> (Tensor, Tensor)",
    fake=lambda x, gate, bias, slots, k, scale: _outputs(x, k),
    cuda=route_topk_cuda,
)
def route_topk_ref(x: Tensor, gate: Tensor, bias: Tensor, slots: Tensor, k: int, scale: float) -> tuple[Tensor, Tensor]:
    """The equations above; equal scores pick the lower expert."""
    scores = _scores(x, gate)
    experts = (scores + bias).sort(dim=-1, descending=True, stable=True).indices[:, :k]
    return _weights(scores, experts, slots, scale)


def route_topk(x: Tensor, gate: Tensor, bias: Tensor, slots: Tensor, k: int, scale: float) -> tuple[Tensor, Tensor]:
    """x [T, H], gate [E, H], bias float32 [E], slots int64 [T] -> (experts int32 [T, k], weights float32 [T, k])."""
    return torch.ops.dsv4.route_topk(x, gate, bias, slots, k, scale)


@op(
    "route_hash(Tensor x, Tensor gate, Tensor tid2eid, Tensor tokens, Tensor slots, float scale) -> (Tensor, Tensor)",
    fake=lambda x, gate, tid2eid, tokens, slots, scale: _outputs(x, tid2eid.shape[1]),
    cuda=_route_hash_cuda,
)
def route_hash_ref(
    x: Tensor, gate: Tensor, tid2eid: Tensor, tokens: Tensor, slots: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """The equations above: the table picks, the gate weighs."""
    picks = tid2eid[torch.where(slots >= 0, tokens, 0)].long()  # the id of an inert token may be anything
    return _weights(_scores(x, gate), picks, slots, scale)


def route_hash(
    x: Tensor, gate: Tensor, tid2eid: Tensor, tokens: Tensor, slots: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """x [T, H], gate [E, H], tid2eid int64 [vocab, k], tokens and slots int64 [T] -> as route_topk."""
    return torch.ops.dsv4.route_hash(x, gate, tid2eid, tokens, slots, scale)

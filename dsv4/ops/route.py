"""route_topk, route_hash: which experts a token uses and with what weight (paper section 2.1).

    s = sqrt(softplus(W x))                          float32
    top-k layers:  the k experts with the largest s + bias (the bias selects only); hash layers: tid2eid[token]
    weight_e = scale * s_e / sum of s over the picked
Tokens without a slot get expert -1, which `moe` reads as none, so padding costs no expert weights.
"""

import torch
from torch import Tensor

from dsv4.ops._register import op


def _weights(scores: Tensor, experts: Tensor, slots: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    picked = scores.gather(1, experts)
    weights = picked / (picked.sum(-1, keepdim=True) + 1e-20) * scale
    active = (slots >= 0)[:, None]
    return torch.where(active, experts, -1).int(), torch.where(active, weights, 0)


def _scores(x: Tensor, gate: Tensor) -> Tensor:
    return torch.nn.functional.softplus(torch.nn.functional.linear(x.float(), gate.float())).sqrt()


def _outputs(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    return x.new_empty((x.shape[0], k), dtype=torch.int32), x.new_empty((x.shape[0], k), dtype=torch.float32)


@op(
    "route_topk(Tensor x, Tensor gate, Tensor bias, Tensor slots, int k, float scale) -> (Tensor, Tensor)",
    fake=lambda x, gate, bias, slots, k, scale: _outputs(x, k),
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
)
def route_hash_ref(
    x: Tensor, gate: Tensor, tid2eid: Tensor, tokens: Tensor, slots: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """The equations above: the table picks, the gate weighs."""
    return _weights(_scores(x, gate), tid2eid[tokens].long(), slots, scale)


def route_hash(
    x: Tensor, gate: Tensor, tid2eid: Tensor, tokens: Tensor, slots: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """x [T, H], gate [E, H], tid2eid int64 [vocab, k], tokens and slots int64 [T] -> as route_topk."""
    return torch.ops.dsv4.route_hash(x, gate, tid2eid, tokens, slots, scale)

"""route_moe_nvfp4: route_topk and then moe_nvfp4, in one launch for one token.

The choice of experts takes a few microseconds of exchange between multiprocessors. In one launch the shared expert's
weights come meanwhile. Several tokens, gates too large for it and float32 take both ops, one after the other.
"""

import torch
from torch import Tensor

from dsv4.ops._register import op
from dsv4.ops.kernels.checks import require_tensors
from dsv4.ops.kernels.moe import Router, run_routed
from dsv4.ops.moe import moe_nvfp4_cuda, moe_nvfp4_fake, moe_nvfp4_ref, nvfp4_call
from dsv4.ops.route import check_route, route_topk_cuda, route_topk_ref

NAME = "route_moe_nvfp4"


def _fake(x: Tensor, gate: Tensor, bias: Tensor, slots: Tensor, k: int, scale: float, *experts) -> Tensor:
    return moe_nvfp4_fake(x, slots, bias, *experts)


def _cuda(x: Tensor, gate: Tensor, bias: Tensor, slots: Tensor, k: int, scale: float, *experts) -> Tensor:
    x = x.contiguous()
    if x.dtype == gate.dtype == torch.bfloat16 and x.shape[0] == 1:
        check_route(NAME, x, gate, slots, k)
        require_tensors(NAME, torch.float32, bias=bias)
        y = run_routed(NAME, x, Router(gate, bias, slots, k, scale), nvfp4_call(*experts))
        if y is not None:
            return y
    return moe_nvfp4_cuda(x, *route_topk_cuda(x, gate, bias, slots, k, scale), *experts)


@op(
    "route_moe_nvfp4(Tensor x, Tensor gate, Tensor bias, Tensor slots, int k, float scale, Tensor gate_up, "
    "Tensor gate_up_scale, Tensor gate_up_scale_2, Tensor down, Tensor down_scale, Tensor down_scale_2, float limit, "
    "Tensor? shared_gate_up=None, Tensor? shared_gate_up_scale=None, Tensor? shared_down=None, "
    "Tensor? shared_down_scale=None, bool shared_last=False) -> Tensor",
    fake=_fake,
    cuda=_cuda,
)
def route_moe_nvfp4_ref(
    x: Tensor, gate: Tensor, bias: Tensor, slots: Tensor, k: int, scale: float, *experts: Tensor | float | bool | None
) -> Tensor:
    """One reference after the other."""
    return moe_nvfp4_ref(x, *route_topk_ref(x, gate, bias, slots, k, scale), *experts)


def route_moe_nvfp4(
    x: Tensor,
    gate: Tensor,
    bias: Tensor,
    slots: Tensor,
    k: int,
    scale: float,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    gate_up_scale_2: Tensor,
    down: Tensor,
    down_scale: Tensor,
    down_scale_2: Tensor,
    limit: float,
    shared_gate_up: Tensor | None = None,
    shared_gate_up_scale: Tensor | None = None,
    shared_down: Tensor | None = None,
    shared_down_scale: Tensor | None = None,
    shared_last: bool = False,
) -> Tensor:
    """x, gate, bias, slots, k and scale as route_topk's, the others as moe_nvfp4's, whose result and errors these are."""
    stacks = gate_up, gate_up_scale, gate_up_scale_2, down, down_scale, down_scale_2
    shared = shared_gate_up, shared_gate_up_scale, shared_down, shared_down_scale, shared_last
    return torch.ops.dsv4.route_moe_nvfp4(x, gate, bias, slots, k, scale, *stacks, limit, *shared)

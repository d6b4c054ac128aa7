"""The mixture-of-experts block: router, routed experts, one shared expert (paper section 2.1)."""

import torch
from torch import Tensor, nn

from dsv4 import ops
from dsv4.model.config import ModelConfig
from dsv4.model.linear import Fp8BlockLinear
from dsv4.model.projection import merge
from dsv4.model.source import Source


class SharedExpert(nn.Module):
    """The expert that every token uses, with the same clamp as the routed ones."""

    def __init__(self, config: ModelConfig, source: Source):
        super().__init__()
        hidden, inter = config.hidden_size, config.moe_intermediate_size
        self.limit = config.swiglu_limit
        self.gate_up = merge([source.linear("w1", inter, hidden), source.linear("w3", inter, hidden)])
        self.down = source.linear("w2", hidden, inter)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(ops.clamped_swiglu(self.gate_up(x), self.limit).to(x.dtype))

    def fp8_weights(self) -> tuple[Tensor, ...] | None:
        """gate_up, its scale, down, its scale, if both are FP8-block; then the expert kernels can take them along."""
        if isinstance(self.gate_up, Fp8BlockLinear) and isinstance(self.down, Fp8BlockLinear):
            return self.gate_up.weight, self.gate_up.scale, self.down.weight, self.down.scale
        return None


class MoE(nn.Module):
    """Hash layers pick experts from a table by token id, the others by the router's scores."""

    def __init__(self, config: ModelConfig, layer: int, source: Source):
        super().__init__()
        hidden, count, k = config.hidden_size, config.n_routed_experts, config.num_experts_per_tok
        self.k, self.scale, self.limit = k, config.routed_scaling_factor, config.swiglu_limit
        self.hashed = config.mlp_layer_types[layer] == "hash_moe"
        self.register_buffer("gate", source.tensor("gate.weight", (count, hidden), source.dtype))
        if self.hashed:
            self.register_buffer("tid2eid", source.tensor("gate.tid2eid", (config.vocab_size, k), torch.int64))
        else:
            self.register_buffer("bias", source.float32("gate.bias", (count,)))
        self.experts = source.experts("experts", count, hidden, config.moe_intermediate_size, "shared_experts")
        self.shared_experts = None if self.experts.shared_last else SharedExpert(config, source.at("shared_experts"))

    def forward(self, x: Tensor, tokens: Tensor, slots: Tensor) -> Tensor:
        """x [T, H] -> [T, H]; the routed sum and the shared expert are added in float32 and rounded once."""
        beside = ()  # what the expert kernels take to add the shared expert; None if it is computed apart
        if self.shared_experts is not None:
            beside = self.shared_experts.fp8_weights() if self.experts.takes_shared else None
        if self.hashed:
            experts, weights = ops.route_hash(x, self.gate, self.tid2eid, tokens, slots, self.scale)
        else:
            router = self.gate, self.bias, slots, self.k, self.scale
            if self.experts.takes_router and beside is not None:
                return self.experts.routed(x, router, self.limit, *beside)
            experts, weights = ops.route_topk(x, *router)
        if beside is not None:
            return self.experts(x, experts, weights, self.limit, *beside)
        routed = self.experts(x, experts, weights, self.limit)
        return (routed + self.shared_experts(x).float()).to(x.dtype)

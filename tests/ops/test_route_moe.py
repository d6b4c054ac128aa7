"""route_moe_nvfp4 against transformers' whole block, and against the two ops it stands for."""

import pytest
import torch

from dsv4 import ops
from dsv4.ops.nvfp4 import dequantize_nvfp4
from tests.ops.cases import assert_near, assert_same_bits, quantize_experts, quantize_fp8_experts
from tests.ops.oracles import hf, randomise, tiny_config

EXPERTS, HIDDEN, INTER, K = 8, 32, 16, 3


def stack(draw, experts=EXPERTS):
    return draw.normal(experts, 2 * INTER, HIDDEN) / 6, draw.normal(experts, HIDDEN, INTER) / 4


def router(draw, tokens, dtype):
    slots = draw.integers(0, 4, tokens)
    slots[1::3] = -1
    return draw.normal(EXPERTS, HIDDEN, dtype=dtype), draw.normal(EXPERTS), slots, K, 1.5


@pytest.mark.parametrize("tokens", [1, 20])
def test_matches_transformers(tokens, draw):
    """The routed experts and the shared one, in float32; weights that NVFP4 and FP8 hold exactly."""
    block = randomise(hf.DeepseekV4SparseMoeBlock(tiny_config(routed_scaling_factor=2.5), 1), draw)
    block.gate.e_score_correction_bias.copy_(draw.normal(EXPERTS) / 4)
    codes, scale, scale_2, *down = quantised = quantize_experts(*stack(draw, EXPERTS + 1))
    gate_up = dequantize_nvfp4(codes, scale, scale_2.repeat_interleave(INTER, 1)[..., None])
    downs = dequantize_nvfp4(*down[:2], down[2][:, None, None])
    block.experts.gate_up_proj.data.copy_(gate_up[:-1])
    block.experts.down_proj.data.copy_(downs[:-1])
    for half, weight in zip(
        gate_up[-1].chunk(2), (block.shared_experts.gate_proj, block.shared_experts.up_proj), strict=True
    ):
        weight.weight.data.copy_(half)
    block.shared_experts.down_proj.weight.data.copy_(downs[-1])
    x, slots = draw.normal(tokens, HIDDEN), torch.zeros(tokens, dtype=torch.int64)
    expected = block(x[None])[0]
    gate = block.gate.weight.data, block.gate.e_score_correction_bias, slots, K, 2.5
    assert_near(ops.route_moe_nvfp4(x, *gate, *quantised, 10.0, shared_last=True), expected)


@pytest.mark.parametrize("shared", ["none", "last", "beside"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_is_the_two_ops(dtype, shared, draw):
    """To the bit, also for tokens without a slot."""
    x, how = draw.normal(7, HIDDEN, dtype=dtype), router(draw, 7, dtype)
    stacked = quantize_experts(*stack(draw, EXPERTS + (shared == "last")))
    more = [tensor[0] for tensor in quantize_fp8_experts(*stack(draw, 1))] if shared == "beside" else []
    actual = ops.route_moe_nvfp4(x, *how, *stacked, 10.0, *more, shared_last=shared == "last")
    expected = ops.moe_nvfp4(x, *ops.route_topk(x, *how), *stacked, 10.0, *more, shared_last=shared == "last")
    assert_same_bits(actual, expected)
    assert actual.dtype == (torch.float32 if shared == "none" else dtype)


def test_half_a_shared_expert_is_refused(draw):
    stacked, shared = quantize_experts(*stack(draw)), [tensor[0] for tensor in quantize_fp8_experts(*stack(draw, 1))]
    with pytest.raises(ValueError, match="3 of the 4 tensors"):
        ops.route_moe_nvfp4(draw.normal(2, HIDDEN), *router(draw, 2, torch.float32), *stacked, 10.0, *shared[:3])

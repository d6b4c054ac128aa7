"""moe_nvfp4_w4a4 against loops in float64 that quantise each row before either product."""

import pytest
import torch

from dsv4 import ops
from dsv4.ops.nvfp4 import dequantize_nvfp4
from tests.ops.cases import assert_near, assert_same_bits, quantize_experts
from tests.ops.oracles import nearest_nvfp4

DTYPES = (torch.float32, torch.bfloat16)
TOKENS = (2, 20)  # x 3 picks of 8 experts: by pick, and expert by expert


def arguments(draw, tokens, dtype, none=0.2):
    gate_up, down = draw.normal(8, 64, 48, scale=48**-0.5), draw.normal(8, 48, 32, scale=32**-0.5)
    gate_up[:, 32:] *= 30
    picks = torch.where(draw.uniform(0, 1, tokens, 3) < none, -1, draw.distinct(tokens, 3, 8)).int()
    x, weights = draw.normal(tokens, 48, dtype=dtype, outliers=10.0), draw.uniform(0.1, 1.0, tokens, 3)
    return x, picks, weights, *quantize_experts(gate_up, down), 10.0


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matches_loops(tokens, dtype, draw):
    x, experts, weights, codes, scale, scale_2, down, down_scale, down_scale_2, limit = arguments(draw, tokens, dtype)
    first = dequantize_nvfp4(codes, scale, scale_2.repeat_interleave(32, 1)[..., None]).double()
    second = dequantize_nvfp4(down, down_scale, down_scale_2[:, None, None]).double()
    wanted, worst = torch.zeros(tokens, 48, dtype=torch.float64), 0.0
    for t in range(tokens):
        seen = nearest_nvfp4(x[t].float()).double()
        for expert, weight in zip(experts[t].tolist(), weights[t].tolist(), strict=True):
            if expert >= 0:
                gate, up = (first[expert] @ seen).chunk(2)
                h = torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit) * weight
                terms = second[expert] * nearest_nvfp4(h.float()).double()
                wanted[t] += terms.sum(-1)
                worst = max(worst, terms.abs().max().item())
    actual = ops.moe_nvfp4_w4a4(x, experts, weights, codes, scale, scale_2, down, down_scale, down_scale_2, limit)
    assert actual.dtype == torch.float32
    # h in float32 may fall to the other side of a midpoint than h in float64, by a third of a term at most.
    near = (actual.double() - wanted).abs() <= 1e-4
    assert near.float().mean() > 0.95 and (actual.double() - wanted).abs().max() <= worst


@pytest.mark.parametrize("tokens", TOKENS)
def test_it_quantises_activations(tokens, draw):
    """Unlike moe_nvfp4, from which it is some percents away."""
    args = arguments(draw, tokens, torch.float32, none=0.0)
    plain, emulated = ops.moe_nvfp4(*args), ops.moe_nvfp4_w4a4(*args)
    assert 0.02 < (plain - emulated).norm() / plain.norm() < 0.4


def test_the_routing_weight_changes_no_code(draw):
    """It is in h before h is quantised, and scales all of a row: twice the weight is twice the result."""
    x, experts, weights, *rest = arguments(draw, 4, torch.float32, none=0.0)
    once = ops.moe_nvfp4_w4a4(x, experts[:, :1], weights[:, :1], *rest)
    assert_near(ops.moe_nvfp4_w4a4(x, experts[:, :1], 2 * weights[:, :1], *rest), 2 * once)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_last_expert_is_shared(tokens, dtype, draw):
    """As one more pick, of weight 1, whose result is rounded before it is added."""
    x, experts, weights, *rest = arguments(draw, tokens, dtype)
    experts = experts.clamp(max=6)
    none, every = experts.new_full((tokens, 1), -1), experts.new_full((tokens, 1), 7)
    routed = ops.moe_nvfp4_w4a4(x, torch.cat((experts, none), 1), torch.nn.functional.pad(weights, (0, 1)), *rest)
    shared = ops.moe_nvfp4_w4a4(x, every, torch.ones(tokens, 1), *rest)
    actual = ops.moe_nvfp4_w4a4(x, experts, weights, *rest, shared_last=True)
    assert actual.dtype == dtype
    assert_near(actual, routed.double() + shared.to(dtype).double())


@pytest.mark.parametrize("tokens", TOKENS)
def test_inert_tokens(tokens, draw):
    """Expert -1 is none: zeros for the token even if its x is NaN, and the other tokens keep their bits."""
    x, experts, *rest = arguments(draw, tokens, torch.float32)
    before = ops.moe_nvfp4_w4a4(x, experts, *rest)
    x[1], experts[1] = torch.nan, -1
    after = ops.moe_nvfp4_w4a4(x, experts, *rest)
    others = torch.arange(tokens) != 1
    assert_same_bits(after[others], before[others])
    assert (after[1] == 0).all()


def test_few_and_many_tokens_agree(draw):
    x, experts, weights, *rest = arguments(draw, 20, torch.float32)
    together = ops.moe_nvfp4_w4a4(x, experts, weights, *rest)
    differences = []
    for t in range(20):
        alone = ops.moe_nvfp4_w4a4(x[t : t + 1], experts[t : t + 1], weights[t : t + 1], *rest)
        largest = together[t].abs().max().clamp(min=1e-30)  # a token may have no expert
        differences.append(((alone[0] - together[t]).abs().max() / largest).item())
    differences.sort()
    assert differences[14] < 1e-5 and differences[-1] < 0.1  # a value at a midpoint may part a token

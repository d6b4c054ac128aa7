"""moe, moe_nvfp4 and moe_fp8 against transformers' experts, loops in float64, and values by hand."""

import math

import pytest
import torch

from dsv4 import ops
from dsv4.ops.fp8 import dequantize_fp8_block
from dsv4.ops.nvfp4 import dequantize_nvfp4
from tests.ops.cases import assert_near, assert_same_bits, quantize_experts, quantize_fp8_experts
from tests.ops.oracles import hf, randomise, tiny_config

DTYPES = (torch.float32, torch.bfloat16)
# The reference takes few tokens by expert id and many expert by expert: 2 x 3 picks of 8 experts, and 20 x 3.
TOKENS = (2, 20)


def silu(x: float) -> float:
    return x / (1 + math.exp(-x))


def assert_matches_loops(actual, x, experts, weights, gate_up, down, limit):
    """Against float64 except for the one rounding of the weighted h to x's dtype; one token and one pick at a time."""
    y, largest = torch.zeros(x.shape, dtype=torch.float64), 0.0
    for t in range(x.shape[0]):
        for expert, weight in zip(experts[t].tolist(), weights[t].tolist(), strict=True):
            if expert < 0:
                continue
            gate, up = (gate_up[expert].double() @ x[t].double()).chunk(2)
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            h = gate * torch.sigmoid(gate) * up * weight
            terms = down[expert].double() * h.to(x.dtype).double()
            y[t] += terms.sum(-1)
            largest = max(largest, terms.abs().max().item())
    assert actual.dtype == torch.float32
    if x.dtype == torch.float32:
        assert_near(actual, y)
    else:
        # A value of h that lies on a rounding boundary may fall to the other side: an ulp (2^-7) of a single term.
        torch.testing.assert_close(actual.double(), y, rtol=2e-5, atol=2**-7 * largest)


def routed(draw, tokens, experts, k, none=0.0):
    """Distinct experts with weights; about the share `none` of them is -1, which means none whatever its weight."""
    picks = draw.distinct(tokens, k, experts)
    absent = draw.uniform(0, 1, tokens, k) < none
    return torch.where(absent, -1, picks).int(), draw.uniform(0.1, 1.0, tokens, k)


def stack(draw, experts=8, hidden=32, inter=16, scale=1.0, dtype=torch.float32):
    gate_up = draw.normal(experts, 2 * inter, hidden, scale=scale * hidden**-0.5, dtype=dtype)
    return gate_up, draw.normal(experts, hidden, inter, scale=inter**-0.5, dtype=dtype)


@pytest.mark.parametrize("tokens", TOKENS)
def test_matches_transformers(tokens, draw):
    """float32: weighting before or after W2 is the same. Activations of size 8 reach the clamps."""
    module = randomise(hf.DeepseekV4Experts(tiny_config()), draw)
    x = draw.normal(tokens, 32, scale=8.0)
    experts, weights = routed(draw, tokens, 8, 3)
    expected = module(x, experts.long(), weights)
    args = module.gate_up_proj.data, module.down_proj.data, 10.0
    assert_near(ops.moe(x, experts, weights, *args), expected)


def test_clamped_swiglu_matches_transformers_mlp(draw):
    """The shared expert uses the same formula with the same clamp, as the modelling code does."""
    module = randomise(hf.DeepseekV4MLP(tiny_config()), draw)
    x = draw.normal(30, 32, scale=15.0)
    gate_up = torch.cat((module.gate_proj(x), module.up_proj(x)), -1)
    assert (gate_up.abs() > 10).any()
    assert_near(module.down_proj(ops.clamped_swiglu(gate_up, 10.0)), module(x))


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matches_loops(tokens, dtype, draw):
    """The routing weight enters before the rounding of h, so bf16 agrees closely; the result is float32, unrounded."""
    x, (experts, weights) = draw.normal(tokens, 32, dtype=dtype, outliers=20.0), routed(draw, tokens, 8, 3, none=0.2)
    gate_up, down = stack(draw, dtype=dtype)
    args = x, experts, weights, gate_up, down, 10.0
    assert_matches_loops(ops.moe(*args), *args)


@pytest.mark.parametrize("tokens", TOKENS)
def test_weight_enters_before_the_rounding(tokens):
    """h = silu(1) = 0.7311 and weight 1 + 2^-12: bf16 has steps of 2^-8 there and rounds both products to 187/256.
    After W2 the weight would survive."""
    gate_up, down = torch.ones(2, 2, 1, dtype=torch.bfloat16), torch.ones(2, 1, 1, dtype=torch.bfloat16)
    x, experts = torch.ones(tokens, 1, dtype=torch.bfloat16), torch.ones(tokens, 1, dtype=torch.int32)
    for weight in (1.0, 1 + 2.0**-12):
        y = ops.moe(x, experts, torch.full((tokens, 1), weight), gate_up, down, 10.0)
        assert (y == 187 / 256).all()


@pytest.mark.parametrize("tokens", TOKENS)
def test_an_expert_picked_twice_counts_twice(tokens, draw):
    gate_up, down = stack(draw)
    x, experts = draw.normal(tokens, 32), draw.integers(0, 8, tokens, 1, dtype=torch.int32)
    twice = ops.moe(x, experts.expand(tokens, 2), torch.tensor([0.25, 0.5]).expand(tokens, 2), gate_up, down, 10.0)
    assert_near(twice, ops.moe(x, experts, torch.full((tokens, 1), 0.75), gate_up, down, 10.0))


@pytest.mark.parametrize("gate", (-50.0, -10.5, 9.5, 10.5, 50.0))
@pytest.mark.parametrize("up", (-50.0, -10.5, 9.5, 50.0))
def test_gate_is_clamped_above_only(gate, up):
    """min(gate, 10) but not max(gate, -10); up on both sides. One expert of width 1, by hand."""
    expected = silu(min(gate, 10.0)) * max(-10.0, min(up, 10.0))
    assert_near(ops.clamped_swiglu(torch.tensor([gate, up]), 10.0), torch.tensor([expected]))
    gate_up = torch.tensor([[[gate], [up]]])
    one, expert = torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int32)
    y = ops.moe(one, expert, one, gate_up, torch.ones(1, 1, 1), 10.0)
    assert_near(y, torch.tensor([[expected]]))
    if gate == -50.0:
        assert abs(expected) < 1e-15  # a gate clamped at -10 would give 4.5e-4 times up


def test_gate_comes_first():
    """w1 then w3 in the packed weight: gate 3, up 0 gives 0; gate 0, up 3 gives 0 too; gate 3, up 1 is silu(3)."""
    for gate, up, expected in ((3.0, 0.0, 0.0), (0.0, 3.0, 0.0), (3.0, 1.0, silu(3.0)), (1.0, 3.0, 3 * silu(1.0))):
        assert_near(ops.clamped_swiglu(torch.tensor([gate, up]), 10.0), torch.tensor([expected]))


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nvfp4_matches_loops(tokens, dtype, draw):
    """w1 and w3 have scale_2 of their own, 30 times apart, and every expert its own."""
    gate_up, down = stack(draw)
    gate_up[:, 16:] *= 30
    gate_up *= draw.uniform(0.5, 2.0, 8, 1, 1)
    quantised = quantize_experts(gate_up, down)
    scale_2 = quantised[2].repeat_interleave(16, 1)[..., None]
    gate_up = dequantize_nvfp4(quantised[0], quantised[1], scale_2)
    down = dequantize_nvfp4(quantised[3], quantised[4], quantised[5][:, None, None])
    x, (experts, weights) = draw.normal(tokens, 32, dtype=dtype), routed(draw, tokens, 8, 3, none=0.2)
    actual = ops.moe_nvfp4(x, experts, weights, *quantised, 10.0)
    assert_matches_loops(actual, x, experts, weights, gate_up, down, 10.0)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("inter", [16, 128, 130])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fp8_matches_loops(tokens, inter, dtype, draw):
    """Blocks of w1 and w3 do not mix, whether 128 divides their rows or not; every expert has scales of its own."""
    gate_up, down = stack(draw, hidden=140, inter=inter)
    gate_up[:, inter:] *= 30
    gate_up *= draw.uniform(0.5, 2.0, 8, 1, 1)
    quantised = quantize_fp8_experts(gate_up, down)
    scale = quantised[1].chunk(2, 1)
    halves = [
        torch.stack([dequantize_fp8_block(w, s) for w, s in zip(half, scale[i], strict=True)])
        for i, half in enumerate(quantised[0].chunk(2, 1))
    ]
    down = torch.stack([dequantize_fp8_block(w, s) for w, s in zip(*quantised[2:], strict=True)])
    x, (experts, weights) = draw.normal(tokens, 140, dtype=dtype), routed(draw, tokens, 8, 3, none=0.2)
    actual = ops.moe_fp8(x, experts, weights, *quantised, 10.0)
    assert_matches_loops(actual, x, experts, weights, torch.cat(halves, 1), down, 10.0)


@pytest.mark.parametrize("tokens", TOKENS)
def test_inert_tokens(tokens, draw):
    """Expert -1 is none: zeros for the token even if its x is NaN, and the other tokens keep their bits."""
    gate_up, down = stack(draw)
    x, (experts, weights) = draw.normal(tokens, 32), routed(draw, tokens, 8, 3)
    before = ops.moe(x, experts, weights, gate_up, down, 10.0)
    x[1], experts[1] = torch.nan, -1
    after = ops.moe(x, experts, weights, gate_up, down, 10.0)
    others = torch.arange(tokens) != 1
    assert_same_bits(after[others], before[others])
    assert (after[1] == 0).all()


@pytest.mark.parametrize("tokens", TOKENS)
def test_no_expert_reads_no_weights(tokens, draw):
    """-1 must not stand for expert 0 or the last one: their weights, huge here, leave no trace."""
    gate_up, down = stack(draw)
    x, (experts, weights) = draw.normal(tokens, 32), routed(draw, tokens, 6, 3, none=0.3)
    experts = torch.where(experts >= 0, experts + 1, -1)  # 0 and 7 are nobody's
    before = ops.moe(x, experts, weights, gate_up, down, 10.0)
    gate_up[[0, 7]] = 1e30
    down[[0, 7]] = 1e30
    assert_same_bits(ops.moe(x, experts, weights, gate_up, down, 10.0), before)


def test_few_and_many_tokens_agree(draw):
    """The same tokens one at a time and together."""
    gate_up, down = stack(draw)
    x, (experts, weights) = draw.normal(20, 32), routed(draw, 20, 8, 3)
    together = ops.moe(x, experts, weights, gate_up, down, 10.0)
    for t in range(20):
        alone = ops.moe(x[t : t + 1], experts[t : t + 1], weights[t : t + 1], gate_up, down, 10.0)
        assert_near(alone[0], together[t])


@pytest.mark.parametrize("tokens", TOKENS)
def test_outliers_stay_finite(tokens, draw):
    """Activations of 1e4 meet the clamps: |h| <= 100 times the weight. They are whole numbers and gate_up holds
    eighths, so that W1 x and W3 x are exact: near 1e4 rounding would show in the few that are not clamped."""
    _, down = stack(draw)
    gate_up = draw.integers(-8, 9, 8, 32, 32, dtype=torch.float32) / 8
    x = draw.integers(-10000, 10001, tokens, 32, dtype=torch.float32)
    experts, weights = routed(draw, tokens, 8, 3)
    args = x, experts, weights, gate_up, down, 10.0
    out = ops.moe(*args)
    assert out.isfinite().all()
    assert_matches_loops(out, *args)


def with_shared(x, routed, gate_up, down, limit):
    """float64 [T, H]: the routed sum plus the shared expert's result, which like its h is rounded to x's dtype."""
    gate, up = (x.double() @ gate_up.double().T).chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    h = gate * torch.sigmoid(gate) * up
    return routed.double() + (h.to(x.dtype).double() @ down.double().T).to(x.dtype).double()


def assert_rounded(actual, expected):
    """In x's dtype. bf16: the nearest to float64 but for sums on the boundary of two, and a value of h there."""
    if actual.dtype == torch.float32:
        assert_near(actual, expected)
    else:
        assert (actual == expected.bfloat16()).float().mean() > 0.97
        assert_near(actual, expected, torch.bfloat16)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("inter", [16, 144])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fp8_shared_expert_beside_nvfp4(tokens, inter, dtype, draw):
    """Every row gets it, also one without experts; the sum of both is rounded. 144: blocks of w1 and w3 apart."""
    stacked = quantize_experts(*stack(draw, hidden=144, inter=inter))
    gate_up, down = stack(draw, experts=1, hidden=144, inter=inter)
    gate_up[:, inter:] *= 30
    codes, scale, down, down_scale = (tensor[0] for tensor in quantize_fp8_experts(gate_up, down))
    x, (experts, weights) = draw.normal(tokens, 144, dtype=dtype), routed(draw, tokens, 8, 3, none=0.2)
    experts[0] = -1
    plain = ops.moe_nvfp4(x, experts, weights, *stacked, 10.0)
    halves = [dequantize_fp8_block(*half) for half in zip(codes.chunk(2), scale.chunk(2), strict=True)]
    expected = with_shared(x, plain, torch.cat(halves), dequantize_fp8_block(down, down_scale), 10.0)
    actual = ops.moe_nvfp4(x, experts, weights, *stacked, 10.0, codes, scale, down, down_scale)
    assert actual.dtype == dtype
    assert_rounded(actual, expected)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", ["moe", "moe_fp8", "moe_nvfp4"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_last_expert_is_shared(tokens, name, dtype, draw):
    """The same as an expert E - 1 that every row picks with weight 1, rounded, added and rounded."""
    gate_up, down = stack(draw, dtype=dtype if name == "moe" else torch.float32)
    quantise = {"moe": lambda *s: s, "moe_fp8": quantize_fp8_experts, "moe_nvfp4": quantize_experts}[name]
    args, call = quantise(gate_up, down), getattr(ops, name)
    x, (experts, weights) = draw.normal(tokens, 32, dtype=dtype), routed(draw, tokens, 7, 3, none=0.2)
    last = call(x, torch.full((tokens, 1), 7, dtype=torch.int32), torch.ones(tokens, 1), *args, 10.0)
    expected = call(x, experts, weights, *args, 10.0) + last.to(dtype).float()
    actual = call(x, experts, weights, *args, 10.0, shared_last=True)
    assert actual.dtype == dtype
    assert_rounded(actual, expected)


def test_half_a_shared_expert_is_refused(draw):
    stacked = quantize_experts(*stack(draw))
    x, (experts, weights) = draw.normal(2, 32), routed(draw, 2, 8, 3)
    shared = [tensor[0] for tensor in quantize_fp8_experts(*stack(draw, experts=1))]
    with pytest.raises(ValueError, match="3 of the 4 tensors"):
        ops.moe_nvfp4(x, experts, weights, *stacked, 10.0, *shared[:3])
    with pytest.raises(ValueError, match="shared_last"):
        ops.moe_nvfp4(x, experts, weights, *stacked, 10.0, *shared, shared_last=True)

"""route_topk and route_hash on CUDA against their references in float32."""

import pytest
import torch

from tests.gpu import small_kernels
from tests.gpu.small_kernels import assert_replay_equals, call, poison, reference

pytestmark = small_kernels.needs_gpu
BF16 = torch.bfloat16
SHAPES = ((256, 4096, 6), (384, 7168, 6), (16, 256, 6), (33, 24, 8), (5, 8, 1))  # experts, hidden, k
TOKENS = (1, 2, 8, 9, 32, 64, 65, 200)


def slots_of(draw, tokens):
    """Some tokens idle; the first is not."""
    slots = draw.integers(-1, 4, tokens)
    slots[0] = 2
    return slots


def inputs(draw, tokens, experts, hidden, dtype=BF16):
    x = draw.normal(tokens, hidden, dtype=BF16, outliers=20.0)
    return x, draw.normal(experts, hidden, scale=2 * hidden**-0.5, dtype=dtype)


def true_scores(x, gate):
    return torch.nn.functional.softplus(x.double() @ gate.double().t()).sqrt()


@pytest.mark.parametrize("dtype", (BF16, torch.float32), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tokens", TOKENS)
def test_route_topk(tokens, shape, dtype, draw):
    """Picks are the k largest in float64 but for differences below float32's rounding, in descending order, with the
    weights that follow from them."""
    experts, hidden, k = shape
    (x, gate), bias = inputs(draw, tokens, experts, hidden, dtype), draw.normal(experts, scale=0.2)
    slots = slots_of(draw, tokens)
    x[slots < 0] = torch.nan
    poison(torch.empty(tokens, k))
    picks, weights = (t.cpu() for t in call("route_topk", x, gate, bias, slots, k, 2.5))
    assert picks.dtype == torch.int32 and weights.dtype == torch.float32
    assert (picks[slots < 0] == -1).all() and (weights[slots < 0] == 0).all()
    busy = slots >= 0
    scores, picks, weights = true_scores(x[busy], gate), picks[busy].long(), weights[busy].double()
    biased = scores + bias.double()
    assert ((picks >= 0) & (picks < experts)).all()
    assert (picks.sort(-1).values.diff(dim=-1) > 0).all(), "an expert was picked twice"
    chosen, best = biased.gather(1, picks), biased.topk(k).values
    torch.testing.assert_close(chosen, best, rtol=0, atol=2e-5)
    wanted = scores.gather(1, picks)
    torch.testing.assert_close(weights, wanted / wanted.sum(-1, keepdim=True) * 2.5, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tokens", (1, 9, 65))
def test_ties_pick_the_lower_expert(tokens, draw):
    """Whole numbers make every sum exact, so many scores are equal."""
    x, gate = draw.integers(-2, 3, tokens, 256, dtype=BF16), draw.integers(-1, 2, 64, 256, dtype=BF16)
    gate[::3] = gate[0]
    gate[1::3] = gate[1]
    args = x, gate, torch.zeros(64), torch.zeros(tokens, dtype=torch.int64), 6, 1.0
    (picks, weights), (wanted, values) = call("route_topk", *args), reference("route_topk", *args)
    assert torch.equal(picks, wanted)
    torch.testing.assert_close(weights, values, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tokens", (1, 70))
def test_extreme_logits(tokens, draw):
    """Softplus from underflow to hundreds; negative biases."""
    x, gate = draw.normal(tokens, 256, dtype=BF16), draw.normal(32, 256, dtype=BF16, scale=20.0)
    args = x, gate, -3.0 - torch.arange(32.0), torch.zeros(tokens, dtype=torch.int64), 6, 1.0
    (picks, weights), (wanted, values) = call("route_topk", *args), reference("route_topk", *args)
    assert torch.equal(picks, wanted)
    torch.testing.assert_close(weights, values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", (BF16, torch.float32), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tokens", (1, 8, 33, 130))
def test_route_hash(tokens, shape, dtype, draw):
    experts, hidden, k = shape
    x, gate = inputs(draw, tokens, experts, hidden, dtype)
    table, ids, slots = draw.distinct(50, k, experts).contiguous(), draw.integers(0, 50, tokens), slots_of(draw, tokens)
    x[slots < 0] = torch.nan
    ids[slots < 0] = 2**40  # an idle token's id is garbage
    poison(torch.empty(tokens, k))
    picks, weights = (t.cpu() for t in call("route_hash", x, gate, table, ids, slots, 1.5))
    busy = slots >= 0
    assert (picks[~busy] == -1).all() and (weights[~busy] == 0).all()
    assert torch.equal(picks[busy].long(), table[ids[busy]])
    scores = true_scores(x[busy], gate).gather(1, table[ids[busy]])
    wanted = scores / scores.sum(-1, keepdim=True) * 1.5
    torch.testing.assert_close(weights[busy].double(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tokens", (1, 8, 33, 100))
def test_replay_equals_eager(tokens, draw):
    (x, gate), slots = inputs(draw, tokens, 256, 4096), slots_of(draw, tokens)
    top = small_kernels.to_device((x, gate, draw.normal(256), slots, 6, 2.5))
    ids = draw.integers(0, 50, tokens)
    hashed = small_kernels.to_device((x, gate, draw.distinct(50, 6, 256).contiguous(), ids, slots, 2.5))
    assert_replay_equals(lambda: (*call("route_topk", *top), *call("route_hash", *hashed)))


def test_unsupported_inputs_are_named(draw):
    x, gate = inputs(draw, 2, 16, 64)
    with pytest.raises(ValueError, match="route_topk: 1 to 8 experts a token, found 9"):
        call("route_topk", x, gate, torch.zeros(16), torch.zeros(2, dtype=torch.int64), 9, 1.0)

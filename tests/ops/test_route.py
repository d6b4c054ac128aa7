"""route_topk and route_hash against transformers' routers and loops in float64."""

import math

import pytest
import torch

from dsv4 import ops
from tests.ops.cases import assert_near, assert_same_bits
from tests.ops.oracles import hf, randomise, tiny_config

DTYPES = (torch.float32, torch.bfloat16)


def by_expert(experts, weights):
    """Picks in ascending order of expert, since their order carries no meaning."""
    order = experts.argsort(-1)
    return experts.gather(-1, order), weights.gather(-1, order)


def clear(scores, k):
    """bool [T]: whether the k-th and the next score are further apart than float32 rounding moves them."""
    top = scores.topk(k + 1).values
    return top[:, k - 1] - top[:, k] > 1e-5


def active(tokens):
    return torch.zeros(tokens, dtype=torch.int64)


def score(logit: float) -> float:
    """sqrt(softplus(logit)) in float64, stable on both sides."""
    return math.sqrt(max(logit, 0.0) + math.log1p(math.exp(-abs(logit))))


def naive_route_topk(logits, bias, k, scale):
    """Python lists: the k largest of score + bias, the lower expert first among equals."""
    experts, weights = [], []
    for row in logits.tolist():
        scores = [score(v) for v in row]
        order = sorted(range(len(row)), key=lambda e: (-(scores[e] + bias[e]), e))[:k]
        total = sum(scores[e] for e in order)
        experts.append(order)
        weights.append([scale * scores[e] / (total + 1e-20) for e in order])
    return torch.tensor(experts, dtype=torch.int32), torch.tensor(weights, dtype=torch.float64)


def test_topk_matches_transformers(draw):
    module = randomise(hf.DeepseekV4TopKRouter(tiny_config(routed_scaling_factor=2.5)), draw)
    module.e_score_correction_bias.copy_(draw.normal(8))
    x = draw.normal(200, 32, scale=3.0)
    logits, weights, experts = module(x)
    actual = ops.route_topk(x, module.weight.data, module.e_score_correction_bias, active(200), 3, 2.5)
    assert actual[0].dtype == torch.int32 and actual[1].dtype == torch.float32
    got, wanted = by_expert(*actual), by_expert(experts.int(), weights)
    rows = clear(module.score_fn(logits) + module.e_score_correction_bias, 3)
    assert torch.equal(got[0][rows], wanted[0][rows])
    assert_near(got[1][rows], wanted[1][rows])


def test_hash_matches_transformers(draw):
    module = randomise(hf.DeepseekV4HashRouter(tiny_config()), draw)
    module.tid2eid.copy_(draw.distinct(64, 3, 8))
    x, tokens = draw.normal(200, 32, scale=3.0), draw.integers(0, 64, 200)
    _, weights, experts = module(x, tokens)
    actual = ops.route_hash(x, module.weight.data, module.tid2eid, tokens, active(200), 1.5)
    assert torch.equal(actual[0], experts.int())
    assert_near(actual[1], weights)


def test_hash_table_may_be_int32(draw):
    """The official module keeps the table in int32, checkpoints in int64."""
    x, gate, table, tokens = draw.normal(9, 16), draw.normal(8, 16), draw.distinct(20, 3, 8), draw.integers(0, 20, 9)
    wide = ops.route_hash(x, gate, table, tokens, active(9), 1.5)
    narrow = ops.route_hash(x, gate, table.int(), tokens, active(9), 1.5)
    for a, b in zip(wide, narrow, strict=True):
        assert_same_bits(a, b)


def test_hash_has_no_bias():
    """Hash layers have no bias in the checkpoint: the op has no place for one."""
    arguments = [a.name for a in torch.ops.dsv4.route_hash.default._schema.arguments]
    assert "bias" not in arguments


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_topk_matches_loops(dtype, draw):
    """bf16 operands, float32 logits: a bf16 rounding of the logits would move weights by 2^-8."""
    x, gate, bias = draw.normal(50, 32, dtype=dtype), draw.normal(16, 32, dtype=dtype), draw.normal(16)
    logits = x.double() @ gate.double().T
    experts, weights = by_expert(*naive_route_topk(logits, bias.tolist(), 6, 1.5))
    actual = by_expert(*ops.route_topk(x, gate, bias, active(50), 6, 1.5))
    rows = clear(torch.nn.functional.softplus(logits).sqrt() + bias, 6)
    assert torch.equal(actual[0][rows], experts[rows])
    assert_near(actual[1][rows], weights[rows])


@pytest.mark.parametrize("scale", (1.0, 1.5, 2.5))
def test_weights_sum_to_the_scale(scale, draw):
    x, gate = draw.normal(40, 32), draw.normal(16, 32)
    _, weights = ops.route_topk(x, gate, draw.normal(16), active(40), 6, scale)
    assert_near(weights.sum(-1), torch.full((40,), scale))
    _, weights = ops.route_hash(x, gate, draw.distinct(20, 6, 16), draw.integers(0, 20, 40), active(40), scale)
    assert_near(weights.sum(-1), torch.full((40,), scale))
    assert (weights > 0).all()


def test_bias_selects_and_does_not_weigh(draw):
    """A bias of +100 on experts 2 and 5 picks them; the weights are those of their scores alone."""
    x, gate, bias = draw.normal(30, 16), draw.normal(8, 16), torch.zeros(8)
    bias[[2, 5]] = 100.0
    experts, weights = by_expert(*ops.route_topk(x, gate, bias, active(30), 2, 1.0))
    assert (experts == torch.tensor([2, 5])).all()
    scores = torch.tensor([[score(v) for v in row] for row in (x.double() @ gate[[2, 5]].double().T).tolist()])
    assert_near(weights, scores / scores.sum(-1, keepdim=True))


@pytest.mark.parametrize("logit", (0.0, 3.0, -100.0))
def test_ties_pick_the_lower_expert(logit):
    """With as many experts as the model: sorting 16 values is stable by accident."""
    x, gate, bias = torch.full((3, 1), logit), torch.ones(256, 1), torch.zeros(256)
    experts, _ = ops.route_topk(x, gate, bias, active(3), 6, 1.0)
    assert by_expert(experts, experts)[0].tolist() == [[0, 1, 2, 3, 4, 5]] * 3
    bias[[40, 90, 110, 200]] = 1.0
    experts, _ = ops.route_topk(x, gate, bias, active(3), 5, 1.0)
    assert by_expert(experts, experts)[0].tolist() == [[0, 40, 90, 110, 200]] * 3
    experts, _ = ops.route_topk(x, gate, bias, active(3), 3, 1.0)
    assert by_expert(experts, experts)[0].tolist() == [[40, 90, 110]] * 3


@pytest.mark.parametrize("logit", (-16.7, -100.0, -104.0, -1e4, 100.0, 1e4))
def test_extreme_logits(logit, draw):
    """log(1 + exp(x)) in float32 is 0 below -16.6, and six zeros would be 0/0. Weights follow transformers' formula:
    s / (sum + 1e-20), which is 0 where even the stable form underflows."""
    x, gate = torch.full((2, 1), logit), torch.ones(16, 1)
    table = draw.distinct(4, 6, 16)
    for experts, weights in (
        ops.route_topk(x, gate, torch.zeros(16), active(2), 6, 1.5),
        ops.route_hash(x, gate, table, torch.tensor([1, 3]), active(2), 1.5),
    ):
        assert weights.isfinite().all() and ((experts >= 0) & (experts < 16)).all()
        s = score(logit)
        # At -100 softplus is a float32 subnormal with five bits left, at -104 it is 0.
        torch.testing.assert_close(weights, torch.full((2, 6), 1.5 * s / (6 * s + 1e-20)), rtol=5e-2, atol=5e-3)


def test_inert_tokens(draw):
    """Slot -1: expert -1 and weight 0, NaN inputs or not, and no effect on the others."""
    x, gate, bias, table = draw.normal(7, 16), draw.normal(8, 16), draw.normal(8), draw.distinct(20, 3, 8)
    tokens, slots = draw.integers(0, 20, 7), active(7)
    before = ops.route_topk(x, gate, bias, slots, 3, 1.5), ops.route_hash(x, gate, table, tokens, slots, 1.5)
    x[[1, 4]], slots[[1, 4]], tokens[[1, 4]] = torch.nan, -1, 0
    after = ops.route_topk(x, gate, bias, slots, 3, 1.5), ops.route_hash(x, gate, table, tokens, slots, 1.5)
    rest = slots >= 0
    for then, now in zip(before, after, strict=True):
        for a, b in zip(then, now, strict=True):
            assert_same_bits(a[rest], b[rest])
        assert (now[0][~rest] == -1).all() and (now[1][~rest] == 0).all()


def test_inert_ids_may_be_anything(draw):
    x, gate, table, ids = draw.normal(4, 16), draw.normal(8, 16), draw.distinct(20, 3, 8), torch.tensor([3, 2**40, 7, -1])
    slots = torch.tensor([0, -1, 2, -1])
    experts, weights = ops.route_hash(x, gate, table, ids, slots, 1.5)
    assert torch.equal(experts[::2].long(), table[ids[::2]])
    assert (experts[1::2] == -1).all() and (weights[1::2] == 0).all()


def test_nan_token_stays_in_range(draw):
    """An active token gone NaN must not index outside the experts."""
    x = draw.normal(3, 16)
    x[1] = torch.nan
    experts, weights = ops.route_topk(x, draw.normal(8, 16), draw.normal(8), active(3), 3, 1.5)
    assert ((experts >= 0) & (experts < 8)).all()
    assert weights[[0, 2]].isfinite().all()

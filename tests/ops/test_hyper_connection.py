"""hc_pre, hc_post, hc_head, hc_mix and hc_mix_head against transformers, and against values computed by hand."""

import math

import pytest
import torch

from dsv4 import ops
from dsv4.ops.hyper_connection import sinkhorn
from tests.ops.cases import assert_near, assert_same_bits
from tests.ops.oracles import hf, randomise, tiny_config

DTYPES = (torch.float32, torch.bfloat16)
EPS = 1e-6


def coefficients(base, scale=(1.0, 1.0, 1.0), hc_eps=EPS, iterations=20):
    """hc_pre's post and comb for logits that are `base` alone (fn = 0), one token."""
    streams = torch.ones(1, 4, 8)
    scales = torch.tensor(scale)
    _, post, comb = ops.hc_pre(streams, torch.zeros(24, 32), base, scales, torch.ones(8), EPS, hc_eps, iterations)
    return post[0], comb[0]


def naive_sinkhorn(logits, iterations, eps):
    """float64 lists [4][4]: softmax of each row plus eps, a column step, then rows and columns in turn."""
    rows = []
    for row in logits:
        top = max(row)
        exps = [math.exp(v - top) for v in row]
        rows.append([e / sum(exps) + eps for e in exps])
    for step in range(iterations):
        if step > 0:
            rows = [[v / (sum(row) + eps) for v in row] for row in rows]
        sums = [sum(row[k] for row in rows) for k in range(4)]
        rows = [[row[k] / (sums[k] + eps) for k in range(4)] for row in rows]
    return torch.tensor(rows, dtype=torch.float64)


# A large hc_eps shows every place where it enters; the real one hides most of them.
@pytest.mark.parametrize("hc_eps", (1e-6, 0.1))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_hc_pre_matches_transformers(hc_eps, dtype, draw):
    config = tiny_config(hc_eps=hc_eps)
    module = randomise(hf.DeepseekV4HyperConnection(config), draw)
    norm = randomise(hf.DeepseekV4RMSNorm(32, EPS), draw)
    streams = draw.normal(30, 4, 32, dtype=dtype, outliers=100.0)
    post, comb, collapsed = module(streams[None])
    weights = module.fn.data, module.base.data, module.scale.data, norm.weight.data
    actual = ops.hc_pre(streams, *weights, EPS, hc_eps, config.hc_sinkhorn_iters)
    assert actual[0].dtype == dtype
    # Twice rounded (before the norm and after it), so twice the tolerance of one rounding.
    expected = norm(collapsed[0].float())
    if dtype == torch.bfloat16:
        assert ((actual[0].float() - expected).abs() <= 2**-6 * expected.abs() + 1e-4).all()
    else:
        assert_near(actual[0], expected)
    for got, wanted in zip(actual[1:], (post[0], comb[0]), strict=True):
        assert got.dtype == torch.float32
        assert_near(got, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_hc_head_matches_transformers(dtype, draw):
    module = randomise(hf.DeepseekV4HyperHead(tiny_config(hc_eps=0.01)), draw)
    norm = randomise(hf.DeepseekV4RMSNorm(32, EPS), draw)
    streams = draw.normal(30, 4, 32, dtype=dtype, outliers=100.0)
    expected = norm(module(streams[None])[0].float())
    weights = module.hc_fn.data, module.hc_base.data, module.hc_scale.data, norm.weight.data
    actual = ops.hc_head(streams, *weights, EPS, 0.01)
    assert actual.dtype == dtype
    if dtype == torch.bfloat16:
        assert ((actual.float() - expected).abs() <= 2**-6 * expected.abs() + 1e-4).all()
    else:
        assert_near(actual, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_hc_post_matches_loops(dtype, draw):
    """X'_k = post_k y + sum_j comb[j, k] X_j, written out in float64."""
    y, streams = draw.normal(6, 8, dtype=dtype, outliers=100.0), draw.normal(6, 4, 8, dtype=dtype, outliers=100.0)
    post, comb = draw.uniform(0, 2, 6, 4), draw.uniform(0, 1, 6, 4, 4)
    expected = torch.zeros(6, 4, 8, dtype=torch.float64)
    for t in range(6):
        for k in range(4):
            expected[t, k] = post[t, k].double() * y[t].double()
            for j in range(4):
                expected[t, k] += comb[t, j, k].double() * streams[t, j].double()
    actual = ops.hc_post(y, streams, post, comb)
    assert actual.dtype == dtype
    assert_near(actual, expected)


def test_hc_post_takes_float32_y(draw):
    """The expert sum arrives unrounded; the result follows the streams."""
    y, streams = draw.normal(3, 8), draw.normal(3, 4, 8, dtype=torch.bfloat16)
    post, comb = draw.uniform(0, 2, 3, 4), draw.uniform(0, 1, 3, 4, 4)
    actual = ops.hc_post(y, streams, post, comb)
    expected = post[..., None] * y[:, None] + comb.transpose(1, 2) @ streams.float()
    assert actual.dtype == torch.bfloat16
    assert_near(actual, expected)


def test_bug_comb_transposed(draw):
    """comb is consumed transposed: stream k gets comb[j, k] of stream j. With only comb[0, 1] set, stream 0 moves to
    stream 1 and not the other way round.
    https://github.com/NVIDIA-NeMo/Automodel/issues/2154 https://github.com/huggingface/transformers/issues/46172
    https://github.com/NVIDIA/Megatron-LM/issues/4957"""
    streams, comb = draw.normal(1, 4, 8), torch.zeros(1, 4, 4)
    comb[0, 0, 1] = 1.0
    out = ops.hc_post(torch.zeros(1, 8), streams, torch.zeros(1, 4), comb)
    assert_same_bits(out[0, 1], streams[0, 0])
    assert (out[0, [0, 2, 3]] == 0).all()
    # And with a comb that the op itself makes from asymmetric logits, one token.
    base = draw.normal(24, scale=2.0)
    _, comb = coefficients(base)
    out = ops.hc_post(torch.zeros(1, 8), streams, torch.zeros(1, 4), comb[None])
    right, wrong = comb.T @ streams[0], comb @ streams[0]
    assert_near(out[0], right)
    assert (right - wrong).abs().max() > 1e-2


def test_bug_post_without_eps_and_doubled():
    """post = 2 sigmoid(.) without eps: logits 0 give 1, +-40 give 2 and 0, log 3 gives 1.5. pre has the eps.
    https://github.com/NVIDIA-NeMo/Automodel/pull/2039"""
    base = torch.zeros(24)
    base[4:8] = torch.tensor([0.0, 40.0, -40.0, math.log(3.0)])
    post, _ = coefficients(base, hc_eps=0.25)
    torch.testing.assert_close(post, torch.tensor([1.0, 2.0, 0.0, 1.5]), rtol=1e-6, atol=1e-12)
    # pre = 0.5 + eps for each of the four streams, seen before the norm flattens it: weights with one stream only.
    base[:4] = torch.tensor([-200.0, -200.0, -200.0, 0.0])
    streams = torch.zeros(1, 4, 2)
    streams[0, 0] = torch.tensor([1.0, 0.0])  # weight 0 + eps
    streams[0, 3] = torch.tensor([0.0, 1.0])  # weight 0.5 + eps
    x, _, _ = ops.hc_pre(streams, torch.zeros(24, 8), base, torch.ones(3), torch.ones(2), 0.0, 0.25, 1)
    assert x[0, 0] / x[0, 1] == pytest.approx(0.25 / 0.75, rel=1e-6)


def test_bug_sinkhorn_order():
    """Softmax over rows, then columns first. One iteration by hand, eps 0: rows of softmax are 1:2:3:4, 4:3:2:1,
    1:1:1:1 and 5:3:1:1 (tenths, and quarters), so the columns sum to 1.25, 1.05, 0.85 and 0.85.
    https://github.com/NVIDIA-NeMo/Automodel/pull/2039"""
    ratios = torch.tensor([[1.0, 2, 3, 4], [4, 3, 2, 1], [1, 1, 1, 1], [5, 3, 1, 1]])
    base = torch.cat((torch.zeros(8), ratios.log().flatten()))
    _, comb = coefficients(base, hc_eps=0.0, iterations=1)
    columns = torch.tensor([1.25, 1.05, 0.85, 0.85])
    expected = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1], [0.25] * 4, [0.5, 0.3, 0.1, 0.1]]) / columns
    torch.testing.assert_close(comb, expected, rtol=1e-6, atol=1e-7)
    # Two iterations add a row and a column step, still by hand for the first column.
    rows = expected / expected.sum(1, keepdim=True)
    _, comb = coefficients(base, hc_eps=0.0, iterations=2)
    torch.testing.assert_close(comb, rows / rows.sum(0), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("hc_eps", (1e-6, 0.1))
@pytest.mark.parametrize("iterations", (1, 2, 20))
def test_sinkhorn_matches_loops(iterations, hc_eps, draw):
    base = draw.normal(24, scale=3.0)
    _, comb = coefficients(base, hc_eps=hc_eps, iterations=iterations)
    expected = naive_sinkhorn(base[8:].view(4, 4).tolist(), iterations, hc_eps)
    assert_near(comb, expected)


def test_scales_act_on_their_own_part(draw):
    """scale_0 on pre, scale_1 on post, scale_2 on comb: each alone changes only its own result."""
    streams, fn, base = draw.normal(5, 4, 8), draw.normal(24, 32, scale=0.2), draw.normal(24)
    args = draw.normal(8), EPS, EPS, 20
    plain = ops.hc_pre(streams, fn, base, torch.tensor([0.5, 0.6, 0.7]), *args)
    for part in range(3):
        scale = torch.tensor([0.5, 0.6, 0.7])
        scale[part] *= -3
        changed = ops.hc_pre(streams, fn, base, scale, *args)
        same = [torch.equal(a, b) for a, b in zip(plain, changed, strict=True)]
        assert same == [part != 0, part != 1, part != 2]


@pytest.mark.parametrize("spread", (1.0, 5.0, 20.0))
def test_sinkhorn_sums(spread, draw):
    """1000 matrices of logits uniform in +-spread: columns sum to 1, since the last step divides by them. Rows do only
    as far as 20 iterations came, which is printed."""
    logits = draw.uniform(-spread, spread, 1000, 16)
    # The projection divides by the streams' root mean square: a filler makes it 4 spread for every token, and scale_2
    # multiplies by it again, so that comb's logits are these.
    filler = (32 * (4 * spread) ** 2 - logits.square().sum(-1, keepdim=True)).sqrt()
    streams = torch.cat((logits, filler, torch.zeros(1000, 15)), -1).view(1000, 4, 8)
    fn = torch.zeros(24, 32)
    fn[8:, :16] = torch.eye(16)
    scale = torch.tensor([1.0, 1.0, 4 * spread])
    comb = ops.hc_pre(streams, fn, torch.zeros(24), scale, torch.ones(8), 0.0, EPS, 20)[2].double()
    assert_near(comb[0].float(), naive_sinkhorn(logits[0].view(4, 4).tolist(), 20, EPS))
    columns, rows = comb.sum(1), comb.sum(2)
    deviation = (rows - 1).abs().flatten()
    print(
        f"logits +-{spread}: columns off by {(columns - 1).abs().max():.1e}; rows by {deviation.max():.1e} at most, "
        f"by {deviation.mean():.1e} on average, {(deviation > 1e-3).double().mean():.1%} of them by more than 1e-3"
    )
    assert (columns - 1).abs().max() <= 1e-5
    assert (comb >= 0).all() and (comb <= 1 + 1e-5).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extreme_streams(dtype, draw):
    """All-zero streams give the base's coefficients; values of 1e4 and logits of +-1e4 stay finite."""
    base = draw.normal(24)
    args = draw.normal(24, 32), base, torch.ones(3), torch.ones(8), EPS, EPS, 20
    x, post, comb = ops.hc_pre(torch.zeros(1, 4, 8, dtype=dtype), *args)
    assert (x == 0).all()
    expected_post, expected_comb = coefficients(base)
    assert_near(post[0], expected_post)
    assert_near(comb[0], expected_comb)
    large = draw.normal(4, 4, 8, dtype=dtype, scale=1e4)
    for out in ops.hc_pre(large, draw.normal(24, 32, scale=1e4), *args[1:]):
        assert out.isfinite().all()
    out = ops.hc_post(large[:, 0], large, draw.uniform(0, 2, 4, 4), draw.uniform(0, 1, 4, 4, 4))
    assert out.isfinite().all()
    head = ops.hc_head(large, draw.normal(4, 32, scale=1e4), draw.normal(4), torch.ones(1), torch.ones(8), EPS, EPS)
    assert head.isfinite().all()


def test_tokens_are_independent(draw):
    """A token's result does not depend on the batch around it, NaN neighbours included."""
    streams, y = draw.normal(5, 4, 8), draw.normal(5, 8)
    streams[3] = torch.nan
    args = draw.normal(24, 32), draw.normal(24), torch.ones(3), torch.ones(8), EPS, EPS, 20
    together = ops.hc_pre(streams, *args)
    mixed = ops.hc_post(y, streams, *together[1:])
    for t in (0, 1, 2, 4):
        alone = ops.hc_pre(streams[t : t + 1], *args)
        for a, b in zip(together, alone, strict=True):
            assert_near(a[t], b[0])
        assert_near(mixed[t], ops.hc_post(y[t : t + 1], streams[t : t + 1], *alone[1:])[0])


def sites(draw, count, rows=24):
    """fn, base, scale, norm_weight of `count` sublayers, H = 8."""
    return [(draw.normal(rows, 32), draw.normal(rows), draw.normal(3), draw.normal(8)) for _ in range(count)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_hc_mix_chain_matches_transformers(dtype, draw):
    """Two sublayers as transformers' decoder layer writes them: the mixing of the first, the collapse of the second."""
    config = tiny_config(hc_eps=0.01)
    modules = [randomise(hf.DeepseekV4HyperConnection(config), draw) for _ in range(2)]
    norms = [randomise(hf.DeepseekV4RMSNorm(32, EPS), draw) for _ in range(2)]
    weights = [(m.fn.data, m.base.data, m.scale.data, n.weight.data) for m, n in zip(modules, norms, strict=True)]
    embedding, y = draw.normal(9, 32, dtype=dtype, outliers=10.0), draw.normal(9, 32, dtype=dtype)
    streams, _, post, logits = first_mix(embedding, weights[0], 0.01)
    args = *weights[1], EPS, 0.01, config.hc_sinkhorn_iters
    mixed, x, post_after, logits_after = ops.hc_mix(y, streams, post, logits, *args)
    assert mixed.dtype == x.dtype == dtype
    hf_post, hf_comb, _ = modules[0](streams[None].float())
    wanted = hf_post[0][..., None] * y.float()[:, None] + hf_comb[0].transpose(1, 2) @ streams.float()
    assert_near(mixed, wanted.to(dtype))
    wanted_post, wanted_comb, collapsed = modules[1](mixed[None])
    expected = norms[1](collapsed[0].float())
    tolerance = 2**-6 if dtype == torch.bfloat16 else 2e-5
    assert ((x.float() - expected).abs() <= tolerance * (expected.abs() + 0.01)).all()
    assert post_after.dtype == logits_after.dtype == torch.float32
    assert_near(post_after, wanted_post[0])
    assert_near(sinkhorn(logits_after, config.hc_sinkhorn_iters, 0.01), wanted_comb[0])


def first_mix(embedding, weights, hc_eps=EPS):
    """hc_mix as the first sublayer calls it: nothing came before but the embedding."""
    tokens, hidden = embedding.shape
    zeros, post, logits = embedding.new_zeros(tokens, 4, hidden), torch.ones(tokens, 4), torch.zeros(tokens, 4, 4)
    return ops.hc_mix(embedding, zeros, post, logits, *weights, EPS, hc_eps, 20)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_first_mix_spreads_the_embedding(dtype, draw):
    """y = the embedding, post = 1, streams of zeros: all streams have its bits, and the rest is hc_pre of them."""
    (weights,) = sites(draw, 1)
    embedding = draw.normal(6, 8, dtype=dtype, outliers=1e4)
    mixed, x, post, logits = first_mix(embedding, weights)
    assert_same_bits(mixed, embedding[:, None].expand(-1, 4, -1))
    for got, wanted in zip((x, post, sinkhorn(logits, 20, EPS)), ops.hc_pre(mixed, *weights, EPS, EPS, 20), strict=True):
        assert_same_bits(got, wanted)


@pytest.mark.parametrize("y_dtype", DTYPES, ids=str)
def test_a_chain_of_mixes_is_pre_and_post_in_turn(y_dtype, draw):
    """Three sublayers and the head, bf16 streams: the rounded streams are what the next projection sees."""
    weights, (head,) = sites(draw, 3), sites(draw, 1, rows=4)
    y = draw.normal(5, 8, dtype=torch.bfloat16)
    streams, post, logits = y.new_zeros(5, 4, 8), torch.ones(5, 4), draw.normal(5, 4, 4)
    plain = y[:, None].expand(-1, 4, -1)
    for site in weights:
        streams, x, post, logits = ops.hc_mix(y, streams, post, logits, *site, EPS, EPS, 20)
        comb = sinkhorn(logits, 20, EPS)
        plain_x, plain_post, plain_comb = ops.hc_pre(plain, *site, EPS, EPS, 20)
        for got, wanted in zip((streams, x, post, comb), (plain, plain_x, plain_post, plain_comb), strict=True):
            assert_same_bits(got, wanted)
        y = draw.normal(5, 8, dtype=y_dtype)
        plain = ops.hc_post(y, plain, plain_post, plain_comb)
    head = *head[:2], head[2][:1], head[3]
    got = ops.hc_mix_head(y, streams, post, logits, *head, EPS, EPS, 20)
    assert_same_bits(got, ops.hc_head(plain, *head, EPS, EPS))
    assert_near(plain.float(), (post[..., None] * y.float()[:, None] + comb.mT @ streams.float()), torch.bfloat16)

"""hc_mix, hc_mix_head, hc_pre, hc_post and hc_head on CUDA against their references in float32."""

import pytest
import torch

from dsv4.ops.hyper_connection import collapse, sinkhorn
from tests.gpu import small_kernels
from tests.gpu.small_kernels import assert_close, assert_replay_equals, call, poison, reference
from tests.ops.cases import assert_same_bits

pytestmark = small_kernels.needs_gpu
BF16 = torch.bfloat16
# One rounding to bf16 (2^-8 of the value at most), and the collapsed value's own before its norm.
ROUNDED, TWICE, EXACT = (2**-7, 1e-5), (2**-6, 1e-4), (1e-4, 1e-5)

HIDDEN = (16, 256, 1000, 4096, 7168)
TOKENS = (*range(1, 10), 16, 17, 32, 33, 64, 70, 130)  # every number of tokens a cluster, and past one launch


def weights(draw, hidden, head=False, n=4):
    """fn, base, scale, norm_weight, eps, hc_eps, and the iterations unless it is the head."""
    rows = n if head else 2 * n + n * n
    fn = draw.normal(rows, n * hidden, scale=(n * hidden) ** -0.5, outliers=10.0)
    floats = draw.normal(rows), draw.normal(1 if head else 3) + 1.0, draw.normal(hidden) + 1.0
    return fn, *floats, 1e-6, 1e-6, *(() if head else (20,))


def streams_of(draw, tokens, hidden, n=4):
    return draw.normal(tokens, n, hidden, dtype=BF16, outliers=30.0)


def before(draw, tokens, hidden, y_dtype=BF16, n=4):
    """y, streams, post, logits as a sublayer leaves them; the logits' combs converge soon, late or not at all."""
    y, spread = draw.normal(tokens, hidden, dtype=y_dtype, outliers=30.0), draw.uniform(0, 6, tokens, 1, 1)
    return y, streams_of(draw, tokens, hidden, n), draw.uniform(0, 2, tokens, n), draw.normal(tokens, n, n) * spread


def collapsed(mixed, rest):
    """x, post and logits of the streams that the kernel rounded, in float32."""
    return collapse(mixed.float(), *small_kernels.to_device(rest)[:-1])


@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("tokens", TOKENS)
def test_hc_mix(tokens, hidden, draw):
    """The streams against the reference; the rest against the reference of the streams that the kernel rounded."""
    y_dtype = (BF16, torch.float32)[tokens % 2]
    args, rest = before(draw, tokens, hidden, y_dtype), weights(draw, hidden)
    wanted = reference("hc_mix", *args, *rest)[0]
    poison(wanted.to(BF16), wanted[:, 0].to(BF16), wanted[:, :, 0], wanted[:, :, :4])
    mixed, x, post, logits = call("hc_mix", *args, *rest)
    assert mixed.dtype == x.dtype == BF16 and post.dtype == logits.dtype == torch.float32
    assert_close(mixed, wanted, *ROUNDED)
    for result, value, tolerance in zip((x, post, logits), collapsed(mixed, rest), (TWICE, EXACT, EXACT), strict=True):
        assert_close(result, value, *tolerance)
    head = weights(draw, hidden, head=True)
    poison(wanted[:, 0].to(BF16))
    assert_close(call("hc_mix_head", *args, *head, 20), reference("hc_head", mixed, *head), *TWICE)


@pytest.mark.parametrize("tokens", (1, 6, 32, 140))
def test_the_first_mix_spreads_the_embedding(tokens, draw):
    embedding, rest = streams_of(draw, tokens, 4096)[:, 0].contiguous(), weights(draw, 4096)
    nothing = torch.zeros(tokens, 4, 4096, dtype=BF16), torch.ones(tokens, 4), draw.normal(tokens, 4, 4)
    mixed, *results = call("hc_mix", embedding, *nothing, *rest)
    assert_same_bits(mixed.cpu(), embedding[:, None].expand(-1, 4, -1))
    for result, value, tolerance in zip(results, collapsed(mixed, rest), (TWICE, EXACT, EXACT), strict=True):
        assert_close(result, value, *tolerance)


@pytest.mark.parametrize("spread", (0.0, 0.3, 3.0, 10.0))
@pytest.mark.parametrize("tokens", (1, 8, 40, 200))
def test_combs_of_logits(tokens, spread, draw):
    """Logits that converge at once, soon and not at all; 1, 2 and 20 iterations; hc_eps from none to large."""
    y, streams, post, logits = before(draw, tokens, 256)
    for iterations in (1, 2, 20):
        for hc_eps in (1e-6, 0.1):
            args = y, streams, post * 0, logits * spread, *weights(draw, 256)[:-2], hc_eps, iterations
            assert_close(call("hc_mix", *args)[0], reference("hc_mix", *args)[0], *ROUNDED)


@pytest.mark.parametrize("n", (1, 2, 3))
@pytest.mark.parametrize("tokens", (1, 2, 3, 5))
def test_other_numbers_of_streams(tokens, n, draw):
    args, rest = before(draw, tokens, 256, n=n), weights(draw, 256, n=n)
    mixed, *results = call("hc_mix", *args, *rest)
    assert_close(mixed, reference("hc_mix", *args, *rest)[0], *ROUNDED)
    for result, value, tolerance in zip(results, collapsed(mixed, rest), (TWICE, EXACT, EXACT), strict=True):
        assert_close(result, value, *tolerance)


@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("tokens", (1, 5, 130))
def test_hc_pre_and_hc_head(tokens, hidden, draw):
    streams, rest, head = streams_of(draw, tokens, hidden), weights(draw, hidden), weights(draw, hidden, head=True)
    expected = reference("hc_pre", streams, *rest)
    poison(*expected)
    for result, value, tolerance in zip(call("hc_pre", streams, *rest), expected, (TWICE, EXACT, EXACT), strict=True):
        assert_close(result, value, *tolerance)
    assert_close(call("hc_head", streams, *head), reference("hc_head", streams, *head), *TWICE)


@pytest.mark.parametrize("dtype", (BF16, torch.float32), ids=str)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_hc_post(hidden, dtype, draw):
    *args, logits = before(draw, 5, hidden, dtype)
    args.append(sinkhorn(logits, 20, 1e-6))
    expected = reference("hc_post", *args)
    poison(expected.to(BF16))
    assert_close(call("hc_post", *args), expected, *ROUNDED)


def test_large_batch(draw):
    args, rest = before(draw, 1200, 256), weights(draw, 256)
    mixed, *results = call("hc_mix", *args, *rest)
    assert_close(mixed, reference("hc_mix", *args, *rest)[0], *ROUNDED)
    for result, value in zip(results, collapsed(mixed, rest), strict=True):
        assert_close(result, value, *TWICE)


@pytest.mark.parametrize("tokens", (3, 24))
def test_extreme_logits(tokens, draw):
    """Logits of hundreds: sigmoid and softmax saturate and stay finite."""
    streams, (fn, base, *rest) = streams_of(draw, tokens, 4096), weights(draw, 4096)
    args = streams, fn * 300, base * 100, *rest
    for result, expected in zip(call("hc_pre", *args), reference("hc_pre", *args), strict=True):
        assert result.isfinite().all()
        assert_close(result, expected, 2**-6, 1e-3)


@pytest.mark.parametrize("spread", (0.0, 0.3, 3.0, 10.0))
def test_sinkhorn_steps(spread, draw):
    """comb of logits that converge at once, soon and not at all; 1, 2 and 20 iterations; hc_eps from none to large."""
    streams, (fn, base, _, norm, eps, *_) = streams_of(draw, 40, 256), weights(draw, 256)
    for iterations in (1, 2, 20):
        for hc_eps in (1e-6, 0.1):
            args = streams, fn, base, torch.tensor([1.0, 1.0, spread]), norm, eps, hc_eps, iterations
            for result, expected in zip(call("hc_pre", *args)[1:], reference("hc_pre", *args)[1:], strict=True):
                assert_close(result, expected, *EXACT)


@pytest.mark.parametrize("tokens", (4, 8, 16, 32))
def test_rows_are_independent(tokens, draw):
    """A row of NaN (an idle slot's garbage) changes no other row, and a row's bits do not depend on its neighbours."""
    args, rest = before(draw, tokens, 4096), weights(draw, 4096)
    expected = call("hc_mix", *args, *rest)
    for tensor in args:
        tensor[3] = torch.nan
    others = [t for t in range(tokens) if t != 3]
    for result, wanted in zip(call("hc_mix", *args, *rest), expected, strict=True):
        assert_same_bits(result[others], wanted[others])


def chain(tokens, draw):
    """As the layers make it: each mix takes what the one before returned. Gives streams, x, post, logits of each, and x."""
    y, *first = small_kernels.to_device(before(draw, tokens, 4096))
    sites = [small_kernels.to_device(weights(draw, 4096)) for _ in range(6)]
    head = small_kernels.to_device(weights(draw, 4096, head=True))

    def run():
        streams, post, logits = first
        x, results = y, []
        for site in sites:
            streams, x, post, logits = call("hc_mix", x, streams, post, logits, *site)
            results += [streams, x, post, logits]
        return *results, call("hc_mix_head", x, streams, post, logits, *head, 20)

    return run


@pytest.mark.parametrize("tokens", (1, 5, 32))
def test_replay_equals_eager(tokens, draw):
    assert_replay_equals(chain(tokens, draw))


@pytest.mark.parametrize("change", (lambda t: t.fill_(torch.nan), lambda t: t[-1].add_(1.0)), ids=("all", "last token"))
@pytest.mark.parametrize("tokens", (1, 5, 32))
def test_logits_that_change_until_the_wait(tokens, change, draw):
    """Launches one right after another, each of logits that the one before writes: what was made of them as they were when
    a block began, NaN, or right but for one token, is made anew."""

    def spoil(results):
        for logits in results[3::4]:
            change(logits)

    assert_replay_equals(chain(tokens, draw), spoil=spoil)


def test_unsupported_inputs_are_named(draw):
    half = draw.normal(2, 4, 64, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"hc_post: streams must be torch.bfloat16, found torch.float16"):
        call("hc_post", half[:, 0], half, draw.normal(2, 4), draw.normal(2, 4, 4))
    args = before(draw, 2, 64)
    with pytest.raises(ValueError, match=r"hc_mix: fn must be \(24, 256\), found \(24, 128\)"):
        call("hc_mix", *args, *weights(draw, 32)[:3], torch.ones(64), 1e-6, 1e-6, 20)

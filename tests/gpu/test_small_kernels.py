"""hc_pre, hc_post, hc_head, q_rope, kv_rope and kv_write on CUDA against their references in float32."""

import pytest
import torch

from tests.gpu import small_kernels
from tests.gpu.small_kernels import assert_close, assert_replay_equals, call, poison, reference
from tests.ops.cases import GARBAGE_POSITIONS, assert_same_bits, make_batch

pytestmark = small_kernels.needs_gpu
BF16 = torch.bfloat16
# One rounding to bf16 (2^-8 of the value at most), and the collapsed value's own before its norm.
ROUNDED, TWICE = (2**-7, 1e-5), (2**-6, 1e-4)

HIDDEN = (16, 256, 1000, 4096, 7168)
TOKENS = (1, 2, 3, 5, 8, 17, 32, 70)


def hc_inputs(draw, tokens, hidden, rows, n=4):
    streams = draw.normal(tokens, n, hidden, dtype=BF16, outliers=30.0)
    fn = draw.normal(rows, n * hidden, scale=(n * hidden) ** -0.5, outliers=10.0)
    scale = draw.normal(3 if rows > n else 1) + 1.0
    return streams, fn, draw.normal(rows), scale, draw.normal(hidden) + 1.0, 1e-6, 1e-6


@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("tokens", TOKENS)
def test_hc_pre(tokens, hidden, draw):
    args = *hc_inputs(draw, tokens, hidden, 24), 20
    expected = reference("hc_pre", *args)
    poison(*expected)
    x, post, comb = call("hc_pre", *args)
    assert x.dtype == BF16
    assert_close(x, expected[0], *TWICE)
    assert_close(post, expected[1], 1e-4, 1e-5)
    assert_close(comb, expected[2], 1e-4, 1e-5)


def test_hc_pre_large_batch(draw):
    """Past the largest number of token groups that share their columns between blocks."""
    args = *hc_inputs(draw, 1200, 256, 24), 20
    for result, expected in zip(call("hc_pre", *args), reference("hc_pre", *args), strict=True):
        assert_close(result, expected, *TWICE)


def test_hc_pre_extreme_logits(draw):
    """Logits of hundreds: sigmoid and softmax saturate and stay finite."""
    streams, fn, base, scale, norm, *rest = hc_inputs(draw, 3, 256, 24)
    args = streams, fn * 300, base * 100, scale, norm, *rest, 20
    for result, expected in zip(call("hc_pre", *args), reference("hc_pre", *args), strict=True):
        assert result.isfinite().all()
        assert_close(result, expected, 2**-6, 1e-3)


def test_hc_rows_are_independent(draw):
    """A row of NaN (an idle slot's garbage) changes no other row, and a row's bits do not depend on its neighbours."""
    args = *hc_inputs(draw, 8, 512, 24), 20
    expected = call("hc_pre", *args)
    args[0][3] = torch.nan
    for result, wanted in zip(call("hc_pre", *args), expected, strict=True):
        others = [0, 1, 2, 4, 5, 6, 7]
        assert_same_bits(result[others], wanted[others])


@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("tokens", TOKENS)
def test_hc_head(tokens, hidden, draw):
    args = hc_inputs(draw, tokens, hidden, 4)
    expected = reference("hc_head", *args)
    poison(expected)
    assert_close(call("hc_head", *args), expected, *TWICE)


@pytest.mark.parametrize("dtype", (BF16, torch.float32), ids=str)
@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("tokens", (1, 5, 32))
def test_hc_post(tokens, hidden, dtype, draw):
    y, streams = draw.normal(tokens, hidden, dtype=dtype, outliers=30.0), draw.normal(tokens, 4, hidden, dtype=BF16)
    args = y, streams, draw.normal(tokens, 4), draw.normal(tokens, 4, 4)
    expected = reference("hc_post", *args)
    poison(expected.to(BF16))
    assert_close(call("hc_post", *args), expected, *ROUNDED)


POSITIONS = (0, 1, 127, 4097, 131_071, 999_999, 1_048_575)


@pytest.mark.parametrize(("heads", "dim", "rope"), ((64, 512, 64), (128, 512, 64), (64, 128, 64), (3, 48, 16), (5, 8, 8)))
@pytest.mark.parametrize("norm", (True, False))
def test_q_rope(heads, dim, rope, norm, draw):
    q, positions = draw.normal(7, heads, dim, dtype=BF16, outliers=30.0), torch.tensor(POSITIONS)
    args = q, draw.inv_freq(rope), positions, 1e-6, norm
    expected = reference("q_rope", *args)
    poison(expected.to(BF16))
    assert_close(call("q_rope", *args), expected, *ROUNDED)


@pytest.mark.parametrize(("dim", "rope"), ((512, 64), (64, 16), (24, 8)))
@pytest.mark.parametrize("tokens", (1, 7, 300))
def test_kv_rope(tokens, dim, rope, draw):
    positions = draw.integers(0, 2**20, tokens)
    args = draw.normal(tokens, dim, dtype=BF16, outliers=30.0), draw.normal(dim), draw.inv_freq(rope), positions, 1e-6
    expected = reference("kv_rope", *args)
    poison(expected.to(BF16))
    assert_close(call("kv_rope", *args), expected, *ROUNDED)


SEGMENTS = (
    [(0, 5, 6)],
    [(-1, 0, 1)],
    [(2, 8, 9), (0, 127, 128), (-1, 0, 1), (1, 1_000_000, 1_000_001)],
    [(1, 3, 40), (-1, 0, 2), (0, 0, 11)],
    [(2, 100, 400), (0, 0, 129)],
)


@pytest.mark.parametrize("segments", SEGMENTS, ids=str)
@pytest.mark.parametrize(("window", "dim"), ((128, 512), (8, 24)))
def test_kv_write(segments, window, dim, draw):
    batch = make_batch(segments, GARBAGE_POSITIONS)
    kv = draw.normal(len(batch.slots), dim, dtype=BF16)
    kv[batch.slots < 0] = torch.nan
    before = draw.normal(3, window, dim, dtype=BF16).to(small_kernels.DEVICE)
    ring, expected = before.clone(), before.clone()
    call("kv_write", kv, batch.positions, batch.slots, ring)
    reference("kv_write", kv.float(), batch.positions, batch.slots, wide := expected.float())
    assert_same_bits(ring, wide.to(BF16))


def test_replay_equals_eager(draw):
    pre = small_kernels.to_device((*hc_inputs(draw, 5, 4096, 24), 20))
    head = small_kernels.to_device(hc_inputs(draw, 5, 4096, 4))
    q, angles = draw.normal(5, 64, 512, dtype=BF16).cuda(), draw.inv_freq(64).cuda()
    positions, slots = torch.arange(5, device="cuda"), torch.arange(5, device="cuda")
    kept = draw.normal(5, 128, 512, dtype=BF16).cuda()
    ring = kept.clone()

    def run():
        x, post, comb = call("hc_pre", *pre)
        streams = call("hc_post", x, pre[0], post, comb)
        kv = call("kv_rope", q[:, 0].contiguous(), angles.new_ones(512), angles, positions, 1e-6)
        call("kv_write", kv, positions, slots, ring)
        turned = call("q_rope", q, angles, positions, 1e-6, True)
        return x, post, comb, streams, call("hc_head", *head), kv, turned, ring

    assert_replay_equals(run, lambda: ring.copy_(kept))


def test_unsupported_inputs_are_named(draw):
    half = draw.normal(2, 4, 64, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"hc_post: streams must be torch.bfloat16, found torch.float16"):
        call("hc_post", half[:, 0], half, draw.normal(2, 4), draw.normal(2, 4, 4))
    with pytest.raises(ValueError, match="q_rope: a head must be a multiple of 8"):
        call("q_rope", draw.normal(2, 4, 12, dtype=BF16), draw.inv_freq(8), torch.arange(2), 1e-6, True)

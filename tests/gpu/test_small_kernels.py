"""q_rope, kv_rope and kv_write on CUDA against their references in float32."""

import pytest
import torch

from dsv4.ops.row_formats import row_bytes, simulate_rows
from tests.gpu import small_kernels
from tests.gpu.small_kernels import assert_close, assert_replay_equals, call, poison, reference
from tests.ops.cases import GARBAGE_POSITIONS, assert_same_bits, make_batch

pytestmark = small_kernels.needs_gpu
BF16 = torch.bfloat16
ROUNDED = 2**-7, 1e-5  # one rounding to bf16: 2^-8 of the value at most

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


@pytest.mark.parametrize("segments", SEGMENTS, ids=str)
@pytest.mark.parametrize(("window", "dim", "rope"), ((128, 512, 64), (8, 72, 8)))
def test_kv_write_compact(segments, window, dim, rope, draw):
    """Rows of all sizes, among them zeros, and rows that went through the format before; other bytes stay."""
    batch = make_batch(segments, GARBAGE_POSITIONS)
    kv = draw.normal(len(batch.slots), dim, outliers=50.0) * 10.0 ** draw.integers(-8, 9, len(batch.slots), 1)
    kv = torch.where(torch.arange(len(batch.slots))[:, None] % 5 == 4, 0, kv).to(BF16)
    kv[::3] = simulate_rows(kv[::3], rope)
    kv[batch.slots < 0] = torch.nan
    before = draw.integers(0, 256, 3, window, row_bytes(dim, rope), dtype=torch.uint8).to(small_kernels.DEVICE)
    ring, expected = before.clone(), before.clone()
    call("kv_write", kv, batch.positions, batch.slots, ring)
    reference("kv_write", kv, batch.positions, batch.slots, expected)
    assert_same_bits(ring, expected)


def test_replay_equals_eager(draw):
    q, angles = draw.normal(5, 64, 512, dtype=BF16).cuda(), draw.inv_freq(64).cuda()
    positions, slots = torch.arange(5, device="cuda"), torch.arange(5, device="cuda")
    kept = draw.normal(5, 128, 512, dtype=BF16).cuda()
    ring = kept.clone()

    def run():
        kv = call("kv_rope", q[:, 0].contiguous(), angles.new_ones(512), angles, positions, 1e-6)
        call("kv_write", kv, positions, slots, ring)
        turned = call("q_rope", q, angles, positions, 1e-6, True)
        return kv, turned, ring

    assert_replay_equals(run, lambda: ring.copy_(kept))


def test_unsupported_inputs_are_named(draw):
    with pytest.raises(ValueError, match="q_rope: a head must be a multiple of 8"):
        call("q_rope", draw.normal(2, 4, 12, dtype=BF16), draw.inv_freq(8), torch.arange(2), 1e-6, True)

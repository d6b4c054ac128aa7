"""NVFP4 against tables, values by hand and loops; against torchao where it is installed."""

import pytest
import torch

from dsv4 import ops
from dsv4.ops.nvfp4 import (
    decode_e2m1,
    dequantize_nvfp4,
    encode_e2m1,
    pack_nibbles,
    quantize_nvfp4,
    unpack_nibbles,
)
from tests.ops.cases import assert_near

DTYPES = (torch.float32, torch.bfloat16)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # codes 0..7; 8..15 are the negatives


def naive_dequantize(packed, scale, scale_2):
    """float64 [N, K], element by element; even k in the low nibble."""
    out = torch.zeros(packed.shape[0], packed.shape[1] * 2, dtype=torch.float64)
    scales, codes = scale.float().tolist(), packed.tolist()
    for n in range(out.shape[0]):
        for k in range(out.shape[1]):
            code = (codes[n][k // 2] >> 4) if k % 2 else (codes[n][k // 2] & 15)
            value = E2M1[code & 7] * (-1 if code & 8 else 1)
            out[n, k] = value * scales[n][k // 16] * float(scale_2)
    return out


def test_e2m1_table():
    decoded = decode_e2m1(torch.arange(16, dtype=torch.uint8))
    assert decoded.dtype == torch.float32
    assert decoded.tolist() == [*E2M1, *(-v for v in E2M1)]
    assert torch.signbit(decoded)[8:].all()  # code 8 is -0.0
    assert encode_e2m1(decoded).tolist() == list(range(16))


def test_encode_rounds_to_nearest_even():
    """Every multiple of 1/64 up to 8, so every midpoint is met exactly; nearest by search, ties to the even code."""
    values = torch.arange(-512, 513) / 64
    for value, code in zip(values.tolist(), encode_e2m1(values).tolist(), strict=True):
        distance = [abs(abs(value) - v) for v in E2M1]
        nearest = [c for c in range(8) if distance[c] == min(distance)]
        expected = nearest[0] if len(nearest) == 1 else next(c for c in nearest if c % 2 == 0)
        assert code & 7 == expected, value
        assert code >> 3 == (value < 0)


def test_encode_just_beside_the_midpoints():
    """One float32 ulp above or below a midpoint is no tie."""
    for low, high in zip(range(7), range(1, 8), strict=True):
        middle = torch.tensor((E2M1[low] + E2M1[high]) / 2)
        below, above = torch.nextafter(middle, torch.tensor(0.0)), torch.nextafter(middle, torch.tensor(9.0))
        assert encode_e2m1(torch.stack((below, above))).tolist() == [low, high]


def test_encode_extremes():
    values = torch.tensor([1e4, -1e4, torch.inf, -torch.inf, -0.0, 1e-30])
    assert encode_e2m1(values).tolist() == [7, 15, 7, 15, 8, 0]


def test_nibbles():
    """Low nibble first, in every position."""
    packed = torch.tensor([[0x21, 0xF8]], dtype=torch.uint8)
    assert unpack_nibbles(packed).tolist() == [[1, 2, 8, 15]]
    every = torch.arange(256, dtype=torch.uint8)[None]
    assert torch.equal(pack_nibbles(unpack_nibbles(every)), every)


def test_known_numbers():
    """Bytes 0x21 0xF8: codes 1, 2, 8, 15 = 0.5, 1, -0, -6; E4M3 scales 2 and 0.5; scale_2 = 0.25."""
    packed = torch.zeros(1, 16, dtype=torch.uint8)
    packed[0, :2] = torch.tensor([0x21, 0xF8])
    packed[0, 8] = 0x75  # codes 5, 7 = 3, 6, in the second group
    scale = torch.tensor([[2.0, 0.5]]).to(torch.float8_e4m3fn)
    expected = torch.zeros(1, 32)
    expected[0, :4] = torch.tensor([0.25, 0.5, -0.0, -3.0])
    expected[0, 16:18] = torch.tensor([0.375, 0.75])
    assert torch.equal(dequantize_nvfp4(packed, scale, torch.tensor(0.25)), expected)
    y = ops.linear_nvfp4(torch.ones(1, 32), packed, scale, torch.tensor(0.25))
    assert y.item() == 0.25 + 0.5 - 3.0 + 0.375 + 0.75


def test_quantize_known_numbers():
    """Largest value 2688 = 6 * 448: scale_2 is 1, its group's scale 448. A group whose largest value is 12 gets scale 2
    and holds 1, 2, 3, 4, 6, 8, 12 exactly."""
    weight = torch.zeros(2, 32)
    weight[0, 3] = -2688.0
    weight[1, 16:23] = torch.tensor([1.0, 2, 3, 4, 6, 8, 12])
    packed, scale, scale_2 = quantize_nvfp4(weight)
    assert scale_2.item() == 1.0 and scale_2.dtype == torch.float32 and scale_2.shape == ()
    assert scale.float().tolist() == [[448.0, 0.0], [0.0, 2.0]] and scale.dtype == torch.float8_e4m3fn
    assert packed.dtype == torch.uint8 and packed[0, 1].item() == 0xF0
    assert packed[1, 8:12].tolist() == [0x21, 0x43, 0x65, 0x07]
    assert torch.equal(dequantize_nvfp4(packed, scale, scale_2), weight)


def test_quantize_error_is_bounded(draw):
    """Each value within half a step of its place in the E2M1 grid, the group's scale being off by 2^-4 at most."""
    weight = draw.normal(40, 64, scale=0.02, outliers=50.0)
    packed, scale, scale_2 = quantize_nvfp4(weight)
    assert torch.equal(scale_2, weight.abs().max() / 2688)
    restored = dequantize_nvfp4(packed, scale, scale_2)
    amax = weight.unflatten(-1, (-1, 16)).abs().amax(-1, keepdim=True)
    error = (restored - weight).abs().unflatten(-1, (-1, 16))
    # The widest gap is 4..6, half of it 1 = amax / 6; a scale rounded down by 2^-4 also saturates by 6 * 2^-4 steps.
    # Scales below 2^-6 are subnormal E4M3 with steps of 2^-9: one half of that times 6.
    assert (error <= amax / 6 * (1 + 2**-4) + 6 * 2**-10 * scale_2).all()


def test_quantize_is_stable(draw):
    """Dequantised weights quantise to themselves, with the same scale_2."""
    first = quantize_nvfp4(draw.normal(20, 48))
    weight = dequantize_nvfp4(*first)
    again = quantize_nvfp4(weight, first[2])
    assert torch.equal(dequantize_nvfp4(*again), weight)


def test_quantize_edges(draw):
    """All zeros; a scale_2 that is too small saturates instead of becoming NaN; K must divide by 16."""
    packed, scale, scale_2 = quantize_nvfp4(torch.zeros(2, 16))
    assert scale_2.item() == 1.0 and (dequantize_nvfp4(packed, scale, scale_2) == 0).all()
    weight = draw.normal(4, 32, scale=100.0)
    packed, scale, scale_2 = quantize_nvfp4(weight, torch.tensor(1e-3))
    restored = dequantize_nvfp4(packed, scale, scale_2)
    assert restored.isfinite().all() and scale.float().isfinite().all()
    assert restored.abs().max().item() == pytest.approx(2.688)
    with pytest.raises(ValueError, match="divisible by 16"):
        quantize_nvfp4(torch.zeros(2, 24))


def test_dequantize_matches_loops(draw):
    packed = draw.integers(0, 256, 6, 24, dtype=torch.uint8)
    scale = draw.uniform(0.01, 448, 6, 3).to(torch.float8_e4m3fn)
    scale_2 = torch.tensor(0.0123)
    actual = dequantize_nvfp4(packed, scale, scale_2)
    torch.testing.assert_close(actual.double(), naive_dequantize(packed, scale, scale_2), rtol=2**-22, atol=0)
    assert torch.equal(dequantize_nvfp4(packed, scale, scale_2, torch.bfloat16), actual.bfloat16())


# One token and several, one and two batch dimensions.
@pytest.mark.parametrize("batch", ((1,), (7,), (2, 3)), ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_matches_float64(batch, dtype, draw):
    packed, scale, scale_2 = quantize_nvfp4(draw.normal(20, 64, outliers=100.0))
    x = draw.normal(*batch, 64, dtype=dtype, outliers=100.0)
    actual = ops.linear_nvfp4(x, packed, scale, scale_2)
    assert actual.dtype == dtype and actual.shape == (*batch, 20)
    assert_near(actual, x.double() @ naive_dequantize(packed, scale, scale_2).T)


def test_linear_with_large_activations(draw):
    """Weight-only: activations are not quantised, so 1e4 beside 1e-3 loses nothing."""
    packed, scale, scale_2 = quantize_nvfp4(torch.eye(16))
    x = torch.full((1, 16), 1e-3)
    x[0, 5] = 1e4
    y = ops.linear_nvfp4(x, packed, scale, scale_2)
    assert_near(y / x, torch.ones(1, 16))
    assert ops.linear_nvfp4(draw.normal(2, 16, scale=1e4), packed, scale, scale_2).isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_groups_norm_and_row_scales(dtype, draw):
    """Group by group what one product gives; RMSNorm comes first and is rounded; scale_2 may differ from row to row."""
    packed, scale, _ = quantize_nvfp4(draw.normal(24, 32))
    scale_2, norm = draw.uniform(0.5, 2.0, 24), draw.normal(32)
    x = draw.normal(5, 3, 32, dtype=dtype, outliers=20.0)[:, :2]
    normed = (x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6) * norm.double()).to(dtype)
    rows = [naive_dequantize(packed[n : n + 1], scale[n : n + 1], scale_2[n]) for n in range(24)]
    low, high = torch.cat(rows).chunk(2)
    expected = torch.cat((normed[:, 0].double() @ low.T, normed[:, 1].double() @ high.T), -1)
    actual = ops.linear_nvfp4(x, packed, scale, scale_2, None, 2, norm, 1e-6, True)
    if dtype == torch.float32:
        assert_near(actual, expected)
    else:  # a value that the two norms round to different sides moves a sum by 2^-8 of one product
        torch.testing.assert_close(actual.double(), expected, rtol=2**-7, atol=2**-7 * expected.abs().max().item())


def test_float32_result_is_not_rounded(draw):
    """A bf16 x gives the float32 sums themselves, which rounded are the bf16 result."""
    weight = quantize_nvfp4(draw.normal(20, 64))
    x = draw.normal(5, 64, dtype=torch.bfloat16, outliers=100.0)
    exact = ops.linear_nvfp4(x, *weight, out_fp32=True)
    assert exact.dtype == torch.float32
    assert_near(exact, x.double() @ naive_dequantize(*weight).T)
    assert torch.equal(exact.bfloat16(), ops.linear_nvfp4(x, *weight))


def test_matches_torchao():
    """Same layout and values as torchao's NVFP4 tensor, with the same per-tensor scale. Of known inputs: torchao multiplies
    with reciprocals, and one value in millions rounds the other way."""
    module = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(7)) * 0.02
    per_tensor = module.per_tensor_amax_to_scale(weight.abs().max())
    theirs = module.NVFP4Tensor.to_nvfp4(weight, per_tensor_scale=per_tensor)
    ours = dequantize_nvfp4(*quantize_nvfp4(weight, per_tensor))
    assert torch.equal(ours, theirs.dequantize(torch.float32))
    assert torch.equal(quantize_nvfp4(weight, per_tensor)[0], theirs.qdata.view(torch.uint8))

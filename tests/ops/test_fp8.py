"""FP8 block format against tables, loops and transformers' grouped linear."""

import math

import pytest
import torch

from dsv4 import ops
from dsv4.ops.fp8 import decode_e8m0, dequantize_fp8_block, encode_e8m0, quantize_fp8_block
from tests.ops.cases import assert_near, assert_same_bits
from tests.ops.oracles import hf

DTYPES = (torch.float32, torch.bfloat16)


def e8m0(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8).view(torch.float8_e8m0fnu)


def e4m3_value(byte: int) -> float:
    """One sign, four exponent (bias 7) and three mantissa bits; no infinities, 0x7F and 0xFF are NaN."""
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (math.ldexp(mantissa / 8, -6) if exponent == 0 else math.ldexp(1 + mantissa / 8, exponent - 7))


def naive_dequantize(weight, scale):
    """float64, element by element."""
    rows, columns = weight.shape
    codes = weight.view(torch.uint8).tolist()
    values = [[e4m3_value(codes[n][k]) * float(scale[n // 128, k // 128]) for k in range(columns)] for n in range(rows)]
    return torch.tensor(values, dtype=torch.float64)


def test_e8m0_every_byte():
    """2^(byte - 127) exactly, the subnormal 2^-127 included; 255 is NaN. Also what torch's own conversion says."""
    scale = e8m0(*range(256))
    decoded = decode_e8m0(scale)
    assert decoded.dtype == torch.float32
    assert decoded[:255].tolist() == [2.0 ** (b - 127) for b in range(255)]
    assert decoded[255].isnan()
    assert torch.equal(decoded[:255], scale.float()[:255])
    assert_same_bits(encode_e8m0(decoded[:255]).view(torch.uint8), torch.arange(255, dtype=torch.uint8))


def test_bug_e8m0_byte_copied_as_float():
    """Byte 120 means 2^-7. Copying the byte gives 120.0, converting the value to an integer gives 0. One block.
    https://github.com/vllm-project/vllm/pull/51946 https://github.com/vllm-project/vllm/issues/43416"""
    assert decode_e8m0(e8m0(120)).item() == 2.0**-7
    weight = torch.full((128, 128), 3.0).to(torch.float8_e4m3fn)
    assert (dequantize_fp8_block(weight, e8m0(120)[None]) == 3.0 / 128).all()
    y = ops.linear_fp8_block(torch.ones(1, 128), weight, decode_e8m0(e8m0(120)[None]))
    assert (y == 3.0).all()


# Whole blocks, ragged ones and less than one block; small, because the loop visits every element.
@pytest.mark.parametrize("shape", ((128, 128), (130, 260), (5, 7)), ids=str)
def test_dequantize_matches_loops(shape, draw):
    codes = draw.integers(0, 256, *shape, dtype=torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0  # NaN codes
    weight = codes.view(torch.float8_e4m3fn)
    blocks = [-(-n // 128) for n in shape]
    scale = e8m0(*draw.integers(110, 140, blocks[0] * blocks[1]).tolist()).view(*blocks)
    expected = naive_dequantize(weight, decode_e8m0(scale))
    # E4M3 times a power of two has four mantissa bits: exact in float32, whichever dtype the scale came in.
    assert torch.equal(dequantize_fp8_block(weight, scale).double(), expected)
    assert torch.equal(dequantize_fp8_block(weight, decode_e8m0(scale)).double(), expected)
    assert torch.equal(dequantize_fp8_block(weight, scale, torch.bfloat16).double(), expected)


def test_quantize_picks_the_smallest_power_of_two(draw):
    weight = draw.normal(300, 200, outliers=1e4)
    weight[:128, 128:] = 0.0
    weight[128:256, :128] *= 1e-6
    codes, scale = quantize_fp8_block(weight)
    assert codes.dtype == torch.float8_e4m3fn and scale.dtype == torch.float8_e8m0fnu and scale.shape == (3, 2)
    restored = dequantize_fp8_block(codes, scale)
    for i in range(3):
        for j in range(2):
            block = (slice(i * 128, i * 128 + 128), slice(j * 128, j * 128 + 128))
            amax, step = weight[block].abs().max().item(), decode_e8m0(scale)[i, j].item()
            assert amax <= 448 * step
            if amax > 0:
                assert amax > 448 * step / 2
            # E4M3 keeps 4 significant bits (half an ulp is 2^-4) down to 2^-6, and steps of 2^-9 below.
            error = (restored[block] - weight[block]).abs()
            assert (error <= torch.maximum(weight[block].abs() * 2**-4, torch.tensor(2.0**-10 * step))).all()
    assert (restored[:128, 128:] == 0).all()


def test_quantize_keeps_what_is_representable(draw):
    """Quantising a dequantised weight changes nothing, so repacking does not lose anything."""
    codes, scale = quantize_fp8_block(draw.normal(130, 140, scale=0.02))
    weight = dequantize_fp8_block(codes, scale)
    again, scale_again = quantize_fp8_block(weight)
    assert torch.equal(dequantize_fp8_block(again, scale_again), weight)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch", ((1,), (5,), (2, 3)), ids=str)
def test_linear_matches_float64(batch, dtype, draw):
    weight, scale = quantize_fp8_block(draw.normal(140, 200, outliers=100.0))
    x = draw.normal(*batch, 200, dtype=dtype, outliers=100.0)
    actual = ops.linear_fp8_block(x, weight, decode_e8m0(scale))
    assert actual.dtype == dtype and actual.shape == (*batch, 140)
    assert_near(actual, x.double() @ naive_dequantize(weight, decode_e8m0(scale)).T)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_float32_scales_need_not_be_powers_of_two(dtype, draw):
    """Other repacks store any float32 under weight_scale_inv; the name says inverse and the meaning is a factor."""
    weight, _ = quantize_fp8_block(draw.normal(140, 200))
    scale = draw.uniform(0.001, 3.0, 2, 2)
    x = draw.normal(5, 200, dtype=dtype)
    actual = ops.linear_fp8_block(x, weight, scale)
    assert_near(actual, x.double() @ naive_dequantize(weight, scale).T)


# 64 rows a group: group boundaries inside a scale block; 128: on it. Real models: 1024.
@pytest.mark.parametrize("rows", (64, 128))
def test_groups_match_transformers(rows, draw):
    """wo_a: group g of the input meets rows g*N/G .. of the weight, results side by side."""
    groups, k = 4, 40
    weight, scale = quantize_fp8_block(draw.normal(groups * rows, k))
    module = hf.DeepseekV4GroupedLinear(k, groups * rows, groups)
    module.weight.copy_(naive_dequantize(weight, decode_e8m0(scale)))
    x = draw.normal(5, groups, k)
    actual = ops.linear_fp8_block(x, weight, decode_e8m0(scale), groups)
    assert_near(actual, module(x).flatten(-2))
    assert_near(
        ops.linear_fp8_block(x.bfloat16(), weight, decode_e8m0(scale), groups),
        module(x.bfloat16().float()).flatten(-2),
        torch.bfloat16,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("groups", (1, 2))
def test_norm_matches_transformers(dtype, groups, draw):
    """RMSNorm of the input, rounded to its dtype, then the product; x is a view of wider rows."""
    weight, scale = quantize_fp8_block(draw.normal(160, 136))
    norm = hf.DeepseekV4RMSNorm(136, 1e-6)
    norm.weight.copy_(draw.normal(136))
    x = draw.normal(5, groups + 1, 136, dtype=dtype, outliers=20.0)[:, :groups].squeeze(1)
    normed = norm(x.float()).to(dtype)
    actual = ops.linear_fp8_block(x, weight, decode_e8m0(scale), groups, norm.weight.detach(), 1e-6)
    assert_near(actual, ops.linear_fp8_block(normed, weight, decode_e8m0(scale), groups).double())
    assert not torch.equal(actual, ops.linear_fp8_block(x, weight, decode_e8m0(scale), groups))

"""project against float64 products, and against the ops that it joins."""

import pytest
import torch

from dsv4 import ops
from dsv4.ops.fp8 import decode_e8m0, dequantize_fp8_block, quantize_fp8_block
from dsv4.ops.nvfp4 import dequantize_nvfp4, quantize_nvfp4
from tests.ops.cases import assert_near, assert_same_bits

DTYPES = (torch.float32, torch.bfloat16)


def plain(weight, dtype, draw):
    return (weight.to(dtype), None, None), weight.to(dtype).double()


def fp8(weight, dtype, draw):
    codes, scale = quantize_fp8_block(weight)
    scale = decode_e8m0(scale)
    return (codes, scale, None), dequantize_fp8_block(codes, scale).double()


def nvfp4(weight, dtype, draw):
    """With a scale_2 for each row."""
    codes, scale, _ = quantize_nvfp4(weight)
    scale_2 = draw.uniform(0.5, 2.0, len(weight))
    return (codes, scale, scale_2), dequantize_nvfp4(codes, scale, scale_2[:, None]).double()


PAIRS = pytest.mark.parametrize("forms", [(fp8, plain), (nvfp4, nvfp4), (nvfp4, plain), (plain, fp8)])


def weights(draw, dtype, forms, rows=140, exact_rows=12, k=256):
    """The tensors of both weights, and the values that they stand for in float64."""
    both = draw.normal(rows, k, outliers=100.0), draw.normal(exact_rows, k)
    (first, value), (second, exact_value) = (form(weight, dtype, draw) for form, weight in zip(forms, both, strict=True))
    return (*first, *second), value, exact_value


@PAIRS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch", ((1,), (5,), (2, 3)), ids=str)
def test_matches_float64(batch, dtype, forms, draw):
    tensors, value, exact_value = weights(draw, dtype, forms)
    x = draw.normal(*batch, 256, dtype=dtype, outliers=100.0)
    y, z = ops.project(x, *tensors)
    assert (y.dtype, y.shape) == (dtype, (*batch, 140)) and (z.dtype, z.shape) == (torch.float32, (*batch, 12))
    assert_near(y, x.double() @ value.T)
    assert_near(z, x.double() @ exact_value.T)


def test_is_the_two_ops(draw):
    x = draw.normal(7, 256, dtype=torch.bfloat16)
    tensors, *_ = weights(draw, torch.bfloat16, (fp8, plain))
    y, z = ops.project(x, *tensors)
    assert_same_bits(y, ops.linear_fp8_block(x, *tensors[:2]))
    assert_same_bits(z, ops.linear_fp32(x, tensors[3]))
    tensors, *_ = weights(draw, torch.bfloat16, (nvfp4, nvfp4))
    y, z = ops.project(x, *tensors)
    assert_same_bits(y, ops.linear_nvfp4(x, *tensors[:3]))
    assert_same_bits(z, ops.linear_nvfp4(x, *tensors[3:], out_fp32=True))


def test_the_exact_part_is_not_rounded(draw):
    """1 + 2^-12 needs more mantissa than bf16 has."""
    x = torch.tensor([[1.0, 2.0**-6]], dtype=torch.bfloat16)
    (codes, scale, none), _ = fp8(draw.normal(140, 2), torch.bfloat16, draw)
    assert ops.project(x, codes, scale, none, x)[1].item() == 1 + 2.0**-12

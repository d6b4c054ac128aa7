"""project against float64 products, and against the two ops that it joins."""

import pytest
import torch

from dsv4 import ops
from dsv4.ops.fp8 import decode_e8m0, dequantize_fp8_block, quantize_fp8_block
from tests.ops.cases import assert_near, assert_same_bits

DTYPES = (torch.float32, torch.bfloat16)


def weights(draw, dtype, rows=140, plain_rows=12, k=256):
    codes, scale = quantize_fp8_block(draw.normal(rows, k, outliers=100.0))
    return codes, decode_e8m0(scale), draw.normal(plain_rows, k, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch", ((1,), (5,), (2, 3)), ids=str)
def test_matches_float64(batch, dtype, draw):
    codes, scale, plain = weights(draw, dtype)
    x = draw.normal(*batch, 256, dtype=dtype, outliers=100.0)
    y, z = ops.project(x, codes, scale, plain)
    assert (y.dtype, y.shape) == (dtype, (*batch, 140)) and (z.dtype, z.shape) == (torch.float32, (*batch, 12))
    assert_near(y, x.double() @ dequantize_fp8_block(codes, scale).double().T)
    assert_near(z, x.double() @ plain.double().T)


def test_is_the_two_ops(draw):
    codes, scale, plain = weights(draw, torch.bfloat16)
    x = draw.normal(7, 256, dtype=torch.bfloat16)
    y, z = ops.project(x, codes, scale, plain)
    assert_same_bits(y, ops.linear_fp8_block(x, codes, scale))
    assert_same_bits(z, ops.linear_fp32(x, plain))


def test_the_plain_part_is_not_rounded(draw):
    """1 + 2^-12 needs more mantissa than bf16 has."""
    codes, scale, _ = weights(draw, torch.bfloat16, k=2)
    x = torch.tensor([[1.0, 2.0**-6]], dtype=torch.bfloat16)
    assert ops.project(x, codes, scale, x)[1].item() == 1 + 2.0**-12

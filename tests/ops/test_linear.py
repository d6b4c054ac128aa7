"""linear_fp32 against float64 products."""

import pytest
import torch

from dsv4 import ops
from tests.ops.cases import assert_near

DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("shape", ((1, 16), (7, 33), (2, 3, 48)), ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matches_float64(shape, dtype, draw):
    """The result is float32 for bf16 operands too, and as exact: held to the float32 tolerance."""
    x, weight = draw.normal(*shape, dtype=dtype, outliers=100.0), draw.normal(20, shape[-1], dtype=dtype)
    actual = ops.linear_fp32(x, weight)
    assert actual.dtype == torch.float32 and actual.shape == (*shape[:-1], 20)
    assert_near(actual, x.double() @ weight.double().T)


def test_bf16_operands_are_not_rounded_again():
    """1 + 2^-12 needs more mantissa than bf16 has: a bf16 result, however computed, cannot show it."""
    x = torch.tensor([[1.0, 2.0**-6]], dtype=torch.bfloat16)
    assert ops.linear_fp32(x, x).item() == 1 + 2.0**-12


def test_mixed_dtypes(draw):
    """float32 activations with a weight left in bf16, as the compressor and router call it."""
    x, weight = draw.normal(5, 16), draw.normal(4, 16, dtype=torch.bfloat16)
    assert_near(ops.linear_fp32(x, weight), x.double() @ weight.double().T)


def test_large_values(draw):
    x, weight = draw.normal(4, 64, dtype=torch.bfloat16, scale=1e4), draw.normal(8, 64, dtype=torch.bfloat16, scale=1e4)
    assert_near(ops.linear_fp32(x, weight), x.double() @ weight.double().T)

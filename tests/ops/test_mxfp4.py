"""MXFP4 and its cast to NVFP4: every code under every exponent keeps its value to the bit, or is refused."""

import pytest
import torch
from torch import Tensor

from dsv4.ops.mxfp4 import SPAN, dequantize_mxfp4, mxfp4_to_nvfp4
from dsv4.ops.nvfp4 import dequantize_nvfp4
from tests.ops.cases import assert_same_bits

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
ALL_CODES = torch.arange(16, dtype=torch.uint8) * 17  # 00 11 22 .. ff: each code in both nibbles, 32 codes


def exponents(*rows) -> Tensor:
    return torch.tensor(rows, dtype=torch.uint8).view(torch.float8_e8m0fnu)


def assert_exact(packed: Tensor, scale: Tensor) -> None:
    cast = mxfp4_to_nvfp4(packed, scale)
    assert [part.dtype for part in cast] == [torch.uint8, torch.float8_e4m3fn, torch.float32]
    assert cast[1].shape == (*scale.shape[:-1], 2 * scale.shape[-1]) and cast[2].shape == ()
    assert_same_bits(cast[0], packed.view(torch.uint8))
    assert_same_bits(dequantize_nvfp4(*cast), dequantize_mxfp4(packed, scale))


def test_values_by_hand():
    """Low nibble first: 0x21 is codes 1, 2; 0xf8 is -0, -6. Byte 120 is 2^-7."""
    packed = torch.zeros(1, 16, dtype=torch.uint8)
    packed[0, :2] = torch.tensor([0x21, 0xF8], dtype=torch.uint8)
    values = dequantize_mxfp4(packed.view(torch.int8), exponents([120]))[0]
    assert values[:4].tolist() == [0.5 / 128, 1 / 128, 0.0, -6 / 128] and torch.signbit(values[2])
    assert dequantize_mxfp4(ALL_CODES[None], exponents([127]))[0, ::2].tolist() == [*E2M1, *(-value for value in E2M1)]


def test_scales_by_hand():
    """kmax = 3: scale_2 = 2^-5, and 2^8, 2^0, 2^-9 for exponents 3, -5, -14, each twice."""
    _, scale, scale_2 = mxfp4_to_nvfp4(ALL_CODES.repeat(3)[None], exponents([130, 122, 113]))
    assert scale_2.item() == 2.0**-5
    assert scale.float().tolist() == [[256.0, 256.0, 1.0, 1.0, 2.0**-9, 2.0**-9]]


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_all_codes_under_all_exponents(dtype):
    """Tensors whose exponents all are one, from 2^-127 (a float32 subnormal) to 2^127."""
    for byte in range(255):
        assert_exact(ALL_CODES[None].view(dtype), exponents([byte]))


def test_all_spans_at_all_places():
    """Each largest exponent with everything that E4M3 reaches below it: 0 to 17 binades, all codes under each."""
    for highest in range(255):
        row = range(highest, max(highest - SPAN, 0) - 1, -1)
        assert_exact(ALL_CODES.repeat(len(row))[None], exponents([*row]))


def test_random_tensors(draw):
    for _ in range(20):
        packed = draw.integers(0, 256, 24, 48, dtype=torch.uint8)
        lowest = draw.random.randrange(237)
        assert_exact(packed, exponents(*draw.integers(lowest, lowest + SPAN + 1, 24, 3).tolist()))


def test_one_binade_too_many():
    packed = ALL_CODES.repeat(2)[None]
    with pytest.raises(ValueError, match=r"span 18 binades, 2\^-7 to 2\^11, and NVFP4 holds at most 17"):
        mxfp4_to_nvfp4(packed, exponents([138, 120]))


def test_groups_of_zeros_do_not_count():
    """A group of zeros, of either sign, is exact under any scale, and some encoders give it the smallest one."""
    zeros = torch.tensor([0x00, 0x80, 0x08, 0x88], dtype=torch.uint8).repeat(4)
    assert_exact(torch.cat((ALL_CODES, zeros, ALL_CODES))[None], exponents([130, 0, 113]))
    assert_exact(torch.cat((zeros, ALL_CODES))[None], exponents([254, 0]))
    assert_exact(torch.cat((zeros, zeros))[None], exponents([254, 0]))


@pytest.mark.parametrize("codes", [ALL_CODES, torch.zeros(16, dtype=torch.uint8)])
def test_byte_255_is_refused(codes):
    with pytest.raises(ValueError, match=r"1 of 2 scales are NaN \(byte 255\)"):
        mxfp4_to_nvfp4(torch.cat((codes, codes))[None], exponents([120, 255]))


def test_without_data_shapes_alone():
    packed = torch.empty(8, 32, dtype=torch.int8, device="meta")
    scale = torch.empty(8, 2, dtype=torch.float8_e8m0fnu, device="meta")
    weight, scale, scale_2 = mxfp4_to_nvfp4(packed, scale)
    assert (weight.shape, weight.dtype) == ((8, 32), torch.uint8)
    assert (scale.shape, scale.dtype) == ((8, 4), torch.float8_e4m3fn)
    assert (scale_2.shape, scale_2.dtype) == ((), torch.float32)


def test_no_rows():
    packed, scale = torch.empty(0, 32, dtype=torch.int8), torch.empty(0, 2, dtype=torch.uint8)
    assert [part.shape for part in mxfp4_to_nvfp4(packed, scale.view(torch.float8_e8m0fnu))] == [(0, 32), (0, 4), ()]

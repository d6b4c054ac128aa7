"""quantize_nvfp4 against a search through all codes and scales, values by hand, and torchao where it is installed."""

import pytest
import torch

from dsv4 import ops
from dsv4.ops.nvfp4 import dequantize_nvfp4, quantize_nvfp4, through_nvfp4, unpack_nibbles
from tests.ops.cases import assert_near, assert_same_bits

DTYPES = (torch.float32, torch.bfloat16)
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()  # all that are finite, from 0 upwards


def assert_nearest(chosen: torch.Tensor, value: torch.Tensor, choices: torch.Tensor) -> None:
    """No other choice is nearer by more than float32's rounding of the value."""
    best = (value.unsqueeze(-1) - choices).abs().amin(-1)
    assert ((chosen - value).abs() <= best + 2**-20 * value.abs()).all()


@pytest.mark.parametrize("shape", ((1, 16), (7, 64), (2, 3, 48)), ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_choice_is_the_nearest(shape, dtype, draw):
    x = draw.normal(*shape, dtype=dtype, outliers=50.0)
    packed, scale, scale_2 = ops.quantize_nvfp4(x)
    assert packed.dtype == torch.uint8 and packed.shape == (*shape[:-1], shape[-1] // 2)
    assert scale.dtype == torch.float8_e4m3fn and scale.shape == (*shape[:-1], shape[-1] // 16)
    assert scale_2.dtype == torch.float32 and scale_2.shape == (*shape[:-1], 1)
    value = x.double()
    torch.testing.assert_close(scale_2.double(), value.abs().amax(-1, keepdim=True) / 2688, rtol=1e-6, atol=0)
    groups = value.unflatten(-1, (-1, 16))
    assert_nearest(scale.double(), groups.abs().amax(-1) / 6 / scale_2.double(), E4M3)
    step = (scale.double() * scale_2.double()).unsqueeze(-1)
    codes = unpack_nibbles(packed).unflatten(-1, (-1, 16))
    assert_nearest(E2M1[(codes & 7).long()], (groups / step).abs().nan_to_num(0.0).clamp(max=6), E2M1)
    assert ((codes >> 3) == torch.signbit(groups)).all()


def test_known_numbers():
    """Largest value 2688 in the first row: global scale 1. The second row is 1/4096 of it: the same codes and scales."""
    x = torch.zeros(2, 32)
    x[0, 3], x[0, 16:23] = -2688.0, torch.tensor([1.0, 2, 3, 4, 6, 8, 12])
    x[1] = x[0] / 4096
    packed, scale, scale_2 = ops.quantize_nvfp4(x)
    assert scale_2.tolist() == [[1.0], [2.0**-12]]
    assert scale.float().tolist() == [[448.0, 2.0]] * 2
    assert packed[0].equal(packed[1]) and packed[0, 1] == 0xF0 and packed[0, 8:12].tolist() == [0x21, 0x43, 0x65, 0x07]
    assert through_nvfp4(x).equal(x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_depends_on_no_other(dtype, draw):
    """Neither on a larger one nor on NaN and infinities in rows that nobody reads."""
    x = draw.normal(6, 64, dtype=dtype)
    alone = ops.quantize_nvfp4(x[2:3])
    x[0] *= 1e4
    x[1, 5], x[3, 9], x[4] = torch.nan, torch.inf, 0.0
    together = ops.quantize_nvfp4(x)
    for part, whole in zip(alone, together, strict=True):
        assert_same_bits(part, whole[2:3])
    assert through_nvfp4(x)[1].isnan().any() and not through_nvfp4(x)[[0, 2, 4, 5]].isnan().any()
    assert (through_nvfp4(x)[4] == 0).all()


@pytest.mark.parametrize("size", [1e-44, 1e-38, 3e38])
def test_extreme_sizes_stay_finite(size, draw):
    """Block scales saturate at 448 where the global scale is subnormal and coarse."""
    x = draw.uniform(-1, 1, 4, 48) * size
    packed, scale, scale_2 = ops.quantize_nvfp4(x)
    assert scale.float().isfinite().all() and scale_2.isfinite().all() and (scale_2 > 0).all()
    assert dequantize_nvfp4(packed, scale, scale_2).isfinite().all()


def test_is_stable(draw):
    """What went through NVFP4 once goes through unchanged, but for ulps of the global scale."""
    once = through_nvfp4(draw.normal(20, 64, outliers=30.0))
    torch.testing.assert_close(through_nvfp4(once), once, rtol=1e-6, atol=0)


def test_last_dimension():
    with pytest.raises(ValueError, match=r"shape \(2, 24\), expected a last dimension divisible by 16"):
        ops.quantize_nvfp4(torch.zeros(2, 24))


def test_same_as_torchao(draw):
    """The definition that torchao and ModelOpt share: in one row with one global scale, as theirs is; block scales too.
    torchao does not use E4M3's subnormals, so blocks that need them are left out."""
    nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    x = draw.normal(32, 64, dtype=torch.bfloat16, outliers=20.0)
    packed, scale, scale_2 = ops.quantize_nvfp4(x.reshape(1, -1))
    per_tensor = nvfp4.per_tensor_amax_to_scale(x.abs().max())
    assert per_tensor.equal(scale_2.reshape(()))
    theirs_scale, theirs_packed = nvfp4.nvfp4_quantize(x, 16, per_tensor)
    scale, packed = scale.view(32, 4), packed.view(32, 4, 8)
    normal = scale.float() >= 2**-6
    assert normal.float().mean() > 0.9
    assert scale.view(torch.uint8)[normal].equal(theirs_scale.view(32, 4).view(torch.uint8)[normal])
    # They multiply with a reciprocal where we divide: a value within an ulp of a midpoint may go either way.
    differ = unpack_nibbles(packed) != unpack_nibbles(theirs_packed.view(torch.uint8).view(32, 4, 8))
    ratio = x.float().view(32, 4, 16).abs() / (scale.float() * scale_2.view(1, 1)).unsqueeze(-1)
    middles = (E2M1[1:] + E2M1[:-1]) / 2
    tie = (ratio.double().unsqueeze(-1) / middles - 1).abs().amin(-1) < 1e-6
    assert not (differ & normal.unsqueeze(-1) & ~tie).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_with_quantised_activations(dtype, draw):
    """activation="nvfp4": the product of both dequantised operands; without it, x as it is."""
    weight = quantize_nvfp4(draw.normal(20, 64))
    x = draw.normal(5, 64, dtype=dtype, outliers=20.0)
    packed, scale, scale_2 = ops.quantize_nvfp4(x)
    seen = dequantize_nvfp4(packed, scale, scale_2, dtype)
    assert_near(
        ops.linear_nvfp4(x, *weight, activation="nvfp4"), seen.double() @ dequantize_nvfp4(*weight).double().T, dtype
    )
    difference = ops.linear_nvfp4(x, *weight).float() - ops.linear_nvfp4(x, *weight, activation="nvfp4").float()
    assert 0.01 < difference.norm() / ops.linear_nvfp4(x, *weight).float().norm() < 0.3
    with pytest.raises(ValueError, match="activation must be None or \"nvfp4\", found 'fp8'"):
        ops.linear_nvfp4(x, *weight, activation="fp8")


def test_linear_compiles_whole(draw):
    weight = quantize_nvfp4(draw.normal(20, 64))
    x = draw.normal(5, 64)

    def linear(x):
        return ops.linear_nvfp4(x, *weight, activation="nvfp4")

    assert_near(torch.compile(linear, fullgraph=True)(x), linear(x))

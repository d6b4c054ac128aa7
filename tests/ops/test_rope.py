"""q_rope and kv_rope against transformers, and against values computed by hand."""

import math

import pytest
import torch

from dsv4 import ops
from dsv4.model import config
from dsv4.ops.rope import rope_angles, rotate
from tests.ops.cases import assert_near, assert_same_bits
from tests.ops.oracles import CSA, SLIDING, hf, inv_freq, randomise, rotary_cos_sin, tiny_config

DTYPES = (torch.float32, torch.bfloat16)
EPS = 1e-6


def hf_rope(x, frequencies, positions):
    """x [T, heads, D] through transformers' apply_rotary_pos_emb, in float32."""
    cos, sin = rotary_cos_sin(frequencies, positions)
    return hf.apply_rotary_pos_emb(x.float()[None].transpose(1, 2), cos, sin).transpose(1, 2)[0]


# Two layers are enough: transformers shares one set of frequencies between CSA and HCA.
@pytest.mark.parametrize("layer", (SLIDING, CSA), ids=("plain", "yarn"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_q_rope_matches_transformers(layer, dtype, draw):
    frequencies = inv_freq(tiny_config(), layer)
    q = draw.normal(40, 3, 32, dtype=dtype, outliers=100.0)
    positions = draw.integers(0, 2000, 40)
    expected = hf_rope(hf.DeepseekV4UnweightedRMSNorm(EPS)(q.float()), frequencies, positions)
    assert_near(ops.q_rope(q, frequencies, positions, EPS), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_q_rope_without_norm_matches_transformers(dtype, draw):
    """As the indexer uses it."""
    frequencies = inv_freq(tiny_config(), CSA)
    q, positions = draw.normal(40, 5, 16, dtype=dtype), draw.integers(0, 2000, 40)
    assert_near(ops.q_rope(q, frequencies, positions, norm=False), hf_rope(q, frequencies, positions), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kv_rope_matches_transformers(dtype, draw):
    frequencies = inv_freq(tiny_config(), SLIDING)
    norm = randomise(hf.DeepseekV4RMSNorm(32, EPS), draw)
    kv = draw.normal(40, 32, dtype=dtype, outliers=100.0)
    positions = draw.integers(0, 2000, 40)
    expected = hf_rope(norm(kv.float())[:, None], frequencies, positions)[:, 0]
    assert_near(ops.kv_rope(kv, norm.weight.data, frequencies, positions, EPS), expected, dtype)


@pytest.mark.parametrize("channel", range(8))
def test_bug_half_split_rope(channel):
    """Channels (2i, 2i+1) turn together, not (i, i + R/2); a one-hot vector at t = 1, values by hand.
    https://github.com/NVIDIA-NeMo/Automodel/pull/2039"""
    frequencies = torch.tensor([1.0, 0.5, 0.25, 0.125])
    one_hot = torch.zeros(1, 1, 12)
    one_hot[0, 0, 4 + channel] = 1.0
    angle = frequencies[channel // 2].item()
    expected = [0.0] * 12
    if channel % 2 == 0:
        expected[4 + channel], expected[5 + channel] = math.cos(angle), math.sin(angle)
    else:
        expected[3 + channel], expected[4 + channel] = -math.sin(angle), math.cos(angle)
    actual = ops.q_rope(one_hot, frequencies, torch.tensor([1]), norm=False)
    assert_near(actual[0, 0], torch.tensor(expected))


@pytest.mark.parametrize("width", (8, 12), ids=("all rotated", "trailing"))
def test_position_0_and_plain_channels_stay(width, draw):
    """At position 0 nothing turns; leading channels never do; both bit for bit."""
    frequencies = draw.inv_freq(8)
    q = draw.normal(6, 2, width)
    assert_same_bits(ops.q_rope(q, frequencies, torch.zeros(6, dtype=torch.int64), norm=False), q)
    turned = ops.q_rope(q, frequencies, torch.arange(6), norm=False)
    assert_same_bits(turned[..., : width - 8], q[..., : width - 8])


def test_scores_depend_on_distance_only(draw):
    """q at p + d against k at p gives the same product for every p: the sign and the pairing agree between the two."""
    frequencies = draw.inv_freq(16)
    q, k = draw.normal(1, 16), draw.normal(1, 16)
    starts = torch.tensor([0, 1, 17, 300, 2000])
    for distance in (0, 1, 5, 127):
        queries = ops.q_rope(q.expand(5, 1, 16), frequencies, starts + distance, norm=False)[:, 0]
        keys = ops.q_rope(k.expand(5, 1, 16), frequencies, starts, norm=False)[:, 0]
        dots = (queries * keys).sum(-1)
        # float32 angles: near position 2000 one ulp is 1.2e-4 rad, times products of size |q| |k| / 16.
        torch.testing.assert_close(dots, dots[:1].expand(5), rtol=0, atol=4e-4 * (q.norm() * k.norm()).item() / 4)


def test_no_length_cap(draw):
    """Positions up to a million, where tables of 8192 or 65536 rows have ended; the angle is the float32 product."""
    frequencies = inv_freq(tiny_config(), CSA)
    positions = torch.tensor([8191, 8192, 65535, 65536, 1_000_003, 1_048_575])
    x = draw.normal(6, 1, 8)
    angles = (positions.float()[:, None] * frequencies).double()
    pairs = torch.view_as_complex(x[:, 0].double().unflatten(-1, (-1, 2))) * torch.polar(angles.new_ones(()), angles)
    expected = torch.view_as_real(pairs).flatten(-2)
    assert_near(ops.q_rope(x, frequencies, positions, norm=False)[:, 0], expected)


@pytest.mark.parametrize("layer", (0, 2), ids=("plain", "yarn"))
def test_angles_of_a_million_positions_are_rounded_once(layer):
    """At every position that fits: the float32 product, as the official table has it, which is the exact product (it fits
    float64) rounded once. So the rotation is off by half an ulp of the angle at most: 0.03 near a million."""
    frequencies = config.flash().inv_freq(layer)
    positions = torch.arange(2**20 - 1, -1, -7)
    exact = positions.double()[:, None] * frequencies.double()
    angles = rope_angles(positions, frequencies)
    assert_same_bits(angles, exact.float())
    assert (angles.double() - exact).abs().max() <= 2**-5
    x = torch.zeros(len(positions), 64)
    x[:, ::2] = 1
    turned = rotate(x, angles).unflatten(-1, (-1, 2))
    assert (turned.double() - torch.stack((angles.double().cos(), angles.double().sin()), -1)).abs().max() < 2e-7


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_rounding(dtype, draw):
    """Against float64 arithmetic on the same inputs, rounded once."""
    frequencies, positions = draw.inv_freq(8), draw.integers(0, 100, 64)
    kv, weight = draw.normal(64, 24, dtype=dtype), draw.normal(24)
    x = kv.double()
    x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    angles = (positions.float()[:, None] * frequencies).double()
    pairs = torch.view_as_complex(x[:, 16:].unflatten(-1, (-1, 2))) * torch.polar(angles.new_ones(()), angles)
    expected = torch.cat((x[:, :16], torch.view_as_real(pairs).flatten(-2)), -1)
    actual = ops.kv_rope(kv, weight, frequencies, positions, EPS)
    if dtype == torch.bfloat16:
        # Half an ulp (2^-9 of the value's power of two), and a little for the float32 arithmetic before it.
        assert ((actual.double() - expected).abs() <= 2**-8 * expected.abs() * 1.01 + 1e-6).all()
    assert_near(actual, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extreme_rows(dtype, draw):
    """All zeros stays zero; rows of 1e4, and rows with one value of 1e4, stay finite and get norm sqrt(D)."""
    frequencies = draw.inv_freq(8)
    q = torch.zeros(3, 1, 16, dtype=dtype)
    q[1] = 1e4
    q[2, 0, 3] = -1e4
    out = ops.q_rope(q, frequencies, torch.tensor([7, 8, 9]), EPS)
    assert (out[0] == 0).all()
    assert_near(out[1:].float().norm(dim=-1), torch.full((2, 1), 4.0), dtype)


def test_views_are_read_by_their_strides(draw):
    """q as a transposed view, kv as a slice of a wider projection: same values, contiguous results."""
    frequencies, positions = draw.inv_freq(8), torch.arange(5)
    q = draw.normal(3, 5, 16).transpose(0, 1)
    wide, weight = draw.normal(5, 40), draw.normal(16)
    out = ops.q_rope(q, frequencies, positions, EPS)
    assert out.is_contiguous()
    assert_same_bits(out, ops.q_rope(q.contiguous(), frequencies, positions, EPS))
    kv = wide[:, 24:]
    out = ops.kv_rope(kv, weight, frequencies, positions, EPS)
    assert out.is_contiguous()
    assert_same_bits(out, ops.kv_rope(kv.contiguous(), weight, frequencies, positions, EPS))

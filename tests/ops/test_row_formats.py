"""Compact rows against values by hand and against loops over the codes' tables; rotation; what reads them."""

from fractions import Fraction

import pytest
import torch

from dsv4 import ops
from dsv4.ops.row_formats import (
    FP4_KEYS,
    FP8_KEYS,
    ROWS,
    decode_keys,
    decode_rows,
    encode_keys,
    encode_rows,
    format_of,
    gather_rows,
    hadamard,
    key_bytes,
    keys_of,
    row_bytes,
    rows_of,
    simulate_fp4,
    simulate_rows,
    stored,
)
from tests.ops.cases import assert_same_bits, compact, sparse_zeros

DTYPES = (torch.float32, torch.bfloat16)
# Magnitudes of codes 0, 1, ..: E2M1, and E4M3 without its NaN.
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E4M3 = [(n % 8) / 8 * 2**-6 if n < 8 else (1 + n % 8 / 8) * 2.0 ** (n // 8 - 7) for n in range(127)]
FLOORS = {448: torch.tensor(1e-4).item(), 6: 6 * 2.0**-126}


def quantised(group, table):
    """(codes with their sign, exponent of the scale) of a group of floats, by search: the smallest power of two under which
    the largest magnitude fits, then the nearest code, of two equally near the even one."""
    largest = table[-1]
    amax, exponent = Fraction(max(FLOORS[largest], *(abs(x) for x in group))), -130
    while amax > Fraction(largest) * Fraction(2) ** exponent:
        exponent += 1
    codes = []
    for x in group:
        magnitude = Fraction(abs(x)) / Fraction(2) ** exponent
        code = min(range(len(table)), key=lambda n: (abs(Fraction(table[n]) - magnitude), n % 2))
        codes.append((str(x)[0] == "-", code))
    return codes, exponent


def difficult_rows(draw, dim, dtype):
    """Rows of many sizes; among them zeros, outliers, powers of two, halves between codes, and largest magnitudes at and
    around the ones where the scale changes."""
    rows = [draw.normal(dim, scale=10.0**n, outliers=50.0) for n in (-12, -6, -3, -1, 0, 1, 3, 9)]
    rows += [torch.zeros(dim), -torch.zeros(dim), 2.0 ** draw.integers(-20, 20, dim).float()]
    rows += [draw.integers(-64, 65, dim).float() / 4, draw.integers(-1000, 1001, dim).float()]
    for largest in (448.0, 6.0):
        for exponent in (-25, -3, 0, 5):
            for edge in (largest, torch.nextafter(torch.tensor(largest), torch.tensor(0.0)).item(), largest * (1 + 2**-7)):
                row = draw.uniform(-1, 1, dim) * largest
                row[draw.random.randrange(dim)] = -edge
                rows.append(row * 2.0**exponent)
    return torch.stack(rows).to(dtype)


# --- key/value rows ---------------------------------------------------------------------------------------------------


def test_sizes():
    assert row_bytes(512, 64) == 584 and row_bytes(72, 8) == 64 + 16 + 8 and row_bytes(9 * 64 + 64, 64) == 576 + 128 + 16
    assert key_bytes(128, "fp8") == 132 and key_bytes(128, "fp4") == 68
    for dim, rope in ((512, 32), (64, 64), (32, 64)):
        with pytest.raises(ValueError, match=f"multiple of 64 channels without rope, found {dim} of which {rope}"):
            row_bytes(dim, rope)
    for dim in (96, 16, 0):
        with pytest.raises(ValueError, match=f"power of two of at least 32 channels, found {dim}"):
            key_bytes(dim, "fp4")
    with pytest.raises(ValueError, match="'fp8' or 'fp4', found 'fp5'"):
        key_bytes(128, "fp5")


def test_format_follows_from_the_width():
    widths = {584: ROWS, 132: FP8_KEYS, 68: FP4_KEYS}
    for width, name in widths.items():
        assert format_of(torch.zeros(1, 4, width, dtype=torch.uint8), 512 if name == ROWS else 128, 64) == name
    assert format_of(torch.zeros(1, 4, 512), 512, 64) is None
    with pytest.raises(
        ValueError, match=r"128 channels, 64 of them with rope: found 584, expected one of: 200 \(fp8 rows\)"
    ):
        format_of(torch.zeros(1, 4, 584, dtype=torch.uint8), 128, 64)
    with pytest.raises(ValueError, match="key/value rows of 128 channels have 200 bytes, found fp4 keys"):
        rows_of(torch.zeros(1, 4, 68, dtype=torch.uint8), 128, 64, torch.float32)


def test_rows_by_hand():
    """Largest 448: scale 1. 17 lies between 16 and 18, 19 between 18 and 20: the even mantissas win. Largest 450: scale 2.
    No row has a scale below that of 1e-4."""
    x = torch.zeros(3, 64 + 8)
    x[0, :6] = torch.tensor([448.0, 1.0, -2.0, 17.0, 19.0, 2.0**-10])
    x[0, 64:66] = torch.tensor([1.0, -3.0])
    x[1, :2] = torch.tensor([-450.0, 3.0])
    codes, scales = encode_rows(x, 8)
    assert codes.shape == (3, 64 + 16) and scales.shape == (3, 8)
    assert codes[0, :7].tolist() == [0x7E, 0x38, 0xC0, 0x58, 0x5A, 0x00, 0x00]
    assert codes[0, 64:70].tolist() == [0x80, 0x3F, 0x40, 0xC0, 0x00, 0x00]  # bf16, the low byte first
    assert codes[1, :2].tolist() == [0xF6, 0x3C] and (codes[2] == 0).all()
    assert scales[:, 0].tolist() == [127, 128, 127 - 22] and (scales[:, 1:] == 0).all()
    values = decode_rows(codes, scales, 8)
    assert values[0, :6].tolist() == [448.0, 1.0, -2.0, 16.0, 20.0, 0.0] and values[0, 64:66].tolist() == [1.0, -3.0]
    assert values[1, :2].tolist() == [-448.0, 3.0] and (values[2] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_match_loops(dtype, draw):
    x = difficult_rows(draw, 128 + 8, dtype)
    codes, scales = encode_rows(x, 8)
    for row in range(len(x)):
        for group in range(2):
            at = slice(64 * group, 64 * group + 64)
            expected, exponent = quantised(x[row, at].tolist(), E4M3)
            assert scales[row, group] == exponent + 127
            assert codes[row, at].tolist() == [128 * negative + code for negative, code in expected]
            values = [(-1) ** negative * E4M3[code] * 2.0**exponent for negative, code in expected]
            assert decode_rows(codes, scales, 8)[row, at].tolist() == values
    assert_same_bits(codes[:, 128:].view(torch.bfloat16), x[:, 128:].to(torch.bfloat16))
    assert (scales[:, 2:] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_compact_values_are_final(dtype, draw):
    """Exact in bf16, and what comes out goes in and out unchanged."""
    x = difficult_rows(draw, 128, dtype)
    for simulate in (
        lambda x: simulate_rows(x, 64),
        simulate_fp4,
        lambda x: decode_keys(*encode_keys(x, FP8_KEYS), FP8_KEYS),
    ):
        once = simulate(x)
        assert torch.equal(once, once.to(torch.bfloat16).to(once.dtype)) and not torch.equal(once.float(), x.float())
        assert torch.equal(simulate(once), once)


def test_scales_lie_behind_the_codes_of_all_rows(draw):
    """Row 2 of slot 1 of [2, 4] rows of 72 channels, 8 with rope: bytes by hand."""
    x, buffer = draw.normal(72, dtype=torch.bfloat16), torch.zeros(2, 4, 88, dtype=torch.uint8)
    codes, scales = encode_rows(x, 8)
    for view, part in stored(x, buffer, 8):
        view[1, 2] = part
    expected = torch.zeros(2 * 4 * 88, dtype=torch.uint8)
    start = 4 * 88
    expected[start + 2 * 80 : start + 3 * 80] = codes
    expected[start + 4 * 80 + 2 * 8 : start + 4 * 80 + 3 * 8] = scales
    assert torch.equal(buffer.flatten(), expected)
    assert_same_bits(rows_of(buffer, 72, 8, torch.bfloat16)[1, 2], simulate_rows(x, 8))


@pytest.mark.parametrize(("format", "width"), ((FP8_KEYS, 128), (FP4_KEYS, 64)))
def test_scales_lie_behind_all_keys(format, width, draw):
    x, buffer = draw.normal(128, dtype=torch.bfloat16), torch.zeros(2, 64, key_bytes(128, format), dtype=torch.uint8)
    for view, part in stored(x, buffer, 64):
        view[1, 5] = part
    codes, scales = encode_keys(hadamard(x), format)
    page = buffer[1].flatten()
    assert torch.equal(page[5 * width : 6 * width], codes)
    assert torch.equal(page[64 * width + 5 * 4 : 64 * width + 6 * 4], scales)
    assert page.count_nonzero() == codes.count_nonzero() + scales.count_nonzero() and (buffer[0] == 0).all()
    assert torch.equal(keys_of(buffer, 128, torch.float32)[1, 5], decode_keys(codes, scales, format))


# --- index keys -------------------------------------------------------------------------------------------------------


def test_fp4_keys_by_hand():
    """Every midpoint of E2M1 goes to the even code; two codes a byte, the even channel low."""
    x = torch.zeros(2, 64)
    x[0, :10] = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.1, -0.1])
    x[0, 32:34] = torch.tensor([6.1, -3.0])
    codes, scales = encode_keys(x, FP4_KEYS)
    assert codes[0, :5].tolist() == [0x07, 0x22, 0x44, 0x66, 0x8F] and (codes[0, 5:16] == 0).all()
    assert codes[0, 16].item() == 0xB5 and (codes[1] == 0).all()
    assert scales.tolist() == [[127, 128], [1, 1]]
    values = decode_keys(codes, scales, FP4_KEYS)
    assert values[0, :10].tolist() == [6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -6.0, 0.0]
    assert values[0, 32:34].tolist() == [6.0, -3.0] and (values[1] == 0).all()


def test_fp8_keys_by_hand():
    x = torch.zeros(2, 32)
    x[0, [0, 31]] = torch.tensor([450.0, -34.0])
    codes, scales = encode_keys(x, FP8_KEYS)
    assert codes[0, [0, 1, 31]].tolist() == [0x76, 0x00, 0xD8] and (codes[1] == 0).all()
    assert scales.tolist() == [[0x00, 0x00, 0x00, 0x40], [0x00, 0x00, 0x80, 0x34]]  # the floats 2 and 2^-22


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_keys_match_loops(dtype, draw):
    x = difficult_rows(draw, 64, dtype)
    (codes, scales), (bytes8, scales8) = encode_keys(x, FP4_KEYS), encode_keys(x, FP8_KEYS)
    for row in range(len(x)):
        for group in range(2):
            expected, exponent = quantised(x[row, 32 * group : 32 * group + 32].tolist(), E2M1)
            assert scales[row, group] == exponent + 127
            nibbles = [8 * negative + code for negative, code in expected]
            pairs = zip(nibbles[::2], nibbles[1::2], strict=True)
            assert codes[row, 16 * group : 16 * group + 16].tolist() == [low + 16 * high for low, high in pairs]
        expected, exponent = quantised(x[row].tolist(), E4M3)
        assert bytes8[row].tolist() == [128 * negative + code for negative, code in expected]
        assert scales8[row].view(torch.float32).item() == 2.0**exponent


def sylvester(dim):
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < dim:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix * dim**-0.5


@pytest.mark.parametrize("dim", (1, 2, 32, 128))
def test_hadamard_is_sylvesters(dim, draw):
    x = draw.normal(9, dim, outliers=30.0)
    expected = x.double() @ sylvester(dim)
    torch.testing.assert_close(hadamard(x).double(), expected, rtol=0, atol=1e-6 * expected.abs().max().item())
    torch.testing.assert_close(hadamard(hadamard(x)), x, rtol=0, atol=1e-6 * x.abs().max().item())
    low = x.to(torch.bfloat16)
    assert_same_bits(hadamard(low), hadamard(low.float()).to(torch.bfloat16))


def index_inputs(draw, tokens=40, blocks=60, heads=3, dim=64):
    """Small integers: with 64 channels the rotation divides by 8, so every product and sum is exact."""
    q, keys = (draw.integers(-3, 4, n, m, dim, dtype=torch.float32) for n, m in ((tokens, heads), (2, blocks)))
    weights, slots = draw.integers(-3, 4, tokens, heads, dtype=torch.float32), draw.integers(0, 2, tokens)
    return q, weights, keys, (draw.integers(0, 4 * blocks, tokens), slots, 4, 5)


def test_bug_rotation_of_query_and_key_together(draw):
    """Rotating both changes no selection; rotating only the query changes most.
    https://github.com/ROCm/ATOM/issues/1507"""
    q, weights, keys, rest = index_inputs(draw)
    expected = ops.index_topk(q, weights, keys, *rest)
    assert_same_bits(ops.index_topk(hadamard(q), weights, hadamard(keys), *rest), expected)
    assert not torch.equal(ops.index_topk(hadamard(q), weights, keys, *rest), expected)


def test_bug_an_outlier_is_rotated_before_it_is_quantised(draw):
    """Keys with one channel 300 times the others, of which the query has nothing: rotated, it costs every channel a
    little; not rotated, fp4 would lose all others of its group. Selections must be those of a simulation by loops.
    https://github.com/vllm-project/vllm/pull/55459"""
    tokens, blocks, dim = 12, 40, 32
    q, keys = draw.normal(tokens, 2, dim), draw.normal(1, blocks, dim)
    keys[..., 7] = 300 * draw.normal(1, blocks)
    q[..., 7] = 0
    weights, at = (
        draw.uniform(0.5, 1, tokens, 2),
        (torch.full((tokens,), 4 * blocks), torch.zeros(tokens, dtype=torch.int64)),
    )

    def by_loops(x):
        rows = []
        for row in x.flatten(0, -2).tolist():
            codes, exponent = quantised(row, E2M1)
            rows.append([(-1) ** negative * E2M1[code] * 2.0**exponent for negative, code in codes])
        return torch.tensor(rows).view_as(x)

    rotated_q, rotated_keys = hadamard(q), hadamard(keys)
    expected = ops.index_topk(by_loops(rotated_q), weights, by_loops(rotated_keys), *at, 4, 6)
    buffer = compact(keys, 8, key_bytes(dim, FP4_KEYS))
    assert_same_bits(ops.index_topk(simulate_fp4(rotated_q), weights, buffer, *at, 4, 6), expected)
    plain = ops.index_topk(by_loops(q), weights, by_loops(keys), *at, 4, 6)
    assert not torch.equal(plain, expected)


# --- readers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", (FP8_KEYS, FP4_KEYS))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_index_topk_reads_compact_keys(dtype, format, draw):
    """As it reads the plain keys that they stand for."""
    q, weights, keys, rest = index_inputs(draw)
    buffer = compact(draw.normal(*keys.shape, outliers=10.0), 8, key_bytes(64, format))
    q, plain = (q + draw.normal(*q.shape)).to(dtype), keys_of(buffer, 64, dtype)
    assert_same_bits(ops.index_topk(q, weights, buffer, *rest), ops.index_topk(q, weights, plain, *rest))


@pytest.mark.parametrize("mode", ("window", "all", "picks"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attend_reads_compact_rows(dtype, mode, draw):
    """As it reads the plain rows that they stand for: ring and entries."""
    tokens, dim, rope = 9, 72, 8
    q, kv = draw.normal(tokens, 2, dim, dtype=dtype), simulate_rows(draw.normal(tokens, dim, dtype=dtype), rope)
    ring, entries = (compact(draw.normal(3, n, dim, outliers=20.0), rope, row_bytes(dim, rope)) for n in (12, 20))
    indices = draw.integers(-1, 20, tokens, 6).int() if mode == "picks" else None
    positions, slots = torch.tensor([5, 6, 7, 80, 81, 0, 33, 34, 9]), torch.tensor([0, 0, 0, 2, 2, -1, 1, 1, -1])
    rest = indices, draw.normal(2), draw.inv_freq(rope), positions, slots, 4

    def attend(ring, entries):
        return ops.attend(q, kv, ring, None if mode == "window" else entries, *rest)

    plain = [rows_of(buffer, dim, rope, dtype) for buffer in (ring, entries)]
    assert_same_bits(attend(ring, entries), attend(*plain))
    assert_same_bits(attend(plain[0], entries), attend(*plain))
    slot, index = torch.tensor([[2], [0]]), torch.tensor([[1, 19, 3], [0, 0, 7]])
    assert torch.equal(gather_rows(entries, slot, index, dim, rope), plain[1][slot, index].float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kv_write_fills_a_compact_ring(dtype, draw):
    """The last row of each position mod window, inert tokens and other slots leaving no byte."""
    dim, rope, window = 136, 8, 12
    kv = draw.normal(40, dim, dtype=dtype, outliers=30.0)
    positions, slots = torch.cat((torch.arange(5, 40), torch.arange(5))), torch.tensor([2] * 35 + [-1] * 5)
    before = draw.integers(0, 256, 3, window, row_bytes(dim, rope), dtype=torch.uint8)
    ring = before.clone()
    ops.kv_write(kv, positions, slots, ring)
    expected = simulate_rows(kv, rope)[[int((positions[:35] % window == n).nonzero().max()) for n in range(window)]]
    assert_same_bits(rows_of(ring, dim, rope, dtype)[2], expected)
    assert torch.equal(ring[:2], before[:2])
    again = ring.clone()
    ops.kv_write(simulate_rows(kv, rope), positions, slots, again)
    assert_same_bits(rows_of(again, dim, rope, dtype)[2], expected)


def test_bug_large_row_numbers(draw):
    """A slot past 2^31 bytes. https://github.com/ROCm/aiter/pull/4028"""
    slots, dim, rope, window = 2**31 // (128 * 88) + 2, 72, 8, 128
    ring, kv = sparse_zeros(slots, window, row_bytes(dim, rope), dtype=torch.uint8), draw.normal(1, dim)
    ops.kv_write(kv, torch.tensor([1_048_575]), torch.tensor([slots - 1]), ring)
    row = gather_rows(ring, torch.tensor([slots - 1]), torch.tensor([127]), dim, rope)
    assert_same_bits(row, simulate_rows(kv, rope))
    assert ring[slots - 1].count_nonzero() <= row_bytes(dim, rope)
    for slot in (0, 1, slots // 2, slots - 2):
        assert (ring[slot] == 0).all()

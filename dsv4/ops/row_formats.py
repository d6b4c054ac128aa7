"""Compact rows: how the cache holds keys and values in 8 bits, and the indexer's keys in 8 or 4.

A buffer of dtype uint8 is compact; which format it holds follows from its width. All formats are block formats with scales
that are powers of two: s = the smallest 2^k for which the group's largest magnitude is at most s times the largest number
of the code. This is the activation simulation with which the model was trained (in the official code act_quant and
fp4_act_quant).

    kv rows     E4M3 in groups of 64; the last R channels, which carry rope, stay bf16; scales E8M0, one byte each
    fp8 keys    E4M3, one group a key; scale float32
    fp4 keys    E2M1 in groups of 32, two a byte, the even channel in the low nibble; scales E8M0

Within a slot the bytes lie in two planes: first the codes of all its rows, then the scales of all its rows. So codes stay
aligned to 16 bytes whatever the scales take, if a slot has a multiple of 4 rows.

Keys are rotated before they are quantised: a Walsh-Hadamard transform spreads an outlier over all channels. It is
orthogonal, so dot products stay what they were when the query is rotated too.

Every value of a compact row is exact in bf16, and quantising such a row again changes no value.
"""

import math

import torch
from torch import Tensor

from dsv4.ops.fp8 import E4M3_MAX, decode_e8m0
from dsv4.ops.kernels.checks import require, require_tensors
from dsv4.ops.mxfp4 import dequantize_mxfp4
from dsv4.ops.nvfp4 import E2M1_MAX, encode_e2m1, pack_nibbles

GROUP, KEY_GROUP = 64, 32
E4M3_FLOOR, E2M1_FLOOR = 1e-4, 6 * 2.0**-126  # the least that a group's largest magnitude counts as
ROWS, FP8_KEYS, FP4_KEYS = "fp8 rows", "fp8", "fp4"
# In kernels/row_formats.cuh.
KERNEL_NAMES = {None: "PLAIN", ROWS: "FP8_ROWS", FP8_KEYS: "FP8_KEYS", FP4_KEYS: "FP4_KEYS"}


def _scale_bytes(channels: int) -> int:
    """Bytes of the scales of a row with so many quantised channels: whole vectors of eight."""
    return -(-channels // (8 * GROUP)) * 8


def row_bytes(dim: int, rope: int) -> int:
    """Bytes of a compact key/value row of `dim` channels, the last `rope` of them bf16. ValueError for other widths."""
    if dim <= rope or (dim - rope) % GROUP:
        raise ValueError(f"fp8 rows need a multiple of {GROUP} channels without rope, found {dim} of which {rope} have it")
    return dim + rope + _scale_bytes(dim - rope)


def key_bytes(dim: int, format: str) -> int:
    """Bytes of a compact index key of `dim` channels, `format` "fp8" or "fp4". ValueError for other widths and names."""
    if format not in (FP8_KEYS, FP4_KEYS):
        raise ValueError(f"index keys are compact as 'fp8' or 'fp4', found {format!r}")
    if dim < KEY_GROUP or dim & (dim - 1):
        raise ValueError(f"compact index keys need a power of two of at least {KEY_GROUP} channels, found {dim}")
    return dim + 4 if format == FP8_KEYS else dim // 2 + dim // KEY_GROUP


def format_of(buffer: Tensor, dim: int, rope: int) -> str | None:
    """What `buffer` [S, n, width] holds of rows with `dim` channels: None for plain rows, ROWS, FP8_KEYS or FP4_KEYS.
    ValueError if it is compact and its width is none of theirs."""
    if buffer.dtype != torch.uint8:
        return None
    widths = {}
    if dim > rope and (dim - rope) % GROUP == 0:
        widths[row_bytes(dim, rope)] = ROWS
    if dim >= KEY_GROUP and dim & (dim - 1) == 0:
        widths |= {key_bytes(dim, name): name for name in (FP8_KEYS, FP4_KEYS)}
    if buffer.shape[-1] not in widths:
        known = ", ".join(f"{width} ({name})" for width, name in widths.items()) or "none"
        found = f"found {buffer.shape[-1]}, expected one of: {known}"
        raise ValueError(f"bytes of a compact row of {dim} channels, {rope} of them with rope: {found}")
    return widths[buffer.shape[-1]]


def are_compact(buffer: Tensor, dim: int, rope: int) -> bool:
    """Whether `buffer` [S, n, width] of key/value rows is compact; ValueError if it holds something else."""
    format = format_of(buffer, dim, rope)
    if format not in (None, ROWS):
        raise ValueError(f"key/value rows of {dim} channels have {row_bytes(dim, rope)} bytes, found {format} keys")
    return format == ROWS


def checked_format(op: str, name: str, buffer: Tensor, dim: int, rope: int) -> str | None:
    """`format_of` a buffer that a kernel is to read or write; ValueError unless it can."""
    format = format_of(buffer, dim, rope)
    require_tensors(op, torch.bfloat16 if format is None else torch.uint8, **{name: buffer})
    if format is None:
        require(op, buffer.shape[2] == dim, f"{name} must be {dim} wide, found {buffer.shape[2]}")
    else:
        require(op, buffer.shape[1] % 4 == 0, f"{name} must have a multiple of 4 compact rows, found {buffer.shape[1]}")
    return format


def rope_of(buffer: Tensor, dim: int) -> int:
    """How many channels of a compact row of `dim` channels are bf16, by the width of its buffer [S, n, width]."""
    for rope in range(dim % GROUP, dim, GROUP):
        if row_bytes(dim, rope) == buffer.shape[-1]:
            return rope
    raise ValueError(f"no compact row of {dim} channels has {buffer.shape[-1]} bytes")


def _planes(buffer: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Views of a compact buffer [S, n, bytes]: codes [S, n, width] and scales [S, n, bytes - width]."""
    rows, total = buffer.shape[1:]
    flat = buffer.flatten(1)
    codes, scales = flat[:, : rows * width], flat[:, rows * width :]
    return codes.unflatten(1, (rows, width)), scales.unflatten(1, (rows, total - width))


def _exponent(amax: Tensor, largest: float) -> Tensor:
    """int32 k + 127 for the smallest 2^k with amax <= largest * 2^k; amax float32, normal and positive.

    With largest = m 2^e, 1 <= m < 2, that is amax's own exponent less e, and one more if its mantissa is above m: then
    adding all that m lacks of 2 but one carries into the exponent."""
    mantissa, exponent = math.frexp(largest)
    carry = int((1 - mantissa) * 2**24) - 1
    return (amax.view(torch.int32) + carry >> 23) - (exponent - 1)


def _quantise_e4m3(groups: Tensor) -> tuple[Tensor, Tensor]:
    """[..., n] -> float8_e4m3fn [..., n] and the exponents of their scales, uint8 [...]."""
    groups = groups.float()
    exponent = _exponent(groups.abs().amax(-1).clamp(min=E4M3_FLOOR), E4M3_MAX).to(torch.uint8)
    codes = (groups / decode_e8m0(exponent)[..., None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes, exponent


# --- key/value rows ---------------------------------------------------------------------------------------------------


def encode_rows(x: Tensor, rope: int) -> tuple[Tensor, Tensor]:
    """x [..., D] -> codes uint8 [..., D + rope], the last 2 * rope of them bf16, and scales uint8 [..., 8 or more]."""
    plain = x.shape[-1] - rope
    codes, exponent = _quantise_e4m3(x[..., :plain].unflatten(-1, (-1, GROUP)))
    codes = torch.cat((codes.flatten(-2).view(torch.uint8), x[..., plain:].to(torch.bfloat16).view(torch.uint8)), -1)
    return codes, torch.nn.functional.pad(exponent, (0, _scale_bytes(plain) - plain // GROUP))


def decode_rows(codes: Tensor, scales: Tensor, rope: int) -> Tensor:
    """The inverse of `encode_rows` -> float32 [..., D]."""
    plain = codes.shape[-1] - 2 * rope
    values = codes[..., :plain].view(torch.float8_e4m3fn).float().unflatten(-1, (-1, GROUP))
    values = values * decode_e8m0(scales[..., : plain // GROUP])[..., None]
    return torch.cat((values.flatten(-2), codes[..., plain:].view(torch.bfloat16).float()), -1)


def simulate_rows(x: Tensor, rope: int) -> Tensor:
    """x [..., D] as its compact row will read, in x's dtype."""
    return decode_rows(*encode_rows(x, rope), rope).to(x.dtype)


def rows_of(buffer: Tensor, dim: int, rope: int, dtype: torch.dtype) -> Tensor:
    """All rows of a plain or compact buffer [S, n, width] -> dtype [S, n, D]."""
    if are_compact(buffer, dim, rope):
        buffer = decode_rows(*_planes(buffer, dim + rope), rope)
    return buffer.to(dtype)


def gather_rows(buffer: Tensor, slot: Tensor, index: Tensor, dim: int, rope: int) -> Tensor:
    """Rows `index` of slots `slot` (int64, broadcast against each other) of a plain or compact buffer -> [..., D], plain
    ones in the buffer's dtype, compact ones in float32."""
    if not are_compact(buffer, dim, rope):
        return buffer[slot, index]
    codes, scales = _planes(buffer, dim + rope)
    return decode_rows(codes[slot, index], scales[slot, index], rope)


# --- index keys -------------------------------------------------------------------------------------------------------


def hadamard(x: Tensor) -> Tensor:
    """The normalised Walsh-Hadamard transform (Sylvester order) of the last dimension, a power of two: in float32, one
    rounding to x's dtype. Its own inverse."""
    width, y = x.shape[-1], x.float()
    for step in (1 << n for n in range(width.bit_length() - 1)):
        a, b = y.unflatten(-1, (-1, 2, step)).unbind(-2)
        y = torch.stack((a + b, a - b), -2).flatten(-3)
    return (y * width**-0.5).to(x.dtype)


def encode_keys(x: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """Rotated keys [..., d] -> codes uint8 [..., d or d / 2] and scales uint8 [..., 4 or d / 32]."""
    if format == FP8_KEYS:
        codes, exponent = _quantise_e4m3(x)
        return codes.view(torch.uint8), decode_e8m0(exponent)[..., None].view(torch.uint8)
    groups = x.float().unflatten(-1, (-1, KEY_GROUP))
    exponent = _exponent(groups.abs().amax(-1).clamp(min=E2M1_FLOOR), E2M1_MAX).to(torch.uint8)
    return pack_nibbles(encode_e2m1(groups / decode_e8m0(exponent)[..., None]).flatten(-2)), exponent


def decode_keys(codes: Tensor, scales: Tensor, format: str) -> Tensor:
    """The inverse of `encode_keys` -> float32 [..., d]."""
    if format == FP8_KEYS:
        return codes.view(torch.float8_e4m3fn).float() * scales.contiguous().view(torch.float32)
    return dequantize_mxfp4(codes, scales)


def simulate_fp4(x: Tensor) -> Tensor:
    """x [..., d] quantised as fp4 keys are and dequantised, in x's dtype: for the query that meets such keys."""
    return decode_keys(*encode_keys(x, FP4_KEYS), FP4_KEYS).to(x.dtype)


def keys_of(buffer: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """All keys of a plain or compact buffer [S, n, width] -> dtype [S, n, d]; compact ones are rotated."""
    if (format := format_of(buffer, dim, dim)) is not None:
        buffer = decode_keys(*_planes(buffer, dim if format == FP8_KEYS else dim // 2), format)
    return buffer.to(dtype)


# --- writing ----------------------------------------------------------------------------------------------------------


def stored(x: Tensor, buffer: Tensor, rope: int) -> list[tuple[Tensor, Tensor]]:
    """How rows x [..., D] go into a plain or compact buffer [S, n, width], keys not rotated yet: pairs of a view [S, n, w]
    of the buffer and what is to be written to it, [..., w]."""
    dim = x.shape[-1]
    format = format_of(buffer, dim, rope)
    if format is None:
        return [(buffer, x)]
    parts = encode_rows(x, rope) if format == ROWS else encode_keys(hadamard(x), format)
    return list(zip(_planes(buffer, parts[0].shape[-1]), parts, strict=True))


# --- moving -----------------------------------------------------------------------------------------------------------


def first_rows(buffer: Tensor, count: int, dim: int, rope: int) -> list[Tensor]:
    """Views [S, count, w] of all that the first `count` rows of a plain or compact buffer consist of; for keys `rope` is
    `dim`."""
    format = format_of(buffer, dim, rope)
    if format is None:
        return [buffer[:, :count]]
    width = {ROWS: dim + rope, FP8_KEYS: dim, FP4_KEYS: dim // 2}[format]
    return [plane[:, :count] for plane in _planes(buffer, width)]

"""MXFP4: 4-bit E2M1 codes and one power of two per 32 of them along K, as the native release stores routed experts.

    W[n, k] = e2m1(code[n, k]) * 2^(scale[n, k // 32] - 127)

Codes are packed as in NVFP4, the even k in the low nibble. No kernel reads this format: a tensor of it is NVFP4 with other
scales, to the bit, as long as its exponents lie within the range of E4M3 (`mxfp4_to_nvfp4`).
"""

import torch
from torch import Tensor

from dsv4.ops.fp8 import decode_e8m0
from dsv4.ops.nvfp4 import decode_e2m1, unpack_nibbles

GROUP = 32
LARGEST, SMALLEST = 8, -9  # exponents of the powers of two that E4M3 holds exactly: 2^8 down to its subnormal 2^-9
SPAN = LARGEST - SMALLEST
# 2^8, 2^7, .. 2^-9 by how far an exponent lies below the largest one.
_SCALES = torch.tensor([2.0 ** (LARGEST - below) for below in range(SPAN + 1)]).to(torch.float8_e4m3fn)


def dequantize_mxfp4(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """int8 or uint8 [..., K/2] and float8_e8m0fnu [..., K/32] -> dtype [..., K]."""
    values = decode_e2m1(unpack_nibbles(packed.view(torch.uint8))).unflatten(-1, (-1, GROUP))
    return (values * decode_e8m0(scale).unsqueeze(-1)).flatten(-2).to(dtype)


def mxfp4_to_nvfp4(packed: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """int8 or uint8 [N, K/2] and float8_e8m0fnu [N, K/32] -> NVFP4: uint8 [N, K/2], float8_e4m3fn [N, K/16] and
    float32 [], whose dequantised values are the same to the bit.

    The codes stay. With k_j the exponents of the groups and kmax the largest of them, scale_2 is 2^(kmax - 8) and group
    j's scale 2^(k_j - kmax + 8), given to both of its halves. On CPU tensors: the exponents decide on the host.

    ValueError when a scale is NaN (byte 255), and when the exponents of the groups that are not all zeros span more than
    17 binades, so that no scale_2 brings them all into E4M3's powers of two.
    """
    packed, exponent = packed.view(torch.uint8), scale.view(torch.uint8)
    if packed.is_meta or packed.numel() == 0:
        scales = packed.new_empty(*scale.shape[:-1], 2 * scale.shape[-1], dtype=torch.float8_e4m3fn)
        return packed, scales, packed.new_ones((), dtype=torch.float32)
    lowest, highest = (int(end) for end in exponent.aminmax())
    if highest == 255:
        raise ValueError(f"{int((exponent == 255).sum())} of {exponent.numel()} scales are NaN (byte 255)")
    if highest - lowest > SPAN:
        # A group of zeros is zero under any scale: it may have been given the smallest one, far below all others.
        used = exponent[((packed & 0x77) != 0).unflatten(-1, (-1, GROUP // 2)).any(-1)]
        lowest, highest = (int(end) for end in used.aminmax()) if used.numel() else (highest, highest)
        if highest - lowest > SPAN:
            raise ValueError(
                f"the scales span {highest - lowest} binades, 2^{lowest - 127} to 2^{highest - 127}, and NVFP4 holds "
                f"at most {SPAN} in one tensor exactly"
            )
    # The scale by exponent byte, twice, as one 2-byte number: one look-up a group is all that is done for its size.
    scales = _SCALES[(highest - torch.arange(256)).clamp(0, SPAN)].view(torch.uint8)
    pairs = torch.stack((scales, scales), -1).view(torch.int16).flatten()
    scales = pairs.index_select(0, exponent.flatten().int()).view(exponent.shape).view(torch.float8_e4m3fn)
    return packed, scales, torch.tensor(2.0 ** (highest - 127 - LARGEST))

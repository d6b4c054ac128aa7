"""quantize_nvfp4: activations to NVFP4 at run time, as W4A4 kernels take them. A study option, never used by default.

    scale_2[t] = max |x[t]| / 2688        scale[t, g] = e4m3(min(max |x[t, g]| / 6 / scale_2[t], 448))
    code[t, k] = e2m1(x[t, k] / (scale[t, k // 16] * scale_2[t]))

Codes, block scales and global scale are NVFP4's as for weights (dsv4.ops.nvfp4). The global scale is found on the device
for each row and not once for all: then a token's values depend neither on the tokens beside it nor on what padding rows
hold. Flattened into one row, x is quantised with one scale for all, as ModelOpt and torchao do it.
"""

import torch
from torch import Tensor

from dsv4.ops import nvfp4
from dsv4.ops._register import op
from dsv4.ops.fp8 import divided
from dsv4.ops.nvfp4 import E2M1_MAX, E4M3_MAX, GROUP


def _fake(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    *batch, k = x.shape
    return (
        x.new_empty((*batch, k // 2), dtype=torch.uint8),
        x.new_empty((*batch, k // GROUP), dtype=torch.float8_e4m3fn),
        x.new_empty((*batch, 1), dtype=torch.float32),
    )


@op("quantize_nvfp4(Tensor x) -> (Tensor, Tensor, Tensor)", fake=_fake)
def quantize_nvfp4_ref(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The equations above in float32. A row of zeros gets scale_2 = 1."""
    scale_2 = divided(x.float().abs().amax(-1, keepdim=True), E2M1_MAX * E4M3_MAX)
    return nvfp4.quantize_nvfp4(x, torch.where(scale_2 > 0, scale_2, torch.ones_like(scale_2)))


def quantize_nvfp4(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x [..., K], bf16 or float32, K divisible by 16 -> codes uint8 [..., K/2], block scales float8_e4m3fn [..., K/16],
    global scales float32 [..., 1]. Block scales saturate; NaN stays in its block and spoils no other row."""
    if x.shape[-1] % GROUP:
        raise ValueError(f"quantize_nvfp4: x has shape {tuple(x.shape)}, expected a last dimension divisible by {GROUP}")
    return torch.ops.dsv4.quantize_nvfp4(x)

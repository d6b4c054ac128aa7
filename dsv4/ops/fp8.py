"""FP8 block format: E4M3 weights with one scale per 128 x 128 block.

    W[n, k] = float(weight[n, k]) * scale[n // 128, k // 128]

Checkpoints store the scale as E8M0 (a power of two in one byte) or as float32; dsv4 holds it as float32 in memory.
The grouped form serves wo_a, whose G groups of rows each see their own slice of the input (paper section 2.3.1).
"""

import torch
from torch import Tensor

from dsv4.ops._register import op
from dsv4.ops.kernels import linear as kernels
from dsv4.ops.kernels.stream import FP8, Weight, check_weight
from dsv4.ops.rope import rms_norm

BLOCK = 128
E4M3_MAX = 448.0


def decode_e8m0(scale: Tensor) -> Tensor:
    """float8_e8m0fnu -> float32 2^(byte - 127); byte 255 is NaN. Reads the byte: torch's own conversions to uint8
    convert the value, and copying the byte into a float gives 120.0 for 2^-7."""
    byte = scale.view(torch.uint8).int()
    # 2^-127 (byte 0) is a float32 subnormal, which exp2 may flush to zero: it is reached from 2^-126 instead.
    value = torch.exp2((byte.clamp(min=1) - 127).float()) * torch.where(byte == 0, 0.5, 1.0)
    return torch.where(byte == 255, torch.nan, value)


def encode_e8m0(scale: Tensor) -> Tensor:
    """Positive float32 powers of two -> float8_e8m0fnu."""
    return (torch.frexp(scale.float()).exponent - 1 + 127).clamp(0, 254).to(torch.uint8).view(torch.float8_e8m0fnu)


def _blocks(weight: Tensor) -> Tensor:
    """[N, K] -> [ceil(N/128), 128, ceil(K/128), 128], zero-padded: block (i, j) stands at [i, :, j, :]."""
    rows, columns = weight.shape
    if rows % BLOCK or columns % BLOCK:
        weight = torch.nn.functional.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    return weight.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))


def _unblock(blocks: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of `_blocks`."""
    return blocks.flatten(2).flatten(0, 1)[: shape[0], : shape[1]]


def dequantize_fp8_block(weight: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """float8_e4m3fn [N, K] and its scale (float8_e8m0fnu or float32, [ceil(N/128), ceil(K/128)]) -> dtype [N, K]."""
    if scale.dtype == torch.float8_e8m0fnu:
        scale = decode_e8m0(scale)
    return _unblock(_blocks(weight.float()) * scale[:, None, :, None], weight.shape).to(dtype)


def divided(value: Tensor, number: float) -> Tensor:
    """value / number, rounded once on every device: by a Python number CUDA multiplies with its rounded reciprocal."""
    return value / torch.full_like(value, number)


def quantize_fp8_block(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise [N, K] to (float8_e4m3fn [N, K], float8_e8m0fnu [ceil(N/128), ceil(K/128)]): the smallest power-of-two
    scale that keeps each block within +-448."""
    blocks = _blocks(weight.float())
    amax = blocks.abs().amax((1, 3))
    mantissa, exponent = torch.frexp(divided(amax.clamp(min=1e-12), E4M3_MAX))  # mantissa from 0.5, which is a power of two
    exponent = (exponent - (mantissa == 0.5).int()).clamp(-127, 127).float()
    scale = torch.exp2(exponent)
    quantised = _unblock((blocks / scale[:, None, :, None]).clamp(-E4M3_MAX, E4M3_MAX), weight.shape)
    return quantised.to(torch.float8_e4m3fn), encode_e8m0(scale)


def _linear_fake(
    x: Tensor, weight: Tensor, scale: Tensor, groups: int = 1, norm: Tensor | None = None, eps: float = 0.0
) -> Tensor:
    batch = x.shape[:-1] if groups == 1 else x.shape[:-2]
    return x.new_empty((*batch, weight.shape[0]))


def _linear_cuda(
    x: Tensor, weight: Tensor, scale: Tensor, groups: int = 1, norm: Tensor | None = None, eps: float = 0.0
) -> Tensor:
    """bf16: the streaming kernel up to 128 tokens, else the weight in bf16 and a matmul. float32: the reference, the
    oracle's precision."""
    if x.dtype == torch.float32:
        return linear_fp8_block_ref(x, weight, scale, groups, norm, eps)
    n, k = weight.shape[0], x.shape[-1]
    kernels.check_linear("linear_fp8_block", FP8, x, n, groups, norm)
    check_fp8_block("linear_fp8_block", weight, scale, k, x.device)
    if x.numel() // (groups * k) <= kernels.MAX_TOKENS:
        return kernels.linear(x, Weight(weight, scale), groups, norm, eps)
    x = x if norm is None else rms_norm(x, norm, eps).to(x.dtype)
    return kernels.grouped_matmul(x, kernels.dequantize(FP8, weight, scale, n, k), groups)


def check_fp8_block(op_name: str, weight: Tensor, scale: Tensor, k: int, device: torch.device) -> None:
    """ValueError unless the kernels can read the weight [N, k] and its scale."""
    n = weight.shape[0]
    check_weight(f"{op_name} weight", weight, torch.float8_e4m3fn, (n, k), device)
    check_weight(f"{op_name} scale", scale, torch.float32, (-(-n // BLOCK), -(-k // BLOCK)), device)


@op(
    "linear_fp8_block(Tensor x, Tensor weight, Tensor scale, int groups=1, Tensor? norm=None, float eps=0.0) -> Tensor",
    fake=_linear_fake,
    cuda=_linear_cuda,
)
def linear_fp8_block_ref(
    x: Tensor, weight: Tensor, scale: Tensor, groups: int = 1, norm: Tensor | None = None, eps: float = 0.0
) -> Tensor:
    """y = x W^T in float32, rounded once; with groups, y[g] = x[g] W[g]^T and the y[g] stand side by side. A normalised x
    is rounded to its dtype first."""
    if norm is not None:
        x = rms_norm(x, norm, eps).to(x.dtype)
    weight = dequantize_fp8_block(weight, scale)
    if groups == 1:
        return torch.nn.functional.linear(x.float(), weight).to(x.dtype)
    y = torch.einsum("...gk,gnk->...gn", x.float(), weight.unflatten(0, (groups, -1)))
    return y.flatten(-2).to(x.dtype)


def linear_fp8_block(
    x: Tensor, weight: Tensor, scale: Tensor, groups: int = 1, norm: Tensor | None = None, eps: float = 0.0
) -> Tensor:
    """Weight-only FP8-block linear: x [..., K] (with groups > 1: [..., G, K]) bf16 or float32; weight float8_e4m3fn
    [N, K] (rows of group g are g*N/G ..); scale float32 [ceil(N/128), ceil(K/128)]. Returns [..., N] in x's dtype.

    norm float32 [K]: x goes through RMSNorm with this weight and `eps` first, in the same launch up to 128 tokens."""
    return torch.ops.dsv4.linear_fp8_block(x, weight, scale, groups, norm, eps)

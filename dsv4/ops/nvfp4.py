"""NVFP4: 4-bit E2M1 codes, one E4M3 scale per 16 of them along K, one float32 scale per tensor.

    W[n, k] = e2m1(code[n, k]) * float(scale[n, k // 16]) * scale_2

Two codes a byte along K, the even k in the low nibble. `input_scale`, which checkpoints carry beside these, belongs to
the activation and never enters here. Layout: NVIDIA ModelOpt's, as read from the V4 NVFP4 checkpoints.
"""

import torch
from torch import Tensor

from dsv4.ops._register import op
from dsv4.ops.fp8 import divided
from dsv4.ops.kernels import linear as kernels
from dsv4.ops.kernels.stream import FP4, Weight, check_weight
from dsv4.ops.rope import rms_norm

GROUP = 16
E2M1_MAX = 6.0
E4M3_MAX = 448.0


def decode_e2m1(codes: Tensor) -> Tensor:
    """Float32 values of E2M1 codes 0..15 (sign, two exponent bits, one mantissa bit). Any integer tensor, same shape."""
    codes = codes.to(torch.int32)
    exponent, mantissa = (codes >> 1) & 3, (codes & 1).float()
    normal = torch.exp2(exponent.float() - 1) * (1 + 0.5 * mantissa)
    magnitude = torch.where(exponent == 0, 0.5 * mantissa, normal)
    return torch.where(codes & 8 != 0, -magnitude, magnitude)


def encode_e2m1(values: Tensor) -> Tensor:
    """E2M1 codes (uint8) of float values, rounded to nearest with ties to the even code, saturating at +-6."""
    magnitude = values.abs().float()
    # Midpoints between 0, .5, 1, 1.5, 2, 3, 4, 6. A tie goes to the even code: up at odd midpoints, down at even ones.
    code = torch.zeros_like(magnitude, dtype=torch.uint8)
    for index, midpoint in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)):
        above = magnitude >= midpoint if index % 2 else magnitude > midpoint
        code += above.to(torch.uint8)
    return code | (torch.signbit(values).to(torch.uint8) << 3)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """[..., K/2] bytes -> [..., K] codes, low nibble first."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def pack_nibbles(codes: Tensor) -> Tensor:
    """[..., K] codes -> [..., K/2] bytes, low nibble first."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def dequantize_nvfp4(packed: Tensor, scale: Tensor, scale_2: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """uint8 [..., K/2], float8_e4m3fn [..., K/16], float32 broadcastable to [..., 1] -> dtype [..., K]."""
    # Decoding all 256 bytes and looking each one up is 4 times faster on a CPU than decoding every code.
    pairs = decode_e2m1(unpack_nibbles(torch.arange(256, dtype=torch.uint8, device=packed.device)[:, None]))
    values = torch.nn.functional.embedding(packed.int(), pairs).flatten(-2).unflatten(-1, (-1, GROUP))
    scales = scale.float() * scale_2
    return (values * scales.unsqueeze(-1)).flatten(-2).to(dtype)


def quantize_nvfp4(weight: Tensor, scale_2: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise [out, in] (in divisible by 16) to (uint8 [out, in/2], float8_e4m3fn [out, in/16], float32 []).

    scale_2 is max|W| / 2688 unless given (2688 = 6 * 448), as ModelOpt defines it. All-zero tensors get scale_2 = 1.
    """
    if weight.shape[-1] % GROUP:
        raise ValueError(f"NVFP4 needs a last dimension divisible by {GROUP}, found shape {tuple(weight.shape)}")
    groups = weight.float().unflatten(-1, (-1, GROUP))
    amax = groups.abs().amax(-1)
    if scale_2 is None:
        scale_2 = divided(amax.max(), E2M1_MAX * E4M3_MAX)
        scale_2 = torch.where(scale_2 > 0, scale_2, torch.ones_like(scale_2))
    scale = (divided(amax, E2M1_MAX) / scale_2).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    step = (scale.float() * scale_2).unsqueeze(-1)
    # A scale that rounds to 0 holds only values below half of the smallest step: all its codes are 0.
    codes = encode_e2m1(torch.where(step > 0, groups / step, torch.zeros_like(groups)))
    return pack_nibbles(codes.flatten(-2)), scale, scale_2.float()


def through_nvfp4(x: Tensor) -> Tensor:
    """x [..., K] as a W4A4 product sees it: quantised by the op `quantize_nvfp4` and dequantised. Same shape and dtype;
    float32 holds the values to an ulp, bf16 rounds them once more, by 2^-9 at most."""
    return dequantize_nvfp4(*torch.ops.dsv4.quantize_nvfp4(x), x.dtype)


def _linear_fake(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    scale_2: Tensor,
    activation: str | None = None,
    groups: int = 1,
    norm: Tensor | None = None,
    eps: float = 0.0,
    out_fp32: bool = False,
) -> Tensor:
    batch = x.shape[:-1] if groups == 1 else x.shape[:-2]
    return x.new_empty((*batch, weight.shape[0]), dtype=torch.float32 if out_fp32 else x.dtype)


def _prepared(x: Tensor, activation: str | None, norm: Tensor | None, eps: float) -> Tensor:
    """What meets the weight: x after the norm, rounded to its dtype, and after the emulated quantisation."""
    if norm is not None:
        x = rms_norm(x, norm, eps).to(x.dtype)
    return x if activation is None else through_nvfp4(x)


def _linear_cuda(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    scale_2: Tensor,
    activation: str | None = None,
    groups: int = 1,
    norm: Tensor | None = None,
    eps: float = 0.0,
    out_fp32: bool = False,
) -> Tensor:
    """bf16: the streaming kernel up to 128 tokens, else the weight in bf16 and a matmul. float32: the reference, the
    oracle's precision."""
    if x.dtype == torch.float32:
        return linear_nvfp4_ref(x, weight, scale, scale_2, activation, groups, norm, eps, out_fp32)
    n, k = weight.shape[0], x.shape[-1]
    kernels.check_linear("linear_nvfp4", FP4, x, n, groups, norm)
    check_nvfp4("linear_nvfp4 weight", weight, scale, scale_2, k, x.device)
    few = x.numel() // (groups * k) <= kernels.MAX_TOKENS
    if activation is not None or not few:
        x, norm = _prepared(x, activation, norm, eps), None
    if few:
        dtype = torch.float32 if out_fp32 else x.dtype
        return kernels.linear(x, Weight(weight, scale, scale_2), groups, norm, eps, dtype)
    y = kernels.grouped_matmul(x, kernels.dequantize(FP4, weight, scale, n, k), groups, torch.float32) * scale_2
    return y if out_fp32 else y.to(x.dtype)


def check_nvfp4(
    name: str, weight: Tensor, scale: Tensor | None, scale_2: Tensor | None, k: int, device: torch.device
) -> None:
    """ValueError unless the kernels can read the weight [N, k/2] and its scales."""
    n = weight.shape[0]
    if scale is None or scale_2 is None:
        raise ValueError(f"{name}: uint8 codes without {'scale' if scale is None else 'scale_2'}, expected both")
    check_weight(name, weight, torch.uint8, (n, k // 2), device)
    check_weight(f"{name}'s scale", scale, torch.float8_e4m3fn, (n, k // GROUP), device)
    check_weight(f"{name}'s scale_2", scale_2, torch.float32, (n,) if scale_2.dim() else (), device)


@op(
    "linear_nvfp4(Tensor x, Tensor weight, Tensor scale, Tensor scale_2, str? activation=None, int groups=1, "
    "Tensor? norm=None, float eps=0.0, bool out_fp32=False) -> Tensor",
    fake=_linear_fake,
    cuda=_linear_cuda,
)
def linear_nvfp4_ref(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    scale_2: Tensor,
    activation: str | None = None,
    groups: int = 1,
    norm: Tensor | None = None,
    eps: float = 0.0,
    out_fp32: bool = False,
) -> Tensor:
    """y = x W^T in float32, rounded once to x's dtype unless `out_fp32`; groups as in linear_fp8_block."""
    rows = _prepared(x, activation, norm, eps).float()
    weight = dequantize_nvfp4(weight, scale, scale_2.unsqueeze(-1))
    if groups == 1:
        y = torch.nn.functional.linear(rows, weight)
    else:
        y = torch.einsum("...gk,gnk->...gn", rows, weight.unflatten(0, (groups, -1))).flatten(-2)
    return y if out_fp32 else y.to(x.dtype)


def linear_nvfp4(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    scale_2: Tensor,
    activation: str | None = None,
    groups: int = 1,
    norm: Tensor | None = None,
    eps: float = 0.0,
    out_fp32: bool = False,
) -> Tensor:
    """Weight-only NVFP4 linear: x [..., K] (with groups > 1: [..., G, K]) bf16 or float32; weight uint8 [N, K/2] (rows of
    group g are g*N/G ..); scale float8_e4m3fn [N, K/16]; scale_2 float32 [], or [N] with a value for each row. Returns
    [..., N] in x's dtype, with `out_fp32` in float32.

    norm float32 [K]: x goes through RMSNorm with this weight and `eps` first, in the same launch up to 128 tokens.
    activation="nvfp4" emulates a W4A4 kernel: what meets the weight goes through NVFP4 (`through_nvfp4`)."""
    if activation not in (None, "nvfp4"):
        raise ValueError(f'linear_nvfp4: activation must be None or "nvfp4", found {activation!r}')
    return torch.ops.dsv4.linear_nvfp4(x, weight, scale, scale_2, activation, groups, norm, eps, out_fp32)

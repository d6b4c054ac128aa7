"""project: all that a layer's attention multiplies its input with, in one launch up to 64 tokens.

    y = x W^T, rounded once        z = x V^T in float32
W gives the low-rank query and the key/value rows; V the projections of the compressors and the indexer's head weights,
which must stay in float32. Both read the same x. Each is plain, in FP8 blocks or in NVFP4.
"""

import torch
from torch import Tensor

from dsv4.ops._register import op
from dsv4.ops.fp8 import check_fp8_block, linear_fp8_block_ref
from dsv4.ops.kernels import linear as kernels
from dsv4.ops.kernels.stream import BF16, FP8, Weight, check_weight
from dsv4.ops.linear import linear_fp32_ref
from dsv4.ops.nvfp4 import check_nvfp4, linear_nvfp4_ref


def _fake(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    scale_2: Tensor | None,
    exact: Tensor,
    exact_scale: Tensor | None = None,
    exact_scale_2: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    batch = x.shape[:-1]
    return x.new_empty((*batch, weight.shape[0])), x.new_empty((*batch, exact.shape[0]), dtype=torch.float32)


def _check(name: str, x: Tensor, weight: Weight) -> None:
    k = x.shape[-1]
    kernels.check_linear(name, weight.number, x, len(weight.codes))
    if weight.number == BF16:
        check_weight(name, weight.codes, torch.bfloat16, (len(weight.codes), k), x.device)
    elif weight.number == FP8:
        check_fp8_block(name, weight.codes, weight.scales, k, x.device)
    else:
        check_nvfp4(name, *weight, k, x.device)


def _many(x: Tensor, weight: Weight, dtype: torch.dtype) -> Tensor:
    """x W^T of any number of tokens, with the weight in bf16 and a matmul."""
    plain = weight.codes
    if weight.number != BF16:
        plain = kernels.dequantize(weight.number, weight.codes, weight.scales, len(plain), x.shape[-1])
    if weight.scale_2 is None:
        return kernels.grouped_matmul(x, plain, dtype=dtype)
    return (kernels.grouped_matmul(x, plain, dtype=torch.float32) * weight.scale_2).to(dtype)


def _cuda(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    scale_2: Tensor | None,
    exact: Tensor,
    exact_scale: Tensor | None = None,
    exact_scale_2: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """bf16: the streaming kernels up to 128 tokens, else two matmuls. float32: the reference, the oracle's precision."""
    if x.dtype == torch.float32:
        return project_ref(x, weight, scale, scale_2, exact, exact_scale, exact_scale_2)
    first, second = Weight(weight, scale, scale_2), Weight(exact, exact_scale, exact_scale_2)
    _check("project weight", x, first)
    _check("project exact", x, second)
    if x.numel() // x.shape[-1] <= kernels.MAX_TOKENS:
        return kernels.project(x, first, second)
    return _many(x, first, x.dtype), _many(x, second, torch.float32)


def _product(x: Tensor, weight: Tensor, scale: Tensor | None, scale_2: Tensor | None) -> Tensor:
    """x W^T in float32."""
    if scale is None:
        return linear_fp32_ref(x, weight)
    if scale_2 is None:
        return linear_fp8_block_ref(x.float(), weight, scale)
    return linear_nvfp4_ref(x, weight, scale, scale_2, out_fp32=True)


@op(
    "project(Tensor x, Tensor weight, Tensor? scale, Tensor? scale_2, Tensor exact, Tensor? exact_scale=None, "
    "Tensor? exact_scale_2=None) -> (Tensor, Tensor)",
    fake=_fake,
    cuda=_cuda,
)
def project_ref(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    scale_2: Tensor | None,
    exact: Tensor,
    exact_scale: Tensor | None = None,
    exact_scale_2: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The two products."""
    return _product(x, weight, scale, scale_2).to(x.dtype), _product(x, exact, exact_scale, exact_scale_2)


def project(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    scale_2: Tensor | None,
    exact: Tensor,
    exact_scale: Tensor | None = None,
    exact_scale_2: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """x [..., K] bf16 or float32; `weight` of N and `exact` of M rows, each as one of the linears takes it: in x's dtype
    [N, K] without scales; float8_e4m3fn [N, K] with scale float32 [ceil(N/128), ceil(K/128)]; uint8 [N, K/2] with scale
    float8_e4m3fn [N, K/16] and scale_2 float32 [] or [N]. Returns y [..., N] in x's dtype and z float32 [..., M]."""
    return torch.ops.dsv4.project(x, weight, scale, scale_2, exact, exact_scale, exact_scale_2)

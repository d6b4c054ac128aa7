"""project: all that a layer's attention multiplies its input with, in one launch up to 64 tokens.

    y = x dequantize(weight, scale)^T, rounded once        z = x plain^T in float32
The low-rank query and the key/value rows are FP8 and give bf16; the projections of the compressors and the indexer's head
weights are plain and must stay in float32. Both read the same x.
"""

import torch
from torch import Tensor

from dsv4.ops._register import op
from dsv4.ops.fp8 import check_fp8_block, linear_fp8_block_ref
from dsv4.ops.kernels import linear as kernels
from dsv4.ops.kernels.stream import FP8, check_weight
from dsv4.ops.linear import linear_fp32_ref


def _fake(x: Tensor, weight: Tensor, scale: Tensor, plain: Tensor) -> tuple[Tensor, Tensor]:
    batch = x.shape[:-1]
    return x.new_empty((*batch, weight.shape[0])), x.new_empty((*batch, plain.shape[0]), dtype=torch.float32)


def _cuda(x: Tensor, weight: Tensor, scale: Tensor, plain: Tensor) -> tuple[Tensor, Tensor]:
    """bf16: the streaming kernel up to 64 tokens, else two matmuls. float32: the reference, the oracle's precision."""
    if x.dtype == torch.float32:
        return project_ref(x, weight, scale, plain)
    n, k = weight.shape[0], x.shape[-1]
    kernels.check_linear("project", FP8, x, n)
    check_fp8_block("project", weight, scale, k, x.device)
    check_weight("project plain", plain, torch.bfloat16, (plain.shape[0], k), x.device)
    if x.numel() // k <= kernels.MAX_TOKENS:
        return kernels.project(x, weight, scale, plain)
    y = kernels.grouped_matmul(x, kernels.dequantize(FP8, weight, scale, n, k))
    return y, kernels.grouped_matmul(x, plain, dtype=torch.float32)


@op("project(Tensor x, Tensor weight, Tensor scale, Tensor plain) -> (Tensor, Tensor)", fake=_fake, cuda=_cuda)
def project_ref(x: Tensor, weight: Tensor, scale: Tensor, plain: Tensor) -> tuple[Tensor, Tensor]:
    """The two products."""
    return linear_fp8_block_ref(x, weight, scale), linear_fp32_ref(x, plain)


def project(x: Tensor, weight: Tensor, scale: Tensor, plain: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., K] bf16 or float32; weight float8_e4m3fn [N, K] with scale float32 [ceil(N/128), ceil(K/128)]; plain [M, K]
    in x's dtype. Returns y [..., N] in x's dtype and z float32 [..., M]."""
    return torch.ops.dsv4.project(x, weight, scale, plain)

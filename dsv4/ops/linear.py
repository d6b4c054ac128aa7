"""linear_fp32: a plain weight whose result must stay in float32.

The official code runs the router, the compressor projections, the indexer's head weights and the output head in
float32. bf16 operands with float32 accumulation and a float32 result give the same products, so weights may stay bf16.
"""

import torch
from torch import Tensor

from dsv4.ops._register import op
from dsv4.ops.kernels import linear as kernels
from dsv4.ops.kernels.stream import BF16, Weight, check_weight

FEW = 4  # tokens; for more the library's GEMM is as fast or faster (measured on an H200)


def _linear_cuda(x: Tensor, weight: Tensor) -> Tensor:
    """bf16: the streaming kernel for few tokens, else a matmul with float32 result. float32: the reference, the oracle's
    precision."""
    if x.dtype == torch.float32:
        return linear_fp32_ref(x, weight)
    n, k = weight.shape[0], x.shape[-1]
    kernels.check_linear("linear_fp32", BF16, x, n)
    check_weight("linear_fp32 weight", weight, torch.bfloat16, (n, k), x.device)
    if x.numel() // k <= FEW:
        return kernels.linear(x, Weight(weight), dtype=torch.float32)
    return kernels.grouped_matmul(x, weight, dtype=torch.float32)


@op(
    "linear_fp32(Tensor x, Tensor weight) -> Tensor",
    fake=lambda x, weight: x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=torch.float32),
    cuda=_linear_cuda,
)
def linear_fp32_ref(x: Tensor, weight: Tensor) -> Tensor:
    """y = x W^T with float32 products and sum."""
    return torch.nn.functional.linear(x.float(), weight.float())


def linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., K] and weight [N, K] in bf16 or float32 -> float32 [..., N]."""
    return torch.ops.dsv4.linear_fp32(x, weight)

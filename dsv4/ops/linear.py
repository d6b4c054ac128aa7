"""linear_fp32: a plain weight whose result must stay in float32.

The official code runs the router, the compressor projections, the indexer's head weights and the output head in
float32. bf16 operands with float32 accumulation and a float32 result give the same products, so weights may stay bf16.
"""

import torch
from torch import Tensor

from dsv4.ops._register import op


@op(
    "linear_fp32(Tensor x, Tensor weight) -> Tensor",
    fake=lambda x, weight: x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=torch.float32),
)
def linear_fp32_ref(x: Tensor, weight: Tensor) -> Tensor:
    """y = x W^T with float32 products and sum."""
    return torch.nn.functional.linear(x.float(), weight.float())


def linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., K] and weight [N, K] in bf16 or float32 -> float32 [..., N]."""
    return torch.ops.dsv4.linear_fp32(x, weight)

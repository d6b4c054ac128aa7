"""linear_fp32: a plain weight whose result must stay in float32.

The official code runs the router, the compressor projections, the indexer's head weights and the output head in
float32. bf16 operands with float32 accumulation and a float32 result give the same products, so weights may stay bf16.
"""

import torch
from torch import Tensor

from dsv4.ops._register import op
from dsv4.ops.kernels import stream


def _linear_cuda(x: Tensor, weight: Tensor) -> Tensor:
    """bf16: the streaming kernel up to 64 tokens, else a matmul with float32 result. float32: the reference, the
    oracle's precision."""
    if x.dtype == torch.float32:
        return linear_fp32_ref(x, weight)
    if x.dtype != torch.bfloat16:
        raise ValueError(f"linear_fp32: x has dtype {x.dtype}, expected bfloat16 or float32")
    n, k = weight.shape[0], x.shape[-1]
    stream.FORMATS[stream.BF16].check(k, "linear_fp32")
    stream.check_weight("linear_fp32 weight", weight, torch.bfloat16, (n, k), x.device)
    rows = stream.rows_of(x, k)
    if len(rows) <= stream.MAX_TOKENS:
        y = torch.empty((len(rows), n), dtype=torch.float32, device=x.device)
        if len(rows):
            stream.run_linear(stream.BF16, rows, weight, None, None, y)
    else:
        y = torch.mm(rows, weight.T, out_dtype=torch.float32)
    return y.view(*x.shape[:-1], n)


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

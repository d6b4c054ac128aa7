"""Rotary embedding of the trailing channels, and the two ops that prepare attention's query and key.

Pairs are interleaved: channels (2i, 2i+1) of the last R turn by position * inv_freq[i] (paper section 2.3; the official
code multiplies complex numbers). Angles are float32, computed from the position: there is no table, so no length cap.

On CUDA bf16 rows run kernels/rope.cu; float32 rows, the oracle's precision, run the references.
"""

import torch
from torch import Tensor

from dsv4.ops._register import op
from dsv4.ops.kernels.build import kernel
from dsv4.ops.kernels.checks import require, require_tensors

_THREADS = 128  # of rope_rows


def rotate(x: Tensor, angles: Tensor, inverse: bool = False) -> Tensor:
    """x [..., D] float32, angles broadcastable to [..., R/2]: turn the last R channels of x by the angles."""
    width = 2 * angles.shape[-1]
    plain, turned = x[..., :-width], x[..., -width:].unflatten(-1, (-1, 2))
    cos, sin = angles.cos(), angles.sin() * (-1.0 if inverse else 1.0)
    even, odd = turned.unbind(-1)
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    return torch.cat((plain, turned), dim=-1)


def rope_angles(positions: Tensor, inv_freq: Tensor) -> Tensor:
    """positions [T], inv_freq [R/2] -> float32 [T, R/2]."""
    return positions.float()[:, None] * inv_freq


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Float32 RMSNorm over the last dimension; weight None means without weight. Returns float32."""
    x = x.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x if weight is None else x * weight.float()


def _rope_rows(op_name, x, weight, inv_freq, positions, heads, eps, norm):
    """Launch rope_rows over x [..., D] of `heads` rows a token."""
    x, dim, rope = x.contiguous(), x.shape[-1], 2 * inv_freq.shape[0]
    require_tensors(op_name, torch.bfloat16, x=x)
    require_tensors(op_name, torch.float32, inv_freq=inv_freq, **({} if weight is None else {"weight": weight}))
    require_tensors(op_name, torch.int64, positions=positions)
    require(op_name, dim % 8 == 0 and 0 < dim <= 4096, f"a head must be a multiple of 8 up to 4096 wide, found {dim}")
    require(op_name, rope <= dim, f"rope turns at most the head's {dim} channels, found {rope}")
    out = torch.empty_like(x)
    rows = x.numel() // dim
    if rows:
        lanes = min(32, 1 << (dim // 8 - 1).bit_length())
        launch = kernel("rope.cu", "rope_rows", f"D={dim}", f"ROPE={rope}", f"LANES={lanes}")
        blocks = -(-rows * lanes // _THREADS)
        launch(blocks, _THREADS, x, weight, inv_freq, positions, heads, rows, eps, int(norm), out, pdl=True)
    return out


def _q_rope_cuda(q, inv_freq, positions, eps=0.0, norm=True):
    if q.dtype == torch.float32:
        return q_rope_ref(q, inv_freq, positions, eps, norm)
    return _rope_rows("q_rope", q, None, inv_freq, positions, q.shape[1], eps, norm)


def _kv_rope_cuda(kv, weight, inv_freq, positions, eps):
    if kv.dtype == torch.float32:
        return kv_rope_ref(kv, weight, inv_freq, positions, eps)
    return _rope_rows("kv_rope", kv, weight, inv_freq, positions, 1, eps, True)


@op(
    "q_rope(Tensor q, Tensor inv_freq, Tensor positions, float eps=0.0, bool norm=True) -> Tensor",
    fake=lambda q, inv_freq, positions, eps=0.0, norm=True: q.new_empty(q.shape),
    cuda=_q_rope_cuda,
)
def q_rope_ref(q: Tensor, inv_freq: Tensor, positions: Tensor, eps: float = 0.0, norm: bool = True) -> Tensor:
    """Per head: x / rms(x), then rope at the token's position; one rounding at the end."""
    x = rms_norm(q, None, eps) if norm else q.float()
    return rotate(x, rope_angles(positions, inv_freq)[:, None]).to(q.dtype)


def q_rope(q: Tensor, inv_freq: Tensor, positions: Tensor, eps: float = 0.0, norm: bool = True) -> Tensor:
    """Attention's query: q [T, heads, D] -> the same, each head divided by its root mean square (no learned weight;
    skipped with norm=False, as the indexer needs) and its last R channels turned. inv_freq float32 [R/2],
    positions int64 [T]."""
    return torch.ops.dsv4.q_rope(q, inv_freq, positions, eps, norm)


@op(
    "kv_rope(Tensor kv, Tensor weight, Tensor inv_freq, Tensor positions, float eps) -> Tensor",
    fake=lambda kv, weight, inv_freq, positions, eps: kv.new_empty(kv.shape),
    cuda=_kv_rope_cuda,
)
def kv_rope_ref(kv: Tensor, weight: Tensor, inv_freq: Tensor, positions: Tensor, eps: float) -> Tensor:
    """RMSNorm with weight, then rope at the token's own position; one rounding at the end."""
    return rotate(rms_norm(kv, weight, eps), rope_angles(positions, inv_freq)).to(kv.dtype)


def kv_rope(kv: Tensor, weight: Tensor, inv_freq: Tensor, positions: Tensor, eps: float) -> Tensor:
    """Attention's shared key and value: kv [T, D], weight [D] float32, inv_freq float32 [R/2], positions int64 [T]."""
    return torch.ops.dsv4.kv_rope(kv, weight, inv_freq, positions, eps)

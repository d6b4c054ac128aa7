"""Rotary embedding of the trailing channels, and the two ops that prepare attention's query and key.

Pairs are interleaved: channels (2i, 2i+1) of the last R turn by position * inv_freq[i] (paper section 2.3; the official
code multiplies complex numbers). Angles are float32, computed from the position: there is no table, so no length cap.
"""

import torch
from torch import Tensor

from dsv4.ops._register import op


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


@op(
    "q_rope(Tensor q, Tensor inv_freq, Tensor positions, float eps=0.0, bool norm=True) -> Tensor",
    fake=lambda q, inv_freq, positions, eps=0.0, norm=True: q.new_empty(q.shape),
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
)
def kv_rope_ref(kv: Tensor, weight: Tensor, inv_freq: Tensor, positions: Tensor, eps: float) -> Tensor:
    """RMSNorm with weight, then rope at the token's own position; one rounding at the end."""
    return rotate(rms_norm(kv, weight, eps), rope_angles(positions, inv_freq)).to(kv.dtype)


def kv_rope(kv: Tensor, weight: Tensor, inv_freq: Tensor, positions: Tensor, eps: float) -> Tensor:
    """Attention's shared key and value: kv [T, D], weight [D] float32, inv_freq float32 [R/2], positions int64 [T]."""
    return torch.ops.dsv4.kv_rope(kv, weight, inv_freq, positions, eps)

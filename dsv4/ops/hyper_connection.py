"""hc_mix, hc_mix_head, hc_pre, hc_post, hc_head: manifold-constrained hyper-connections (paper section 2.2).

The residual is N streams X [N, H] a token. Before a sublayer they collapse into one input, after it they mix:
    m    = fn . flatten(X) / rms(flatten(X))          24 = 2N + N^2 numbers: pre, post, comb
    pre  = sigmoid(m scale_0 + base) + eps            x = RMSNorm(sum_j pre_j X_j)
    post = 2 sigmoid(m scale_1 + base)                (no eps)
    comb = Sinkhorn(softmax(m scale_2 + base) + eps)  ends on a column step, so columns sum to 1
    X'_k = post_k y + sum_j comb[j, k] X_j            comb enters transposed
All of it in float32 with one rounding at the end, as the official code does.

Between two sublayers X'_k of the first and x of the second follow one another: hc_mix does both, and hc_mix_head ends the
model. They take and give the logits of comb, m scale_2 + base: Sinkhorn's steps need nothing else, so hc_mix's kernel takes
those of the sublayer before while it waits for that sublayer's y, where at its end the next kernel would wait for them.
The first sublayer's streams are all the embedding: y mixed with post = 1 into streams of zeros, with any finite logits (-0
becomes 0).

On CUDA bf16 streams run kernels/hyper_connection*.cu; float32 streams, the oracle's precision, run the references.
"""

import torch
from torch import Tensor

from dsv4.ops._register import op
from dsv4.ops.kernels import hyper_connection as launches
from dsv4.ops.rope import rms_norm


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """float32 [..., N, N] -> nearly doubly stochastic: softmax over rows, then alternating column and row steps."""
    comb = logits.softmax(-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


def _projection(streams: Tensor, fn: Tensor, eps: float) -> Tensor:
    return torch.nn.functional.linear(rms_norm(streams.flatten(1), None, eps), fn)


def collapse(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm_weight: Tensor, eps: float, hc_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, H], post float32 [T, N] and the logits of comb float32 [T, N, N]; arguments as in hc_pre."""
    n = streams.shape[1]
    pre, post, comb = _projection(streams, fn, eps).split((n, n, n * n), dim=-1)
    pre = torch.sigmoid(pre * scale[0] + base[:n]) + hc_eps
    post = 2 * torch.sigmoid(post * scale[1] + base[n : 2 * n])
    logits = (comb * scale[2] + base[2 * n :]).unflatten(-1, (n, n))
    collapsed = torch.einsum("tn,tnh->th", pre, streams.float()).to(streams.dtype)
    return rms_norm(collapsed, norm_weight, eps).to(streams.dtype), post, logits


def _hc_pre_cuda(streams, *weights):
    if streams.dtype == torch.float32:
        return hc_pre_ref(streams, *weights)
    return launches.run("hc_pre", None, streams, *weights)[1:]


def _hc_head_cuda(streams, *weights):
    if streams.dtype == torch.float32:
        return hc_head_ref(streams, *weights)
    return launches.run("hc_head", None, streams, *weights, 0, head=True)[1]


def _hc_post_cuda(y, streams, post, comb):
    if streams.dtype == torch.float32:
        return hc_post_ref(y, streams, post, comb)
    return launches.run_post("hc_post", y, streams, post, comb)


def _hc_mix_cuda(y, streams, post, logits, *weights):
    if streams.dtype == torch.float32:
        return hc_mix_ref(y, streams, post, logits, *weights)
    return launches.run("hc_mix", (y, post, logits), streams, *weights)


def _hc_mix_head_cuda(y, streams, post, logits, *weights):
    if streams.dtype == torch.float32:
        return hc_mix_head_ref(y, streams, post, logits, *weights)
    return launches.run("hc_mix_head", (y, post, logits), streams, *weights, head=True)[1]


def _pre_fake(streams, fn, base, scale, norm_weight, eps, hc_eps, iterations):
    tokens, n, hidden = streams.shape
    return (
        streams.new_empty((tokens, hidden)),
        streams.new_empty((tokens, n), dtype=torch.float32),
        streams.new_empty((tokens, n, n), dtype=torch.float32),
    )


@op(
    "hc_pre(Tensor streams, Tensor fn, Tensor base, Tensor scale, Tensor norm_weight, float eps, float hc_eps, "
    "int iterations) -> (Tensor, Tensor, Tensor)",
    fake=_pre_fake,
    cuda=_hc_pre_cuda,
)
def hc_pre_ref(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_weight: Tensor,
    eps: float,
    hc_eps: float,
    iterations: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The equations above; the collapsed input is rounded to the streams' dtype before its RMSNorm and after it."""
    x, post, logits = collapse(streams, fn, base, scale, norm_weight, eps, hc_eps)
    return x, post, sinkhorn(logits, iterations, hc_eps)


def hc_pre(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_weight: Tensor,
    eps: float,
    hc_eps: float,
    iterations: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """streams [T, N, H]; float32 fn [2N + N*N, N*H], base [2N + N*N], scale [3], norm_weight [H].
    Returns x [T, H] in the streams' dtype (collapsed and normalised), post float32 [T, N], comb float32 [T, N, N]."""
    return torch.ops.dsv4.hc_pre(streams, fn, base, scale, norm_weight, eps, hc_eps, iterations)


@op(
    "hc_post(Tensor y, Tensor streams, Tensor post, Tensor comb) -> Tensor",
    fake=lambda y, streams, post, comb: streams.new_empty(streams.shape),
    cuda=_hc_post_cuda,
)
def hc_post_ref(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """X' = post (x) y + comb^T X."""
    mixed = torch.einsum("tjk,tjh->tkh", comb, streams.float())
    return (post[..., None] * y.float()[:, None] + mixed).to(streams.dtype)


def hc_post(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """y [T, H] (bf16 or float32), streams [T, N, H], post float32 [T, N], comb float32 [T, N, N] -> [T, N, H]."""
    return torch.ops.dsv4.hc_post(y, streams, post, comb)


@op(
    "hc_head(Tensor streams, Tensor fn, Tensor base, Tensor scale, Tensor norm_weight, float eps, float hc_eps) -> Tensor",
    fake=lambda streams, fn, base, scale, norm_weight, eps, hc_eps: streams.new_empty((streams.shape[0], streams.shape[2])),
    cuda=_hc_head_cuda,
)
def hc_head_ref(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm_weight: Tensor, eps: float, hc_eps: float
) -> Tensor:
    """w_j = sigmoid(m_j scale + base_j) + eps; RMSNorm(sum_j w_j X_j). No softmax and no Sinkhorn."""
    weights = torch.sigmoid(_projection(streams, fn, eps) * scale + base) + hc_eps
    collapsed = torch.einsum("tn,tnh->th", weights, streams.float()).to(streams.dtype)
    return rms_norm(collapsed, norm_weight, eps).to(streams.dtype)


def hc_head(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm_weight: Tensor, eps: float, hc_eps: float
) -> Tensor:
    """The last collapse and the model's final RMSNorm: streams [T, N, H]; float32 fn [N, N*H], base [N], scale [1],
    norm_weight [H] -> [T, H] in the streams' dtype."""
    return torch.ops.dsv4.hc_head(streams, fn, base, scale, norm_weight, eps, hc_eps)


@op(
    "hc_mix(Tensor y, Tensor streams, Tensor post, Tensor logits, Tensor fn, Tensor base, Tensor scale, "
    "Tensor norm_weight, float eps, float hc_eps, int iterations) -> (Tensor, Tensor, Tensor, Tensor)",
    fake=lambda y, streams, post, logits, *weights: (streams.new_empty(streams.shape), *_pre_fake(streams, *weights)),
    cuda=_hc_mix_cuda,
)
def hc_mix_ref(
    y: Tensor,
    streams: Tensor,
    post: Tensor,
    logits: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_weight: Tensor,
    eps: float,
    hc_eps: float,
    iterations: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hc_post with the comb of `logits`, then x, post and logits of its rounded result."""
    mixed = hc_post_ref(y, streams, post, sinkhorn(logits, iterations, hc_eps))
    return mixed, *collapse(mixed, fn, base, scale, norm_weight, eps, hc_eps)


def hc_mix(
    y: Tensor,
    streams: Tensor,
    post: Tensor,
    logits: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_weight: Tensor,
    eps: float,
    hc_eps: float,
    iterations: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What lies between two sublayers. Of the one before: its result y [T, H] (bf16 or float32), the streams [T, N, H] it
    read, its post float32 [T, N] and the logits of its comb float32 [T, N, N]. Of the one after: float32 fn
    [2N + N*N, N*H], base [2N + N*N], scale [3], norm_weight [H]. Returns the mixed streams, and of them x [T, H], post and
    logits for it."""
    return torch.ops.dsv4.hc_mix(y, streams, post, logits, fn, base, scale, norm_weight, eps, hc_eps, iterations)


@op(
    "hc_mix_head(Tensor y, Tensor streams, Tensor post, Tensor logits, Tensor fn, Tensor base, Tensor scale, "
    "Tensor norm_weight, float eps, float hc_eps, int iterations) -> Tensor",
    fake=lambda y, streams, *rest: streams.new_empty((streams.shape[0], streams.shape[2])),
    cuda=_hc_mix_head_cuda,
)
def hc_mix_head_ref(
    y: Tensor,
    streams: Tensor,
    post: Tensor,
    logits: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_weight: Tensor,
    eps: float,
    hc_eps: float,
    iterations: int,
) -> Tensor:
    """hc_post with the comb of `logits`, then hc_head of its rounded result."""
    mixed = hc_post_ref(y, streams, post, sinkhorn(logits, iterations, hc_eps))
    return hc_head_ref(mixed, fn, base, scale, norm_weight, eps, hc_eps)


def hc_mix_head(
    y: Tensor,
    streams: Tensor,
    post: Tensor,
    logits: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_weight: Tensor,
    eps: float,
    hc_eps: float,
    iterations: int,
) -> Tensor:
    """After the last sublayer: y, streams, post, logits and iterations as in hc_mix, the other arguments and the result as
    in hc_head."""
    return torch.ops.dsv4.hc_mix_head(y, streams, post, logits, fn, base, scale, norm_weight, eps, hc_eps, iterations)

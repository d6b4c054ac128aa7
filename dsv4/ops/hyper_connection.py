"""hc_pre, hc_post, hc_head: manifold-constrained hyper-connections (paper section 2.2).

The residual is N streams X [N, H] a token. Before a sublayer they collapse into one input, after it they mix:
    m    = fn . flatten(X) / rms(flatten(X))          24 = 2N + N^2 numbers: pre, post, comb
    pre  = sigmoid(m scale_0 + base) + eps            x = RMSNorm(sum_j pre_j X_j)
    post = 2 sigmoid(m scale_1 + base)                (no eps)
    comb = Sinkhorn(softmax(m scale_2 + base) + eps)  ends on a column step, so columns sum to 1
    X'_k = post_k y + sum_j comb[j, k] X_j            comb enters transposed
All of it in float32 with one rounding at the end, as the official code does.

On CUDA bf16 streams run kernels/hyper_connection.cu; float32 streams, the oracle's precision, run the references.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.ops._register import op
from dsv4.ops.kernels.build import kernel
from dsv4.ops.kernels.checks import require, require_tensors
from dsv4.ops.kernels.limits import raised
from dsv4.ops.rope import rms_norm

_POST_THREADS = 64


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """float32 [..., N, N] -> nearly doubly stochastic: softmax over rows, then alternating column and row steps."""
    comb = logits.softmax(-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


# Tokens up to which one launch does it all, and up to which hc_products multiplies; beyond that a matrix product does.
_ONE_LAUNCH, _SMALL = 8, 64
_WARPS = 8  # of hc_products and hc_finish


@dataclass(frozen=True)
class Plan:
    """How hc_collapse is spread: blocks a cluster, warps a block, rows of fn a warp, tokens a cluster."""

    cluster: int
    warps: int
    rows: int
    tokens: int

    @staticmethod
    def of(tokens: int, rows: int, n: int, hidden: int) -> "Plan":
        """As measured best on an H200 for `rows` of fn [rows, n * hidden]: more than two clusters of 16 blocks hinder
        each other, since a cluster must lie within one group of multiprocessors."""
        most = 16 if tokens <= 2 else 8
        cluster = next(c for c in (16, 8, 4, 2, 1) if c <= most and hidden % (8 * c) == 0)
        a_warp = min(rows, 6)
        tiles = -(-n * hidden // cluster // 128) * -(-rows // a_warp)
        return Plan(cluster, max(4, min(tiles, 32)), a_warp, 1)


def _split(fn: Tensor) -> Tensor:
    """float32 fn [rows, K] -> bf16 [3 * rows, K] whose three parts add up to fn, to 2^-24 of each value."""
    high = fn.to(torch.bfloat16)
    rest = fn - high.float()
    middle = rest.to(torch.bfloat16)
    return torch.cat((high, middle, (rest - middle.float()).to(torch.bfloat16)))


def _collapse(name, streams, fn, base, scale, norm_weight, eps, hc_eps, iterations=0, post=None, comb=None, plan=None):
    """With post and comb hc_pre, without them hc_head. Returns x."""
    tokens, n, hidden = streams.shape
    streams = streams.contiguous()
    require_tensors(name, torch.bfloat16, streams=streams)
    require_tensors(name, torch.float32, fn=fn, base=base, scale=scale, norm_weight=norm_weight)
    require(name, hidden % 8 == 0 and hidden <= 8192, f"hidden must be a multiple of 8 up to 8192, found {hidden}")
    require(name, 1 <= n <= 4, f"1 to 4 streams, found {n}")
    rows = n if post is None else 2 * n + n * n
    require(name, fn.shape == (rows, n * hidden), f"fn must be {(rows, n * hidden)}, found {tuple(fn.shape)}")
    x = streams.new_empty((tokens, hidden))
    if tokens == 0:
        return x
    sizes = f"HEAD={int(post is None)}", f"N={n}", f"H={hidden}"
    constants = base, scale, norm_weight, eps, hc_eps, iterations
    if plan or tokens <= _ONE_LAUNCH:
        plan = plan or Plan.of(tokens, rows, n, hidden)
        spread = f"CLUSTER={plan.cluster}", f"WARPS={plan.warps}", f"RPW={plan.rows}", f"TT={plan.tokens}"
        launch = raised(kernel("hyper_connection.cu", "hc_collapse", *sizes, *spread), 0, plan.cluster)
        cluster = {"cluster": plan.cluster} if plan.cluster > 1 else {}
        arguments = streams, fn, *constants, tokens, x, post, comb
        launch(-(-tokens // plan.tokens), 32 * plan.warps, *arguments, pdl=True, **cluster)
        return x
    sizes = *sizes, f"WARPS={_WARPS}"
    if tokens <= _SMALL:
        groups = -(-tokens // 8)
        parts = min(-(-n * hidden // 128), max(1, 256 // groups))
        products = fn.new_empty((tokens, parts, rows))
        launch = kernel("hyper_connection.cu", "hc_products", *sizes)
        launch((parts, groups), 32 * _WARPS, streams, fn, tokens, products, pdl=True)
    else:
        parts = 3
        products = torch.mm(streams.flatten(1), _split(fn).t(), out_dtype=torch.float32)
    launch = kernel("hyper_connection.cu", "hc_finish", *sizes)
    launch(tokens, 32 * (_WARPS + 1), streams, products, *constants, parts, x, post, comb, pdl=True)
    return x


def _hc_pre_cuda(streams, fn, base, scale, norm_weight, eps, hc_eps, iterations):
    if streams.dtype == torch.float32:
        return hc_pre_ref(streams, fn, base, scale, norm_weight, eps, hc_eps, iterations)
    tokens, n, _ = streams.shape
    post, comb = fn.new_empty((tokens, n)), fn.new_empty((tokens, n, n))
    x = _collapse("hc_pre", streams, fn, base, scale, norm_weight, eps, hc_eps, iterations, post, comb)
    return x, post, comb


def _hc_head_cuda(streams, fn, base, scale, norm_weight, eps, hc_eps):
    if streams.dtype == torch.float32:
        return hc_head_ref(streams, fn, base, scale, norm_weight, eps, hc_eps)
    return _collapse("hc_head", streams, fn, base, scale, norm_weight, eps, hc_eps)


def _hc_post_cuda(y, streams, post, comb):
    if streams.dtype == torch.float32:
        return hc_post_ref(y, streams, post, comb)
    tokens, n, hidden = streams.shape
    y, streams = y.contiguous(), streams.contiguous()
    require_tensors("hc_post", torch.bfloat16, streams=streams)
    require_tensors("hc_post", torch.float32, post=post, comb=comb)
    require("hc_post", y.dtype in (torch.bfloat16, torch.float32), f"y must be bf16 or float32, found {y.dtype}")
    require_tensors("hc_post", y.dtype, y=y)
    require("hc_post", hidden % 8 == 0, f"hidden must be a multiple of 8, found {hidden}")
    require("hc_post", 1 <= n <= 4, f"1 to 4 streams, found {n}")
    out = torch.empty_like(streams)
    if tokens:
        launch = kernel(
            "hyper_connection.cu", "hc_post", f"N={n}", f"H={hidden}", f"Y_FLOAT={int(y.dtype == torch.float32)}"
        )
        launch((-(-hidden // 8 // _POST_THREADS), tokens), _POST_THREADS, y, streams, post, comb, out, pdl=True)
    return out


def _projection(streams: Tensor, fn: Tensor, eps: float) -> Tensor:
    return torch.nn.functional.linear(rms_norm(streams.flatten(1), None, eps), fn)


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
    n = streams.shape[1]
    pre, post, comb = _projection(streams, fn, eps).split((n, n, n * n), dim=-1)
    pre = torch.sigmoid(pre * scale[0] + base[:n]) + hc_eps
    post = 2 * torch.sigmoid(post * scale[1] + base[n : 2 * n])
    comb = sinkhorn((comb * scale[2] + base[2 * n :]).unflatten(-1, (n, n)), iterations, hc_eps)
    collapsed = torch.einsum("tn,tnh->th", pre, streams.float()).to(streams.dtype)
    return rms_norm(collapsed, norm_weight, eps).to(streams.dtype), post, comb


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

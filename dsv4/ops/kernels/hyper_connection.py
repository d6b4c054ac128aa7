"""Launches of the hyper-connection kernels: hyper_connection.cu for up to some hundred tokens, and for more
hyper_connection_prefill.cu around a matrix product."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.ops.kernels.build import kernel
from dsv4.ops.kernels.checks import require, require_tensors
from dsv4.ops.kernels.limits import cluster_of, raised

SMALL = 128  # tokens up to which one launch does it all
WARPS, ROWS = 16, 3  # of hc_mix; rows of fn a warp
FINISH_THREADS = 288
POST_THREADS = 64
BLOCKS = 64  # more of them in clusters of 16 hinder each other, as a cluster lies within one group of multiprocessors


@dataclass(frozen=True)
class Plan:
    """How hc_mix is spread: blocks a cluster, tokens a cluster, and quads of weights that a thread has in registers."""

    cluster: int
    tokens: int
    held: int

    @staticmethod
    def of(tokens: int, hidden: int) -> "Plan":
        """The plan as measured best on an H200."""
        cluster = cluster_of(-(-hidden // 256))
        slice_ = -(-hidden // 8 // cluster) * 8
        most = 8 if slice_ <= 256 else 4  # 15 or 16 warps, each with at most 256 channels of a token, collapse the streams
        wanted = max(min(tokens, 2), -(-tokens * cluster // BLOCKS))  # two tokens in a cluster cost less than a second one
        a_cluster = min(most, 1 << (wanted - 1).bit_length())
        return Plan(cluster, a_cluster, 6 if a_cluster <= 2 else 2)

    def defines(self) -> tuple[str, ...]:
        return f"CLUSTER={self.cluster}", f"TT={self.tokens}", f"HELD={self.held}"

    def shared(self, rows: int, n: int, hidden: int) -> int:
        """Bytes of dynamic shared memory for `rows` of fn: the weights that are not in registers, and the streams."""
        chunks = -(-n * (-(-hidden // 8 // self.cluster) * 8) // 128)
        a_warp = min(ROWS, rows)
        quads = -(-chunks // (WARPS // -(-rows // a_warp))) * a_warp
        return max(0, quads - self.held) * WARPS * 32 * 16 + self.tokens * chunks * 256


def _split(fn: Tensor) -> Tensor:
    """float32 fn [rows, K] -> bf16 [3 * rows, K] whose three parts add up to fn, to 2^-24 of each value."""
    high = fn.to(torch.bfloat16)
    rest = fn - high.float()
    middle = rest.to(torch.bfloat16)
    return torch.cat((high, middle, (rest - middle.float()).to(torch.bfloat16)))


def _check(name, streams, fn, base, scale, norm_weight, head: bool) -> None:
    _, n, hidden = streams.shape
    require_tensors(name, torch.bfloat16, streams=streams)
    require_tensors(name, torch.float32, fn=fn, base=base, scale=scale, norm_weight=norm_weight)
    require(name, hidden % 8 == 0 and hidden <= 8192, f"hidden must be a multiple of 8 up to 8192, found {hidden}")
    require(name, 1 <= n <= 4, f"1 to 4 streams, found {n}")
    rows = n if head else 2 * n + n * n
    require(name, fn.shape == (rows, n * hidden), f"fn must be {(rows, n * hidden)}, found {tuple(fn.shape)}")


def _check_post(name, y, streams, post, comb, which: str) -> None:
    tokens, n, hidden = streams.shape
    require_tensors(name, torch.bfloat16, streams=streams)
    require_tensors(name, torch.float32, post=post, **{which: comb})
    require(name, y.dtype in (torch.bfloat16, torch.float32), f"y must be bf16 or float32, found {y.dtype}")
    require_tensors(name, y.dtype, y=y)
    require(name, post.shape == (tokens, n), f"post must be {(tokens, n)}, found {tuple(post.shape)}")
    require(name, comb.shape == (tokens, n, n), f"{which} must be {(tokens, n, n)}, found {tuple(comb.shape)}")
    require(name, hidden % 8 == 0, f"hidden must be a multiple of 8, found {hidden}")
    require(name, 1 <= n <= 4, f"1 to 4 streams, found {n}")


def _defines(streams: Tensor, y: Tensor | None, head: bool, logits: bool) -> tuple[str, ...]:
    _, n, hidden = streams.shape
    y_float = y is not None and y.dtype == torch.float32
    return f"HEAD={int(head)}", f"N={n}", f"H={hidden}", f"Y_FLOAT={int(y_float)}", f"LOGITS={int(logits)}"


def run_post(
    name: str, y: Tensor, streams: Tensor, post: Tensor, comb: Tensor, steps: tuple[float, int] | None = None
) -> Tensor:
    """hc_post. With `steps`, Sinkhorn's eps and iterations, `comb` comes as logits."""
    tokens, _, hidden = streams.shape
    y, streams, post, comb = y.contiguous(), streams.contiguous(), post.contiguous(), comb.contiguous()
    _check_post(name, y, streams, post, comb, "logits" if steps else "comb")
    mixed = torch.empty_like(streams)
    if tokens:
        launch = kernel("hyper_connection_prefill.cu", "hc_post", *_defines(streams, y, False, bool(steps)))
        grid = -(-hidden // 8 // POST_THREADS), tokens
        launch(grid, POST_THREADS, y, streams, post, comb, *(steps or (0.0, 0)), mixed, pdl=True)
    return mixed


def run(
    name: str,
    before: tuple[Tensor, Tensor, Tensor] | None,
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_weight: Tensor,
    eps: float,
    hc_eps: float,
    iterations: int,
    head: bool = False,
) -> tuple[Tensor, ...]:
    """Mix the streams with `before` = (y, post, logits of comb) of the sublayer before, then collapse them. Returns the
    mixed streams, x, post, logits. With None instead of `before`: `streams`, x, post and comb itself. `head`: post and
    comb are None."""
    tokens, n, hidden = streams.shape
    streams, logits = streams.contiguous(), before is not None
    _check(name, streams, fn, base, scale, norm_weight, head)
    x = streams.new_empty((tokens, hidden))
    post, comb = (None, None) if head else (fn.new_empty((tokens, n)), fn.new_empty((tokens, n, n)))
    constants = base, scale, norm_weight, eps, hc_eps, iterations
    if tokens > SMALL:
        if before:
            y, *old = before
            streams = run_post(name, y, streams, *old, (hc_eps, iterations))
        products = torch.mm(streams.flatten(1), _split(fn).t(), out_dtype=torch.float32)
        launch = kernel("hyper_connection_prefill.cu", "hc_finish", *_defines(streams, None, head, logits))
        launch(tokens, FINISH_THREADS, streams, products, *constants, 3, x, post, comb, pdl=True)
        return streams, x, post, comb
    y, old_post, old_logits = (t.contiguous() for t in before) if before else (None, None, None)
    if before:
        _check_post(name, y, streams, old_post, old_logits, "logits")
    mixed = torch.empty_like(streams) if before and not head else streams
    if tokens:
        plan = Plan.of(tokens, hidden)
        defines = *_defines(streams, y, head, logits), *plan.defines()
        shared = plan.shared(fn.shape[0], n, hidden)
        launch = raised(kernel("hyper_connection.cu", "hc_mix", *defines), shared, plan.cluster)
        arguments = y, streams, old_post, old_logits, fn, *constants, tokens, mixed, x, post, comb
        launch(-(-tokens // plan.tokens), 32 * WARPS, *arguments, shared=shared, cluster=plan.cluster, pdl=True)
    return mixed, x, post, comb

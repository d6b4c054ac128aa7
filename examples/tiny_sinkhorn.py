"""Sinkhorn normalisation of the 4 x 4 hyper-connection matrices with its exact gradient, as one differentiable op.

One op, so that the compiler sees one node instead of 40. On CUDA a Triton kernel keeps each matrix in registers, and
`check_kernels` compares it with the PyTorch version, which serves on the CPU. The tensor's device alone decides.
"""

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of PyTorch come without it; CUDA tensors then fail by name
    triton = None


def steps(logits, iters, eps):
    """Every normalisation of logits [4, 4, T] as (matrix, denominator, axis); axis 1 sums rows, axis 0 columns."""
    m = torch.softmax(logits, 1) + eps
    out = []
    for axis in [0] + [1, 0] * (iters - 1):
        denominator = m.sum(axis, keepdim=True) + eps
        m = m / denominator
        out.append((m, denominator, axis))
    return out


def forward_torch(logits, iters, eps):
    return steps(logits, iters, eps)[-1][0].contiguous()


def backward_torch(grad, logits, iters, eps):
    for m, denominator, axis in reversed(steps(logits, iters, eps)):
        grad = (grad - (grad * m).sum(axis, keepdim=True)) / denominator
    p = torch.softmax(logits, 1)
    return (p * (grad - (grad * p).sum(1, keepdim=True))).contiguous()


if triton:

    @triton.jit
    def _forward_kernel(x_ptr, y_ptr, T, eps, iters: tl.constexpr, BLOCK: tl.constexpr):
        j = tl.arange(0, 4)[:, None, None]
        k = tl.arange(0, 4)[None, :, None]
        t = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[None, None, :]
        at = (j * 4 + k) * T + t
        x = tl.load(x_ptr + at, mask=t < T, other=0.0)
        m = tl.exp(x - tl.max(x, axis=1, keep_dims=True))
        m = m / tl.sum(m, axis=1, keep_dims=True) + eps
        m = m / (tl.sum(m, axis=0, keep_dims=True) + eps)
        for _ in range(iters - 1):
            m = m / (tl.sum(m, axis=1, keep_dims=True) + eps)
            m = m / (tl.sum(m, axis=0, keep_dims=True) + eps)
        tl.store(y_ptr + at, m, mask=t < T)

    @triton.jit
    def _backward_kernel(g_ptr, x_ptr, kept_ptr, out_ptr, T, eps, iters: tl.constexpr, BLOCK: tl.constexpr):
        # kept [2 * iters - 2, 4, T] takes the denominators: with them each step is undone instead of stored.
        j = tl.arange(0, 4)[:, None, None]
        k = tl.arange(0, 4)[None, :, None]
        t = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[None, None, :]
        at = (j * 4 + k) * T + t
        inside = t < T
        x = tl.load(x_ptr + at, mask=inside, other=0.0)
        p = tl.exp(x - tl.max(x, axis=1, keep_dims=True))
        p = p / tl.sum(p, axis=1, keep_dims=True)
        m = p + eps
        first = tl.sum(m, axis=0, keep_dims=True) + eps
        m = m / first
        for i in range(iters - 1):
            row = tl.sum(m, axis=1, keep_dims=True) + eps
            tl.store(kept_ptr + (2 * i * 4 + j) * T + t, row, mask=inside)
            m = m / row
            column = tl.sum(m, axis=0, keep_dims=True) + eps
            tl.store(kept_ptr + ((2 * i + 1) * 4 + k) * T + t, column, mask=inside)
            m = m / column
        tl.debug_barrier()  # the denominators may be read back by other threads of the block
        g = tl.load(g_ptr + at, mask=inside, other=0.0)
        for back in range(iters - 1):
            i = iters - 2 - back
            column_ = tl.load(kept_ptr + ((2 * i + 1) * 4 + k) * T + t, mask=inside, other=1.0)
            g = (g - tl.sum(g * m, axis=0, keep_dims=True)) / column_
            m = m * column_
            row_ = tl.load(kept_ptr + (2 * i * 4 + j) * T + t, mask=inside, other=1.0)
            g = (g - tl.sum(g * m, axis=1, keep_dims=True)) / row_
            m = m * row_
        g = (g - tl.sum(g * m, axis=0, keep_dims=True)) / first
        tl.store(out_ptr + at, p * (g - tl.sum(g * p, axis=1, keep_dims=True)), mask=inside)


def forward_triton(logits, iters, eps, block=64):
    out = torch.empty_like(logits)
    _forward_kernel[(triton.cdiv(logits.shape[2], block),)](
        logits, out, logits.shape[2], eps, iters, BLOCK=block, num_warps=2
    )
    return out


def backward_triton(grad, logits, iters, eps, block=64):
    t = logits.shape[2]
    out, kept = torch.empty_like(logits), logits.new_empty(2 * iters - 2, 4, t)
    _backward_kernel[(triton.cdiv(t, block),)](grad, logits, kept, out, t, eps, iters, BLOCK=block, num_warps=2)
    return out


def check_kernels():
    """Compare the Triton kernels with PyTorch on this GPU; raises where they differ."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    x, g = (2 * torch.randn(4, 4, 1000, device="cuda", generator=generator) for _ in range(2))
    for name, ours, plain, tolerance in (
        ("forward", sinkhorn(x, 20, 1e-6), forward_torch(x, 20, 1e-6), 1e-5),
        ("backward", sinkhorn_backward(g, x, 20, 1e-6), backward_torch(g, x, 20, 1e-6), 1e-4),
    ):
        error = ((ours - plain).abs() / (1 + 10 * plain.abs())).max().item()
        if not error <= tolerance:  # also where it is not a number
            raise RuntimeError(f"the Sinkhorn {name} Triton kernel is off by {error:.1e} on this GPU")


def use_triton(x):
    if x.is_cuda and (triton is None or x.dtype != torch.float32):
        raise RuntimeError(f"Sinkhorn on CUDA needs Triton ({'found' if triton else 'not found'}) and float32 ({x.dtype})")
    return x.is_cuda


@torch.library.custom_op("tiny_dsv4::sinkhorn", mutates_args=())
def sinkhorn(logits: torch.Tensor, iters: int, eps: float) -> torch.Tensor:
    """logits [4, 4, T] contiguous -> doubly stochastic [4, 4, T]; axis 0 is summed by the last step."""
    return (forward_triton if use_triton(logits) else forward_torch)(logits.contiguous(), iters, eps)


@torch.library.custom_op("tiny_dsv4::sinkhorn_backward", mutates_args=())
def sinkhorn_backward(grad: torch.Tensor, logits: torch.Tensor, iters: int, eps: float) -> torch.Tensor:
    return (backward_triton if use_triton(logits) else backward_torch)(grad.contiguous(), logits.contiguous(), iters, eps)


@sinkhorn.register_fake
def _(logits, iters, eps):
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


@sinkhorn_backward.register_fake
def _(grad, logits, iters, eps):
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _save(ctx, inputs, output):
    logits, ctx.iters, ctx.eps = inputs
    ctx.save_for_backward(logits)


def _gradient(ctx, grad):
    return sinkhorn_backward(grad.contiguous(), ctx.saved_tensors[0], ctx.iters, ctx.eps), None, None


sinkhorn.register_autograd(_gradient, setup_context=_save)

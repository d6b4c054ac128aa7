"""The expert kernels against their float32 references: routing of every kind, widths, token counts, CUDA graphs."""

import pytest
import torch

from dsv4 import ops
from dsv4.ops._register import registered
from dsv4.ops.nvfp4 import quantize_nvfp4

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# experts, hidden, inter, choices: tiny, odd, Flash's widths, Pro's widths
SHAPES = [(16, 256, 128, 4), (6, 512, 192, 2), (12, 4096, 2048, 6), (8, 7168, 3072, 6)]
TOKENS = (1, 2, 8, 20, 64, 100, 300)
NEAR = 1e-3  # h is rounded to bf16 in both; a sum that differs in its last bits rounds the other way now and then


def stacks(name, experts, hidden, inter):
    """Weights in the op's format; random codes and scales, as quantising takes long."""
    if name == "moe":
        normal = lambda *s: (torch.randn(*s, device="cuda") / s[-1] ** 0.5).bfloat16()  # noqa: E731
        return normal(experts, 2 * inter, hidden), normal(experts, hidden, inter)

    def stack(rows, width, scale_2):
        codes = torch.randint(0, 256, (experts, rows, width // 2), dtype=torch.uint8, device="cuda")
        scale = (torch.rand(experts, rows, width // 16, device="cuda") * 1.5 + 0.25).to(torch.float8_e4m3fn)
        return codes, scale, (torch.rand(scale_2, device="cuda") + 0.5) * 0.4 / width**0.5

    return *stack(2 * inter, hidden, (experts, 2)), *stack(hidden, inter, (experts,))


def routed(tokens, experts, k, none=0.0):
    picks = torch.rand(tokens, experts, device="cuda").argsort(-1)[:, :k].int()
    picks = torch.where(torch.rand(tokens, k, device="cuda") < none, -1, picks)
    return picks, torch.rand(tokens, k, device="cuda") + 0.1


def activations(tokens, hidden):
    x = torch.randn(tokens, hidden, device="cuda")
    return torch.where(torch.rand(tokens, hidden, device="cuda") < 1 / 256, x * 30, x).bfloat16()


def run(name, x, picks, weights, stack, limit=7.0):
    call = lambda: getattr(ops, name)(x, picks, weights, *stack, limit)  # noqa: E731
    call()
    filled = [torch.full((n,), torch.nan, device="cuda") for n in (x.numel(), picks.numel() * x.shape[1])]
    del filled
    return call()


def check(name, x, picks, weights, stack, limit=7.0, near=NEAR):
    actual = run(name, x, picks, weights, stack, limit)
    expected = registered()[name].reference(x, picks, weights, *stack, limit)
    error = (actual - expected).double().norm() / expected.double().norm()
    assert actual.dtype == torch.float32 and error <= near, f"relative error {error:.2e}"


@pytest.fixture(scope="module")
def weights_of():
    kept = {}

    def get(name, shape):
        if (name, shape) not in kept:
            kept.clear()
            kept[name, shape] = stacks(name, *shape[:3])
        return kept[name, shape]

    return get


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["moe_nvfp4", "moe"])
@pytest.mark.parametrize("tokens", TOKENS)
def test_matches_the_reference(name, shape, tokens, weights_of):
    experts, hidden, _, k = shape
    check(name, activations(tokens, hidden), *routed(tokens, experts, k), weights_of(name, shape))


@pytest.mark.parametrize("tokens", [1, 5, 32])
def test_absent_experts_and_idle_tokens(tokens, weights_of):
    """-1 is none, and a token without experts gives zeros whatever its x is."""
    shape = SHAPES[0]
    stack = weights_of("moe_nvfp4", shape)
    x, (picks, weights) = activations(tokens, 256), routed(tokens, 16, 4, none=0.5)
    picks[0, 1] = 3
    check("moe_nvfp4", x, picks, weights, stack)
    x[-1], picks[-1] = torch.nan, -1
    y = run("moe_nvfp4", x, picks, weights, stack)
    assert (y[-1] == 0).all() and y.isfinite().all()
    assert (run("moe_nvfp4", x, torch.full_like(picks, -1), weights, stack) == 0).all()


@pytest.mark.parametrize("tokens", [1, 9, 32, 64])
def test_all_tokens_pick_the_same_experts(tokens, weights_of):
    shape = SHAPES[0]
    picks = torch.tensor([5, 2, 2, 15], dtype=torch.int32, device="cuda").repeat(tokens, 1)  # one of them twice
    weights = torch.rand(tokens, 4, device="cuda")
    # Many tokens: the reference rounds the sum of the two, the kernels each of the two.
    check("moe_nvfp4", activations(tokens, 256), picks, weights, weights_of("moe_nvfp4", shape), near=3e-3)


@pytest.mark.parametrize("tokens", [1, 6])
def test_clamps_and_small_scales(tokens, weights_of):
    """Large gate_up values meet the clamp; block scales at the bottom of E4M3 count."""
    codes, scale, scale_2, *down = weights_of("moe_nvfp4", SHAPES[1])
    scale = torch.where(torch.rand(scale.shape, device="cuda") < 0.3, 2**-9, scale.float()).to(scale.dtype)
    stack = codes, scale, scale_2 * 50, *down
    check("moe_nvfp4", activations(tokens, 512), *routed(tokens, 6, 2), stack, 2.5)


def test_a_real_quantised_stack():
    experts, hidden, inter = 4, 512, 256
    up = [quantize_nvfp4(torch.randn(inter, hidden, device="cuda")) for _ in range(2 * experts)]
    down = [quantize_nvfp4(torch.randn(hidden, inter, device="cuda") / 16) for _ in range(experts)]
    join = lambda parts, i: torch.stack([p[i] for p in parts])  # noqa: E731
    stack = (
        join(up, 0).view(experts, 2 * inter, -1), join(up, 1).view(experts, 2 * inter, -1), join(up, 2).view(experts, 2),
        join(down, 0), join(down, 1), join(down, 2),
    )  # fmt: skip
    for tokens in (1, 4, 12):
        check("moe_nvfp4", activations(tokens, hidden), *routed(tokens, experts, 3), stack)


@pytest.mark.parametrize("tokens", [1, 8, 32])
def test_graph_replay_equals_eager_and_itself(tokens, weights_of):
    """Routing, activations and weights change under the graph; three layers in a row depend on each other."""
    stack = weights_of("moe_nvfp4", SHAPES[2])
    x, (picks, weights) = activations(tokens, 4096), routed(tokens, 12, 6)

    def chain():
        y = x
        for _ in range(3):
            y = ops.moe_nvfp4(y, picks, weights, *stack, 7.0).bfloat16()
        return y

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain()
    for _ in range(3):
        x.copy_(activations(tokens, 4096))
        for old, new in zip((picks, weights), routed(tokens, 12, 6, none=0.1), strict=True):
            old.copy_(new)
        graph.replay()
        first = y.clone()
        graph.replay()
        assert torch.equal(first, y) and torch.equal(y, chain())


def test_what_the_kernels_do_not_read_is_refused(weights_of):
    stack = weights_of("moe_nvfp4", SHAPES[0])
    x, (picks, weights) = activations(2, 256), routed(2, 16, 4)
    for change, message in (((x.half(), picks, weights), "dtype"), ((x, picks.long(), weights), "int32"),
                            ((x[:, :128].contiguous(), picks, weights), "gate_up")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            ops.moe_nvfp4(*change, *stack, 7.0)

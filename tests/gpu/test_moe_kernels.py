"""The expert kernels against their float32 references: formats, routing, widths, token counts, CUDA graphs."""

import pytest
import torch

from dsv4 import ops
from dsv4.ops._register import registered
from dsv4.ops.nvfp4 import quantize_nvfp4

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# experts, hidden, inter, choices: tiny, odd, Flash's widths, Pro's widths; the first and the smallest of multiples of 1024
SHAPES = [(16, 256, 128, 4), (6, 512, 192, 2), (12, 4096, 2048, 6), (8, 7168, 3072, 6)]
SMALL = [SHAPES[0], (16, 1024, 1024, 4)]
TOKENS = (1, 2, 8, 20, 64, 100, 300)
NAMES = ("moe_nvfp4", "moe_fp8", "moe")
NEAR = 1e-3  # h is rounded to bf16 in both; a sum that differs in its last bits rounds the other way now and then
ROUNDED = 1e-3  # and a bf16 result: a few of its values lie on the other side of a boundary, 2^-8 away
# How the shared expert comes: not at all, as the last of the stack, in FP8 beside it.
NONE, LAST, BESIDE = "routed", "shared last", "shared beside"


def fp8_stack(*shape):
    """Weights [..., 2 halves * rows, width] and scales of their blocks; random, as quantising takes long."""
    *leading, halves, rows, width = shape
    codes = torch.randn(*leading, halves * rows, width, device="cuda").to(torch.float8_e4m3fn)
    scales = torch.rand(*leading, halves * -(-rows // 128), -(-width // 128), device="cuda") + 0.5
    return codes, scales / width**0.5


def nvfp4_stack(experts, halves, rows, width):
    codes = torch.randint(0, 256, (experts, halves * rows, width // 2), dtype=torch.uint8, device="cuda")
    scale = (torch.rand(experts, halves * rows, width // 16, device="cuda") * 1.5 + 0.25).to(torch.float8_e4m3fn)
    scale_2 = torch.rand((experts, 2)[:halves], device="cuda") + 0.5
    return codes, scale, scale_2 * 0.4 / width**0.5


def stacks(name, experts, hidden, inter):
    """gate_up and down in the op's format."""
    if name == "moe":
        normal = lambda *s: (torch.randn(*s, device="cuda") / s[-1] ** 0.5).bfloat16()  # noqa: E731
        return normal(experts, 2 * inter, hidden), normal(experts, hidden, inter)
    stack = fp8_stack if name == "moe_fp8" else nvfp4_stack
    return *stack(experts, 2, inter, hidden), *stack(experts, 1, hidden, inter)


def shared_fp8(hidden, inter):
    return *fp8_stack(2, inter, hidden), *fp8_stack(1, hidden, inter)


def routed(tokens, experts, k, none=0.0):
    picks = torch.rand(tokens, experts, device="cuda").argsort(-1)[:, :k].int()
    picks = torch.where(torch.rand(tokens, k, device="cuda") < none, -1, picks)
    return picks, torch.rand(tokens, k, device="cuda") + 0.1


def activations(tokens, hidden):
    x = torch.randn(tokens, hidden, device="cuda")
    return torch.where(torch.rand(tokens, hidden, device="cuda") < 1 / 256, x * 30, x).bfloat16()


def run(name, x, picks, weights, stack, limit=7.0, *shared):
    call = lambda: getattr(ops, name)(x, picks, weights, *stack, limit, *shared)  # noqa: E731
    call()
    sizes = x.numel(), (picks.numel() + len(x)) * x.shape[1], (picks.numel() + len(x)) * 8192
    filled = [torch.full((n,), torch.nan, device="cuda") for n in sizes]
    del filled
    return call()


def check(name, x, picks, weights, stack, limit=7.0, *shared, near=NEAR):
    actual = run(name, x, picks, weights, stack, limit, *shared)
    expected = registered()[name].reference(x, picks, weights, *stack, limit, *shared)
    error = (actual.double() - expected.double()).norm() / expected.double().norm()
    assert actual.dtype == expected.dtype == (torch.bfloat16 if shared else torch.float32)
    assert error <= near + (ROUNDED if shared else 0), f"relative error {error:.2e}"


def check_replays(chain, change):
    """`chain` in a graph gives the same bits each time, and those of `chain` itself, after any `change` of its inputs."""
    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain()
    for _ in range(4):
        change()
        graph.replay()
        first = y.clone()
        graph.replay()
        assert torch.equal(first, y) and torch.equal(y, chain())


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
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tokens", TOKENS)
def test_matches_the_reference(name, shape, tokens, weights_of):
    experts, hidden, _, k = shape
    check(name, activations(tokens, hidden), *routed(tokens, experts, k), weights_of(name, shape))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name, shared", [*((name, LAST) for name in NAMES), ("moe_nvfp4", BESIDE)])
@pytest.mark.parametrize("tokens", TOKENS)
def test_shared_expert(name, shared, shape, tokens, weights_of):
    """In bf16 only few values may differ: sums on the boundary of two, or values of h there."""
    experts, hidden, inter, k = shape
    more = (*shared_fp8(hidden, inter),) if shared == BESIDE else (None,) * (4 * (name == "moe_nvfp4")) + (True,)
    picks = routed(tokens, experts - (shared == LAST), k, none=0.1)
    check(name, activations(tokens, hidden), *picks, weights_of(name, shape), 7.0, *more)


@pytest.mark.parametrize("hidden, inter", [(9216, 1024), (1024, 9216)])
def test_rows_of_more_than_64_blocks(hidden, inter):
    check("moe_fp8", activations(1, hidden), *routed(1, 3, 2), stacks("moe_fp8", 3, hidden, inter))


@pytest.mark.parametrize("tokens", [1, 3, 70, 200])
@pytest.mark.parametrize("inter", [72, 136])
def test_widths_that_fill_no_step(tokens, inter):
    """Widths of 8 times an odd number in bf16, of 16 times one in FP8."""
    check("moe", activations(tokens, 136), *routed(tokens, 5, 3), stacks("moe", 5, 136, inter))
    picks = routed(tokens, 5, 3)
    check("moe_fp8", activations(tokens, 272), *picks, stacks("moe_fp8", 5, 272, 2 * inter))


@pytest.mark.parametrize("name, shared", [("moe_nvfp4", BESIDE), ("moe_fp8", LAST), ("moe", NONE)])
@pytest.mark.parametrize("tokens", [65, 500, 7000])
def test_many_tokens(tokens, name, shared, weights_of):
    """From a few entries an expert to more than one launch takes; some experts have none, one has far more than others."""
    experts, hidden, inter, k = SHAPES[0]
    more = {NONE: (), LAST: (True,), BESIDE: shared_fp8(hidden, inter)}[shared]
    picks, weights = routed(tokens, experts - 4, k, none=0.2)
    picks = torch.where(torch.rand(tokens, 1, device="cuda") < 0.5, torch.where(picks == 2, 5, picks), picks)
    near = 3e-3  # where the same one is picked twice: the reference rounds the sum of the two
    check(name, activations(tokens, hidden), picks, weights, weights_of(name, SHAPES[0]), 7.0, *more, near=near)


@pytest.mark.parametrize("shape", SMALL)
@pytest.mark.parametrize("tokens", [1, 5, 32, 90])
def test_absent_experts_and_idle_tokens(tokens, shape, weights_of):
    """-1 is none, and a token without experts gives zeros whatever its x is; with a shared expert, what that gives."""
    stack, widths = weights_of("moe_nvfp4", shape), shape[1:3]
    x, (picks, weights) = activations(tokens, widths[0]), routed(tokens, 16, 4, none=0.5)
    picks[0] = torch.tensor([-1, 3, -1, -1])
    check("moe_nvfp4", x, picks, weights, stack)
    check("moe_nvfp4", x, torch.full_like(picks, -1), weights, stack, 7.0, *shared_fp8(*widths))
    x[-1], picks[-1] = torch.nan, -1
    y = run("moe_nvfp4", x, picks, weights, stack)
    assert (y[-1] == 0).all() and y.isfinite().all()
    assert (run("moe_nvfp4", x, torch.full_like(picks, -1), weights, stack) == 0).all()
    y = run("moe_nvfp4", x, picks, weights, stack, 7.0, *shared_fp8(*widths))
    assert y[:-1].isfinite().all()


@pytest.mark.parametrize("shape", SMALL)
@pytest.mark.parametrize("tokens", [1, 3, 9, 32, 64, 300])
def test_all_tokens_pick_the_same_experts(tokens, shape, weights_of):
    picks = torch.tensor([5, 2, 2, 15], dtype=torch.int32, device="cuda").repeat(tokens, 1)  # one of them twice
    weights = torch.rand(tokens, 4, device="cuda")
    # Many tokens: the reference rounds the sum of the two, the kernels each of the two.
    check("moe_nvfp4", activations(tokens, shape[1]), picks, weights, weights_of("moe_nvfp4", shape), near=3e-3)


@pytest.mark.parametrize("shape", [SHAPES[1], SMALL[1]])
@pytest.mark.parametrize("shared", [NONE, BESIDE])
@pytest.mark.parametrize("tokens", [2, 8, 40, 100, 300])
def test_a_row_does_not_depend_on_the_others(tokens, shared, shape, weights_of):
    """The same bits whatever the other rows hold, pick and weigh."""
    experts, hidden, inter, k = shape
    stack, more = weights_of("moe_nvfp4", shape), shared_fp8(hidden, inter) if shared == BESIDE else ()
    x, (picks, weights) = activations(tokens, hidden), routed(tokens, experts, k)
    before = run("moe_nvfp4", x, picks, weights, stack, 7.0, *more)[0].clone()
    x[1:] = activations(tokens - 1, hidden)
    picks[1:], weights[1:] = routed(tokens - 1, experts, k, none=0.5)
    assert torch.equal(run("moe_nvfp4", x, picks, weights, stack, 7.0, *more)[0], before)


@pytest.mark.parametrize("tokens", [1, 6])
def test_clamps_and_small_scales(tokens, weights_of):
    """Large gate_up values meet the clamp; block scales at the bottom of E4M3 count."""
    codes, scale, scale_2, *down = weights_of("moe_nvfp4", SHAPES[1])
    scale = torch.where(torch.rand(scale.shape, device="cuda") < 0.3, 2**-9, scale.float()).to(scale.dtype)
    stack = codes, scale, scale_2 * 50, *down
    check("moe_nvfp4", activations(tokens, 512), *routed(tokens, 6, 2), stack, 2.5)


@pytest.mark.parametrize("tokens", [1, 6, 80])
def test_every_code_and_blocks_of_zeros(tokens):
    """All 254 numbers of E4M3, and an FP8 block whose scale is 0 between others."""
    stack = [t.clone() for t in stacks("moe_fp8", 4, 384, 256)]
    for codes, scale in (stack[:2], stack[2:]):
        numbers = torch.arange(256, device="cuda")
        numbers = numbers[(numbers & 127) != 127].to(torch.uint8).view(torch.float8_e4m3fn)
        codes.copy_(numbers.view(torch.uint8)[torch.randint(254, codes.shape, device="cuda")].view(codes.dtype))
        scale.div_(100)
        scale[:, 1, 1] = scale[:, :, 0] = 0
    check("moe_fp8", activations(tokens, 384), *routed(tokens, 4, 2), stack)


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


@pytest.mark.parametrize("shared", [NONE, BESIDE])
@pytest.mark.parametrize("tokens", [1, 8, 32, 200])
def test_graph_replay_equals_eager_and_itself(tokens, shared, weights_of):
    """Routing, activations and weights change under the graph; three layers in a row depend on each other."""
    stack, more = weights_of("moe_nvfp4", SHAPES[2]), shared_fp8(4096, 2048) if shared == BESIDE else ()
    x, (picks, weights) = activations(tokens, 4096), routed(tokens, 12, 6)

    def chain():
        y = x
        for _ in range(3):
            y = ops.moe_nvfp4(y, picks, weights, *stack, 7.0, *more).bfloat16()
        return y

    def change():
        x.copy_(activations(tokens, 4096))
        for old, new in zip((picks, weights), routed(tokens, 12, 6, none=0.1), strict=True):
            old.copy_(new)

    check_replays(chain, change)


def test_one_token_is_one_launch(weights_of):
    x, (picks, weights), shared = activations(1, 4096), routed(1, 12, 6), shared_fp8(4096, 2048)
    args = x, picks, weights, weights_of("moe_nvfp4", SHAPES[2]), 7.0
    run("moe_nvfp4", *args, *shared)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        ops.moe_nvfp4(*args[:3], *args[3], 7.0, *shared)
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert names == ["moe_token"]


def test_what_the_kernels_do_not_read_is_refused(weights_of):
    stack = weights_of("moe_nvfp4", SHAPES[0])
    x, (picks, weights) = activations(2, 256), routed(2, 16, 4)
    for change, message in (((x.half(), picks, weights), "dtype"), ((x, picks.long(), weights), "int32"),
                            ((x[:, :128].contiguous(), picks, weights), "gate_up")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            ops.moe_nvfp4(*change, *stack, 7.0)
    gate_up, scale, down, down_scale = shared_fp8(256, 128)
    with pytest.raises(ValueError, match="shared_down"):
        ops.moe_nvfp4(x, picks, weights, *stack, 7.0, gate_up, scale, down.T.contiguous(), down_scale)
    with pytest.raises(ValueError, match="3 of the 4"):
        ops.moe_nvfp4(x, picks, weights, *stack, 7.0, gate_up, scale, down)

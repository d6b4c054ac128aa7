"""route_moe_nvfp4: one launch for one token, against the references and against the two kernels it stands for."""

import pytest
import torch

from dsv4 import ops
from dsv4.ops._register import registered
from tests.gpu.test_moe_kernels import BESIDE, LAST, NONE, activations, check_replays, nvfp4_stack, shared_fp8

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# experts, hidden, inter, choices: small, Flash, Pro's widths, and widths that have no launch of their own
SHAPES = [(40, 1024, 1024, 4), (256, 4096, 2048, 6), (150, 7168, 3072, 6), (16, 256, 128, 4)]
SCALE, LIMIT = 1.5, 7.0


def case(shape, shared, tokens=1):
    experts, hidden, inter, k = shape
    stored = min(experts, 24)  # only so many experts' weights, over and over, lest large shapes fill the device
    rows = torch.arange(experts + (shared == LAST), device="cuda") % stored
    stack = [*nvfp4_stack(stored, 2, inter, hidden), *nvfp4_stack(stored, 1, hidden, inter)]
    stack = [tensor[rows] for tensor in stack]
    gate = (torch.randn(experts, hidden, device="cuda") / hidden**0.5).bfloat16()
    bias, slots = torch.randn(experts, device="cuda") / 8, torch.arange(tokens, device="cuda")
    more = shared_fp8(hidden, inter) if shared == BESIDE else (None,) * 4 + (shared == LAST,)
    return activations(tokens, hidden), (gate, bias, slots, k, SCALE), (*stack, LIMIT, *more)


def run(x, router, rest):
    ops.route_moe_nvfp4(x, *router, *rest)
    filled = [torch.full((n,), torch.nan, device="cuda") for n in (x.numel(), 7 * 8192, 8 * 8192)]
    del filled
    return ops.route_moe_nvfp4(x, *router, *rest)


@pytest.mark.parametrize("shared", [NONE, LAST, BESIDE])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tokens", [1, 3])
def test_matches_the_references(tokens, shape, shared):
    x, router, rest = case(shape, shared, tokens)
    for _ in range(3):
        expected = registered()["route_moe_nvfp4"].reference(x, *router, *rest)
        actual = run(x, router, rest)
        assert actual.dtype == expected.dtype
        error = (actual.double() - expected.double()).norm() / expected.double().norm()
        assert error <= 2e-3, f"relative error {error:.2e}"
        x = activations(tokens, shape[1])


def test_picks_what_the_router_picks_and_nothing_without_a_slot():
    x, (gate, bias, slots, *how), rest = case(SHAPES[0], BESIDE)
    for _ in range(20):
        x = activations(1, 1024)
        experts, weights = ops.route_topk(x, gate, bias, slots, *how)
        expected = ops.moe_nvfp4(x, experts, weights, *rest)
        actual = run(x, (gate, bias, slots, *how), rest)
        assert (actual.double() - expected.double()).norm() <= 1e-3 * expected.double().norm()
    none = torch.full_like(experts, -1)
    expected = ops.moe_nvfp4(x, none, weights, *rest)
    assert torch.equal(run(x, (gate, bias, slots - 1, *how), rest), expected)


def test_ties_go_to_the_lower_expert():
    x, (gate, bias, slots, *how), rest = case(SHAPES[0], NONE)
    gate[:], bias[:] = gate[0].clone(), 0.0
    expected = ops.moe_nvfp4(
        x, torch.arange(4, device="cuda").int()[None], torch.full((1, 4), SCALE / 4, device="cuda"), *rest
    )
    actual = run(x, (gate, bias, slots, *how), rest)
    assert (actual - expected).norm() <= 1e-5 * expected.norm()


def test_graph_replay_equals_eager_and_itself():
    """The router's input and bias change under the graph; three layers in a row depend on each other."""
    x, router, rest = case(SHAPES[1], BESIDE)

    def chain():
        y = x
        for _ in range(3):
            y = ops.route_moe_nvfp4(y, *router, *rest)
        return y

    def change():
        x.copy_(activations(1, 4096))
        router[1].copy_(torch.randn(256, device="cuda"))

    check_replays(chain, change)


def test_launches_in_a_row_do_not_disturb_each_other():
    """Each begins while the one before it still runs."""
    _, router, rest = case(SHAPES[0], BESIDE)
    xs, alone = [activations(1, 1024) for _ in range(50)], []
    for x in xs:
        alone.append(ops.route_moe_nvfp4(x, *router, *rest))
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        in_a_row = [ops.route_moe_nvfp4(x, *router, *rest) for x in xs]
    for _ in range(3):
        graph.replay()
        assert all(map(torch.equal, in_a_row, alone))


def test_one_token_is_one_launch():
    x, router, rest = case(SHAPES[0], BESIDE)
    run(x, router, rest)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        ops.route_moe_nvfp4(x, *router, *rest)
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert names == ["moe_token"]


def test_what_it_does_not_read_is_refused():
    x, (gate, bias, slots, *how), rest = case(SHAPES[0], BESIDE)
    with pytest.raises(ValueError, match="gate must be 1024 wide"):
        ops.route_moe_nvfp4(x, gate[:, :512].contiguous(), bias, slots, *how, *rest)
    with pytest.raises(ValueError, match="bias"):
        ops.route_moe_nvfp4(x, gate, bias.double(), slots, *how, *rest)
    with pytest.raises(ValueError, match="3 of the 4"):
        ops.route_moe_nvfp4(x, gate, bias, slots, *how, *rest[:-1])

"""The expert kernels compile for Hopper and Blackwell, without spills and within their registers and shared memory."""

import pytest

from dsv4.ops.kernels.limits import SHARED_BYTES
from dsv4.ops.kernels.moe import COMBINE, EXPERTS, TOKEN
from dsv4.ops.kernels.moe_plans import WHOLE, experts_plan, token_plan
from dsv4.ops.kernels.moe_prefill import ORDER, PREFILL, order_defines, prefill_bytes, prefill_defines
from dsv4.ops.kernels.stream import BF16, FP4, FP8
from tests.ops.test_kernels_build_linear import ARCHITECTURES, assert_fits

pytest.importorskip("cuda.core")

FLASH, PRO = (4096, 2048), (7168, 3072)
ODD = {BF16: (328, 200), FP8: (336, 208), FP4: (320, 192)}  # that do not fill steps of 128 bytes
KINDS = [(BF16, False), (FP8, False), (FP4, False), (FP4, True)]  # and whether an FP8 expert goes along
kinds = pytest.mark.parametrize("number, beside", KINDS, ids=["bf16", "FP8", "NVFP4", "NVFP4 and FP8"])
arches = pytest.mark.parametrize("arch", ARCHITECTURES)


def shapes(hidden: int, inter: int) -> tuple[tuple[bool, int, int], ...]:
    """(gate_up, width, rows) of both launches."""
    return (True, hidden, inter), (False, inter, hidden)


@arches
@kinds
@pytest.mark.parametrize("size", [FLASH, PRO], ids=["Flash", "Pro"])
def test_one_token(size, number, beside, arch):
    """One block an SM."""
    plan = token_plan(number, *size, 6, beside, 132)
    assert_fits(TOKEN, arch, plan.defines(number, beside), plan.threads)


@arches
@pytest.mark.parametrize("beside", [False, True], ids=["NVFP4", "NVFP4 and FP8"])
@pytest.mark.parametrize("size, experts", [(FLASH, 256), (PRO, 384)], ids=["Flash", "Pro"])
def test_one_token_with_its_routing(size, experts, beside, arch):
    plan = token_plan(FP4, *size, 6, beside, 132)
    assert_fits(TOKEN, arch, (*plan.defines(FP4, beside), *plan.routing_defines(experts, 6, 132)), plan.threads)


@arches
@kinds
@pytest.mark.parametrize("odd, tokens", [(False, 8), (False, 32), (True, 8)], ids=["Flash, 8", "Flash, 32", "odd"])
def test_several_tokens(odd, tokens, number, beside, arch):
    for shape in shapes(*(ODD[number] if odd else FLASH)):
        plan = experts_plan(number, *shape[:2], tokens * 6, beside)
        assert_fits(EXPERTS, arch, plan.defines(number, beside), plan.warps * 32)


@arches
def test_combine(arch):
    assert_fits(EXPERTS, arch, COMBINE, 128)


@arches
@kinds
@pytest.mark.parametrize("gated", [True, False])
def test_many_tokens(gated, number, beside, arch):
    assert_fits(PREFILL, arch, prefill_defines(number, beside, gated), 640)
    assert prefill_bytes(number) <= SHARED_BYTES


@arches
@kinds
def test_order_of_many_tokens(number, beside, arch):
    """Two blocks of 256 threads an SM, or more, prepare activations."""
    assert_fits(ORDER, arch, order_defines(number, beside), 512)


@pytest.mark.parametrize("size", [FLASH, PRO], ids=["Flash", "Pro"])
@kinds
def test_they_fit_into_shared_memory(size, number, beside):
    plan = token_plan(number, *size, 6, beside, 132)
    assert plan.stages >= 3 and plan.bytes <= WHOLE
    for shape in shapes(*size):
        for entries in (1, 6, 48, 384):
            plan = experts_plan(number, *shape[:2], entries, beside)
            assert plan.stages >= 2 and plan.bytes <= WHOLE


def test_other_widths_take_the_general_kernels():
    for width in (512, 1536):
        for hidden, inter in ((1024, width), (width, 1024)):
            assert token_plan(FP4, hidden, inter, 6, True, 132) is None


def test_gates_too_large_for_registers_are_routed_apart():
    plan = token_plan(FP4, *PRO, 6, True, 132)
    assert plan.routing_defines(384, 6, 132) and plan.routing_defines(384, 6, 80) is None


def test_slots_hold_a_power_of_two_of_pairs():
    """For Flash: four pairs of gate and up rows in NVFP4, two in FP8; of down twice as many."""
    plan = token_plan(FP4, *FLASH, 6, True, 132)
    assert (plan.slot, plan.stages) == (4 * 2 * (2048 + 256), 10)

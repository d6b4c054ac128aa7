"""The kernels of up to 64 tokens compile for Hopper and Blackwell, without spills and within their registers."""

import pytest

from dsv4.ops.kernels.build import compile_cubin
from dsv4.ops.kernels.gemm import Product, linear_plan, project_defines, project_plans
from dsv4.ops.kernels.stream import BF16, FORMATS, FP4, FP8

pytest.importorskip("cuda.core")

ARCHITECTURES = ("sm_90a", "sm_100a")
# Widths of Flash: q_b after a norm, o_a in 8 groups, o_b, the head; and some that do not fill steps of 128 bytes.
Q_B, O_A, O_B = (40960, 1024, 1, True), (8192, 4096, 8), (4096, 8192)
LINEARS = [(tokens, FP8, sizes) for tokens in (8, 16, 32, 64) for sizes in (Q_B, O_A, O_B)]
LINEARS += [(8, FP4, Q_B), (32, FP4, Q_B), (32, FP4, O_B), (64, FP4, O_A), (16, BF16, (129280, 4096))]
LINEARS += [(32, BF16, (4096, 264)), (16, FP8, (4096, 272)), (64, FP4, (4096, 320))]


def assert_fits(source: str, arch: str, defines: tuple[str, ...], threads: int) -> None:
    """No spills, and `threads` threads of an SM have their registers (allotted by eight)."""
    _, found = compile_cubin(source, arch, defines)
    assert found
    for name, used in found.items():
        registers = -(-used.registers // 8) * 8 * threads
        assert used.spill_bytes == 0 and used.stack_bytes == 0 and registers <= 65536, f"{name}: {used}"
        assert used.shared_bytes == 0


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("tokens, number, sizes", LINEARS)
def test_linear(tokens, number, sizes, arch):
    work = Product(FORMATS[number], tokens, *sizes)
    plan = linear_plan(work, 132)
    out = "float" if number == BF16 else "__nv_bfloat16"
    defines = f"FMT={number}", f"OUT={out}", f"NORM={int(work.norm)}", *plan.defines(work.tail)
    assert_fits("gemm_linear.cu", arch, defines, plan.warps * 32)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("tokens", [16, 32, 64])
@pytest.mark.parametrize("number, exact", [(FP8, BF16), (FP4, FP4)])
def test_project(number, exact, tokens, arch):
    plan, second = project_plans(tokens, 1536, 2624, 4096, 132, number, exact)
    assert_fits("gemm_project.cu", arch, project_defines(plan, second, 4096, number, exact), plan.warps * 32)

"""The linear kernels compile for Hopper and Blackwell, without spills and within their registers."""

import pytest

from dsv4.ops.kernels.build import compile_cubin
from dsv4.ops.kernels.linear import Work, linear_plan, project_plans
from dsv4.ops.kernels.stream import BF16, FORMATS, FP8

pytest.importorskip("cuda.core")

ARCHITECTURES = ("sm_90a", "sm_100a")
NAMES = [form.name for form in FORMATS]


def assert_fits(source: str, arch: str, defines: tuple[str, ...], threads: int) -> None:
    """No spills, and all the block's threads have their registers (allotted by eight, to four warps at a time)."""
    _, found = compile_cubin(source, arch, defines)
    assert found
    for name, used in found.items():
        registers = -(-used.registers // 8) * 8 * -(-threads // 128) * 128
        assert used.spill_bytes == 0 and registers <= 65536, f"{name}: {used}"
        assert used.shared_bytes <= 4096


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("number", range(len(FORMATS)), ids=NAMES)
@pytest.mark.parametrize("tokens, tail", [(1, False), (1, True), (16, False), (32, False), (64, False), (64, True)])
def test_linear(number, tokens, tail, arch):
    work = Work(FORMATS[number], tokens, 4096, (264, 272, 320)[number] if tail else 4096)
    assert work.tail == tail
    plan = linear_plan(work, 132)
    out = "float" if number == BF16 else "__nv_bfloat16"
    assert_fits("gemv_linear.cu", arch, (f"FMT={number}", f"OUT={out}", *plan.defines(tail)), plan.threads)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("tokens", [1, 16, 32, 64])
def test_project(tokens, arch):
    plan, _ = project_plans(tokens, 1536, 2624, 4096, 132)
    assert_fits("gemv_project.cu", arch, plan.defines(False), plan.threads)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_dequantize(arch):
    assert_fits("gemv_dequantize.cu", arch, ("THREADS=256",), 256)


# Flash and Pro: q_a, kv, q_b, o_a (8 and 16 groups), o_b, index q_b, shared w1 and w2, router, head.
MODELS = {
    "Flash": [
        (FP8, 1024, 4096, 1), (FP8, 512, 4096, 1), (FP8, 32768, 1024, 1), (FP8, 8192, 4096, 8), (FP8, 4096, 8192, 1),
        (FP8, 8192, 1024, 1), (FP8, 2048, 4096, 1), (FP8, 4096, 2048, 1), (BF16, 256, 4096, 1), (BF16, 129280, 4096, 1),
    ],
    "Pro": [
        (FP8, 1536, 7168, 1), (FP8, 512, 7168, 1), (FP8, 65536, 1536, 1), (FP8, 16384, 4096, 16), (FP8, 7168, 16384, 1),
        (FP8, 3072, 7168, 1), (FP8, 7168, 3072, 1), (BF16, 384, 7168, 1), (BF16, 129280, 7168, 1),
    ],
}  # fmt: skip


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("tokens", [1, 8, 32])
def test_the_models_fit_into_shared_memory(model, tokens):
    """One launch, with 24 KB of weights in flight in every SM; with one token there is room for the next kernel."""
    for number, n, k, groups in MODELS[model]:
        plan = linear_plan(Work(FORMATS[number], tokens, n, k, groups), 132)
        assert plan is not None and plan.stages * plan.warps * 2048 >= 24 * 1024, (number, n, k, plan)
        assert plan.shared <= (110 if tokens == 1 else 227) * 1024

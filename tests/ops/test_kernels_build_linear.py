"""The linear kernels compile for Hopper and Blackwell, without spills and within their registers."""

import pytest

from dsv4.ops.kernels.build import compile_cubin
from dsv4.ops.kernels.linear import Work, linear_plan, project_plans
from dsv4.ops.kernels.stream import BF16, FORMATS, FP8

pytest.importorskip("cuda.core")

ARCHITECTURES = ("sm_90a", "sm_100a")
NAMES = [form.name for form in FORMATS]


def assert_fits(source: str, arch: str, defines: tuple[str, ...], threads: int) -> None:
    """No spills, and `threads` threads of an SM have their registers (allotted by eight, to four warps at a time)."""
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


# Flash and Pro: q_b with the index q_b and without, both after a norm, o_a (8 and 16 groups), o_b, shared w1 with w3 and w2
# where the experts do not take them along, head.
MODELS = {
    "Flash": [
        (FP8, 40960, 1024, 1, True), (FP8, 32768, 1024, 1, True), (FP8, 8192, 4096, 8), (FP8, 4096, 8192),
        (FP8, 4096, 4096), (FP8, 4096, 2048), (BF16, 129280, 4096),
    ],
    "Pro": [
        (FP8, 73728, 1536, 1, True), (FP8, 65536, 1536, 1, True), (FP8, 16384, 4096, 16), (FP8, 7168, 16384),
        (FP8, 6144, 7168), (FP8, 7168, 3072), (BF16, 129280, 7168),
    ],
}  # fmt: skip
# q_a with kv; the projections of the compressors, in CSA with the weights of the index heads; the input width.
PROJECTS = {"Flash": [(1536, 2624, 4096), (1536, 1024, 4096)], "Pro": [(2048, 2624, 7168), (2048, 1024, 7168)]}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("tokens", [1, 8, 32])
def test_the_models_fit_into_shared_memory(model, tokens):
    """One launch, with 24 KB of weights in flight in every SM; with one token there is room for the next kernel."""
    plans = [linear_plan(Work(FORMATS[number], tokens, *sizes), 132) for number, *sizes in MODELS[model]]
    plans += [plan for sizes in PROJECTS[model] for plan in project_plans(tokens, *sizes, 132)]
    for plan in plans:
        assert plan is not None and plan.stages * plan.warps * 2048 >= 24 * 1024, plan
        assert plan.shared <= (110 if tokens == 1 else 227) * 1024

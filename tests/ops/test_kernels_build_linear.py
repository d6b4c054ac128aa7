"""The linear kernels compile for Hopper and Blackwell, without spills and within their registers."""

import pytest

from dsv4.ops.kernels import gemv_nvfp4
from dsv4.ops.kernels.build import compile_cubin
from dsv4.ops.kernels.linear import ALONE, BESIDE, WARPS, WHOLE, WITH_ATTENTION, Work, halves, linear_plan, project_plans
from dsv4.ops.kernels.stream import BF16, FORMATS, FP4, FP8

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
@pytest.mark.parametrize(
    "tokens, tail, groups, norm",
    [(1, False, 1, True), (1, False, 8, False), (1, True, 1, False), (8, False, 1, True), (8, True, 1, False)],
)
def test_linear(number, tokens, tail, groups, norm, arch):
    """Room for a second block of 256 threads, and with one token for attention's, of 384 with 88 registers."""
    work = Work(FORMATS[number], tokens, 4096, (264, 272, 320)[number] if tail else 4096, groups, norm)
    assert work.tail == tail
    plan = linear_plan(work, 132)
    out = "float" if number == BF16 else "__nv_bfloat16"
    defines = f"FMT={number}", f"OUT={out}", f"NORM={int(norm)}", *plan.defines(tail)
    assert_fits("gemv_linear.cu", arch, defines, 2 * plan.threads)
    if tokens == 1:
        _, found = compile_cubin("gemv_linear.cu", arch, defines)
        assert found["linear"].registers <= 120


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("tokens", [1, 8])
@pytest.mark.parametrize("forms", [(FP8, BF16), (FP4, FP4), (FP4, BF16)], ids=str)
def test_project(forms, tokens, arch):
    plan, exact = project_plans(tokens, 1536, 2624, 4096, 132, *forms)
    defines = f"FMT={forms[0]}", f"EXACT={forms[1]}", *plan.defines(False), f"EXACT_STEPS={exact.steps}"
    assert_fits("gemv_project.cu", arch, defines, 2 * plan.threads)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    "k, norm", [(1024, True), (1536, True), (4096, False), (7168, False), (8192, False), (16384, False)]
)
def test_one_token_in_nvfp4(k, norm, arch):
    """Room for a block of attention, of 384 threads with 88 registers."""
    defines = gemv_nvfp4.defines(k, norm)
    assert_fits("gemv_nvfp4.cu", arch, defines, 2 * gemv_nvfp4.WARPS * 32)
    _, found = compile_cubin("gemv_nvfp4.cu", arch, defines)
    assert found["gemv_nvfp4"].registers <= 120
    assert gemv_nvfp4.shared_bytes(k, gemv_nvfp4.MOST_UNITS // gemv_nvfp4.split_k(k)) <= BESIDE


@pytest.mark.parametrize("tokens", [2, 5, 9, 65, 100, 128])
def test_halves_are_all_tokens_and_fit_a_launch(tokens):
    rows = list(range(tokens))
    first, second = (rows[part] for part in halves(tokens))
    assert first + second == rows and min(len(first), len(second)) > 0 and max(len(first), len(second)) <= 64


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
@pytest.mark.parametrize("tokens", [1, 4, 8])
def test_the_models_fit_into_shared_memory(model, tokens):
    """One launch, with 64 KB of weights in flight in every SM. With one token an SM holds one block only of a kernel that
    comes after one with few blocks, and beside it a block of the next kernel."""
    works = [Work(FORMATS[number], tokens, *sizes) for number, *sizes in MODELS[model] if number == FP8 or tokens <= 4]
    plans = [(linear_plan(work, 132), work.leads) for work in works]
    plans += [(plan, True) for sizes in PROJECTS[model] for plan in project_plans(tokens, *sizes, 132)]
    for plan, leads in plans:
        assert plan is not None and plan.stages * WARPS * 2048 >= 64 * 1024, plan
        least, most = (ALONE if leads else 0), (WITH_ATTENTION if leads else BESIDE) if tokens == 1 else WHOLE
        assert least <= plan.shared <= most, plan

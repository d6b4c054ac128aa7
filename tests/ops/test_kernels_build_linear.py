"""The linear and expert kernels compile for Hopper and Blackwell, without spills and within their registers."""

import pytest

from dsv4.ops.kernels.build import compile_cubin
from dsv4.ops.kernels.moe import SOURCE, plans
from dsv4.ops.kernels.stream import BF16, FORMATS, FP4, FP8, Plan, linear_plan

pytest.importorskip("cuda.core")

ARCHITECTURES = ("sm_90a", "sm_100a")
NAMES = [form.name for form in FORMATS]


def plan_of(number: int, tokens: int, tail: bool = False) -> Plan:
    plan = linear_plan(number, tokens, 4096, (264, 272, 320)[number] if tail else 4096, 1, 132)
    assert plan.tail == tail
    return plan


def assert_fits(source: str, arch: str, defines: tuple[str, ...], threads: int) -> None:
    """No spills, and all the block's threads have their registers (allotted by eight, to four warps at a time)."""
    _, found = compile_cubin(source, arch, defines)
    assert found
    for name, used in found.items():
        registers = -(-used.registers // 8) * 8 * -(-threads // 128) * 128
        assert used.spill_bytes == 0 and registers <= 65536, f"{name}: {used}"
        assert used.shared_bytes <= 4096


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("number", [BF16, FP8, FP4], ids=NAMES)
@pytest.mark.parametrize("tokens, tail", [(1, False), (1, True), (16, False), (32, False), (64, False)])
def test_linear(number, tokens, tail, arch):
    plan = plan_of(number, tokens, tail)
    defines = plan.defines(number) + (("OUT_FP32=1",) if number == BF16 else ())
    assert_fits("gemv_linear.cu", arch, defines, plan.threads)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("number", [BF16, FP4], ids=["bf16", "NVFP4"])
@pytest.mark.parametrize("hidden, inter", [(4096, 2048), (256, 96)], ids=["Flash", "odd"])
def test_experts(number, hidden, inter, arch):
    for plan in {p.defines(number): p for p in plans(number, hidden, inter, 8, 6, 256, 132)[:2]}.values():
        assert_fits(SOURCE, arch, plan.defines(number), plan.threads)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("gated", [0, 1])
@pytest.mark.parametrize("number", [BF16, FP4], ids=["bf16", "NVFP4"])
def test_experts_of_many_tokens(number, gated, arch):
    """Two blocks of 256 threads an SM."""
    assert_fits("moe_prefill.cu", arch, (f"FMT={number}", f"GATE_UP={gated}"), 512)


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
    """One launch a linear for up to 32 tokens, with at least 32 KB of weights in flight in every SM."""
    for number, n, k, groups in MODELS[model]:
        plan = linear_plan(number, tokens, n, k, groups, 132)
        assert plan is not None and (plan.stages - 1) * plan.warps * 2048 >= 32768, (number, n, k, plan)
        assert plan.shared <= 227 * 1024


def test_experts_fit_into_shared_memory():
    for hidden, inter in ((4096, 2048), (7168, 3072)):
        for tokens in (1, 8, 32):
            up, down, one = plans(FP4, hidden, inter, tokens, 6, 256, 132)
            assert min(up.stages, down.stages) >= 3 and one == (tokens == 1)

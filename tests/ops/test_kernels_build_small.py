"""Every variant of the small kernels that a model runs compiles for sm_90a and sm_100a, without spills, within budget."""

import pytest

from dsv4.ops.hyper_connection import Plan
from dsv4.ops.kernels.build import compile_cubin
from dsv4.ops.route import _split

pytest.importorskip("cuda.core")
pytest.importorskip("cuda.bindings.nvrtc")

MODELS = {"tiny": (256, 16), "Flash": (4096, 256), "Pro": (7168, 384)}  # hidden, experts
ARCHITECTURES = ("sm_90a", "sm_100a")


def variants():
    """(source, defines, registers a thread that it may use), each once."""
    found = {}
    for hidden, experts in MODELS.values():
        for head, rows in ((0, 24), (1, 4)):
            found["hyper_connection.cu", (f"HEAD={head}", "N=4", f"H={hidden}", "WARPS=8")] = 128
            for tokens in (1, 8):
                plan = Plan.of(tokens, rows, 4, hidden)
                sizes = f"HEAD={head}", "N=4", f"H={hidden}", f"CLUSTER={plan.cluster}", f"WARPS={plan.warps}"
                found["hyper_connection.cu", (*sizes, f"RPW={plan.rows}", f"TT={plan.tokens}")] = 128
        for is_float in (0, 1):
            found["hyper_connection.cu", ("N=4", f"H={hidden}", f"Y_FLOAT={is_float}")] = 80
            split = _split(hidden)
            sizes = f"H={hidden}", f"E={experts}", "TOP=6", f"GATE_FLOAT={is_float}"
            for batch in (1, 4):
                found["route.cu", (*sizes, f"SPLIT={split}", "SETS=2", f"BATCH={batch}")] = 128
            found["route.cu", (*sizes, f"SPLIT={min(4, split)}", "SETS=6", "BATCH=1", "HASH=1")] = 80
    for dim, lanes in ((512, 32), (128, 16), (64, 8)):
        found["rope.cu", (f"D={dim}", f"ROPE={min(64, dim)}", f"LANES={lanes}")] = 40
        found["rope.cu", (f"VECTORS={dim // 8}",)] = 32
    for dim, overlap, rate, threads in ((512, 1, 4, 512), (512, 0, 128, 512), (128, 1, 4, 256), (64, 0, 128, 512)):
        sizes = f"DIM={dim}", f"OVERLAP={overlap}", f"RATE={rate}", "ROPE=64", f"THREADS={threads}"
        found["compress.cu", sizes] = 128
    for vocab, threads, cluster in ((129_280, 512, 8), (1000, 256, 1), (8192, 512, 4), (262_144, 512, 8)):
        for is_float in (0, 1):
            sizes = f"V={vocab}", f"THREADS={threads}", f"CLUSTER={cluster}", f"FLOAT_LOGITS={is_float}"
            found["sample.cu", sizes] = 128
    return [(*key, registers) for key, registers in found.items()]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    ("source", "defines", "registers"),
    variants(),
    ids=lambda value: ",".join(value) if isinstance(value, tuple) else None,
)
def test_compiles_without_spills(source, defines, registers, arch):
    _, resources = compile_cubin(source, arch, defines)
    assert resources
    for name, used in resources.items():
        assert used.spill_bytes == 0, f"{name} spills {used.spill_bytes} bytes"
        assert used.registers <= registers, f"{name} uses {used.registers} registers, {registers} allowed"
        assert used.shared_bytes <= 48 * 1024

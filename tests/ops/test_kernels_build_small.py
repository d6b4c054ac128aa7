"""Every variant of the small kernels that a model runs compiles for sm_90a and sm_100a, without spills, within budget."""

import pytest

from dsv4.ops.compress import THREADS, parts_of
from dsv4.ops.kernels.build import compile_cubin
from dsv4.ops.route import hash_split, topk_plan
from dsv4.ops.sample import shape

pytest.importorskip("cuda.core")
pytest.importorskip("cuda.bindings.nvrtc")

MODELS = {"tiny": (256, 16), "Flash": (4096, 256), "Pro": (7168, 384)}  # hidden, experts
ARCHITECTURES = ("sm_90a", "sm_100a")


def variants():
    """(source, defines, registers a thread that it may use), each once."""
    found = {}
    for hidden, experts in MODELS.values():
        sizes = f"H={hidden}", f"E={experts}", "TOP=6"
        cluster, spread, stored = topk_plan(hidden, experts)
        defines = *sizes, f"CLUSTER={cluster}", f"SPREAD={spread}", f"STORED={stored}"
        found["route.cu", defines] = 64 if spread == 1 else 128
        found["route.cu", (*sizes, "HASH=1", f"SPLIT={hash_split(hidden)}")] = 64
    for dim, lanes in ((512, 32), (128, 16), (64, 8)):
        found["rope.cu", (f"D={dim}", f"ROPE={min(64, dim)}", f"LANES={lanes}")] = 48
        found["rope.cu", (f"VECTORS={dim // 8}",)] = 32
    found["rope.cu", ("VECTORS=64", "ROPE=64")] = 48
    rows, keys = ("PLAIN", "FP8_ROWS"), ("PLAIN", "FP8_KEYS", "FP4_KEYS")
    for dim, overlap, rate, formats in ((512, 1, 4, rows), (512, 0, 128, rows), (128, 1, 4, keys), (64, 0, 128, rows[:1])):
        for form in formats:
            sizes = f"DIM={dim}", f"OVERLAP={overlap}", f"RATE={rate}", "ROPE=64"
            parts = parts_of(dim, overlap, form != "PLAIN")
            found["compress.cu", (*sizes, f"PARTS={parts}", f"THREADS={THREADS}", f"FORMAT={form}")] = 128
    for rate, overlap, index_dim in ((0, 0, 0), (4, 1, 128), (128, 0, 0)):
        for row in rows:
            parts = parts_of(512, overlap, row != "PLAIN") if rate else 1
            sizes = "DIM=512", "ROPE=64", f"THREADS={THREADS}", f"RATE={rate}", f"OVERLAP={overlap}", f"PARTS={parts}"
            for key in keys if index_dim else keys[:1]:
                for heads in (1, 2, 4):
                    kind = f"INDEX_DIM={index_dim}", f"HEADS={heads}", f"KV={row}", f"KEYS={key}"
                    found["advance.cu", (*sizes, *kind)] = 128
    for vocab in (129_280, 1000, 8192, 262_144):
        found["advance_state.cu", (f"V={vocab}", "STOPS=16", "QUADS=4")] = 40
        for rows in (1, 32):
            threads, cluster = shape(rows, -(-vocab // 4))
            for is_float in (0, 1):
                sizes = f"V={vocab}", f"THREADS={threads}", f"CLUSTER={cluster}", f"FLOAT_LOGITS={is_float}"
                found["sample.cu", sizes] = 64
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
        assert used.spill_bytes == used.stack_bytes == 0, f"{name} spills {used.spill_bytes}, has {used.stack_bytes} bytes"
        assert used.registers <= registers, f"{name} uses {used.registers} registers, {registers} allowed"
        assert used.shared_bytes <= 48 * 1024

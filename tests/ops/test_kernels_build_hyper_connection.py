"""Every variant of the hyper-connection kernels that a model runs compiles for sm_90a and sm_100a, without spills, and
leaves room for a block of another kernel beside it."""

import pytest

from dsv4.ops.kernels.build import compile_cubin
from dsv4.ops.kernels.hyper_connection import WARPS, Plan
from dsv4.ops.kernels.limits import SHARED_BYTES

pytest.importorskip("cuda.core")
pytest.importorskip("cuda.bindings.nvrtc")

MODELS = {"tiny": 256, "Flash": 4096, "Pro": 7168}
ARCHITECTURES = ("sm_90a", "sm_100a")


def variants():
    """(source, defines, dynamic shared memory), each once."""
    found = {}
    for hidden in MODELS.values():
        for head, rows in ((0, 24), (1, 4)):
            for is_float in (0, 1):
                sizes = f"HEAD={head}", "N=4", f"H={hidden}", f"Y_FLOAT={is_float}"
                for logits in (0, 1):
                    found["hyper_connection_prefill.cu", (*sizes, f"LOGITS={logits}")] = 0
                for tokens in (1, 8, 16, 32):
                    plan = Plan.of(tokens, hidden)
                    for logits in (0, 1) if tokens == 1 else (1,):
                        defines = *sizes, f"LOGITS={logits}", *plan.defines()
                        found["hyper_connection.cu", defines] = plan.shared(rows, 4, hidden)
    return [(*key, shared) for key, shared in found.items()]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    ("source", "defines", "shared"),
    variants(),
    ids=lambda value: ",".join(value) if isinstance(value, tuple) else None,
)
def test_compiles_without_spills(source, defines, shared, arch):
    _, resources = compile_cubin(source, arch, defines)
    assert resources
    for name, used in resources.items():
        assert used.spill_bytes == used.stack_bytes == 0, f"{name} spills {used.spill_bytes}, has {used.stack_bytes} bytes"
        assert used.registers <= 128
        assert used.shared_bytes + shared <= SHARED_BYTES
        if name == "hc_mix" and "H=4096" in defines:
            assert used.registers * WARPS * 32 <= 32768 and used.shared_bytes + shared <= 118 * 1024

"""Every variant of the index kernels that is used compiles for Hopper and Blackwell, without spills."""

import pytest

pytest.importorskip("cuda.core")

from dsv4.ops.index_topk import SCORE_THREADS, THREADS, prefill_for, shape_for
from dsv4.ops.kernels.build import compile_cubin
from dsv4.ops.kernels.limits import SHARED_BYTES

ARCHES = ("sm_90a", "sm_100a")
FEW = [
    *(shape_for(t, 64, 128, "FP4", n, k) for t, n, k in ((1, 1024, 512), (1, 262144, 512), (32, 262144, 1024))),
    shape_for(8, 64, 128, "FP8", 262144, 512),
    shape_for(16, 64, 128, "BF16", 65536, 1024),
    shape_for(1, 4, 32, "BF16", 64, 8),
]
MANY = [prefill_for(t, 132, 64, 128, f, k) for t, f, k in ((512, "FP4", 512), (64, "FP8", 1024), (264, "BF16", 1024))]


def check(name, arch, defines, threads):
    _, resources = compile_cubin(f"{name}.cu", arch, defines)
    assert set(resources) == {name}
    assert resources[name].spill_bytes == 0 and resources[name].registers * threads <= 65536


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("shape", FEW, ids=str)
def test_few_tokens(shape, arch):
    check("index_score", arch, shape.score_defines, SCORE_THREADS)
    check("index_select", arch, shape.defines, shape.threads)
    assert shape.shared <= SHARED_BYTES


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("shape", MANY, ids=str)
def test_many_tokens(shape, arch):
    check("index_prefill", arch, shape.defines, THREADS)
    assert shape.shared <= SHARED_BYTES

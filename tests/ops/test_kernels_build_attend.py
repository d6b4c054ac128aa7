"""Every variant of the attend and index kernels that is used compiles for Hopper and Blackwell, without spills."""

import pytest

pytest.importorskip("cuda.core")

from dsv4.ops.attend import shape_for as attend_shape
from dsv4.ops.index_topk import shape_for as index_shape
from dsv4.ops.kernels import limits
from dsv4.ops.kernels.build import compile_cubin

ARCHES = ("sm_90a", "sm_100a")
ATTEND = sorted(
    {attend_shape(t, h, d) for t in (1, 8, 32, 64, 4096) for h, d in ((64, 512), (128, 512), (4, 64))}
    | {attend_shape(1, 64, 512, keys=8192)}
)
INDEX = sorted(
    {index_shape(t, 64, 128, n, k) for t in (1, 16, 32) for n, k in ((1024, 512), (16384, 512), (262144, 1024))}
    | {index_shape(1, 4, 32, 64, 8)}
)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("shape", ATTEND, ids=str)
def test_attend(shape, arch):
    _, resources = compile_cubin("attend.cu", arch, shape.defines)
    threads = -(-(shape.wd + 4) // 4) * 128  # registers are given out to four warps at a time
    assert resources["attend"].spill_bytes == 0
    assert resources["attend"].registers * threads <= 65536
    assert shape.shared <= limits.SHARED_BYTES


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("shape", INDEX, ids=str)
def test_index(shape, arch):
    _, resources = compile_cubin("index.cu", arch, shape.defines)
    assert set(resources) == {"index_select", "index_score"}
    assert all(kernel.spill_bytes == 0 for kernel in resources.values())
    assert resources["index_select"].registers <= 128  # 512 threads
    assert resources["index_score"].registers <= 255  # 256
    assert shape.shared <= limits.SHARED_BYTES

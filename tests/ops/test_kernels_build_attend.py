"""Every variant of the attend kernels that is used compiles for Hopper and Blackwell, without spills."""

import pytest

pytest.importorskip("cuda.core")

from dsv4.ops.kernels import limits
from dsv4.ops.kernels.attend_plans import plan_for
from dsv4.ops.kernels.build import compile_cubin

ARCHES = ("sm_90a", "sm_100a")
WIDTHS = ((64, 512, 0), (64, 512, 448), (4, 64, 0))  # heads, dim, coded channels
ATTEND = sorted(
    {
        (share.shape, arch)
        for tokens in (1, 4, 8, 16, 32, 4096)
        for keys in (128, 640, 8192)
        for heads, dim, coded in WIDTHS
        for arch in ARCHES
        for share in plan_for(tokens, heads, dim, keys, wide=arch == "sm_90a" and heads > 32, coded=coded)
    },
    key=str,
)


@pytest.mark.parametrize(("shape", "arch"), ATTEND, ids=str)
def test_attend(shape, arch):
    source, function = shape.kernel
    _, resources = compile_cubin(source, arch, shape.defines)
    threads = -(-shape.threads // 128) * 128  # registers are given out to four warps at a time
    assert resources[function].spill_bytes == 0
    assert resources[function].registers * threads <= 65536
    assert shape.shared <= limits.SHARED_BYTES

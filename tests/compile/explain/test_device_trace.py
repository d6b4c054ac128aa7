"""A step read from a profiler's trace, here one that is made up: two ops and a generated kernel, a copy and a wait, and the
same step replayed."""

from dsv4.compile.explain.device_trace import as_in, read, with_modules
from dsv4.compile.explain.provenance import Launch

WINDOW = "dsv4 explain: one step"


def event(cat: str, name: str, ts: float, dur: float, correlation: int | None = None) -> dict:
    args = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": 1, "args": args}


def launch(correlation: int, ts: float) -> dict:
    return event("cuda_runtime", "cudaLaunchKernel", ts, 1, correlation)


EVENTS = [
    {"ph": "M", "name": "process_name"},
    event("user_annotation", WINDOW, 100, 100),
    event("cpu_op", "lib::attend", 110, 20),
    event("cpu_op", "aten::mm", 112, 5),  # inside of it
    launch(1, 114),
    launch(2, 120),
    launch(3, 140),  # generated code launches by itself
    event("cpu_op", "lib::attend", 150, 10),
    launch(4, 155),
    event("cuda_runtime", "cudaMemcpyAsync", 165, 1, 5),
    event("cuda_runtime", "cudaStreamSynchronize", 170, 5, 6),
    event("cuda_runtime", "cudaDeviceSynchronize", 300, 5, 7),  # the profiler's own
    event("kernel", "gemm", 200, 4, 1),
    event("kernel", "softmax", 206, 2, 2),
    event("kernel", "triton_poi_fused_add_0", 208, 3, 3),
    event("kernel", "gemm", 215, 4, 4),
    event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 220, 1, 5),
    event("kernel", "somebody else's", 230, 1, 99),
]
LAUNCHES = [
    Launch("lib::attend", "lib", "layers.0.attn"),
    Launch("triton_poi_fused_add_0", "inductor", "layers.0"),
    Launch("lib::attend", "lib", "layers.1.attn"),
]


def test_the_step_alone_is_read():
    step = read(EVENTS)
    assert [kernel.name for kernel in step.kernels] == [
        "gemm",
        "softmax",
        "triton_poi_fused_add_0",
        "gemm",
        "Memcpy DtoH (Device -> Pinned)",
    ]
    assert [kernel.start_us for kernel in step.kernels] == [0, 6, 8, 15, 20]
    assert step.waits == ("cudaStreamSynchronize",) and len(step.copies) == 1
    assert step.gap_us == 2 + 4 + 1


def test_kernels_know_their_op_and_module():
    """The two kernels of one call of an op belong to one launch; its second call is the second launch of its name."""
    kernels = with_modules(read(EVENTS).kernels, LAUNCHES)
    assert [kernel.op for kernel in kernels] == ["lib::attend", "lib::attend", "", "lib::attend", ""]
    assert [kernel.module for kernel in kernels] == ["layers.0.attn", "layers.0.attn", "layers.0", "layers.1.attn", ""]
    assert [kernel.origin for kernel in kernels] == ["lib", "lib", "inductor", "lib", "library"]


def test_a_replayed_step_takes_what_is_known():
    known = with_modules(read(EVENTS).kernels, LAUNCHES)
    replay = [event("user_annotation", WINDOW, 100, 100), launch(1, 110)]
    names = ["gemm", "softmax", "triton_poi_fused_add_0", "gemm", "gemm"]
    replay += [event("kernel", name, 200 + 5 * i, 4, 1) for i, name in enumerate(names)]
    step = read(replay)
    assert [kernel.module for kernel in as_in(step.kernels, known)] == [
        "layers.0.attn",
        "layers.0.attn",
        "layers.0",
        "layers.1.attn",
        "",
    ]

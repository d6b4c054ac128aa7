"""The one line."""

from dsv4.compile.explain.report import Finding, Stage
from dsv4.compile.explain.verdict import verdict

CLEAN = [
    Stage(1, "ok", "9 op calls; 2 ops outside of torch, all sound"),
    Stage(2, "ok", "1 graph, 0 breaks"),
    Stage(3, "ok", "0 recompiles over 8 calls, 1,040 guards"),
]
STEP = {"syncs": 0, "allocations": 0, "nodes_per_layer": 14.25, "ms": 1.5}


def test_without_a_device():
    skipped = Stage(4, "skipped", "skipped: no CUDA device", data={"captured": None, "why": "no CUDA device"})
    assert verdict([*CLEAN, skipped, Stage(5, "skipped", "skipped: no CUDA device")]) == (
        "1 graph, 0 breaks, 0 recompiles over 8 calls; CUDA graph: not checked (no CUDA device)"
    )


def test_with_a_device():
    captured = Stage(4, "ok", "captured", data={"captured": True, "why": ""})
    assert verdict([*CLEAN, captured, Stage(5, "ok", "replayed", data=STEP)]).endswith(
        "8 calls; one CUDA graph, 0 syncs, 0 allocations, 14.2 kernels a layer, 1.500 ms"
    )
    lost = Stage(4, "found", "not captured", data={"captured": False, "why": "capture fails"})
    assert "no CUDA graph (capture fails)" in verdict([*CLEAN, lost])


def test_faults():
    op = Finding("op", "op without a fake", details={"op": "a::b"})
    stages = [
        Stage(1, "found", "", findings=(op, op)),
        Stage(2, "found", "3 graphs, 2 breaks; in one call 9 graph runs and 6 breaks"),
        Stage(3, "error", "the stage met an exception"),
        Stage(6, "found", "", findings=(Finding("difference", "compiled differs from eager"),)),
        Stage(7, "found", "", data={"rungs": [{"name": "eager", "ok": True}, {"name": "inductor", "ok": False}]}),
    ]
    assert verdict(stages) == (
        "1 unsound op, 3 graphs, 2 breaks; compiled differs from eager; does not run with inductor; failed: recompiles"
    )
    assert verdict([]) == "nothing was looked at"
    assert verdict([Stage(6, "ok", "", findings=(Finding("note", "cannot be compared"),))]) == "nothing was looked at"

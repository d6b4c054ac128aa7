"""Reports made by hand: one with everything that can be wrong, one of a step as it should be."""

from dsv4.compile.explain.report import STAGES, Finding, Report, Stage

HOSTILE = 'print("</script><script>alert(1)</script>", x["<b>"] & y)  # \'quoted\''
LONG_KERNEL = "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int, int, int>, float>>"
ENVIRONMENT = {
    "torch": "2.11.0+cu130",
    "device": "NVIDIA H200",
    "python": "3.12.3",
    "platform": "Linux x86_64",
    "versions": {"transformers": "5.17.0", "triton": "3.6.0"},
}
KERNELS = (  # of one layer: name, module below it, origin, microseconds
    ("triton_red_fused_mean_mul_rsqrt_0", "attn_hc", "inductor", 2.1),
    ("hc_pre_kernel", "attn_hc", "dsv4", 3.2),
    (LONG_KERNEL, "attn.wq_b", "library", 9.7),
    ("q_rope_kernel", "attn", "dsv4", 2.4),
    ("attend_split_kernel", "attn", "dsv4", 7.9),
    ("attend_merge_kernel", "attn", "dsv4", 2.2),
    ("linear_fp8_block_kernel", "attn.wo_a", "dsv4", 8.8),
    ("hc_post_kernel", "attn_hc", "dsv4", 1.9),
    ("route_kernel", "ffn.gate", "dsv4", 3.0),
    ("moe_gate_up_kernel", "ffn.experts", "dsv4", 21.5),
    ("moe_down_kernel", "ffn.experts", "dsv4", 12.1),
    ("triton_poi_fused_add_mul_1", "ffn", "inductor", 1.6),
    ("hc_post_kernel", "ffn_hc", "dsv4", 1.9),
)


def timeline(layers: int, gap: float = 1.2) -> list[dict]:
    """A step of 3 kernels outside the layers and of KERNELS for each layer."""
    names = [("embedding_kernel", "embed", 2.0)]
    names += [(name, f"layers.{i}.{module}", us) for i in range(layers) for name, module, _, us in KERNELS]
    names += [("linear_kernel", "head", 41.0), ("sample_kernel", "", 6.5)]
    found, now = [], 0.0
    for name, module, us in names:
        found.append({"name": name, "module": module, "start_us": round(now, 2), "us": us})
        now += us + gap
    return found


def step_data(layers: int, **changes) -> dict:
    kernels = [
        {"name": name, "module": f"layers.*.{module}", "origin": origin, "count": layers, "us": us * layers}
        for name, module, origin, us in KERNELS
    ]
    kernels += [
        {"name": "embedding_kernel", "module": "embed", "origin": "library", "count": 1, "us": 2.0},
        {"name": "linear_kernel", "module": "head", "origin": "dsv4", "count": 1, "us": 41.0},
        {"name": "sample_kernel", "module": "", "origin": "dsv4", "count": 1, "us": 6.5},
    ]
    line = timeline(layers)
    end = line[-1]["start_us"] + line[-1]["us"]
    return {
        "kernels": kernels,
        "timeline": line,
        "nodes": len(line),
        "nodes_per_layer": float(len(KERNELS)),
        "gap_us": round(end - sum(kernel["us"] for kernel in line), 2),
        "ms": end / 1e3,
        "bytes": 11_430_000_000,
        "floor_ms": 2.69,
        "syncs": 0,
        "copies": 0,
        "allocations": 0,
    } | changes


def clean() -> Report:
    """A captured step of 43 layers without a finding but a note."""
    layers = [{"name": f"layers.{i}", "graphs": [0], "breaks": 0} for i in range(43)]
    note = Finding("note", "14 of 41 ops have no CUDA kernel here", "No GPU is needed to trace them.")
    stages = (
        Stage(1, "ok", "41 ops: schemas, kernels and fakes agree", 1.8, (note,), ops()),
        Stage(
            2,
            "ok",
            "1 graph, 0 breaks",
            21.3,
            data={"graphs": [{"id": 0, "ops": 1204, "modules": ["layers.*"]}], "layers": layers},
        ),
        Stage(
            3, "ok", "0 recompiles over 4 calls", 2.0, data={"sweep": [{"shape": s, "compiled": s == "1"} for s in "1234"]}
        ),
        Stage(
            4,
            "ok",
            "captured; no input is copied",
            0.4,
            data={"captured": True, "why": "", "static_bytes": 152_000_000_000, "copied_bytes": 0},
        ),
        Stage(5, "ok", "562 kernels, 13 a layer, 0 syncs, 0 allocations", 3.1, data=step_data(43)),
        Stage(6, "ok", "eager, compiled and replayed agree to 2e-3", 4.0, data={"pairs": pairs(None)}),
        Stage(7, "ok", "4 of 4 rungs run", 40.2, data={"rungs": rungs("")}),
    )
    verdict = "1 graph, 0 breaks, 0 recompiles over 4 calls, captured, 0 syncs, 0 allocations, 13 kernels a layer"
    return Report("models/V4-Flash (decode)", verdict, stages, ENVIRONMENT)


def ops() -> dict:
    return {
        "ops": [
            {
                "name": "mylib::append",
                "schema": "mylib::append(Tensor(a!) cache, Tensor x) -> ()",
                "kernels": ["CPU", "CUDA"],
                "mutates": ["cache"],
                "tags": ["pt2_compliant_tag"],
                "calls": 46,
            },
            {"name": "mylib::fused_gate", "schema": "...", "kernels": [], "mutates": [], "tags": [], "calls": 1},
        ]
    }


def pairs(first: str | None) -> list[dict]:
    return [
        {"a": "eager", "b": "compiled", "max_abs": 1.9e-3, "max_rel": 4.2e-3, "first_module": first},
        {"a": "compiled", "b": "replayed", "max_abs": 0.0, "max_rel": 0.0, "first_module": None},
    ]


def rungs(error: str) -> list[dict]:
    return [
        {"name": "eager", "ok": True, "seconds": 0.0412, "first_seconds": 0.05, "error": ""},
        {"name": "aot_eager", "ok": True, "seconds": 0.0387, "first_seconds": 8.2, "error": ""},
        {"name": "inductor", "ok": True, "seconds": 0.00731, "first_seconds": 29.4, "error": ""},
        {
            "name": "inductor with a CUDA graph",
            "ok": not error,
            "seconds": 0.0 if error else 0.0049,
            "first_seconds": 30.1,
            "error": error,
        },
    ]


def broken(layers: int = 46) -> Report:
    """Everything that can go wrong, in 46 layers and 601 kernels; one stage failed, one was skipped."""
    wrong_ops = (
        Finding(
            "op",
            "mylib::fused_gate has no fake",
            "torch.compile must know shape and dtype of what the op returns without running it; this op raises instead.",
            "Register one: @torch.library.register_fake('mylib::fused_gate') def _(x, w): return x.new_empty(x.shape)",
            "my_model/ops.py",
            12,
            '@torch.library.custom_op("mylib::fused_gate", mutates_args=())',
        ),
    )
    breaks = (
        Finding(
            "break",
            "branch on the value of a tensor",
            "Python decides here by a number that only the device knows, so the graph ends and the device is waited for.",
            "Compute both sides and choose with torch.where(scores.max() > limit, a, b).",
            "my_model/attention.py",
            88,
            "if scores.max() > limit:",
            "layers.*.attn",
            layers,
            {"gb_id": "GB0170", "original": "Data-dependent branching\n  Explanation: Detected data-dependent branching"},
        ),
        Finding(
            "break",
            "call of print",
            "print is not traced.",
            "Remove it, or print outside of the compiled function.",
            "my_model/moe.py",
            31,
            HOSTILE,
            "layers.3.ffn",
        ),
    )
    recompiles = (
        Finding(
            "recompile",
            "sequence length became 130, the graph assumed 128",
            "A size of an input is part of the graph, so each new length compiles again.",
            "Pad to a fixed length, or mark it: torch._dynamo.mark_dynamic(tokens, 1).",
            "my_model/model.py",
            40,
            "def forward(self, tokens, cache):",
            count=3,
        ),
    )
    skips = (
        Finding(
            "skip",
            "a tensor on the CPU",
            "CUDA graphs replay work of one device; `scale` lies in the CPU's memory.",
            "Make it a buffer of the module: self.register_buffer('scale', scale), so that .to('cuda') moves it.",
            "my_model/moe.py",
            57,
            "x = x * self.scale.to(x.device)",
            "layers.*.ffn",
            layers,
        ),
    )
    step = (
        Finding(
            "sync",
            ".item() waits for the device",
            "The host stops until everything before it has run.",
            "Keep the number on the device as a tensor.",
            "my_model/sampling.py",
            9,
            "token = probs.argmax().item()",
            "",
            1,
            {"stack": "generate.py:20 in generate\nmy_model/sampling.py:9 in sample"},
        ),
        Finding(
            "alloc",
            "allocates 2.0 MB in each step",
            "",
            "Allocate once and write with out=.",
            "my_model/kv.py",
            5,
            "torch.cat((k, new))",
        ),
    )
    failed = Finding(
        "error",
        "RuntimeError in stage 6",
        "CUDA error: an illegal memory access was encountered",
        details={"traceback": "..."},
    )
    graphs = [{"id": i, "ops": 31, "modules": [f"layers.{i - 1}", f"layers.{i}"]} for i in range(layers + 1)]
    strip = [{"name": f"layers.{i}", "graphs": [i, i + 1], "breaks": 2 if i == 3 else 1} for i in range(layers)]
    sweep = [{"shape": f"tokens [1, {n}]", "compiled": n > 128} for n in (128, 128, 130, 131, 200)]
    stages = (
        Stage(1, "found", "1 of 3 ops cannot be compiled", 0.9, wrong_ops, ops()),
        Stage(2, "found", f"{len(graphs)} graphs, {layers + 1} breaks", 12.5, breaks, {"graphs": graphs, "layers": strip}),
        Stage(3, "found", "3 recompiles over 5 calls", 8.1, recompiles, {"sweep": sweep}),
        Stage(
            4,
            "found",
            "skipped by inductor: a tensor on the CPU",
            0.3,
            skips,
            {
                "captured": False,
                "why": "skipping cudagraphs due to cpu device (arg3_1)",
                "static_bytes": 3_400_000_000,
                "copied_bytes": 65_536,
            },
        ),
        Stage(
            5, "found", "601 kernels, 1 sync, 1 allocation", 2.2, step, step_data(layers, syncs=1, allocations=1, copies=2)
        ),
        Stage(6, "error", "the stage met an exception", 1.0, (failed,)),
        Stage(7, "found", "3 of 4 rungs run", 33.0, data={"rungs": rungs("RuntimeError: capture failed\n  " + HOSTILE)}),
    )
    return Report(
        "my_model:step",
        f"{len(graphs)} graphs, {layers + 1} breaks, 3 recompiles, not captured, 1 sync",
        stages,
        ENVIRONMENT,
    )


def on_cpu() -> Report:
    """What is left of `clean` where there is no GPU."""
    whole = clean()
    stages = tuple(
        Stage(stage.number, "skipped", "needs a CUDA device") if stage.number in (4, 5) else stage for stage in whole.stages
    )
    assert [stage.number for stage in stages] == list(STAGES)
    return Report(
        whole.subject, "1 graph, 0 breaks, 0 recompiles over 4 calls", stages, whole.environment | {"device": "CPU"}
    )

"""dsv4 bench: how long a decode step takes against the bytes that it has to read.

Random weights of a release's widths and formats are made on the device, with fewer layers than the release (a whole
Flash does not fit one GPU) but the same CSA/HCA alternation, top-k routing and full head. The step is the product's own:
one compiled graph, captured, replayed. Two depths give the cost of a layer and of what lies outside the layers; each op
is also timed by itself (dsv4.bench_ops).
"""

import argparse
import dataclasses
import importlib.util
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator
from functools import partial

from dsv4.cli import add_cache_arguments

GIB = 2**30


def add_bench(commands) -> None:
    """The parser of `dsv4 bench`."""
    parser = commands.add_parser(
        "bench",
        help="time the decode step on random weights (needs a CUDA device)",
        description="Time the captured decode step at a release's widths on random weights, at one or two depths.",
        allow_abbrev=False,
    )
    parser.add_argument("--widths", choices=("flash", "pro"), default="flash", help="default: flash")
    parser.add_argument("--layers", default="6,12", metavar="N[,M]", help="depths; default: 6,12")
    parser.add_argument("--batch", default="1", metavar="B[,B...]", help="sequences decoded together; default: 1")
    parser.add_argument("--context", type=int, default=4096, metavar="N", help="position of the timed step; default: 4096")
    add_cache_arguments(parser)
    parser.add_argument(
        "--format", default="nvfp4-experts", metavar="NAME", help="nvfp4-experts (default), mxfp4, all-nvfp4 or bf16"
    )
    parser.add_argument("--replays", type=int, default=200, metavar="N", help="timed replays; default: 200")
    parser.add_argument(
        "--eager", action="store_true", help="capture the step uncompiled: the layers' kernels are the same"
    )
    parser.add_argument("--plot", metavar="FILE", help="draw each op's time over its floor (PNG; needs matplotlib)")
    parser.add_argument("--peer", choices=("transformers",), help="also time a layer of this library's model")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.set_defaults(run=bench)


def parse_numbers(name: str, text: str, most: int) -> list[int]:
    """Positive integers of a comma-separated list; ValueError that names the flag."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not 1 <= len(numbers) <= most or min(numbers, default=0) < 1:
        raise ValueError(f"{name} must be 1 to {most} positive integers separated by commas, found {text!r}")
    return numbers


def bench(args: argparse.Namespace) -> int:
    """Run the benchmark and print it."""
    import torch

    from dsv4.bench_ops import OpTime, plot
    from dsv4.bench_peer import transformers_layer
    from dsv4.model import config as configs
    from dsv4.model.cache import choose_formats

    layers = sorted(set(parse_numbers("--layers", args.layers, 2)))
    batches = parse_numbers("--batch", args.batch, 8)
    if args.context < 1 or args.replays < 10:
        raise ValueError(f"--context must be at least 1 and --replays at least 10, found {args.context}, {args.replays}")
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib, which is not installed; install it with: pip install 'dsv4[plot]'")
    if not torch.cuda.is_available():
        raise ValueError("bench needs a CUDA device, and PyTorch sees none; nothing was run")
    args.kv, args.index = choose_formats(getattr(configs, args.widths)(), args.kv, args.index, args.context)
    bandwidth = copy_bandwidth()
    results = []
    for depth in layers:
        for row in measure(args, depth, batches, depth == layers[0]):
            results.append(row)
            print(step_line(row, bandwidth), file=sys.stderr, flush=True)  # so that an interrupted run leaves something
    report = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "copy_bytes_per_second": bandwidth,
        **{key: getattr(args, key) for key in ("widths", "format", "context", "kv", "index", "replays", "eager")},
        "steps": results,
        "layer": per_layer(results, bandwidth),
    }
    if args.peer:
        widths = getattr(configs, args.widths)()
        report["peer"] = {"name": args.peer, "seconds": transformers_layer(widths, args.context, 20)}
    if args.plot:
        plot([OpTime(**op) for op in results[0]["ops"]], bandwidth, args.plot)
    print(json.dumps(report) if args.json else text(report))
    return 0


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a large device copy: the ceiling that the floors are computed with."""
    import torch

    source = torch.empty(2 * GIB, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    seconds = time_replays(lambda: target.copy_(source), 10)
    return 2 * source.nbytes / statistics.median(seconds)


def time_replays(run, count: int) -> list[float]:
    """Seconds of each of `count` calls on the device, after 3 that are not timed."""
    import torch

    for _ in range(3):
        run()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)]


def measure(args: argparse.Namespace, depth: int, batches: list[int], with_ops: bool) -> Iterator[dict]:
    """Time one depth; yields a row for each batch size, with its ops one by one if asked for."""
    import torch

    from dsv4.bench_ops import time_ops
    from dsv4.compile.graphs import CapturedStep, compile_step
    from dsv4.compile.step import DecodeState, decode_step
    from dsv4.model import config as configs
    from dsv4.model.cache import Cache
    from dsv4.model.plan import Sizes, buffer_bytes, step_bytes
    from dsv4.model.random_source import RandomSource, fill_cache
    from dsv4.model.transformer import Transformer

    room = -(-(args.context + args.replays + 64) // 128) * 128  # the replays go on from the context
    config = configs.excerpt(getattr(configs, args.widths)(), depth, max_position_embeddings=room)
    device = torch.device("cuda")
    with torch.no_grad():
        model = Transformer(config, RandomSource(device, form=args.format))
        for batch in batches:
            cache = Cache(config, batch, room, torch.bfloat16, device, args.kv, args.index)
            fill_cache(cache, config)
            sizes = Sizes(batch, args.context, torch.bfloat16, args.kv, args.index)
            state = DecodeState(batch, config.vocab_size, device)
            start = time.perf_counter()
            step = partial(decode_step if args.eager else compile_step(decode_step), model, cache, state)
            step()
            torch.cuda.synchronize()
            compiled = time.perf_counter() - start
            replay = CapturedStep(step)
            state.slots.copy_(torch.arange(batch, device=device))
            state.positions.fill_(args.context)
            state.tokens.random_(config.vocab_size)
            state.remaining.fill_(2**40)
            allocated = torch.cuda.memory_allocated()
            seconds = sorted(time_replays(replay, args.replays))
            assert torch.cuda.memory_allocated() == allocated, "a replay allocated memory"
            row = {
                "layers": depth,
                "batch": batch,
                "seconds": statistics.median(seconds),
                "spread": (seconds[-len(seconds) // 10 or -1] - seconds[len(seconds) // 10]),
                "bytes": step_bytes(buffer_bytes(model), config, sizes),
                "compile_seconds": compiled,
                "memory": allocated,
                "kernels": kernels(replay),
                "ops": [],
            }
            if with_ops:
                state.positions.fill_(args.context)
                ops = time_ops(partial(decode_step, model, cache, state), args.context, time_replays)
                row["ops"] = [dataclasses.asdict(op) for op in ops]
            yield row
            del cache, state, step, replay
    del model
    torch.cuda.empty_cache()


def kernels(replay) -> dict[str, tuple[int, float]]:
    """Name -> (launches, microseconds) of the kernels of one replay, as the profiler sees them."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as trace:
        replay()
        torch.cuda.synchronize()
    table = {}
    for event in trace.key_averages():
        if event.device_type == torch.autograd.DeviceType.CUDA and event.self_device_time_total > 0:
            table[event.key] = (event.count, event.self_device_time_total)
    return table


def per_layer(results: list[dict], bandwidth: float) -> list[dict]:
    """From two depths: the cost of a layer and of what lies outside, per batch size."""
    rows = []
    for batch in sorted({row["batch"] for row in results}):
        pair = [row for row in results if row["batch"] == batch]
        if len(pair) != 2:
            continue
        low, high = pair
        count = high["layers"] - low["layers"]
        seconds = (high["seconds"] - low["seconds"]) / count
        nbytes = (high["bytes"] - low["bytes"]) / count
        nodes = [sum(launches for launches, _ in row["kernels"].values()) for row in pair]
        rows.append(
            {
                "batch": batch,
                "seconds": seconds,
                "bytes": nbytes,
                "of_floor": nbytes / bandwidth / seconds,
                "kernels": (nodes[1] - nodes[0]) / count,
                "outside_seconds": low["seconds"] - low["layers"] * seconds,
                "by_kernel": {
                    name: (
                        (launches - low["kernels"].get(name, (0, 0))[0]) / count,
                        (micros - low["kernels"].get(name, (0, 0))[1]) / count,
                    )
                    for name, (launches, micros) in high["kernels"].items()
                },
            }
        )
    return rows


def step_line(row: dict, bandwidth: float) -> str:
    """One measured step as a line of the table."""
    floor = row["bytes"] / bandwidth
    launches = sum(count for count, _ in row["kernels"].values())
    return (
        f"{row['layers']:>6} {row['batch']:>5} {row['seconds'] * 1e3:>8.3f} {row['spread'] * 1e3:>7.3f} "
        f"{row['bytes'] / 1e9:>8.3f} {floor * 1e3:>8.3f} {floor / row['seconds']:>8.0%} {launches:>7} "
        f"{row['compile_seconds']:>9.1f} {row['memory'] / GIB:>6.1f}"
    )


def text(report: dict) -> str:
    """The report as tables."""
    from dsv4.bench_ops import OpTime, table

    bandwidth = report["copy_bytes_per_second"]
    lines = [
        f"{report['device']}, torch {report['torch']}, device copy {bandwidth / 1e12:.2f} TB/s; V4-{report['widths']} "
        f"widths, {report['format']}, context {report['context']}, cache rows {report['kv']} and index keys "
        f"{report['index']}, median of {report['replays']} replays",
        f"{'layers':>6} {'batch':>5} {'ms/step':>8} {'spread':>7} {'GB read':>8} {'floor ms':>8} {'of floor':>8} "
        f"{'kernels':>7} {'compile s':>9} {'GiB':>6}",
    ]
    lines += [step_line(row, bandwidth) for row in report["steps"]]
    for row in report["layer"]:
        lines.append(
            f"batch {row['batch']}: {row['seconds'] * 1e6:.1f} us a layer, floor {row['bytes'] / bandwidth * 1e6:.1f} us "
            f"({row['of_floor']:.0%}), {row['kernels']:.1f} kernels a layer; outside the layers "
            f"{row['outside_seconds'] * 1e3:.3f} ms"
        )
        named = sorted(row["by_kernel"].items(), key=lambda item: -item[1][1])
        lines += [
            f"    {micros:>8.2f} us {count:>5.1f} x  {name[:90]}"
            for name, (count, micros) in named
            if micros > 0.2 or count > 0
        ]
    for row in report["steps"]:
        if row["ops"]:
            lines += [
                "",
                f"batch {row['batch']}: each op by itself, all its calls of a step of {row['layers']} layers in turn",
            ]
            lines += table([OpTime(**op) for op in row["ops"]], bandwidth)
    if "peer" in report:
        seconds = ", ".join(f"{kind} {value * 1e3:.2f} ms" for kind, value in report["peer"]["seconds"].items())
        lines += ["", f"{report['peer']['name']}, eager, bf16, batch 1, a layer a token: {seconds}"]
    return "\n".join(lines)

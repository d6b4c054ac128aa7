"""One sequence of up to a million tokens on a model of a release's widths with random weights: how fast the prompt runs,
how long a decode step takes at each length, and how much memory it took against what was predicted.

    python examples/long_context.py                                     # 12 layers of Flash, fp8 rows, fp4 keys; a GPU
    python examples/long_context.py --prompt 131072 --seconds 60        # stops in time, with what it has until then
    python examples/long_context.py --fill --eager                      # random state, no prompt; nothing compiled
"""

import argparse
import json
import pathlib
import random
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # dsv4, where it is not installed

import torch  # noqa: E402

from dsv4.bench import copy_bandwidth, parse_numbers  # noqa: E402
from dsv4.cli import add_cache_arguments  # noqa: E402
from dsv4.compile.engine import check_memory  # noqa: E402
from dsv4.compile.runner import Runner  # noqa: E402
from dsv4.model import config as configs  # noqa: E402
from dsv4.model.cache import Cache  # noqa: E402
from dsv4.model.config import CSA, HCA, ModelConfig  # noqa: E402
from dsv4.model.plan import GIB, PREFILL_CHUNK, Plan, Sizes, buffer_bytes, plan, step_bytes  # noqa: E402
from dsv4.model.random_source import FORMATS, RandomSource, fill_cache  # noqa: E402
from dsv4.model.transformer import Transformer  # noqa: E402

POSITIONS = "4096,65536,131072,262144,1048576"
STEPS = 128  # of a timing: every block ends in it, those of HCA layers once
LEFT = 6.0  # seconds of the limit that are kept for decoding


def operations(config: ModelConfig, tokens: int) -> dict[str, float]:
    """Floating-point operations, a multiplication and an addition each, of a prompt's index scores and of its attention."""
    heads = config.num_attention_heads * config.head_dim
    pairs = tokens * tokens / 2  # of a token and one at or before it
    scores = config.layer_types.count(CSA) * 2 * config.index_n_heads * config.index_head_dim * pairs / config.csa_rate
    selected = min(config.index_topk, tokens / 2 / config.csa_rate) * tokens * config.layer_types.count(CSA)
    everything = pairs / config.hca_rate * config.layer_types.count(HCA)
    window = min(config.sliding_window, tokens) * tokens * config.num_hidden_layers
    return {"index scores": scores, "attention": 4 * heads * (selected + everything + window)}


def matmul_rate() -> float:
    """Operations a second of a large bf16 matmul on this device."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for run in range(6):
        if run == 2:
            start.record()
        a @ b
    end.record()
    torch.cuda.synchronize()
    return 4 * 2 * 8192**3 / (start.elapsed_time(end) / 1e3)


def prefill(runner: Runner, length: int, deadline: float) -> tuple[int, float]:
    """Run a prompt of random tokens until the deadline; how many went through, and in how many seconds."""
    draw = random.Random(0)
    ids = [draw.randrange(runner.model.config.vocab_size) for _ in range(length)]
    start = shown = time.perf_counter()
    done = done_then = 0
    for chunk in runner.chunks([(0, ids)]):
        runner.prefill(chunk)
        done += sum(piece.count for piece in chunk.pieces)
        now = time.perf_counter()
        if now - shown > 2 or done == length:
            rate = (done - done_then) / (now - shown)
            shown, done_then = now, done
            print(f"  {done:,} of {length:,} tokens, {rate:,.0f} tokens/s, {(length - done) / rate:.0f} s left", flush=True)
        if now > deadline:
            print("  the time is up")
            break
    runner.synchronize()
    return done, time.perf_counter() - start


def decode(runner: Runner, position: int, steps: int) -> float:
    """Seconds a decode step, the mean of `steps` that end just below `position`."""
    state = runner.state
    state.slots[0].fill_(0)
    state.remaining.fill_(2**40)
    for timed in (False, True):
        state.positions.fill_(position - steps)
        runner.synchronize()
        clock = runner.clock()
        for _ in range(steps if timed else 3):
            runner.decode()
        clock.stop()
        runner.synchronize()
    state.slots.fill_(-1)
    return clock.seconds() / steps


def memory() -> dict[str, int]:
    """Bytes on the device: in PyTorch's tensors, held by PyTorch now and at most, and all else (the CUDA context, kernels,
    libraries, other processes)."""
    free, total = torch.cuda.mem_get_info()
    reserved = torch.cuda.memory_reserved()
    found = {"allocated": torch.cuda.memory_allocated(), "reserved": reserved}
    return found | {"most_reserved": torch.cuda.max_memory_reserved(), "outside": total - free - reserved}


def report(runner: Runner, length: int, positions: list[int], fill: bool, deadline: float) -> dict:
    """Bring a sequence to `length` tokens, then time decode steps; printed as it goes, and returned."""
    config, cache = runner.model.config, runner.cache
    out: dict = {"layers": config.num_hidden_layers, "kv": cache.kv, "index": cache.index, "cache_bytes": cache.nbytes()}
    if fill:
        fill_cache(cache, config)
        reached = length
    else:
        reached, seconds = prefill(runner, length, deadline)
        out["prefill"] = {"tokens": reached, "seconds": seconds, "tokens_per_second": reached / seconds}
        print(f"{reached:,} prompt tokens in {seconds:.1f} s, {reached / seconds:,.0f} tokens/s", flush=True)
    out["steps"] = []
    weights = buffer_bytes(runner.model)
    for position in [position for position in positions if position < reached] + [reached]:
        seconds = decode(runner, position, min(STEPS, position))
        sizes = Sizes(1, position, runner.model.embed.dtype, cache.kv, cache.index)
        step = {"position": position, "seconds": seconds, "bytes": step_bytes(weights, config, sizes)}
        out["steps"].append(step)
        ratio = seconds / out["steps"][0]["seconds"]
        print(f"decode at {position:>9,}: {seconds * 1e3:.3f} ms a step, {ratio:.3f} of the first", flush=True)
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", choices=("flash", "pro"), default="flash")
    parser.add_argument("--layers", type=int, default=12, metavar="N")
    parser.add_argument("--format", choices=FORMATS, default=FORMATS[0], help="of the weights")
    parser.add_argument("--max-context", type=int, default=2**20, metavar="N")
    parser.add_argument("--prompt", type=int, metavar="N", help="tokens; default: --max-context")
    parser.add_argument("--chunk", type=int, default=PREFILL_CHUNK, metavar="N", help="prompt tokens a step")
    parser.add_argument("--positions", default=POSITIONS, help="where decode steps are timed, as far as they are reached")
    parser.add_argument("--fill", action="store_true", help="fill the cache with random rows, run no prompt")
    parser.add_argument("--eager", action="store_true", help="capture the steps uncompiled: the kernels are the same")
    parser.add_argument("--seconds", type=float, default=600.0, metavar="S", help="stop the prompt in time for this limit")
    parser.add_argument("--steps", type=int, default=1000, metavar="N", help="decode steps in which memory must stay flat")
    parser.add_argument("--json", action="store_true", help="the report as JSON at the end")
    add_cache_arguments(parser)
    args = parser.parse_args()
    begin = time.perf_counter()
    try:
        out = run(args, begin + args.seconds)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(out))
    return 0 if out["flat"] else 1


@torch.no_grad()
def run(args: argparse.Namespace, deadline: float) -> dict:
    """Plan, build, measure, compare."""
    length = args.max_context if args.prompt is None else args.prompt
    if not 0 < length <= args.max_context or args.steps >= args.max_context:
        raise ValueError(f"--prompt and --steps must be within --max-context, found {length}, {args.steps}")
    positions = sorted(set(parse_numbers("--positions", args.positions, 16)))
    start = time.perf_counter()
    config = configs.excerpt(getattr(configs, args.widths)(), args.layers)
    sizes = Sizes(1, args.max_context, torch.bfloat16, args.kv, args.index, args.chunk)
    device = torch.device("cuda")
    planned = Transformer(config, RandomSource("meta", form=args.format))
    check_memory(planned, sizes, device)
    need = plan(buffer_bytes(planned), config, sizes)
    model = Transformer(config, RandomSource(device, form=args.format))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()  # making random weights takes more than reading them
    cache = Cache(config, 1, args.max_context, torch.bfloat16, device, args.kv, args.index)
    runner = Runner(model, cache, args.chunk, compile=not args.eager)
    if args.eager:
        runner.capture()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; V4-{args.widths} widths, {args.layers} layers, rows "
        f"{cache.kv}, index keys {cache.index}; ready in {time.perf_counter() - start:.1f} s"
    )
    print(f"cache {cache.nbytes() / GIB:.3f} GiB for {args.max_context:,} tokens", flush=True)
    out = report(runner, length, positions, args.fill, deadline - LEFT)
    reached = out["steps"][-1]["position"]
    before = memory()
    seconds = decode(runner, reached, min(args.steps, reached))
    after = memory()
    out |= {"memory_before": before, "memory_after": after}
    out["flat"] = all(abs(after[name] - before[name]) < 50 * 2**20 for name in ("allocated", "reserved"))
    changes = ", ".join(f"{name} {(after[name] - before[name]) / 2**20:+.1f} MiB" for name in ("allocated", "reserved"))
    print(f"{args.steps:,} steps at {reached:,}: {seconds * 1e3:.3f} ms each; {changes}")
    out["memory"] = compare_memory(need, after)
    if "prefill" in out:
        layers = sum(buffer.nbytes for buffer in model.layers.buffers())
        out["prefill"] |= floors(config, out["prefill"], layers, args.chunk)
    return out


def compare_memory(need: Plan, measured: dict[str, int]) -> dict:
    """What was predicted beside what was taken."""
    parts = {name: getattr(need, name) for name in ("weights", "cache", "working", "total")}
    peak = measured["most_reserved"] + measured["outside"]
    text = " + ".join(f"{name} {parts[name] / GIB:.3f}" for name in ("weights", "cache", "working"))
    print(
        f"predicted {text} = {need.total / GIB:.3f} GiB; taken at most {measured['most_reserved'] / GIB:.3f} by PyTorch + "
        f"{measured['outside'] / GIB:.3f} beside it = {peak / GIB:.3f} GiB, {peak / need.total:.1%}"
    )
    return parts | {"measured": peak, "share": peak / need.total}


def floors(config: ModelConfig, prompt: dict, weights: int, chunk: int) -> dict:
    """The least that a prompt could take: its arithmetic at the rate of a large matmul, the weights read in each chunk."""
    rate, bandwidth = matmul_rate(), copy_bandwidth()
    found = {name: count / rate for name, count in operations(config, prompt["tokens"]).items()}
    found["weights"] = -(-prompt["tokens"] // chunk) * weights / bandwidth
    text = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in found.items())
    arithmetic = found["index scores"] + found["attention"]
    print(
        f"floors: {text}; index scores and attention alone are {arithmetic / prompt['seconds']:.0%} of the "
        f"{prompt['seconds']:.1f} s ({rate / 1e12:.0f} TFLOP/s, {bandwidth / 1e12:.2f} TB/s)"
    )
    return {"floors": found}


if __name__ == "__main__":
    sys.exit(main())

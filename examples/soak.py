"""A long run: many requests of random lengths with stop strings through one engine. Memory must stay flat, and nothing may
be compiled.

    python examples/soak.py                                   # 2,000 requests of 1 to 2,000 tokens, 32 at a time; a GPU
    python examples/soak.py --requests 50 --longest 60 --slots 4 --no-compile --device cpu
"""

import argparse
import collections
import json
import os
import pathlib
import random
import sys
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # dsv4, where it is not installed

import torch  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402

import dsv4  # noqa: E402

GROWTH = 32 * 2**20  # bytes of the process that count as flat: the results themselves are kept, some kB each
STOP = (".", "\n", " and")


def run(engine, count: int, longest: int, new_tokens: int, seed: int = 0, progress: bool | None = None) -> dict:
    """Generate for `count` prompts of 1 to `longest` random tokens, and report. Growth is that of the peak, from the first
    half of the run to the second."""
    draw = random.Random(seed)
    vocab = engine.config.vocab_size
    lengths = [draw.randint(1, longest) for _ in range(count)]
    prompts = [[draw.randrange(2, vocab) for _ in range(length)] for length in lengths]
    engine.generate(prompts[: count // 10], new_tokens, stop=STOP, seed=seed, progress=False)  # what is lazy is set up
    samples = []
    running = threading.Event()

    def watch() -> None:
        while not running.wait(0.1):
            samples.append(memory(engine.runner.device))

    compiled = counters["stats"]["unique_graphs"]
    watcher = threading.Thread(target=watch, daemon=True)
    samples.append(memory(engine.runner.device))
    start = time.perf_counter()
    watcher.start()
    try:
        with torch.compiler.set_stance("fail_on_recompile"):
            completions = engine.generate(prompts, new_tokens, stop=STOP, seed=seed, progress=progress)
    finally:
        running.set()
        watcher.join()
    seconds = time.perf_counter() - start
    samples.append(memory(engine.runner.device))
    generated = sum(completion.timing.new_tokens for completion in completions)
    first, second = samples[: len(samples) // 2], samples[len(samples) // 2 :]
    host, device = (max(sample[i] for sample in second) - max(sample[i] for sample in first) for i in (0, 1))
    return {
        "requests": count,
        "prompt_tokens": sum(lengths),
        "new_tokens": generated,
        "seconds": round(seconds, 1),
        "new_tokens_per_second": round(generated / seconds),
        "ended_by": dict(collections.Counter(completion.finish_reason for completion in completions)),
        "graphs_compiled": counters["stats"]["unique_graphs"] - compiled,
        "host_growth_bytes": host,
        "device_growth_bytes": device,
        "flat": host < GROWTH and device <= 0,
    }


def memory(device: torch.device) -> tuple[int, int]:
    """Bytes of this process in memory, and bytes that PyTorch has reserved on the device."""
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resident, torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "examples" / "tiny"), metavar="FOLDER")
    parser.add_argument("--device")
    parser.add_argument("--requests", type=int, default=2000, metavar="N")
    parser.add_argument("--longest", type=int, default=2000, metavar="N", help="tokens of a prompt, at most")
    parser.add_argument("--new-tokens", type=int, default=64, metavar="N", help="at most, for each")
    parser.add_argument("--slots", type=int, default=32, metavar="N")
    parser.add_argument("--no-compile", action="store_true")
    args = parser.parse_args()
    engine = dsv4.load(
        args.model,
        args.device,
        max_batch=args.slots,
        max_context=args.longest + args.new_tokens,
        compile=not args.no_compile,
    )
    report = run(engine, args.requests, args.longest, args.new_tokens)
    print(json.dumps(report))
    return 0 if report["flat"] and report["graphs_compiled"] == 0 else 1


if __name__ == "__main__":
    sys.exit(main())

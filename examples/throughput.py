"""Slots kept full against one batch after another: the same requests, of mixed lengths, both ways.

python examples/throughput.py                       # examples/tiny
python examples/throughput.py --flash 6             # six layers of V4-Flash's widths, random NVFP4 weights; a GPU
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

import dsv4  # noqa: E402
from dsv4.compile.requests import Request  # noqa: E402
from dsv4.compile.runner import Runner  # noqa: E402
from dsv4.compile.sampling import SamplingParams  # noqa: E402
from dsv4.compile.scheduler import Scheduler  # noqa: E402
from dsv4.model.cache import Cache  # noqa: E402
from dsv4.model.config import excerpt, flash  # noqa: E402
from dsv4.model.random_source import RandomSource  # noqa: E402
from dsv4.model.transformer import Transformer  # noqa: E402


@torch.no_grad()
def flash_runner(layers: int, slots: int, context: int, deterministic: bool) -> Runner:
    """Layers of Flash from where the CSA, HCA alternation begins."""
    config = excerpt(flash(), layers)
    device = torch.device("cuda")
    model = Transformer(config, RandomSource(device))
    cache = Cache(config, slots, context, torch.bfloat16, device)
    return Runner(model, cache, prefill_chunk=512, compile=True, deterministic=deterministic)


def requests(count: int, prompt: int, new: int, vocab: int, seed: int) -> list[Request]:
    """Prompts of 1 to `prompt` tokens, each with 1 to `new` tokens to generate; nothing ends one before that."""
    draw = random.Random(seed)
    found = []
    for index in range(count):
        ids = [draw.randrange(2, vocab) for _ in range(draw.randint(1, prompt))]
        found.append(Request(ids, SamplingParams(seed=index), draw.randint(1, new), frozenset(), None))
    return found


def timed(scheduler: Scheduler, batches: list[list[Request]]) -> float:
    """Seconds to run the batches one after another."""
    scheduler.runner.synchronize()
    start = time.perf_counter()
    for batch in batches:
        for _ in scheduler.run(batch):
            pass
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "examples" / "tiny"), metavar="FOLDER")
    parser.add_argument("--flash", type=int, metavar="LAYERS", help="random weights at Flash widths in place of a folder")
    parser.add_argument("--requests", type=int, default=256, metavar="N")
    parser.add_argument("--prompt", type=int, default=256, metavar="N", help="tokens of a prompt, at most")
    parser.add_argument("--new", type=int, default=256, metavar="N", help="tokens to generate for each, at most")
    parser.add_argument("--slots", type=int, default=32, metavar="N")
    parser.add_argument("--deterministic", action="store_true")
    args = parser.parse_args()
    context = args.prompt + args.new
    if args.flash:
        runner = flash_runner(args.flash, args.slots, context, args.deterministic)
    else:
        settings = dict(max_batch=args.slots, max_context=context, deterministic=args.deterministic)
        runner = dsv4.load(args.model, **settings).runner
    print(json.dumps(compare(runner, args.requests, args.prompt, args.new)))


def compare(runner: Runner, count: int, prompt: int, new: int) -> dict:
    """Tokens a second both ways."""
    slots, scheduler = runner.cache.num_slots, Scheduler(runner)

    def fresh(seed: int = 0) -> list[Request]:
        return requests(count, prompt, new, runner.model.config.vocab_size, seed)

    timed(scheduler, [fresh(1)[: 2 * slots]])  # not measured
    full = timed(scheduler, [fresh()])
    rows = fresh()
    batched = timed(scheduler, [rows[at : at + slots] for at in range(0, count, slots)])
    tokens = sum(request.max_new_tokens for request in rows)
    return {
        "layers": runner.model.config.num_hidden_layers,
        "slots": slots,
        "deterministic": runner.deterministic,
        "requests": count,
        "prompt_tokens": sum(len(request.prompt) for request in rows),
        "new_tokens": tokens,
        "slots_full_tokens_per_second": round(tokens / full),
        "batch_after_batch_tokens_per_second": round(tokens / batched),
        "ratio": round(batched / full, 2),
    }


if __name__ == "__main__":
    main()

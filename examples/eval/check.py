"""Are the scores right, and do they stay the same?

    python examples/eval/check.py hf       every item of the log-likelihood tasks against lm-eval's own hf model, in float32
    python examples/eval/check.py batch    the same items at batch sizes 1, 3, 8 and 32, in both orders, after other work

`hf` needs lm-eval (pip install 'dsv4[eval]'); it gives transformers the dequantised weights. `batch` needs only dsv4, and
compares what the engine does by default with deterministic=True.
"""

import argparse
import json
import pathlib
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))  # dsv4, where it is not installed

import dsv4  # noqa: E402

CHOICES = ("dsv4_definitions", "dsv4_next_sentence")


def hf(args: argparse.Namespace) -> bool:
    import lm_eval
    import torch
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from dsv4 import eval_transformers
    from dsv4.eval import Dsv4LM

    device = args.device or "cpu"
    settings = dict(device=device, dtype="fp32", max_length=args.window, batch_size=8, compile=False)
    ours = Dsv4LM(args.model, **settings)
    model = eval_transformers.load(args.model, torch.float32, torch.device(device))
    manager = TaskManager(include_path=str(HERE), include_defaults=False)
    good = True
    for task in args.tasks.split(","):
        # hf puts BOS in front of a context only if told to, and in front of rolling windows always
        theirs = HFLM(
            pretrained=model, tokenizer=tokenizer_with_bos(args.model), batch_size=1, max_length=args.window,
            add_bos_token=task != "dsv4_bits", device=device,
        )  # fmt: skip
        runs = []
        for lm in (ours, theirs):
            start = time.perf_counter()
            options = dict(tasks=[task], task_manager=manager, limit=args.limit, bootstrap_iters=0)
            runs.append((lm_eval.simple_evaluate(model=lm, **options), time.perf_counter() - start))
        (a, ours_took), (b, theirs_took) = runs
        pairs = list(zip(a["samples"][task], b["samples"][task], strict=True))
        metric = "bits_per_byte" if task == "dsv4_bits" else "acc"
        got, expected = (run["results"][task][f"{metric},none"] for run in (a, b))
        other = sum(x["acc"] != y["acc"] for x, y in pairs) if metric == "acc" else int(abs(got - expected) > 1e-4)
        gap = max(abs(p - q) for x, y in pairs for p, q in zip(logprobs(x), logprobs(y), strict=True))
        good &= other == 0
        print(
            f"{task:20s} {len(pairs):4d} items  {metric} {got:.6f}, hf {expected:.6f}; items that differ {other}, largest "
            f"difference of a log-probability {gap:.1e}; {ours_took:.0f} s, hf {theirs_took:.0f} s",
            flush=True,
        )
    return good


def logprobs(sample: dict) -> list[float]:
    """The log-probabilities of an item: of its choices, its continuation, or its text."""
    return [float(each[0] if isinstance(each, (tuple, list)) else each) for each in sample["filtered_resps"]]


def tokenizer_with_bos(folder: str):
    """The folder's tokenizer, which puts BOS in front of a text when it is asked for special tokens."""
    from tokenizers import Tokenizer, processors
    from transformers import PreTrainedTokenizerFast

    from dsv4.model.tokenizer import Tokenizer as Ours

    bos, eos = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")
    backend = Tokenizer.from_file(f"{folder}/tokenizer.json")
    special = [(bos, Ours.from_folder(folder).bos_token_id)]
    backend.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=special)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token=eos, pad_token=eos)


def batch(args: argparse.Namespace) -> bool:
    lines = [
        line for task in ("definitions", "next_sentence") for line in (HERE / f"{task}.jsonl").read_text().splitlines()
    ]
    questions = [json.loads(line) for line in lines][: args.limit]
    others = [(f"{n} words and no more, {n * n}", f" of {n % 7}") for n in range(500)]
    first: dict[bool, tuple[list, list[int]]] = {}
    good = True
    for deterministic in (False, True):
        for size in (1, 3, 8, 32):
            engine = dsv4.load(
                args.model, args.device, args.dtype, size, args.window, compile=False, deterministic=deterministic
            )
            encode = engine.tokenizer.encode
            requests = [
                (encode(row["query"]), encode(f" {choice}", add_bos=False))
                for row in questions
                for choice in row["choices"]
            ]
            engine.score([(encode(text), encode(end, add_bos=False)) for text, end in others])
            start = time.perf_counter()
            forward = [score.logprob for score in engine.score(requests)]
            took = time.perf_counter() - start
            back = [score.logprob for score in engine.score(requests[::-1])][::-1]
            for scores, order in ((forward, "in order"), (back, "reversed")):
                picks = [max(range(4), key=lambda i, at=at: scores[4 * at + i]) for at in range(len(questions))]
                expected, chosen = first.setdefault(deterministic, (scores, picks))
                gap = max(abs(x - y) for x, y in zip(scores, expected, strict=True))
                other = sum(x != y for x, y in zip(picks, chosen, strict=True))
                right = sum(pick == row["label"] for pick, row in zip(picks, questions, strict=True))
                good &= other == 0 and (gap == 0 or not deterministic)
                print(
                    f"deterministic={deterministic!s:5} batch {size:2d} {order:8s} {right} of {len(questions)} right; "
                    f"against the first row {other} items differ, log-probabilities by {gap:.1e} at most; {took:.1f} s",
                    flush=True,
                )
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("hf", "batch"))
    parser.add_argument("--model", default=str(ROOT / "examples" / "tiny"), metavar="FOLDER")
    parser.add_argument("--tasks", default=",".join((*CHOICES, "dsv4_cloze", "dsv4_bits")), help="of hf")
    parser.add_argument("--limit", type=int, metavar="N", help="items of a task (batch: in all); default: all")
    parser.add_argument("--window", type=int, default=512, metavar="N", help="context window; default: 512")
    parser.add_argument("--device", help="default: cpu for hf, else cuda if there is one")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), help="of batch; default: the checkpoint's")
    args = parser.parse_args()
    good = (hf if args.what == "hf" else batch)(args)
    print("the same" if good else "NOT the same")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

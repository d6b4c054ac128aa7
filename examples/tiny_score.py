"""Held-out bits per byte and sample texts of a trained model."""

import json
import math
import time

import torch
from tiny_data import ASSISTANT, THINK_END, USER, held_out_batches
from tiny_quantise import quantise_in_place, round_bf16
from tokenizers import Tokenizer

PROMPTS = [
    "It was a fine morning in the spring, and",
    "And God said to Abraham,",
    "The function returns",
    "The whale rose out of the water and",
    "She looked at him with surprise, and said,",
    "water (noun):",
    "In this chapter we will learn how to",
    "The king of the country was",
]
QUESTIONS = ["friend", "river", "to run", "happiness"]


def score(model, loss_fn, data, shape, report, log, deadline, out, tokenizer):
    """Held-out bits per byte in bf16 and as the quantised checkpoint, then samples; the shape is a compiled one."""
    dev = model.embed.weight.device
    dense = torch.zeros((), dtype=torch.bool, device=dev)
    batches = held_out_batches(data["valid"], *shape)
    round_bf16(model)
    for name in ("bf16", "nvfp4"):
        if name == "nvfp4":
            quantise_in_place(model)
        total, count = 0.0, 0
        for ids, target in batches:
            with torch.enable_grad():  # as in training: without gradients the compiler would build the graph once more
                total += loss_fn(ids.to(dev), target.to(dev), dense)[0].item()
            count += 1
            if time.time() > deadline:
                break
        seen = sum((t >= 0).sum().item() for _, t in batches[:count])
        share = seen / len(data["valid"])
        report["held_out_share"] = share
        report[f"held_out_nats_per_token_{name}"] = total / seen
        report[f"held_out_bits_per_byte_{name}"] = total / math.log(2) / (data["valid_bytes"].sum() * share)
        log(
            f"held out {name}: {total / seen:.4f} nats a token, {report[f'held_out_bits_per_byte_{name}']:.4f} bits a "
            f"byte ({share:.0%} of the held-out tokens)"
        )
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    samples = sample(model, Tokenizer.from_file(str(tokenizer)), deadline)
    (out / "samples.txt").write_text("\n\n".join(samples) + "\n")
    for text in samples:
        log(text + "\n")


@torch.no_grad()
def sample(model, tok, deadline, new_tokens=100, seed=0):
    """Greedy and sampled (temperature 0.8) continuations with the weights as they are; recomputes each prefix."""
    user, assistant, think_end = (tok.token_to_id(t) for t in (USER, ASSISTANT, THINK_END))
    starts = [[0, *tok.encode(p, add_special_tokens=False).ids] for p in PROMPTS]
    starts += [
        [0, user, *tok.encode(f'What does "{q}" mean?', add_special_tokens=False).ids, assistant, think_end]
        for q in QUESTIONS
    ]
    dev, window = model.embed.weight.device, model.c.sliding_window
    rows = [list(s) for s in starts + starts]
    greedy, generator = len(starts), torch.Generator(device=dev).manual_seed(seed)
    for _ in range(new_tokens):
        if time.time() > deadline:
            break
        width = -(-max(map(len, rows)) // window) * window
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = torch.tensor(row)
        hidden, _, _ = model(ids.to(dev), torch.zeros((), dtype=torch.bool, device=dev))
        last = hidden[torch.arange(len(rows), device=dev), torch.tensor([len(r) - 1 for r in rows], device=dev)]
        logits = model.logits(last)
        logits[:, 2] = -torch.inf
        drawn = torch.multinomial(torch.softmax(logits / 0.8, -1), 1, generator=generator)[:, 0].tolist()
        for i, (best, other) in enumerate(zip(logits.argmax(-1).tolist(), drawn, strict=True)):
            if 1 not in rows[i]:
                rows[i].append(best if i < greedy else other)
    return [
        ("greedy:  " if i < greedy else "sampled: ") + tok.decode(r[1:], skip_special_tokens=False)
        for i, r in enumerate(rows)
    ]

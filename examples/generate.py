"""The Python API on the shipped checkpoint: python examples/generate.py, from the repository root; a CPU is enough."""

import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # dsv4, where it is not installed

import dsv4  # noqa: E402

# Eager, so that it starts at once; compile=True costs a minute or two on a CPU and is faster from then on.
engine = dsv4.load(ROOT / "examples" / "tiny", max_batch=2, max_context=512, compile=False)

# Prompts are text or token ids, of any lengths; prompt i draws with seed + i.
prompts = ["The whale rose out of the water and", "In this chapter we will learn how to"]
completions = engine.generate(prompts, max_new_tokens=24, temperature=0.8, seed=1)
for prompt, completion in zip(prompts, completions, strict=True):
    print(f"{prompt}|{completion.text}")
    print(f"[{completion.finish_reason}, {completion.timing.tokens_per_second:.1f} tokens/s]")

# Text as it becomes certain, always whole characters.
for piece in engine.stream("She looked at him with surprise, and said,", max_new_tokens=24, temperature=0):
    print(piece, end="", flush=True)
print()

# Teacher-forced logits: float32 [tokens, vocab] for each prompt; row t is the distribution of the token after t.
ids = engine.tokenizer.encode("He opened the door")  # BOS comes first
(logits,) = engine.logits([ids])
nats = -logits.log_softmax(-1)[range(len(ids) - 1), ids[1:]].mean()
print(f"{len(ids) - 1} tokens at {nats:.2f} nats each; next: {engine.tokenizer.decode([int(logits[-1].argmax())])!r}")

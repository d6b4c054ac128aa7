"""Random conversations as OpenAI's API writes them, for comparing encoders."""

import json
import random

TEXTS = ["hi", "深度", "a\nb", "x\n\n", "<b>", "\n\n<", "né", "🙂"]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]
VALUES = [1, 2.5, None, True, "x", "", [1, "é"], {"z": "<"}, "</think"]


def arguments(rng: random.Random, least: int = 1) -> dict:
    return {name: rng.choice(VALUES) for name in rng.sample("abcd", rng.randint(least, 3))}


def calls(rng: random.Random, first: int) -> list[dict]:
    """One to three calls with ids from `first` on."""
    functions = [
        {"name": rng.choice("fg"), "arguments": json.dumps(arguments(rng), ensure_ascii=False)}
        for _ in range(rng.randint(1, 3))
    ]
    return [{"id": f"c{first + n:03d}", "type": "function", "function": f} for n, f in enumerate(functions)]


def conversation(rng: random.Random, reminders: bool = True) -> list[dict]:
    """Some turns, with tool calls and results in any order; ends with an answer or before one."""
    messages = [{"role": "system", "content": rng.choice(TEXTS)}] if rng.random() < 0.6 else []
    count = 0
    for _ in range(rng.randint(1, 4)):
        messages += [{"role": "user", "content": rng.choice(TEXTS)} for _ in range(rng.randint(1, 2))]
        if reminders and rng.random() < 0.2:
            messages.append({"role": "latest_reminder", "content": rng.choice(TEXTS)})
        while rng.random() < 0.4:
            made = calls(rng, count)
            count += len(made)
            text, why = rng.choice(["", *TEXTS]), rng.choice(TEXTS)
            messages.append({"role": "assistant", "content": text, "reasoning_content": why, "tool_calls": made})
            results = [{"role": "tool", "tool_call_id": call["id"], "content": rng.choice(TEXTS)} for call in made]
            messages += rng.sample(results, len(results))
        messages.append({"role": "assistant", "content": rng.choice(TEXTS), "reasoning_content": rng.choice(TEXTS)})
    return messages[:-1] if rng.random() < 0.8 else messages

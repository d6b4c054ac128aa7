"""Data of the offline tasks, for the YAML files beside this one. Nothing here needs a network."""

import json
import pathlib

from datasets import Dataset

HERE = pathlib.Path(__file__).resolve().parent
CHARS = 3.2  # a token of examples/tiny's vocabulary, low enough that N tokens of text are never more than N
ROOM = 64  # tokens left for the needle, the question and the answer


def _rows(name: str) -> list[dict]:
    with open(HERE / f"{name}.jsonl", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def definitions(**_) -> dict:
    return {"test": Dataset.from_list(_rows("definitions"))}


def cloze(**_) -> dict:
    return {"test": Dataset.from_list(_rows("cloze"))}


def next_sentence(**_) -> dict:
    return {"test": Dataset.from_list(_rows("next_sentence"))}


def texts(**_) -> dict:
    return {"test": Dataset.from_list(_rows("texts"))}


def needle(tokens: int) -> dict:
    """Prompts of about `tokens` tokens: prose with one sentence hidden in it, and the question at the end."""
    hay = (HERE / "haystack.txt").read_text(encoding="utf-8")
    hay += "\n\n" + hay
    size = int((tokens - ROOM) * CHARS)
    rows = []
    for row in _rows("needles"):
        begin = hay.index(" ", int(row["start"] * len(hay) / 2)) + 1
        text = hay[begin : begin + size].rpartition(" ")[0]
        # between two sentences near the wanted depth
        at = text.find(". ", int(row["depth"] * (len(text) - 400)))
        key = f"The secret word of the {row['place']} is"
        prompt = f"{text[: at + 2]}{key} {row['word']}. {text[at + 2 :]}\n\n{key}"
        rows.append({"prompt": prompt, "word": row["word"]})
    return {"test": Dataset.from_list(rows)}


def needle_1k(**_) -> dict:
    return needle(1024)


def needle_2k(**_) -> dict:
    return needle(2048)


def needle_4k(**_) -> dict:
    return needle(4096)


def needle_8k(**_) -> dict:
    return needle(8192)


def found(doc: dict, results: list[str]) -> dict:
    """Exact match of the first word of the answer."""
    words = results[0].split()
    return {"acc": float(bool(words) and words[0].strip(".,\"'").lower() == doc["word"])}

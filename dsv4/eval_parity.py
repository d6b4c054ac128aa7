"""dsv4 eval --parity A B: how far two configurations of the engine, or the engine and transformers, are apart on the same
texts.

Both score every token of every text after the same context, so differences are paired: a few thousand tokens show what
two accuracies of a few hundred questions cannot. Needs no lm-eval.
"""

import json
import math
import random
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

_SETTINGS = {"dtype": str, "device": str, "compile": bool, "prefill_chunk": int, "activation": str, "deterministic": bool}
_SETTINGS |= {"kv": str, "index": str}
_OF_TRANSFORMERS = {"dtype", "device"}
_RESAMPLES = 2000


@dataclass(frozen=True)
class Parity:
    """Of all tokens, unless said otherwise. Log-probabilities are natural; differences are B minus A.

    `perplexity_ratio` is B's perplexity over A's, `interval` its 95 % interval from resampling whole texts.
    `first_divergence`: (text, token index) of the first token, in reading order, where the most likely tokens differ.
    """

    texts: int
    tokens: int
    agreement: float
    mean_difference: float
    max_difference: float
    perplexity_a: float
    perplexity_b: float
    perplexity_ratio: float
    interval: tuple[float, float]
    first_divergence: tuple[int, int] | None

    def __str__(self) -> str:
        low, high = self.interval
        first = "none" if self.first_divergence is None else "text {}, token {}".format(*self.first_divergence)
        return "\n".join(
            [
                f"texts, tokens               {self.texts}, {self.tokens}",
                f"most likely token the same  {self.agreement:.4%}",
                f"first difference            {first}",
                f"|log-probability difference| mean {self.mean_difference:.3e}, max {self.max_difference:.3e}",
                f"perplexity                  A {self.perplexity_a:.5f}, B {self.perplexity_b:.5f}",
                f"perplexity of B over A      {self.perplexity_ratio:.6f} (95 %: {low:.6f} to {high:.6f})",
            ]
        )


def parity(command) -> int:
    """Run `dsv4 eval --parity`."""
    texts = read_texts(command.texts)[: command.items]
    sides = [parse_side(side) for side in command.parity]
    results = []
    for folder, settings in sides:  # one after the other: two of a large checkpoint would not fit
        results.append(scores(folder, settings, texts, command.window))
    report = compare(*results)
    if command.json:
        print(json.dumps({"a": command.parity[0], "b": command.parity[1], **asdict(report)}))
    else:
        print(f"A {command.parity[0]}\nB {command.parity[1]}\n{report}")
    return 0


def parse_side(text: str) -> tuple[str, dict]:
    """`FOLDER,dtype=fp32,compile=False` as a folder and settings of `dsv4.load`; of `FOLDER,transformers` the settings hold
    transformers=True too."""
    folder, *pairs = text.split(",")
    settings = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        kind = _SETTINGS.get(name)
        if pair == "transformers":
            settings["transformers"] = True
            continue
        if kind is None:
            raise ValueError(
                f"--parity: found {pair!r}, expected FOLDER, and after it transformers or any of {', '.join(_SETTINGS)}, "
                "as dtype=fp32"
            )
        if kind is bool:
            if value not in ("True", "False"):
                raise ValueError(f"--parity: {name} must be True or False, found {value!r}")
            settings[name] = value == "True"
        elif kind is int:
            if not value.isdecimal():
                raise ValueError(f"--parity: {name} must be an integer, found {value!r}")
            settings[name] = int(value)
        else:
            settings[name] = value
    if settings.get("transformers") and settings.keys() - _OF_TRANSFORMERS - {"transformers"}:
        raise ValueError(f"--parity: {text}: of the settings transformers takes only {', '.join(sorted(_OF_TRANSFORMERS))}")
    return folder, settings


def read_texts(file: str) -> list[str]:
    """Texts of a JSON-lines file (field `text`), or a plain text file as one."""
    try:
        content = Path(file).read_text(encoding="utf-8")
        if not file.endswith(".jsonl"):
            return [content]
        texts = [json.loads(line)["text"] for line in content.splitlines()]
    except OSError as error:
        raise ValueError(f"--texts: {file}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--texts: {file}: expected UTF-8, and in .jsonl a field text on each line ({error!r})") from error
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"--texts: {file}: expected at least one text, and none of them empty")
    return texts


def scores(folder: str, settings: dict, texts: list[str], window: int) -> list:
    """Scores of the first `window` tokens of each text behind BOS."""
    import dsv4
    from dsv4.model.tokenizer import Tokenizer

    if Path(folder).is_dir() and not (Path(folder) / "tokenizer.json").exists():
        raise ValueError(f"{folder}: --parity needs a tokenizer, and the folder has no tokenizer.json")
    if settings.get("transformers"):
        from dsv4 import eval_transformers
        from dsv4.compile.engine import device_of, dtype_of
        from dsv4.model.config import ModelConfig

        config = ModelConfig.from_folder(folder)
        model = eval_transformers.load(folder, dtype_of(settings.get("dtype"), config), device_of(settings.get("device")))
        score = partial(eval_transformers.score, model)
    else:
        score = dsv4.load(folder, max_batch=4, max_context=window, progress=True, **settings).score
    tokenizer = Tokenizer.from_folder(folder)
    ids = [tokenizer.encode(text)[: window + 1] for text in texts]
    return score([(each[:1], each[1:]) for each in ids])


def compare(a: list, b: list) -> Parity:
    """From the scores of both sides."""
    if [len(s.token_logprobs) for s in a] != [len(s.token_logprobs) for s in b]:
        raise ValueError("--parity: the two folders cut the texts into different tokens, so tokens cannot be compared")
    counts = [len(s.token_logprobs) for s in a]
    tokens = sum(counts)
    gaps = [y - x for s, t in zip(a, b, strict=True) for x, y in zip(s.token_logprobs, t.token_logprobs, strict=True)]
    parted = [
        (text, index)
        for text, (s, t) in enumerate(zip(a, b, strict=True))
        for index, (x, y) in enumerate(zip(s.best_tokens, t.best_tokens, strict=True))
        if x != y
    ]
    losses = [x.logprob - y.logprob for x, y in zip(a, b, strict=True)]
    draw, ratios = random.Random(0), []
    for _ in range(_RESAMPLES):
        picked = draw.choices(range(len(a)), k=len(a))
        ratios.append(math.exp(sum(losses[i] for i in picked) / sum(counts[i] for i in picked)))
    ratios.sort()
    return Parity(
        texts=len(a),
        tokens=tokens,
        agreement=1 - len(parted) / tokens,
        mean_difference=sum(map(abs, gaps)) / tokens,
        max_difference=max(map(abs, gaps)),
        perplexity_a=math.exp(-sum(s.logprob for s in a) / tokens),
        perplexity_b=math.exp(-sum(s.logprob for s in b) / tokens),
        perplexity_ratio=math.exp(sum(losses) / tokens),
        interval=(ratios[int(0.025 * _RESAMPLES)], ratios[int(0.975 * _RESAMPLES)]),
        first_divergence=parted[0] if parted else None,
    )

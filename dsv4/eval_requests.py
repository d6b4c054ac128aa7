"""Requests of an evaluation made ready for the engine: fitted into the context window, decoding settings understood."""

from dataclasses import dataclass

from dsv4.compile.requests import Request
from dsv4.compile.sampling import SamplingParams
from dsv4.model.tokenizer import TextStream, Tokenizer

# Arguments of a generation that mean something here. Everything else is refused: a run that ignored one would be reported
# under settings it never had.
_SAMPLING = ("top_k", "top_p", "min_p", "repetition_penalty", "seed")
# Accepted where they ask for what happens anyway.
_NEUTRAL = {"num_beams": 1, "use_cache": True, "num_return_sequences": 1, "length_penalty": 1.0}


class Refused(ValueError):
    """A single request cannot be answered; the others can."""


@dataclass(frozen=True)
class Decoding:
    """What a generation request asks for."""

    params: SamplingParams
    max_new_tokens: int
    stop: tuple[str, ...]


def decoding(gen_kwargs: dict, max_gen_toks: int, seed: int) -> Decoding:
    """From the harness's generation arguments, made uniform by its own helpers. ValueError names what is unknown."""
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs

    kwargs = dict(normalize_gen_kwargs(gen_kwargs, max_gen_toks))
    # No EOS literal among the stop strings: the engine stops at the token.
    stop = tuple(text for text in handle_stop_sequences(kwargs.pop("until"), eos=None) if text)
    count, sample = kwargs.pop("max_gen_toks"), kwargs.pop("do_sample")
    temperature = float(kwargs.pop("temperature", 1.0)) if sample else 0.0
    kwargs.pop("temperature", None)
    settings = {name: kwargs.pop(name) for name in _SAMPLING if name in kwargs}
    unknown = {name: value for name, value in kwargs.items() if name not in _NEUTRAL or value != _NEUTRAL[name]}
    if unknown:
        found = ", ".join(f"{name}={value!r}" for name, value in unknown.items())
        raise ValueError(
            f"generation arguments: found {found}, which dsv4 does not have; it has until, max_gen_toks, do_sample, "
            f"temperature, {', '.join(_SAMPLING)}"
        )
    settings.setdefault("seed", seed)
    if not sample:  # harness tasks often leave top_p and the like beside do_sample=False
        settings = {name: settings[name] for name in ("repetition_penalty", "seed") if name in settings}
    return Decoding(SamplingParams(count, temperature=temperature, **settings), count, stop)


def fit_context(ids: list[int], room: int, bos: int) -> list[int]:
    """The last `room` tokens of a context; BOS stays in front, where the model has always seen it."""
    if len(ids) <= room:
        return ids
    if ids[0] == bos and room > 1:
        return [bos, *ids[len(ids) - room + 1 :]]
    return ids[len(ids) - room :]


class AnswerRequest(Request):
    """A Request whose text is the answer alone: with `think_end`, text begins after that token, and stop strings count
    from there, because reasoning is full of blank lines and quoted stop strings."""

    def __init__(
        self,
        prompt: list[int],
        decoding: Decoding,
        stop_ids: frozenset[int],
        tokenizer: Tokenizer,
        think_end: int | None,
    ):
        super().__init__(prompt, decoding.params, decoding.max_new_tokens, stop_ids, tokenizer)
        self._answer = TextStream(tokenizer, stop=decoding.stop)
        self._think_end, self._tokenizer = think_end, tokenizer
        if think_end is None:
            self._stream = self._answer

    def push(self, token: int, logprob: float, top: dict[int, float]) -> str:
        piece = super().push(token, logprob, top)
        if token == self._think_end and self._stream is not self._answer:
            self._stream = self._answer
            self._pieces.clear()
        return piece

    @property
    def text(self) -> str:
        """The answer; empty while the model still reasons, also if it was cut off there."""
        if self._stream is not self._answer:
            return ""
        text = "".join(self._pieces)
        return text if self._think_end is None else text.lstrip()

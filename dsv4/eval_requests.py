"""Requests of an evaluation made ready for the engine: fitted into the context window, decoding settings understood."""

from dsv4.compile.sampling import SamplingParams

# Arguments of a generation that mean something here. Everything else is refused: a run that ignored one would be reported
# under settings it never had.
_SAMPLING = ("top_k", "top_p", "min_p", "repetition_penalty", "seed")
# Accepted where they ask for what happens anyway.
_NEUTRAL = {"num_beams": 1, "use_cache": True, "num_return_sequences": 1, "length_penalty": 1.0}


class Refused(ValueError):
    """A single request cannot be answered; the others can."""


def decoding(gen_kwargs: dict, max_gen_toks: int, seed: int) -> SamplingParams:
    """From the harness's generation arguments, made uniform by its own helpers, with max_new_tokens always set. ValueError
    names what is unknown."""
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
    return SamplingParams(count, temperature=temperature, stop=stop, **settings)


def fit_context(ids: list[int], room: int, bos: int) -> list[int]:
    """The last `room` tokens of a context; BOS stays in front, where the model has always seen it."""
    if len(ids) <= room:
        return ids
    if ids[0] == bos and room > 1:
        return [bos, *ids[len(ids) - room + 1 :]]
    return ids[len(ids) - room :]

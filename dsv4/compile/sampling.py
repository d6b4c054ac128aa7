"""What a user asks of a generation, checked, and what comes back."""

import secrets
from dataclasses import dataclass, field, replace

MAX_STOP_IDS = 16  # size of the stop-token table inside the decode graph
MAX_LOGPROBS = 64


@dataclass(frozen=True)
class SamplingParams:
    """How one request is decoded. Raises ValueError that names the parameter, the value and the range.

    temperature 0 is greedy; top_k None, 0 or -1, top_p 1, min_p 0 and repetition_penalty 1 are off. `logprobs` None
    returns none, 0 the log-probability of each new token, n > 0 also the n most likely tokens. `max_new_tokens` None
    means until a stop or the end of the context.
    """

    max_new_tokens: int | None = None
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self):
        def check(name: str, good: bool, expected: str) -> None:
            if not good:
                raise ValueError(f"{name} must be {expected}, found {getattr(self, name)!r}")

        def number(name: str, low: float, high: float, expected: str, low_too: bool = True) -> None:
            value = getattr(self, name)
            good = type(value) in (int, float) and low <= value <= high and (low_too or value > low)  # NaN is neither
            check(name, good, expected)

        def whole(value: object, low: int, high: int = 2**31) -> bool:
            return type(value) is int and low <= value < high

        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            value = (value,) if isinstance(value, str) else () if value is None else value
            check(name, isinstance(value, (list, tuple, set, frozenset)), "a list")
            object.__setattr__(self, name, tuple(value))
        check("stop", all(isinstance(text, str) and text for text in self.stop), "non-empty strings")
        check("stop_token_ids", all(whole(i, 0) for i in self.stop_token_ids), "a list of token ids")
        for name, default in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0), ("seed", secrets.randbits(62))):
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        number("temperature", 0, 1e6, "in [0, 1e6] (0 is greedy)")
        number("top_p", 0, 1, "in (0, 1]", low_too=False)
        number("min_p", 0, 1, "in [0, 1]")
        number("repetition_penalty", 0, 1e6, "in (0, 1e6]", low_too=False)
        check("top_k", whole(self.top_k, -1), "an integer >= 1, or 0 or -1 for off")
        check("seed", whole(self.seed, 0, 2**63), "an integer in [0, 2^63)")
        check("max_new_tokens", self.max_new_tokens is None or whole(self.max_new_tokens, 1), "an integer >= 1 or None")
        check(
            "logprobs", self.logprobs is None or whole(self.logprobs, 0, MAX_LOGPROBS + 1), f"in 0..{MAX_LOGPROBS} or None"
        )

    def for_prompt(self, index: int) -> "SamplingParams":
        """The same for prompt `index` of a list: its own seed, so that equal prompts draw differently."""
        return replace(self, seed=(self.seed + index) % 2**63)


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of a generated token under the model's own distribution (before penalties and temperature), and
    of the most likely tokens, largest first."""

    token_id: int
    logprob: float
    top: dict[int, float] = field(default_factory=dict)


@dataclass
class Timing:
    """Seconds by the host's clock. `time_to_first_token` counts from submission. `prefill_seconds` runs from the moment a
    slot was free to the end of the prompt, decode steps of others between its chunks included; `tokens_per_second` is of
    the tokens after the first. `kept_tokens` of the prompt were in a held slot already."""

    prompt_tokens: int = 0
    new_tokens: int = 0
    prefill_seconds: float = 0.0
    time_to_first_token: float = 0.0
    decode_seconds: float = 0.0
    kept_tokens: int = 0

    @property
    def tokens_per_second(self) -> float:
        return (self.new_tokens - 1) / self.decode_seconds if self.new_tokens > 1 and self.decode_seconds > 0 else 0.0


@dataclass
class Completion:
    """One finished generation. `token_ids` includes the stop token that ended it, if one did; `text` has neither special
    tokens nor the stop string. finish_reason: "stop" (stop token or string) or "length"."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    logprobs: list[TokenLogprob] | None
    timing: Timing

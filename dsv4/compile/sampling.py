"""What a user asks of a generation, checked, and what comes back."""

import math
import secrets
from dataclasses import dataclass, field, replace

MAX_STOP_IDS = 16  # size of the stop-token table inside the decode graph


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
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, off)
        if self.seed is None:
            object.__setattr__(self, "seed", secrets.randbits(62))

        def check(name: str, good: bool, expected: str) -> None:
            if not good:
                raise ValueError(f"{name} must be {expected}, found {getattr(self, name)!r}")

        number = {
            name: isinstance(getattr(self, name), (int, float)) and math.isfinite(getattr(self, name))
            for name in ("temperature", "top_p", "min_p", "repetition_penalty")
        }
        check("temperature", number["temperature"] and self.temperature >= 0, "a number >= 0 (0 is greedy)")
        check("top_k", isinstance(self.top_k, int) and self.top_k >= -1, "an integer >= 1, or 0 or -1 for off")
        check("top_p", number["top_p"] and 0 < self.top_p <= 1, "in (0, 1]")
        check("min_p", number["min_p"] and 0 <= self.min_p <= 1, "in [0, 1]")
        check("repetition_penalty", number["repetition_penalty"] and self.repetition_penalty > 0, "a number > 0")
        check("seed", isinstance(self.seed, int) and 0 <= self.seed < 2**63, "an integer in [0, 2^63)")
        tokens = self.max_new_tokens
        check("max_new_tokens", tokens is None or (isinstance(tokens, int) and tokens >= 1), "an integer >= 1 or None")
        count = self.logprobs
        check("logprobs", count is None or (isinstance(count, int) and 0 <= count <= 64), "in 0..64 or None")
        check("stop", all(isinstance(text, str) and text for text in stop), "non-empty strings")
        check("stop_token_ids", all(isinstance(i, int) for i in self.stop_token_ids), "integers")

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
    """Seconds by the host's clock. `time_to_first_token` counts from submission; `tokens_per_second` is of the tokens
    after the first."""

    prompt_tokens: int = 0
    new_tokens: int = 0
    prefill_seconds: float = 0.0
    time_to_first_token: float = 0.0
    decode_seconds: float = 0.0

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

"""One request on its way: its tokens so far, its text, when it is done."""

import time

from dsv4.compile.sampling import Completion, SamplingParams, Timing, TokenLogprob
from dsv4.model.tokenizer import TextStream, Tokenizer


class Request:
    """Collects what the device produced for one prompt and turns it into text; knows when it is finished."""

    def __init__(
        self,
        prompt: list[int],
        params: SamplingParams,
        max_new_tokens: int,
        stop_ids: frozenset[int],
        tokenizer: Tokenizer | None,
        slot: int | None = None,
    ):
        self.prompt, self.params = prompt, params
        self.max_new_tokens, self.stop_ids = max_new_tokens, stop_ids
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: str | None = None
        self.launched = 0  # decode steps that were given to the device for it
        self.slot = slot  # the held slot it continues; None is any that is free
        self.prefill_clock = None  # set at admission
        self.timing = Timing(prompt_tokens=len(prompt))
        self._submitted = time.perf_counter()
        self._first = self._submitted
        self._tokenizer = tokenizer
        self._stream = TextStream(tokenizer, stop=list(params.stop)) if tokenizer is not None else None
        self._pieces: list[str] = []
        self._reasoning_ends: int | None = None
        self._answer_from: int | None = 0

    def reasons_until(self, token: int) -> None:
        """Its text is reasoning up to this token. Stop strings count from there: reasoning is full of them."""
        self._reasoning_ends, self._answer_from = token, None
        self._stream = TextStream(self._tokenizer)

    def push(self, token: int, logprob: float, top: dict[int, float]) -> str:
        """Take the next token; returns the text that became certain with it."""
        now = time.perf_counter()
        if not self.token_ids:
            self._first = now
            self.timing.time_to_first_token = now - self._submitted
        self.token_ids.append(token)
        self.timing.new_tokens += 1
        self.timing.decode_seconds = now - self._first
        if self.params.logprobs is not None:
            self.logprobs.append(TokenLogprob(token, logprob, top))
        piece = ""
        stopped = token in self.stop_ids
        if self._stream is not None and not stopped:
            if self._answer_from is None and token == self._reasoning_ends:
                piece = self._stream.flush()
                self._stream = TextStream(self._tokenizer, stop=list(self.params.stop))
                self._answer_from = len(self._pieces) + 1
            piece += self._stream.push(token)
            stopped = self._stream.stopped
        if stopped:
            self.finish_reason = "stop"
        elif len(self.token_ids) >= self.max_new_tokens:
            self.finish_reason = "length"
        if self.finish_reason and self._stream is not None:
            piece += self._stream.flush()
        self._pieces.append(piece)
        return piece

    @property
    def stopped_itself(self) -> bool:
        """Whether the device knew that it was finished, so that it ran nothing beyond."""
        return self.finish_reason == "length" or (bool(self.token_ids) and self.token_ids[-1] in self.stop_ids)

    @property
    def answer(self) -> str:
        """The text so far without the reasoning and the white space after it; empty while the model still reasons."""
        if self._answer_from is None:
            return ""
        text = "".join(self._pieces[self._answer_from :])
        return text if self._reasoning_ends is None else text.lstrip()

    def completion(self) -> Completion:
        """The finished request's result."""
        assert self.finish_reason is not None, "completion() of a request that is still running"
        return Completion(
            prompt_token_ids=self.prompt,
            token_ids=self.token_ids,
            text="".join(self._pieces),
            finish_reason=self.finish_reason,
            logprobs=self.logprobs if self.params.logprobs is not None else None,
            timing=self.timing,
        )

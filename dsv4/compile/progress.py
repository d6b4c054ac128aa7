"""Progress bars on stderr: of many generations, and of one long prompt."""

import time
from collections.abc import Iterator

from tqdm import tqdm

from dsv4.compile.prefill import Chunk
from dsv4.compile.requests import Request
from dsv4.compile.scheduler import Scheduler

_EVERY = 0.25  # seconds between two updates
_PATIENCE = 1.0  # and before the bar of a prompt appears
_FORMAT = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
_PROMPT_FORMAT = "prompt: {percentage:3.0f}%|{bar}| {n:,}/{total:,} tokens [{elapsed}<{remaining}, {rate_fmt}]"


class PromptBar:
    """The bar of one prompt of `total` tokens: tokens a second, time left. It appears if the prompt takes longer than a
    second, and goes when it is through. show: None means only if stderr is a terminal."""

    def __init__(self, total: int, show: bool | None):
        disable = None if show is None else not show
        self._bar = tqdm(
            total=total, unit=" tokens", bar_format=_PROMPT_FORMAT, delay=_PATIENCE, leave=False, disable=disable
        )
        self._begun = False

    def add(self, chunk: Chunk) -> None:
        """A chunk of the prompt was run."""
        for piece in chunk.pieces:
            if not self._begun:  # what was there already counts neither as done now nor as left
                self._begun = True
                self._bar.initial = self._bar.n = self._bar.last_print_n = piece.position
            self._bar.update(piece.count)
        if self._bar.n >= self._bar.total:
            self._bar.close()

    def __enter__(self) -> "PromptBar":
        return self

    def __exit__(self, *error) -> None:
        self._bar.close()


def watched(
    scheduler: Scheduler, requests: list[Request], show: bool | None, what: str = "generate"
) -> Iterator[tuple[Request, str]]:
    """`scheduler.run(requests)` with a bar: of one request its prompt's; of several the requests', with tokens a second,
    slots in use and requests left. show: None means only if stderr is a terminal."""
    if len(requests) == 1:
        with PromptBar(len(requests[0].prompt) - 1, show) as bar:
            yield from scheduler.run(requests, bar.add)
        return
    total, slots = len(requests), len(scheduler.rows)
    with tqdm(total=total, desc=what, bar_format=_FORMAT, disable=None if show is None else not show) as bar:
        start = shown = time.perf_counter()
        tokens = prompt_tokens = 0

        def update(done: bool) -> None:
            nonlocal shown
            now = time.perf_counter()
            if not bar.disable and (done or now - shown > _EVERY):
                shown = now
                rates = f"{prompt_tokens / (now - start):,.0f} prompt + {tokens / (now - start):,.1f} new tokens/s"
                left = f"{scheduler.busy}/{slots} slots, {total - bar.n - done} left"
                bar.set_postfix_str(f"{rates}, {left}", refresh=not done)
            bar.update(done)

        def prefilled(chunk: Chunk) -> None:
            nonlocal prompt_tokens
            prompt_tokens += sum(piece.count for piece in chunk.pieces)
            update(False)

        for request, piece in scheduler.run(requests, prefilled):
            tokens += 1
            update(bool(request.finish_reason))
            yield request, piece

"""The progress bar of many generations."""

import time
from collections.abc import Iterator

from tqdm import tqdm

from dsv4.compile.requests import Request
from dsv4.compile.scheduler import Scheduler

_EVERY = 0.25  # seconds between two updates
_FORMAT = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"


def watched(
    scheduler: Scheduler, requests: list[Request], show: bool | None, what: str = "generate"
) -> Iterator[tuple[Request, str]]:
    """`scheduler.run(requests)`, with a bar on stderr: finished requests, new tokens a second, slots in use, requests left.
    show: None means only if stderr is a terminal."""
    total, slots = len(requests), len(scheduler.rows)
    with tqdm(total=total, desc=what, bar_format=_FORMAT, disable=None if show is None else not show) as bar:
        start = shown = time.perf_counter()
        for tokens, (request, piece) in enumerate(scheduler.run(requests), 1):
            done = bool(request.finish_reason)
            now = time.perf_counter()
            if not bar.disable and (done or now - shown > _EVERY):
                shown = now
                rate, left = tokens / (now - start), total - bar.n - done
                text = f"{rate:,.1f} tokens/s, {scheduler.busy}/{slots} slots, {left} left"
                bar.set_postfix_str(text, refresh=not done)
            bar.update(done)
            yield request, piece

"""Sequences that outlive their request: a slot is held, and its state can be continued, rewound, saved and restored.

What a cache keeps of a sequence is of two kinds. Entries and index keys stand for complete blocks and are never changed
again. Rings hold the last tokens and are overwritten by those that follow: the window's rows, and what the compressors
need of their open blocks. So going back to a position takes its rings. They are still there if few enough tokens were
written since, and otherwise if a Mark was made there: a copy of the rings on the host, some hundred KB a layer, however
long the sequence is.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.model.cache import Cache
from dsv4.model.config import CSA, ModelConfig

MARKS = 32  # kept for a sequence; the oldest go first


def covered(config: ModelConfig, position: int, written: int) -> bool:
    """Whether the rings of a sequence of which `written` tokens were written still hold all that its first `position`
    tokens must leave behind: the window without the token to come, and the tokens of blocks that are not pooled yet."""
    needs = [(max(position - (config.sliding_window - 1), 0), config.sliding_window)]  # first token, depth of its ring
    for layer, kind in enumerate(config.layer_types):
        if rate := config.rate(layer):
            blocks = 2 if kind == CSA else 1  # an overlapping block also needs the one before
            needs.append((max(position // rate - (blocks - 1), 0) * rate, blocks * rate))
    return position <= written and all(first >= min(written - depth, position) for first, depth in needs)


def rings_of(cache: Cache, slot: int) -> dict[str, Tensor]:
    """Views of the part of a slot's state that tokens overwrite, by name."""
    return {name: view for name, view in cache.state_of(slot).items() if not name.endswith(".entries")}


def copies_of(views: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies in one piece of host memory; on CUDA they are on their way behind the work that was launched before."""
    sizes = [-(-view.nbytes // 16) * 16 for view in views.values()]
    pinned = any(view.is_cuda for view in views.values())
    places = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pinned).split(sizes)
    copies = {}
    for (name, view), place in zip(views.items(), places, strict=True):
        copies[name] = place[: view.nbytes].view(view.dtype).view(view.shape).copy_(view, non_blocking=True)
    return copies


@dataclass
class Mark:
    """The rings after `position` tokens, of a sequence of which `written` tokens were written by then."""

    position: int
    written: int
    rings: dict[str, Tensor]


class Sequence:
    """The sequence in one held slot: `tokens` are those its state is known to hold. More may have been `written` behind
    them: what the device ran before the host knew that a request had ended."""

    def __init__(self, config: ModelConfig, cache: Cache, slot: int):
        self.config, self.cache, self.slot = config, cache, slot
        self.tokens: list[int] = []
        self.written = 0
        self.marks: list[Mark] = []

    @property
    def intact(self) -> bool:
        """Whether the state after `tokens` is still there."""
        return covered(self.config, len(self.tokens), self.written)

    def require_intact(self) -> None:
        """ValueError, with what can be done, if the state after `tokens` is not there."""
        if not self.intact:
            known = ", ".join(str(p) for p in self.positions())
            raise ValueError(
                f"slot {self.slot} ran beyond position {len(self.tokens)}, where its request ended; rewind it first, to "
                f"one of {known}"
            )

    def positions(self) -> list[int]:
        """The positions to which `rewind` can go, ascending."""
        end = len(self.tokens)
        near = {*range(min(end, 2 * self.config.sliding_window)), max(end - 1, 0), end}  # no others can be covered
        live = [position for position in near if covered(self.config, position, self.written)]
        return sorted({0, *live, *(mark.position for mark in self.marks)})

    def mark(self) -> None:
        """Make it possible to come back to the present state."""
        position = len(self.tokens)
        if position and self.intact and position not in (mark.position for mark in self.marks):
            rings = copies_of(rings_of(self.cache, self.slot))
            self.marks = [*self.marks, Mark(position, self.written, rings)][-MARKS:]

    def rewind(self, position: int) -> None:
        """Go back to the state after the first `position` tokens. ValueError if nothing holds it any more."""
        if type(position) is not int or not 0 <= position <= len(self.tokens):
            raise ValueError(
                f"position must be an integer from 0 to {len(self.tokens)}, the tokens held, found {position!r}"
            )
        mark = next((mark for mark in self.marks if mark.position == position), None)
        there = covered(self.config, position, self.written)
        if position and not there and mark is None:
            known = ", ".join(str(p) for p in self.positions())
            raise ValueError(
                f"slot {self.slot} cannot go back to position {position}: later tokens replaced its window; it can go to "
                f"{known}. engine.mark(slot) makes a position one that can be returned to"
            )
        # In this order an interruption at any place leaves nothing that claims to be whole and is not.
        self.marks = [mark for mark in self.marks if mark.position <= position]
        del self.tokens[position:]
        if position == 0:
            self.written = 0  # nothing of an empty sequence is ever read
        elif not there:
            for name, view in rings_of(self.cache, self.slot).items():
                view.copy_(mark.rings[name], non_blocking=True)
            self.written = mark.written

    def begin(self, prompt: list[int]) -> int:
        """Make ready for a request: keep the longest beginning of `prompt` that the state holds or can go back to, at
        least its last token excepted, since a request decodes that one. Returns how many tokens are kept."""
        shared = 0
        for mine, wanted in zip(self.tokens, prompt[:-1], strict=False):
            if mine != wanted:
                break
            shared += 1
        if shared == len(self.tokens):
            self.mark()  # the end of the last request: an undo comes back here
        usable = [mark.position for mark in self.marks if mark.position <= shared]
        if covered(self.config, shared, self.written):
            usable.append(shared)
        start = max(usable, default=0)
        self.rewind(start)
        return start

    def writes(self, count: int) -> None:
        """To be called before `count` tokens are run behind `tokens`."""
        self.written = max(self.written, len(self.tokens) + count)

    def ran(self, tokens: list[int]) -> None:
        """These tokens were run."""
        self.tokens += tokens

"""Held slots: what an Engine offers to those who come back to a sequence."""

import secrets
from pathlib import Path

from dsv4.compile.scheduler import Scheduler
from dsv4.compile.sequences import Sequence
from dsv4.compile.snapshot import Snapshot, put, take
from dsv4.model.cache import Cache
from dsv4.model.config import ModelConfig
from dsv4.model.fingerprint import fingerprint


class HeldSlots:
    """The part of Engine that holds slots. A request with slot=N continues the sequence in it: of its prompt, which is the
    whole text as ever, only what that sequence does not begin with is run."""

    config: ModelConfig
    cache: Cache
    scheduler: Scheduler
    folder: str | Path | None
    activation: str | None
    _fingerprint: str | None = None

    def hold(self) -> int:
        """Reserve a slot for one sequence, empty at first; only requests that name it use it. ValueError if none is."""
        self.scheduler.check_idle()
        slot = self.scheduler.free_slots()[0]
        self.scheduler.held[slot] = Sequence(self.config, self.cache, slot)
        return slot

    def release(self, slot: int) -> None:
        """Give a held slot back; its sequence is lost."""
        self._sequence(slot)
        del self.scheduler.held[slot]

    def tokens(self, slot: int) -> list[int]:
        """The token ids whose state a held slot has. The last token of an answer is not among them: it was never run."""
        return list(self._sequence(slot).tokens)

    def mark(self, slot: int) -> None:
        """Make the present position of a held slot one that `rewind` can return to later. The engine does so by itself at
        the end of every prompt and before every request. ValueError if the state is not whole."""
        sequence = self._sequence(slot)
        sequence.require_intact()
        sequence.mark()

    def positions(self, slot: int) -> list[int]:
        """The positions to which a held slot can be rewound."""
        return self._sequence(slot).positions()

    def rewind(self, slot: int, position: int) -> None:
        """Take a held slot back to the state after its first `position` tokens, to the bit: to a marked position, or one so
        near that nothing of it was replaced. ValueError, and no change, for any other."""
        self._sequence(slot).rewind(position)

    def snapshot(self, slot: int) -> Snapshot:
        """A held slot's state in host memory; `save` writes it to a file. ValueError if the state is not whole."""
        return take(self._sequence(slot), self._identity)

    def restore(self, slot: int, snapshot: Snapshot) -> None:
        """Put a snapshot into a held slot, whatever it held before. ValueError, and no change, if it does not fit."""
        put(snapshot, self._sequence(slot), self._identity)

    def _sequence(self, slot: int) -> Sequence:
        self.scheduler.check_idle()
        return self.scheduler.sequence(slot)

    @property
    def _identity(self) -> str:
        """What a snapshot must have been made with to fit: a checkpoint, or this very engine if it has no folder."""
        if self._fingerprint is None and self.folder is None:
            self._fingerprint = f"of engine {secrets.token_hex(8)}, which has no folder"
        elif self._fingerprint is None:
            self._fingerprint = fingerprint(self.folder, {"activation": self.activation})
        return self._fingerprint

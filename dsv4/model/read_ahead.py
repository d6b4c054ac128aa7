"""Reading tensors before they are asked for, so that the disk works while weights are converted and sent to the device.

A load asks for the same tensors in the same order as the check of the headers before it, so the order is known.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from dsv4.model.shards import Reader, Stored

THREADS = 4  # one stream does not fill a fast disk, or a network's
LIMIT = 2**29  # bytes in host memory that nobody has asked for yet; larger tensors wait until somebody does
BATCH = 2**23  # bytes that are worth a thread's while: small tensors are read together


class ReadAhead(Reader):
    """A Reader for whole tensors that will be asked for in this order; others are read when they are asked for."""

    def __init__(self, order: Iterable[Stored]):
        super().__init__()
        self._pool = ThreadPoolExecutor(THREADS)
        self._waiting = deque(_batches(order))
        self._ahead: deque[tuple[list[Stored], Future | None]] = deque()  # begun, but for what is too large
        self._bytes = 0  # of what is begun
        self._ready: deque[tuple[Stored, Tensor | None]] = deque()
        self._fill()

    def read(self, stored: Stored) -> Tensor:
        if not self._ready and self._ahead and self._ahead[0][0][0] is stored:
            batch, begun = self._ahead.popleft()
            self._ready.extend(zip(batch, begun.result() if begun else [None], strict=True))
            self._bytes -= _size(batch) if begun else 0
            self._fill()
        foreseen = bool(self._ready) and self._ready[0][0] is stored
        tensor = self._ready.popleft()[1] if foreseen else None
        return super().read(stored) if tensor is None else tensor

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._waiting.clear()
        self._ahead.clear()
        self._ready.clear()
        super().close()

    def _fill(self) -> None:
        """Begin with what comes next, as far as the limit allows."""
        while self._waiting:
            batch, size = self._waiting[0], _size(self._waiting[0])
            if size <= LIMIT and self._bytes + size > LIMIT:
                return
            begun = None
            if size <= LIMIT:
                self.open(stored.file for stored in batch)  # here, since opening is not for several threads at once
                begun = self._pool.submit(lambda batch: [super(ReadAhead, self).read(s) for s in batch], batch)
                self._bytes += size
            self._ahead.append((batch, begun))
            self._waiting.popleft()


def _size(batch: list[Stored]) -> int:
    return sum(stored.nbytes for stored in batch)


def _batches(order: Iterable[Stored]) -> Iterator[list[Stored]]:
    """Neighbours of at least BATCH bytes together, but no more than the limit; a tensor beyond it stays alone."""
    batch: list[Stored] = []
    for stored in order:
        if batch and (_size(batch) >= BATCH or _size(batch) + stored.nbytes > LIMIT):
            yield batch
            batch = []
        batch.append(stored)
    if batch:
        yield batch

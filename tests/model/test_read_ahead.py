"""Reading ahead: the same tensors as without, within its limit, and nothing left behind."""

import threading

import pytest
import torch
from safetensors.torch import save_file

from dsv4.model import read_ahead
from dsv4.model.checkpoint import FolderSource, load_folder
from dsv4.model.read_ahead import ReadAhead
from dsv4.model.shards import Reader, read_header
from tests.model.checkpoints import build, nvfp4_experts_tensors, plain_tensors, same, write

SIZES = (3, 5, 40, 0, 7, 90, 1, 64, 2, 200, 6)  # bytes of tensors a, b, c, ...


@pytest.fixture
def small(monkeypatch):
    """Batches of 16 bytes, 64 bytes ahead: of SIZES 90 and 200 are too large to be read ahead."""
    monkeypatch.setattr(read_ahead, "BATCH", 16)
    monkeypatch.setattr(read_ahead, "LIMIT", 64)


@pytest.fixture
def stored(tmp_path):
    tensors = {chr(97 + i): torch.arange(size, dtype=torch.uint8) for i, size in enumerate(SIZES)}
    save_file(tensors, tmp_path / "x.safetensors")
    header = read_header(tmp_path / "x.safetensors")
    return [header[name] for name in tensors]


def names_of_threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def test_as_foreseen(small, stored, monkeypatch):
    """Each tensor as it is, read once, and by other threads unless it is large."""
    read, by_me = Reader.read, []

    def spy(self, one):
        if threading.current_thread() is threading.main_thread():
            by_me.append(one.name)
        return read(self, one)

    monkeypatch.setattr(Reader, "read", spy)
    reader = ReadAhead(stored)
    for one, size in zip(stored, SIZES, strict=True):
        assert reader.read(one).tolist() == list(range(size))
        assert reader._bytes <= 64
    reader.close()
    assert by_me == ["f", "j"]


def test_other_requests_are_read_at_once(small, stored):
    """Those that are not in the order, in between and at its end, and an order that is not kept."""
    reader = ReadAhead(stored[::2])
    for one in stored:
        assert len(reader.read(one)) == one.nbytes
    assert len(reader.read(stored[0])) == SIZES[0]
    reader.close()
    reader = ReadAhead(stored)
    for one in reversed(stored):
        assert len(reader.read(one)) == one.nbytes
    reader.close()


def test_a_file_that_shrinks_is_an_error_of_the_one_who_asks(stored):
    with stored[0].file.open("rb+") as stream:
        stream.truncate(stored[6].start)
    reader = ReadAhead(sorted(stored, key=lambda one: one.start))
    with pytest.raises(ValueError, match="truncated while it was being read"):
        for one in sorted(stored, key=lambda one: one.start):
            reader.read(one)
    reader.close()


@pytest.mark.parametrize("tensors", [plain_tensors, nvfp4_experts_tensors])
def test_a_load_foresees_everything(tensors, tmp_path, monkeypatch):
    """No tensor of a load is read by the thread that asks for it, and all of them are what they are."""
    folder = write(tmp_path, tensors())
    given, _ = load_folder(folder, build, "cpu", torch.bfloat16)
    source = FolderSource(folder, "cpu", torch.bfloat16)  # without an order
    wanted = build(source)
    source.finish()
    for name, module in given.items():
        pairs = zip(*([x] if isinstance(x, torch.Tensor) else x.buffers() for x in (module, wanted[name])), strict=True)
        assert all(same(one, other) for one, other in pairs), name
    read = Reader.read

    def elsewhere(self, one):
        assert threading.current_thread() is not threading.main_thread(), one.name
        return read(self, one)

    monkeypatch.setattr(Reader, "read", elsewhere)
    load_folder(folder, build, "cpu", torch.bfloat16)


def test_an_interrupted_load_leaves_no_thread_and_no_open_file(tmp_path, monkeypatch):
    """Ctrl-C in the middle of a load."""
    folder, before, readers = write(tmp_path, nvfp4_experts_tensors()), names_of_threads(), []
    open_ = Reader.open
    monkeypatch.setattr(Reader, "open", lambda self, files: (readers.append(self), open_(self, files)))

    def interrupted(done, total):
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_folder(folder, build, "cpu", torch.bfloat16, interrupted)
    assert names_of_threads() == before
    assert readers and not any(reader._files for reader in readers)

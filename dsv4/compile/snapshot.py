"""Snapshots: the state of one sequence in host memory or in a file.

A snapshot has the rings whole and of the entries those that stand for complete blocks, so its size follows the length of
the sequence, not max_context, and it can be restored into any slot of any engine that has loaded the same checkpoint with
the same formats and dtype and has room.
"""

import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dsv4.compile.sequences import Sequence, rings_of
from dsv4.model.cache import Cache
from dsv4.model.config import ModelConfig
from dsv4.ops.row_formats import first_rows

KIND = "dsv4 snapshot 1"
TOKENS = "tokens"  # the name of the token ids among the tensors


@dataclass(frozen=True)
class Snapshot:
    """The state after `tokens`. `model` and `formats` say where it fits; `written` is as in Sequence."""

    tokens: list[int]
    written: int
    model: str
    formats: str
    parts: dict[str, Tensor]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    def save(self, path: str | Path) -> None:
        """Write it to a file: all of it or nothing, an older file of this name is replaced at the end."""
        path = Path(path)
        tensors = {**self.parts, TOKENS: torch.tensor(self.tokens, dtype=torch.int64)}
        about = {"kind": KIND, "model": self.model, "formats": self.formats, "written": str(self.written)}
        number, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        os.close(number)
        try:
            save_file(tensors, name, {**about, "sha256": _digest(tensors, about)})
            with open(name, "rb") as file:
                os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise

    @staticmethod
    def load(path: str | Path) -> "Snapshot":
        """Read a file that `save` wrote. ValueError if it is something else, cut off or altered."""
        try:
            with safe_open(path, "pt") as file:
                about = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is not a mapping)
        except FileNotFoundError:
            raise ValueError(f"{path}: there is no such file") from None
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path}: not a whole snapshot ({error}); it cannot be restored") from error
        wanted = about.pop("sha256", None)
        if about.get("kind") != KIND:
            raise ValueError(f"{path}: found {about.get('kind', 'no snapshot')}, expected {KIND!r}")
        if wanted != _digest(tensors, about):
            raise ValueError(f"{path}: its checksum is wrong, the file was altered; it cannot be restored")
        tokens = tensors.pop(TOKENS).tolist()
        return Snapshot(tokens, int(about["written"]), about["model"], about["formats"], tensors)


def take(sequence: Sequence, model: str) -> Snapshot:
    """The state of a sequence now; waits for the device. ValueError if it is not whole."""
    sequence.require_intact()
    views = _parts(sequence, len(sequence.tokens))
    parts = {name: view.to("cpu", copy=True).contiguous() for name, view in views.items()}
    return Snapshot(list(sequence.tokens), sequence.written, model, formats_of(sequence.cache), parts)


def put(snapshot: Snapshot, sequence: Sequence, model: str) -> None:
    """Make a snapshot the state of a sequence. ValueError, with the sequence as it was, if it does not fit."""
    if snapshot.model != model:
        raise ValueError(
            f"the snapshot is of checkpoint {snapshot.model}, the engine has loaded {model}; load the same one with the "
            "same activation"
        )
    if snapshot.formats != formats_of(sequence.cache):
        found, wanted = snapshot.formats, formats_of(sequence.cache)
        raise ValueError(f"the snapshot's cache has {found}, the engine's {wanted}; load with the same kv, index and dtype")
    if len(snapshot.tokens) > sequence.cache.max_context:
        raise ValueError(
            f"the snapshot has {len(snapshot.tokens)} tokens, but max_context is {sequence.cache.max_context}; load with a "
            "larger one"
        )
    views = _parts(sequence, len(snapshot.tokens))
    found, wanted = ({name: (part.shape, part.dtype) for name, part in parts.items()} for parts in (snapshot.parts, views))
    if found != wanted:
        raise ValueError("the snapshot's tensors do not have the shapes of this engine's state; it cannot be restored")
    sequence.rewind(0)  # what it is if this is interrupted
    for name, view in views.items():
        view.copy_(snapshot.parts[name])
    sequence.written = snapshot.written
    sequence.tokens = list(snapshot.tokens)


def formats_of(cache: Cache) -> str:
    """What a cache's rows are and were made from, in words that two engines can be compared by."""
    return f"kv={cache.kv} index={cache.index} dtype={str(cache.dtype).removeprefix('torch.')}"


def _parts(sequence: Sequence, position: int) -> dict[str, Tensor]:
    """Views of what the first `position` tokens leave behind, by name: rings, and rows of complete blocks."""
    config: ModelConfig = sequence.config
    slot = slice(sequence.slot, sequence.slot + 1)
    views = rings_of(sequence.cache, sequence.slot)
    for number, layer in enumerate(sequence.cache.layers):
        for name, dim, rope in (
            ("compressor", config.head_dim, config.qk_rope_head_dim),
            ("indexer", config.index_head_dim, config.index_head_dim),
        ):
            if (part := getattr(layer, name)) is not None:
                rows = first_rows(part.entries[slot], position // config.rate(number), dim, rope)
                views |= {f"layers.{number}.{name}.entries.{i}": view for i, view in enumerate(rows)}
    return views


def _digest(tensors: dict[str, Tensor], about: dict[str, str]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes of tensors, and the metadata."""
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()

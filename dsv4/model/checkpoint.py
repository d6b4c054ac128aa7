"""Checkpoint folders as the source of a model's weights.

The model asks for its weights by native name (dsv4.model.source). `FolderSource` finds each one in a folder, checks it,
converts it, places it on the device and hands it out as a tensor or as the linear or expert module of its format; when
the model is built, it accounts for every tensor of the folder. A pass on the meta device makes all these requests
against the file headers alone, so a checkpoint that does not fit is refused before any of its data is read.
"""

import copy
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TextIO, TypeVar

import torch
from torch import Tensor, nn

from dsv4.model import formats, names, stacks
from dsv4.model.formats import Format
from dsv4.model.read_ahead import ReadAhead
from dsv4.model.shards import TORCH_DTYPES, Folder, Stored
from dsv4.model.sizes import size_text
from dsv4.model.source import Source
from dsv4.model.stacks import ExpertStack

# Storage dtypes that may be read as a tensor of a given kind. Nothing is ever cast from one kind to the other.
INTEGERS = ("I64", "I32")

Progress = Callable[[int, int], None]  # bytes done, bytes in all
Model = TypeVar("Model")


@dataclass
class Count:
    """A number of tensors and their bytes on disk."""

    tensors: int = 0
    bytes: int = 0

    def add(self, stored: Stored) -> None:
        self.tensors += 1
        self.bytes += stored.nbytes

    def __str__(self) -> str:
        return f"{self.tensors} tensors, {size_text(self.bytes)}"


@dataclass(frozen=True)
class LoadReport:
    """What became of every tensor of a folder: used (by format), skipped (by prefix) or ignored (by suffix)."""

    folder: Path
    naming: str
    formats: dict[str, Count] = field(default_factory=dict)
    skipped: dict[str, Count] = field(default_factory=dict)
    ignored: dict[str, Count] = field(default_factory=dict)
    draft: str | None = None  # which draft head was skipped: "MTP", "DSpark", or one that is neither
    unused_files: tuple[str, ...] = ()
    seconds: float = 0.0

    def __str__(self) -> str:
        lines = [f"{self.folder}: {self.naming} names, {self.seconds:.1f} s"]
        lines += [f"  {name}: {count}" for name, count in sorted(self.formats.items())]
        draft = f" (a draft head: {self.draft})" if self.draft else ""
        lines += [f"  skipped {prefix}*: {count}{draft}" for prefix, count in sorted(self.skipped.items())]
        lines += [f"  not needed .{suffix}: {count}" for suffix, count in sorted(self.ignored.items())]
        lines += [f"  not read: {name}" for name in self.unused_files]
        return "\n".join(lines)


class FolderSource(Source):
    """The weights of a checkpoint folder, placed on `device`; plain weights are cast to `dtype`.

    On the meta device no data is read: requests are checked against the headers and answered with meta tensors. All
    errors are ValueErrors of one line that name the file, the tensor, what was found and what was expected.
    """

    def __init__(
        self,
        folder: str | Path | Folder,
        device: torch.device | str,
        dtype: torch.dtype,
        progress: Progress | None = None,
        order: Iterable[Stored] = (),
    ):
        """`order`: what will be asked for, in that order, as far as it is known; it is read ahead."""
        self._prefix = ""
        folder = folder if isinstance(folder, Folder) else Folder.open(folder)
        self._load = _Load(folder, torch.device(device), progress, order)
        self.device = self._load.device
        self.dtype = dtype

    @classmethod
    def check(cls, folder: str | Path | Folder, build: Callable[[Source], object], dtype: torch.dtype) -> LoadReport:
        """Build the model without data, from the headers alone: raises whatever a real load would raise for names,
        shapes, dtypes, scales, shards and truncation. Only bad values in scales are left to be found."""
        source = cls(folder, "meta", dtype)
        build(source)
        return source.finish()

    def at(self, name: str) -> "FolderSource":
        child = copy.copy(self)
        child._prefix = f"{self._prefix}{name}."
        return child

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if not dtype.is_floating_point and dtype != torch.int64:
            raise ValueError(f"{self._prefix}{name}: tensors are read as float dtypes or torch.int64, not {dtype}")
        stored = self._load.required(self._prefix + name)
        formats.check(stored, formats.FLOATS if dtype.is_floating_point else INTEGERS, tuple(shape))
        self._load.take(self._prefix + name, "plain")
        self._load.order.append(stored)
        return self._load.read(stored).view(shape).to(dtype).to(self.device)

    def linear(self, name: str, out_features: int, in_features: int, groups: int = 1) -> nn.Module:
        name = self._prefix + name
        form, parts = self._parts(name, out_features, in_features)
        tensors = self._converted(form, parts, {role: self._load.read(stored) for role, stored in parts.items()})
        return form.linear({role: tensor.to(self.device) for role, tensor in tensors.items()}, groups)

    def experts(self, name: str, num_experts: int, hidden: int, intermediate: int, shared: str | None = None) -> nn.Module:
        name = self._prefix + name
        gate_up_keys = stacks.find_fused(self._load.tensors, f"{name}.{stacks.FUSED[0]}")
        fused = bool(gate_up_keys or stacks.find_fused(self._load.tensors, f"{name}.{stacks.FUSED[1]}"))
        if fused:
            form, found = self._recognise(gate_up_keys, f"{name}.{stacks.FUSED[0]}")
        else:
            form, found = self._found(f"{name}.0.w1")
        first = form, formats.weight_of(form, found)
        shared_last = shared is not None and all(
            self._found(f"{self._prefix}{shared}.{projection}")[0] is form for projection in ("w1", "w3", "w2")
        )
        gate_up, down = (ExpertStack(num_experts + shared_last, halves, self.device) for halves in (2, 1))
        if fused:
            self._fill_fused(f"{name}.{stacks.FUSED[0]}", (num_experts, 2 * intermediate, hidden), gate_up, first)
            self._fill_fused(f"{name}.{stacks.FUSED[1]}", (num_experts, hidden, intermediate), down, first)
        places = [] if fused else [(f"{name}.{expert}", expert) for expert in range(num_experts)]
        if shared_last:
            places.append((self._prefix + shared, num_experts))
        for path, expert in places:
            for projection, stack, half, size in (
                ("w1", gate_up, 0, (intermediate, hidden)),
                ("w3", gate_up, 1, (intermediate, hidden)),
                ("w2", down, 0, (hidden, intermediate)),
            ):
                form, parts = self._parts(f"{path}.{projection}", *size)
                _require_same_format(first, (form, parts["weight"]))
                if not stack.is_complete:
                    read = {role: self._load.read(stored) for role, stored in parts.items()}
                    stack.put(expert, half, self._converted(form, parts, read))
        return form.experts(gate_up.tensors(), down.tensors(), shared_last)

    def finish(self) -> LoadReport:
        """The report of the load, once the model is built. ValueError if the folder holds a tensor that nobody asked
        for, other than those under skipped prefixes."""
        return self._load.finish()

    @property
    def order(self) -> list[Stored]:
        """What has been asked for until now, in order, without what is read in pieces."""
        return self._load.order

    def close(self) -> None:
        """Close the files; `finish` does so too."""
        self._load.reader.close()

    def _parts(self, name: str, out_features: int, in_features: int) -> tuple[Format, dict[str, Stored]]:
        """The format of the weight `name` and its tensors on disk by role, checked and accounted for."""
        form, found = self._found(name)
        parts = formats.find_parts(form, found, out_features, in_features)
        self._account(form, {suffix: f"{name}.{suffix}" for suffix in found})
        self._load.order += parts.values()
        return form, parts

    def _found(self, name: str) -> tuple[Format, dict[str, Stored]]:
        """The format of the weight `name` and its tensors on disk by suffix."""
        keys = {suffix: key for suffix in formats.SUFFIXES if (key := f"{name}.{suffix}") in self._load.tensors}
        return self._recognise(keys, f"{name}.{formats.WEIGHT_SUFFIXES[0]}")

    def _recognise(self, keys: dict[str, str], needed: str) -> tuple[Format, dict[str, Stored]]:
        """The format of a weight from the native names of its tensors by suffix; `needed` is the name to miss."""
        found = {suffix: self._load.tensors[key] for suffix, key in keys.items()}
        if not any(suffix in found for suffix in formats.WEIGHT_SUFFIXES):
            self._load.required(needed)
        return formats.recognise(found), found

    def _account(self, form: Format, keys: dict[str, str]) -> None:
        for suffix, key in keys.items():
            if suffix in form.ignored:
                self._load.ignore(key, suffix)
            else:
                self._load.take(key, form.name)

    def _converted(
        self, form: Format, parts: dict[str, Stored], read: dict[str, Tensor], which: str = ""
    ) -> dict[str, Tensor]:
        """The tensors of one weight as its module holds them, by role, from those `read` of its parts, on the host.
        `which` says in errors what of the parts was read."""
        tensors, at_fault = {}, parts["weight"]
        try:
            for part in form.parts:
                at_fault = parts[part.role]
                tensors[part.role] = part.convert(read[part.role], self.dtype)
            return form.repack(tensors) if form.repack else tensors
        except ValueError as error:
            raise ValueError(f"{at_fault}{which}: {error}") from error

    def _fill_fused(self, name: str, shape: tuple[int, int, int], stack: ExpertStack, first: tuple[Format, Stored]) -> None:
        """All experts' rows in one tensor: gate_up_proj [E, 2I, H] (w1's, then w3's) or down_proj [E, H, I]."""
        halves = stack.halves
        keys = stacks.find_fused(self._load.tensors, name)
        form, found = self._recognise(keys, name)
        parts = formats.find_parts(form, found, *shape[1:], shape[0], halves)
        _require_same_format(first, (form, parts["weight"]))
        self._account(form, keys)
        for expert, read in enumerate(self._split(form, parts, shape[0], halves)):
            for half in range(halves):
                one = {role: matrices[half] for role, matrices in read.items()}
                which = f" (expert {expert}, {'w2' if halves == 1 else ('w1', 'w3')[half]})"
                stack.put(expert, half, self._converted(form, parts, one, which))
            if stack.is_complete:
                break

    def _split(
        self, form: Format, parts: dict[str, Stored], count: int, halves: int
    ) -> Iterator[dict[str, tuple[Tensor, ...]]]:
        """The parts of a fused weight, expert by expert: by role, the tensors of its halves."""
        by_role = {}
        for part in form.parts:
            if part.shape(0, 0) == ():
                by_role[part.role] = stacks.split_scalars(self._load.read(parts[part.role]), count, halves)
            else:
                by_role[part.role] = (row.chunk(halves) for row in self._load.read_rows(parts[part.role]))
        for matrices in zip(*by_role.values(), strict=False):
            yield dict(zip(by_role, matrices, strict=True))


def load_folder(
    folder: str | Path,
    build: Callable[[Source], Model],
    device: torch.device | str,
    dtype: torch.dtype,
    progress: Progress | None = None,
) -> tuple[Model, LoadReport]:
    """Build a model from a folder: first from the headers alone, so that a checkpoint that does not fit is refused
    before its data is read, then for good. `build` is called twice, each time with the source of all weights."""
    opened = Folder.open(folder)
    check = FolderSource(opened, "meta", dtype)
    build(check)
    check.finish()
    source = FolderSource(opened, device, dtype, progress, check.order)
    try:
        return build(source), source.finish()
    finally:
        source.close()


class ProgressLine:
    """A progress callback: one line that says how much has been read and how fast, rewritten every half second."""

    def __init__(self, stream: TextIO | None = None):
        self._stream = sys.stderr if stream is None else stream
        self._start = self._shown = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._shown < 0.5 and done < total:
            return
        self._shown = now
        rate = done / max(now - self._start, 1e-3)
        end = "\n" if done >= total else ""
        self._stream.write(f"\rloading {size_text(done)} of {size_text(total)}, {size_text(rate)}/s{end}")
        self._stream.flush()


class _Load:
    """What all scopes of one load share: the tensors by native name, which of them are accounted for, the reader."""

    def __init__(self, folder: Folder, device: torch.device, progress: Progress | None, order: Iterable[Stored]):
        self.folder, self.device, self.progress = folder, device, progress
        self.reader = ReadAhead(order)
        self.order: list[Stored] = []  # see FolderSource.order
        self.start = time.monotonic()
        self.done = 0
        kept = {name: stored for name, stored in folder.tensors.items() if not names.is_skipped(name)}
        try:
            self.naming = names.recognise(kept)
        except ValueError as error:
            raise ValueError(f"{folder.path}: {error}") from error
        self.report = LoadReport(
            folder.path, self.naming.name, draft=names.draft_kind(folder.tensors), unused_files=folder.unused_files
        )
        for name in folder.tensors.keys() - kept.keys():
            prefix = next(prefix for prefix in names.SKIPPED_PREFIXES if name.startswith(prefix))
            self.report.skipped.setdefault(prefix, Count()).add(folder.tensors[name])
        # A name that the naming does not know stays as it is: nobody will ask for it, and `finish` will name it.
        self.tensors: dict[str, Stored] = {}
        for name, stored in kept.items():
            native = self.naming.to_native(name) or name
            if native in self.tensors:
                raise ValueError(
                    f"{stored} and {self.tensors[native].name} are two names of one tensor; remove one of them"
                )
            self.tensors[native] = stored
        self.left = set(self.tensors)
        self.total = sum(stored.nbytes for stored in kept.values())

    def required(self, name: str) -> Stored:
        if name not in self.tensors:
            stored_name = self.naming.from_native(name) or name
            raise ValueError(
                f"{self.folder.path}: no tensor {stored_name} in {len(self.tensors)} tensors, but the model needs it; "
                "the checkpoint is incomplete or config.json is of another model"
            )
        return self.tensors[name]

    def take(self, name: str, format_name: str) -> None:
        self._account(name, self.report.formats.setdefault(format_name, Count()))

    def ignore(self, name: str, suffix: str) -> None:
        self._account(name, self.report.ignored.setdefault(suffix, Count()))
        self._advance(self.tensors[name].nbytes)

    def _account(self, name: str, count: Count) -> None:
        if name not in self.left:
            raise ValueError(f"{self.tensors[name]} was asked for twice; each weight has one place in the model")
        self.left.remove(name)
        count.add(self.tensors[name])

    def read(self, stored: Stored) -> Tensor:
        if self.device.type == "meta":
            return torch.empty(stored.shape, dtype=TORCH_DTYPES[stored.dtype], device="meta")
        tensor = self.reader.read(stored)
        self._advance(stored.nbytes)
        return tensor

    def read_rows(self, stored: Stored) -> Iterator[Tensor]:
        if self.device.type == "meta":
            yield self.read(stored)[0]
            return
        for row in self.reader.read_rows(stored):
            self._advance(row.nbytes)
            yield row

    def _advance(self, nbytes: int) -> None:
        self.done += nbytes
        if self.progress is not None and self.device.type != "meta":
            self.progress(self.done, self.total)

    def finish(self) -> LoadReport:
        self.reader.close()
        if self.left:
            left = sorted(self.tensors[name].name for name in self.left)
            more = f" and {len(left) - 5} more" if len(left) > 5 else ""
            raise ValueError(
                f"{self.folder.path}: {len(left)} of {len(self.tensors)} tensors have no place in this model: "
                f"{', '.join(left[:5])}{more}; config.json is of another model or the checkpoint has unknown parts"
            )
        return replace(self.report, seconds=time.monotonic() - self.start)


def _require_same_format(first: tuple[Format, Stored], other: tuple[Format, Stored]) -> None:
    if other[0] is not first[0]:
        raise ValueError(
            f"{other[1]} is {other[0].name}, but {first[1].name} is {first[0].name}; expected one format for all experts "
            "of a layer"
        )

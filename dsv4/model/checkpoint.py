"""Checkpoint folders as the source of a model's weights.

The model asks for its weights by native name (dsv4.model.source). `FolderSource` finds each one in a folder, checks it,
converts it, places it on the device and hands it out as a tensor or as the linear or expert module of its format; when
the model is built, it accounts for every tensor of the folder. A pass on the meta device makes all these requests
against the file headers alone, so a checkpoint that does not fit is refused before any of its data is read.
"""

import copy
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TextIO, TypeVar

import torch
from torch import Tensor, nn

from dsv4.model import formats, names
from dsv4.model.formats import Format
from dsv4.model.shards import TORCH_DTYPES, Folder, Reader, Stored
from dsv4.model.source import Source

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
        return f"{self.tensors} tensors, {_size(self.bytes)}"


@dataclass(frozen=True)
class LoadReport:
    """What became of every tensor of a folder: used (by format), skipped (by prefix) or ignored (by suffix)."""

    folder: Path
    naming: str
    formats: dict[str, Count] = field(default_factory=dict)
    skipped: dict[str, Count] = field(default_factory=dict)
    ignored: dict[str, Count] = field(default_factory=dict)
    unused_files: tuple[str, ...] = ()
    seconds: float = 0.0

    def __str__(self) -> str:
        lines = [f"{self.folder}: {self.naming} names, {self.seconds:.1f} s"]
        lines += [f"  {name}: {count}" for name, count in sorted(self.formats.items())]
        lines += [f"  skipped {prefix}*: {count}" for prefix, count in sorted(self.skipped.items())]
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
    ):
        self._prefix = ""
        self._load = _Load(
            folder if isinstance(folder, Folder) else Folder.open(folder), torch.device(device), progress
        )
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
        return self._load.read(stored).view(shape).to(dtype).to(self.device)

    def linear(self, name: str, out_features: int, in_features: int, groups: int = 1) -> nn.Module:
        name = self._prefix + name
        form, parts = self._parts(name, out_features, in_features)
        if form.linear is None:
            raise _unsupported(parts["weight"], form, "a linear layer")
        tensors = {role: tensor.to(self.device) for role, tensor in self._tensors(form, parts)}
        try:
            return form.linear(tensors, groups)
        except ValueError as error:
            raise ValueError(f"{parts['weight']}: {error}") from error

    def experts(self, name: str, num_experts: int, hidden: int, intermediate: int) -> nn.Module:
        name = self._prefix + name
        if f"{name}.gate_up_proj" in self._load.tensors or f"{name}.down_proj" in self._load.tensors:
            return self._fused_experts(name, num_experts, hidden, intermediate)
        first: tuple[Format, Stored] | None = None
        gate_up: dict[str, Tensor] = {}  # by role: [E, 2, I, ...], or [E, 2] of scalars
        down: dict[str, Tensor] = {}  # by role: [E, H, ...], or [E] of scalars
        for expert in range(num_experts):
            for projection, stack, place, size in (
                ("w1", gate_up, (expert, 0), (intermediate, hidden)),
                ("w3", gate_up, (expert, 1), (intermediate, hidden)),
                ("w2", down, (expert,), (hidden, intermediate)),
            ):
                form, parts = self._parts(f"{name}.{expert}.{projection}", *size)
                if form.experts is None:
                    raise _unsupported(parts["weight"], form, "an expert")
                first = first or (form, parts["weight"])
                if form is not first[0]:
                    raise ValueError(
                        f"{parts['weight']} is {form.name}, but {first[1].name} is {first[0].name}; expected one "
                        "format for all experts of a layer"
                    )
                # Without data, the first expert shows the shapes of the stacks, and the others add nothing.
                if self.device.type == "meta" and stack.keys() == parts.keys():
                    continue
                for role, tensor in self._tensors(form, parts):
                    if role not in stack:
                        leading = (num_experts, 2) if stack is gate_up else (num_experts,)
                        stack[role] = torch.empty(leading + tensor.shape, dtype=tensor.dtype, device=self.device)
                    stack[role][place].copy_(tensor)
        gate_up = {role: stack.flatten(1, 2) if stack.ndim > 2 else stack for role, stack in gate_up.items()}
        return first[0].experts(gate_up, down)

    def finish(self) -> LoadReport:
        """The report of the load, once the model is built. ValueError if the folder holds a tensor that nobody asked
        for, other than those under skipped prefixes."""
        return self._load.finish()

    def close(self) -> None:
        """Close the files; `finish` does so too."""
        self._load.reader.close()

    def _parts(self, name: str, out_features: int, in_features: int) -> tuple[Format, dict[str, Stored]]:
        """The format of the weight `name` and its tensors on disk by role, checked and accounted for."""
        load = self._load
        found = {
            suffix: load.tensors[key] for suffix in formats.SUFFIXES if (key := f"{name}.{suffix}") in load.tensors
        }
        if not any(suffix in found for suffix in formats.WEIGHT_SUFFIXES):
            load.required(f"{name}.{formats.WEIGHT_SUFFIXES[0]}")
        form = formats.recognise(found)
        parts = formats.find_parts(form, found, out_features, in_features)
        for suffix in found:
            if suffix in form.ignored:
                load.ignore(f"{name}.{suffix}", suffix)
            else:
                load.take(f"{name}.{suffix}", form.name)
        return form, parts

    def _tensors(self, form: Format, parts: dict[str, Stored]) -> Iterator[tuple[str, Tensor]]:
        """Each part of a weight by role, read and converted on the host, one at a time."""
        for part in form.parts:
            stored = self._load.read(parts[part.role])
            try:
                tensor = part.convert(stored, self.dtype)
            except ValueError as error:
                raise ValueError(f"{parts[part.role]}: {error}") from error
            yield part.role, tensor

    def _fused_experts(self, name: str, num_experts: int, hidden: int, intermediate: int) -> nn.Module:
        """Experts stored as transformers holds them: gate_up_proj [E, 2I, H] (gate then up) and down_proj [E, H, I]."""
        stacks = []
        for leaf, shape in (
            ("gate_up_proj", (num_experts, 2 * intermediate, hidden)),
            ("down_proj", (num_experts, hidden, intermediate)),
        ):
            stored = self._load.required(f"{name}.{leaf}")
            formats.check(stored, formats.FLOATS, shape, " (stacked experts)")
            self._load.take(f"{name}.{leaf}", formats.PLAIN.name)
            stack = torch.empty(shape, dtype=self.dtype, device=self.device)
            if not stack.is_meta:
                for expert, weight in enumerate(self._load.read_rows(stored)):
                    stack[expert].copy_(weight)
            stacks.append({"weight": stack})
        return formats.PLAIN.experts(*stacks)


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
    FolderSource.check(opened, build, dtype)
    source = FolderSource(opened, device, dtype, progress)
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
        self._stream.write(f"\rloading {_size(done)} of {_size(total)}, {_size(rate)}/s{end}")
        self._stream.flush()


class _Load:
    """What all scopes of one load share: the tensors by native name, which of them are accounted for, the reader."""

    def __init__(self, folder: Folder, device: torch.device, progress: Progress | None):
        self.folder, self.device, self.progress = folder, device, progress
        self.reader = Reader()
        self.start = time.monotonic()
        self.done = 0
        kept = {name: stored for name, stored in folder.tensors.items() if not names.is_skipped(name)}
        try:
            self.naming = names.recognise(kept)
        except ValueError as error:
            raise ValueError(f"{folder.path}: {error}") from error
        self.report = LoadReport(folder.path, self.naming.name, unused_files=folder.unused_files)
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


def _unsupported(weight: Stored, form: Format, what: str) -> ValueError:
    return ValueError(
        f"{weight} is {what} stored as {form.name}, which is recognised but not supported yet; "
        "use a checkpoint that stores it as NVFP4, BF16, F16 or F32"
    )


def _size(nbytes: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"

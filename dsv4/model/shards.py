"""A folder of safetensors files: what its headers say, and the bytes of one tensor at a time.

A safetensors file is 8 bytes (little-endian length of the header), the header (JSON: name -> dtype, shape, byte range),
then the data without gaps. Headers are read here and not through the safetensors package so that a damaged file can be
told from a foreign one, and so that everything can be checked before the first byte of data is read.
"""

import json
import math
import os
import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_SHARD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*\.safetensors")
MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors package

# Bits of each dtype a header may name; those not in TORCH_DTYPES can be skipped but not read.
BITS = {
    **{"F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32},
    **{"F16": 16, "BF16": 16, "I16": 16, "U16": 16, "BOOL": 8, "I8": 8, "U8": 8},
    **{"F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8},
    **{"F6_E2M3": 6, "F6_E3M2": 6, "F4": 4},
}
TORCH_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor as its file's header describes it. `start` counts from the beginning of the file."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.file}: tensor {self.name}"


def read_header(file: Path) -> dict[str, Stored]:
    """All tensors of one safetensors file by name.

    ValueError when the file is truncated, is no safetensors file, or when its header contradicts itself.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        if start == b"version ":  # "version https://git-lfs.github.com/spec/v1"
            raise ValueError(f"{file}: is a Git LFS pointer, not the data; fetch the file itself")
        if len(start) < 8:
            raise ValueError(f"{file}: truncated: {size} bytes, a safetensors file has at least 8; download it again")
        (length,) = struct.unpack("<Q", start)
        if 8 + length > size or length > MAX_HEADER:
            raise ValueError(
                f"{file}: truncated or not safetensors: the header needs {8 + length} bytes, the file has {size}; "
                "download it again"
            )
        raw = stream.read(length)
    try:
        header = json.loads(raw, object_pairs_hook=_unique_keys)
        if not isinstance(header, dict):
            raise ValueError("it is not a JSON object")
        tensors = [_parse(file, name, entry, 8 + length) for name, entry in header.items() if name != "__metadata__"]
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise ValueError(f"{file}: corrupt header: {error}; download it again") from error
    _check_layout(file, tensors, 8 + length, size)
    return {stored.name: stored for stored in tensors}


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    keys = dict(pairs)
    if len(keys) != len(pairs):
        seen = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"{twice!r} occurs twice")
    return keys


def _is_word(name: str) -> bool:
    """Whether a name can stand in a message of one line."""
    return name.isprintable() and name != ""


def _parse(file: Path, name: str, entry: object, data_start: int) -> Stored:
    if not _is_word(name):
        raise ValueError(f"a tensor has the name {name!r}")
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(begin), int(end)]}:
            pass
        case _:
            raise ValueError(f"tensor {name} lacks dtype, shape or data_offsets")
    if dtype not in BITS:
        raise ValueError(f"tensor {name} has the unknown dtype {dtype!r}")
    if not all(type(side) is int and side >= 0 for side in shape):
        raise ValueError(f"tensor {name} has the shape {shape}")
    nbytes = math.prod(shape) * BITS[dtype] // 8
    if end - begin != nbytes or begin < 0:
        raise ValueError(f"tensor {name} ({dtype} {shape}) needs {nbytes} bytes, its byte range is [{begin}, {end}]")
    return Stored(file, name, dtype, tuple(shape), data_start + begin, nbytes)


def _check_layout(file: Path, tensors: list[Stored], data_start: int, size: int) -> None:
    end = data_start
    for stored in sorted(tensors, key=lambda stored: (stored.start, stored.nbytes)):
        if stored.start != end:
            raise ValueError(
                f"{stored}: corrupt header: its data begins at byte {stored.start}, the tensor before ends at {end}; "
                "download the file again"
            )
        end += stored.nbytes
        if end > size:
            raise ValueError(
                f"{stored}: truncated: its data ends at byte {end}, the file has {size}; download the file again"
            )
    if end != size:
        raise ValueError(f"{file}: {size - end} bytes after the last tensor; not a complete safetensors file")


@dataclass(frozen=True)
class Folder:
    """The tensors of a checkpoint folder by the names they are stored under, and the safetensors files not used."""

    path: Path
    tensors: dict[str, Stored]
    unused_files: tuple[str, ...]

    @staticmethod
    def open(path: str | Path) -> "Folder":
        """Read every header of a folder with config.json and one safetensors file, or shards and their index.

        ValueError for a missing folder, config, file or shard, a damaged file, a tensor stored twice, and an index that
        does not agree with its shards.
        """
        path = Path(path)
        if not path.is_dir():
            raise ValueError(f"{path}: no such folder; give the folder that holds config.json and *.safetensors")
        if not (path / "config.json").is_file():
            raise ValueError(f"{path}: no config.json; a checkpoint folder holds config.json and *.safetensors")
        present = sorted(file.name for file in path.glob("*.safetensors"))
        weight_map = _read_index(path / INDEX_NAME) if (path / INDEX_NAME).is_file() else None
        used = sorted(set(weight_map.values())) if weight_map is not None else _single_file(path, present)
        tensors: dict[str, Stored] = {}
        for name in used:
            if not (path / name).is_file():
                owner = next(tensor for tensor, shard in (weight_map or {}).items() if shard == name)
                raise ValueError(
                    f"{path}: shard {name} is missing ({INDEX_NAME} puts {owner} there); download the missing shard"
                )
            for stored in read_header(path / name).values():
                if stored.name in tensors:
                    first = tensors[stored.name].file.name
                    raise ValueError(
                        f"{stored}: stored twice, also in {first}; remove or download again one of the two shards"
                    )
                tensors[stored.name] = stored
        for tensor, shard in (weight_map or {}).items():
            if tensor not in tensors or tensors[tensor].file.name != shard:
                found = f"it is in {tensors[tensor].file.name}" if tensor in tensors else "no shard has it"
                raise ValueError(
                    f"{path / shard}: no tensor {tensor}, where {INDEX_NAME} puts it: {found}; "
                    "index and shards are of different downloads"
                )
        return Folder(path, tensors, tuple(name for name in present if name not in used))


def _read_index(file: Path) -> dict[str, str]:
    try:
        index = json.loads(file.read_bytes(), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: damaged index: {error}; download it again") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{file}: no weight_map; download it again")
    for tensor, shard in weight_map.items():
        if not _is_word(tensor):
            raise ValueError(f"{file}: damaged index: a tensor has the name {tensor!r}; download it again")
        # Not a path, neither upwards nor absolute; 255 bytes is what file systems allow.
        if not (isinstance(shard, str) and _SHARD.fullmatch(shard) and len(shard) < 256):
            raise ValueError(f"{file}: {tensor} is in {shard!r:.300}, expected the name of a *.safetensors file beside it")
    return weight_map


def _single_file(path: Path, present: list[str]) -> list[str]:
    if not present:
        raise ValueError(f"{path}: no *.safetensors files; other formats (.bin, .pt, .gguf) are not read")
    if SINGLE_NAME in present:
        return [SINGLE_NAME]
    if len(present) > 1:
        raise ValueError(f"{path}: {len(present)} *.safetensors files but no {INDEX_NAME}; download the index")
    return present


class Reader:
    """Reads tensors of safetensors files into host memory, one at a time; keeps the files open until closed."""

    def __init__(self):
        self._files: dict[Path, int] = {}

    def read(self, stored: Stored) -> Tensor:
        """The whole tensor, on the CPU, in its stored dtype and shape."""
        (tensor,) = self._read(stored, 1, stored.shape)
        return tensor

    def read_rows(self, stored: Stored) -> Iterator[Tensor]:
        """stored[0], stored[1], ...: only one of them is in memory at a time."""
        return self._read(stored, stored.shape[0], stored.shape[1:])

    def open(self, files: Iterable[Path]) -> None:
        """Open files that are not open yet; afterwards several threads may read from them."""
        for file in files:
            if file not in self._files:
                self._files[file] = os.open(file, os.O_RDONLY)

    def _read(self, stored: Stored, count: int, shape: tuple[int, ...]) -> Iterator[Tensor]:
        self.open([stored.file])
        nbytes = stored.nbytes // max(count, 1)
        for index in range(count):
            # Not mmap: plain reads are read ahead by the system, and never fault half way in a copy.
            tensor = torch.empty(nbytes, dtype=torch.uint8)
            data, done = memoryview(tensor.numpy()), 0
            while done < nbytes:  # one read returns at most 2 GiB
                received = os.preadv(self._files[stored.file], [data[done:]], stored.start + index * nbytes + done)
                if not received:
                    raise ValueError(f"{stored}: truncated while it was being read; download the file again")
                done += received
            yield tensor.view(TORCH_DTYPES[stored.dtype]).view(shape)

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()

"""What a stored result depends on: a fingerprint of a checkpoint and of settings."""

import hashlib
import json
from pathlib import Path

_SAMPLES, _SAMPLE_BYTES = 16, 1 << 16  # read from each weight file, spread evenly


def fingerprint(folder: str | Path, settings: dict) -> str:
    """16 hex digits of a checkpoint folder and of settings (plain values).

    JSON files count whole; of each safetensors file the size, the header and 1 MiB spread over the data, which any training
    step or requantisation changes: hashing all of a 150 GB checkpoint would take longer than loading it.
    """
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for file in sorted(Path(folder).glob("*.json")):
        digest.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    for file in sorted(Path(folder).glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with open(file, "rb") as data:
            header = data.read(8)
            digest.update(header + data.read(min(int.from_bytes(header, "little"), size)))
            start = data.tell()
            for index in range(_SAMPLES):
                data.seek(start + max(size - start - _SAMPLE_BYTES, 0) * index // (_SAMPLES - 1))
                digest.update(data.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]

"""What a stored answer depends on: a fingerprint of the checkpoint and of the settings, and a guard for answer caches.

lm-evaluation-harness keys `--use_cache` by the request alone, so a file filled by one checkpoint would silently answer for
another.
"""

import hashlib
import json
import os
from pathlib import Path

_SAMPLES, _SAMPLE_BYTES = 16, 1 << 16  # read from each weight file, spread evenly
_KEY = "dsv4 fingerprint"


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


def keyed_path(path: str, key: str) -> str:
    """The path to hand to the harness as `use_cache`: the user's, with the fingerprint in its name."""
    return f"{path}-{key}" if os.path.basename(path) else os.path.join(path, key)


def guard(store, key: str) -> None:
    """Mark an answer cache (a mapping that persists) as this fingerprint's; ValueError if it is another's or nobody's."""
    found = store.get(_KEY)
    if found is None and len(store) == 0:
        store[_KEY] = key
    elif found != key:
        raise ValueError(
            f"the answer cache holds answers of {found or 'an unknown model'}, and this checkpoint with these settings is "
            f"{key}; give another --use_cache path, or use Dsv4LM.cache_path(path)"
        )

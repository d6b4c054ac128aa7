"""A guard for answer caches.

lm-evaluation-harness keys `--use_cache` by the request alone, so a file filled by one checkpoint would silently answer for
another.
"""

import os

_KEY = "dsv4 fingerprint"


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

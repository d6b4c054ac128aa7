"""The static cache: everything a sequence leaves behind, allocated once for (max_batch, max_context).

Per layer and slot: a ring with the last `sliding_window` key/value rows; for a compressor the entries it has written and
float32 rings with the tokens of its open block (CSA: and of the block before, whose first halves the next entry needs).
All are buffers with fixed addresses, and they are the only tensors that a step changes. What of them is valid follows
from the position alone (see ops.rows), so admission to a used slot needs no clearing.

Rows and index keys are stored plain ("bf16": in the engine's dtype) or as bytes (see ops.row_formats): `kv` is the format
of window rows and entries, `index` that of the index keys.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dsv4.model.config import CSA, ModelConfig
from dsv4.ops.row_formats import key_bytes, row_bytes

KV_FORMATS = ("bf16", "fp8")
INDEX_FORMATS = ("bf16", "fp8", "fp4")
LONG_CONTEXT = 65536  # tokens; above, "auto" stores compact rows
COMPACT_ROWS = 4  # of which a compact buffer has a multiple, so that the scales behind the rows are aligned


class Row(NamedTuple):
    """What one row of a buffer holds: `width` numbers of `dtype`; uint8 is the dtype of compact rows."""

    width: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.width * self.dtype.itemsize

    def count(self, rows: int) -> int:
        """How many rows a buffer for `rows` of them has."""
        return -(-rows // COMPACT_ROWS) * COMPACT_ROWS if self.dtype == torch.uint8 else rows


def kv_row(config: ModelConfig, kv: str, dtype: torch.dtype) -> Row:
    """A key/value row in the format `kv` (not "auto"), `dtype` if it is plain. ValueError if the model's rows have not the
    widths for it."""
    if kv == "bf16":
        return Row(config.head_dim, dtype)
    try:
        width = row_bytes(config.head_dim, config.qk_rope_head_dim)
    except ValueError as error:
        raise ValueError(f'kv="{kv}": {error}; load with kv="bf16"') from error
    if config.sliding_window % COMPACT_ROWS:
        window = config.sliding_window
        raise ValueError(
            f'kv="{kv}": sliding_window must be a multiple of {COMPACT_ROWS}, found {window}; load with kv="bf16"'
        )
    return Row(width, torch.uint8)


def index_key(config: ModelConfig, index: str, dtype: torch.dtype) -> Row:
    """An index key in the format `index`, as in `kv_row`."""
    if index == "bf16":
        return Row(config.index_head_dim, dtype)
    try:
        return Row(key_bytes(config.index_head_dim, index), torch.uint8)
    except ValueError as error:
        raise ValueError(f'index="{index}": {error}; load with index="bf16"') from error


def choose_formats(config: ModelConfig, kv: str, index: str, max_context: int) -> tuple[str, str]:
    """The formats (kv, index) with "auto" replaced: fp8 rows and fp4 keys for more than LONG_CONTEXT tokens, where the
    model's widths allow them, else plain. ValueError for formats that there are not."""
    chosen = []
    for name, found, formats, make in (("kv", kv, KV_FORMATS, kv_row), ("index", index, INDEX_FORMATS, index_key)):
        if found not in ("auto", *formats):
            raise ValueError(f"{name} must be one of auto, {', '.join(formats)}, found {found!r}")
        if found == "auto":
            plain, *_, smallest = formats
            found = smallest if max_context > LONG_CONTEXT and _allows(make, config, smallest) else plain
        chosen.append(found)
    return tuple(chosen)


def _allows(make: Callable, config: ModelConfig, form: str) -> bool:
    try:
        make(config, form, torch.bfloat16)
    except ValueError:
        return False
    return True


class CompressorCache(nn.Module):
    """One compressor's state: entries [S, blocks, d] as `row` says, in compact formats with up to 3 more; c_ring, z_ring
    float32 [S, tokens, width]."""

    def __init__(self, num_slots: int, max_context: int, rate: int, dim: int, overlap: bool, row: Row, device):
        super().__init__()
        depth, width = (2 * rate, 2 * dim) if overlap else (rate, dim)
        # A context shorter than one block still gets one (unused) entry: no op sees an empty tensor.
        blocks = row.count(max(max_context // rate, 1))
        self.register_buffer("entries", torch.zeros(num_slots, blocks, row.width, dtype=row.dtype, device=device))
        self.register_buffer("c_ring", torch.zeros(num_slots, depth, width, dtype=torch.float32, device=device))
        self.register_buffer("z_ring", torch.zeros(num_slots, depth, width, dtype=torch.float32, device=device))


class LayerCache(nn.Module):
    """One layer's state: ring [S, window, D]; `compressor` (CSA, HCA) and `indexer` (CSA) or None. `rows` and `keys` say
    what is stored."""

    def __init__(self, config: ModelConfig, layer: int, num_slots: int, max_context: int, rows: Row, keys: Row, device):
        super().__init__()
        rate = config.rate(layer)
        overlap = config.layer_types[layer] == CSA
        shape = (num_slots, config.sliding_window, rows.width)
        self.register_buffer("ring", torch.zeros(shape, dtype=rows.dtype, device=device))
        self.compressor = self.indexer = None
        if rate:
            self.compressor = CompressorCache(num_slots, max_context, rate, config.head_dim, overlap, rows, device)
        if overlap:
            self.indexer = CompressorCache(num_slots, max_context, rate, config.index_head_dim, True, keys, device)


class Cache(nn.Module):
    """The state of `num_slots` sequences of at most `max_context` tokens, one LayerCache a layer.

    kv, index: formats of rows and of index keys, "auto" as in `choose_formats`; afterwards what was chosen. dtype is that
    of plain rows."""

    def __init__(
        self,
        config: ModelConfig,
        num_slots: int,
        max_context: int,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        kv: str = "bf16",
        index: str = "bf16",
    ):
        super().__init__()
        for name, value in (("max_batch", num_slots), ("max_context", max_context)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, found {value}")
        if max_context > config.max_position_embeddings:
            raise ValueError(
                f"max_context {max_context} is beyond the model's max_position_embeddings "
                f"{config.max_position_embeddings}; load with a smaller max_context"
            )
        self.num_slots, self.max_context, self.dtype = num_slots, max_context, dtype
        self.kv, self.index = choose_formats(config, kv, index, max_context)
        kinds = kv_row(config, self.kv, dtype), index_key(config, self.index, dtype)
        self.layers = nn.ModuleList(
            LayerCache(config, layer, num_slots, max_context, *kinds, device) for layer in range(config.num_hidden_layers)
        )

    def nbytes(self) -> int:
        """Bytes of all state."""
        return sum(buffer.nbytes for buffer in self.buffers())

    def state_of(self, slot: int) -> dict[str, Tensor]:
        """Views of one slot's state by name."""
        return {name: buffer[slot] for name, buffer in self.named_buffers()}

    @torch.no_grad()
    def reset(self, slot: int) -> None:
        """Zero one slot's state. Exactness does not need it; it keeps one user's data from outliving its request."""
        for view in self.state_of(slot).values():
            view.zero_()

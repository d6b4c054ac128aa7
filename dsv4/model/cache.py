"""The static cache: everything a sequence leaves behind, allocated once for (max_batch, max_context).

Per layer and slot: a ring with the last `sliding_window` key/value rows; for a compressor the entries it has written and
float32 rings with the tokens of its open block (CSA: and of the block before, whose first halves the next entry needs).
All are buffers with fixed addresses, and they are the only tensors that a step changes. What of them is valid follows
from the position alone (see ops.rows), so admission to a used slot needs no clearing.
"""

import torch
from torch import Tensor, nn

from dsv4.model.config import CSA, ModelConfig


class CompressorCache(nn.Module):
    """One compressor's state: entries [S, blocks, d] in the cache dtype; c_ring, z_ring float32 [S, tokens, width]."""

    def __init__(self, num_slots: int, max_context: int, rate: int, dim: int, overlap: bool, dtype, device):
        super().__init__()
        depth, width = (2 * rate, 2 * dim) if overlap else (rate, dim)
        # A context shorter than one block still gets one (unused) entry: no op sees an empty tensor.
        blocks = max(max_context // rate, 1)
        self.register_buffer("entries", torch.zeros(num_slots, blocks, dim, dtype=dtype, device=device))
        self.register_buffer("c_ring", torch.zeros(num_slots, depth, width, dtype=torch.float32, device=device))
        self.register_buffer("z_ring", torch.zeros(num_slots, depth, width, dtype=torch.float32, device=device))


class LayerCache(nn.Module):
    """One layer's state: ring [S, window, D]; `compressor` (CSA, HCA) and `indexer` (CSA) or None."""

    def __init__(self, config: ModelConfig, layer: int, num_slots: int, max_context: int, dtype, device):
        super().__init__()
        rate = config.rate(layer)
        overlap = config.layer_types[layer] == CSA
        shape = (num_slots, config.sliding_window, config.head_dim)
        self.register_buffer("ring", torch.zeros(shape, dtype=dtype, device=device))
        self.compressor = self.indexer = None
        if rate:
            self.compressor = CompressorCache(num_slots, max_context, rate, config.head_dim, overlap, dtype, device)
        if overlap:
            self.indexer = CompressorCache(num_slots, max_context, rate, config.index_head_dim, True, dtype, device)


class Cache(nn.Module):
    """The state of `num_slots` sequences of at most `max_context` tokens, one LayerCache a layer."""

    def __init__(
        self,
        config: ModelConfig,
        num_slots: int,
        max_context: int,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
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
        self.num_slots, self.max_context = num_slots, max_context
        self.layers = nn.ModuleList(
            LayerCache(config, layer, num_slots, max_context, dtype, device) for layer in range(config.num_hidden_layers)
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

"""Attention of all three layer types (paper section 2.3): low-rank query, one shared key/value row, window plus
compressed entries, sink, grouped low-rank output.

It comes in four parts so that what changes the cache (`advance`, `write`) stands apart from what only computes
(`project`, `attend`): torch.compile then compiles the computing parts once for all layers of a kind (see Block).
"""

from torch import Tensor, nn

from dsv4 import ops
from dsv4.model.cache import LayerCache
from dsv4.model.compressor import Compressor, Indexer
from dsv4.model.config import CSA, ModelConfig
from dsv4.model.projection import InputProjection, merge
from dsv4.model.source import Source


class Attention(nn.Module):
    """Sliding (window only), CSA (window and the indexer's blocks) or HCA (window and all blocks), by layer."""

    def __init__(self, config: ModelConfig, layer: int, source: Source):
        super().__init__()
        self.heads, self.head_dim, self.groups = config.num_attention_heads, config.head_dim, config.o_groups
        self.rank, self.rate, self.eps = config.q_lora_rank, config.rate(layer), config.rms_norm_eps
        hidden, total, low = config.hidden_size, self.heads * self.head_dim, self.groups * config.o_lora_rank
        overlap = config.layer_types[layer] == CSA

        rounded = [source.linear("wq_a", self.rank, hidden), source.linear("wkv", self.head_dim, hidden)]
        exact, queries = [], [source.linear("wq_b", total, self.rank)]
        self.compressor = self.indexer = None
        if self.rate:
            at = source.at("compressor")
            self.compressor = Compressor(at, self.rate, self.head_dim, overlap)
            exact += self.compressor.linears(at, hidden)
        if overlap:
            at = source.at("indexer")
            self.indexer = Indexer(config, at, self.rate)
            exact += self.indexer.compressor.linears(at.at("compressor"), hidden)
            exact.append(self.indexer.head_weights(at, hidden))
            queries.append(self.indexer.query(at, self.rank))
        self.wx = InputProjection(rounded, exact)
        self.wq_b = merge(queries)
        self.register_buffer("q_norm", source.float32("q_norm.weight", (self.rank,)))
        self.register_buffer("kv_norm", source.float32("kv_norm.weight", (self.head_dim,)))
        self.register_buffer("sinks", source.float32("attn_sink", (self.heads,)))
        self.register_buffer("inv_freq", config.inv_freq(layer).to(source.device))
        self.wo_a = source.linear("wo_a", low, total // self.groups, groups=self.groups)
        self.wo_b = source.linear("wo_b", hidden, low)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """x [T, H] -> the products that need no position: queries of attention and indexer side by side; the low-rank
        query and the raw key/value side by side; with a compressor its candidates and gates, with an indexer its own
        compressor's too and the weights of its heads."""
        y, *z = self.wx(x)
        return self.wq_b(y[:, : self.rank], self.q_norm, self.eps), y, *z

    def advance(
        self, projected: tuple[Tensor, ...], positions: Tensor, slots: Tensor, cache: LayerCache, decode: bool
    ) -> tuple[Tensor, ...]:
        """Norm and rope, and the blocks that this batch completes go into the cache: a token sees the block it completes.
        -> what `attend` takes: q [T, heads, D] and kv [T, D], with an indexer its q and weights.

        When decoding, the window ring is written here too. A chunk's later tokens would replace ring rows that its earlier
        ones still see, so then `write` does it after `attend`."""
        place = self.kv_norm, self.inv_freq, positions, slots, cache.ring
        if self.compressor is None:
            return ops.advance_window(*projected, *place, self.heads, self.eps, decode)
        main = _state(self.compressor, cache.compressor)
        if self.indexer is None:
            return ops.advance_hca(*projected, *place, *main, self.heads, self.rate, self.eps, decode)
        index = _state(self.indexer.compressor, cache.indexer)
        return ops.advance_csa(
            *projected, *place, *main, *index, self.heads, self.indexer.heads, self.rate, self.eps, decode
        )

    def attend(self, advanced: tuple[Tensor, ...], positions: Tensor, slots: Tensor, cache: LayerCache) -> Tensor:
        """-> [T, H]. Reads the cache and changes nothing."""
        q, kv, *index = advanced
        entries = indices = None
        if self.compressor is not None:
            entries = cache.compressor.entries
        if self.indexer is not None:
            keys = cache.indexer.entries
            indices = ops.index_topk(*index, keys, positions, slots, self.rate, self.indexer.topk)
        o = ops.attend(q, kv, cache.ring, entries, indices, self.sinks, self.inv_freq, positions, slots, self.rate)
        o = o.flatten(1) if self.groups == 1 else o.flatten(1).unflatten(1, (self.groups, -1))
        return self.wo_b(self.wo_a(o))

    def write(self, advanced: tuple[Tensor, ...], positions: Tensor, slots: Tensor, cache: LayerCache) -> None:
        """Put a chunk's rows into the window ring, after `attend`."""
        ops.kv_write(advanced[1], positions, slots, cache.ring)


def _state(compressor: Compressor, cache) -> tuple[Tensor, ...]:
    return compressor.ape, compressor.norm, cache.c_ring, cache.z_ring, cache.entries

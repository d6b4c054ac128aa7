"""Attention of all three layer types (paper section 2.3): low-rank query, one shared key/value row, window plus
compressed entries, sink, grouped low-rank output.

It comes in four parts so that what changes the cache (`append`, `write`) stands apart from what only computes
(`project`, `attend`): torch.compile then compiles the computing parts once for all layers of a kind (see Block).
"""

from torch import Tensor, nn

from dsv4 import ops
from dsv4.model.cache import LayerCache
from dsv4.model.compressor import Compressor, Indexer
from dsv4.model.config import CSA, ModelConfig
from dsv4.model.norm import RMSNorm
from dsv4.model.source import Source


class Attention(nn.Module):
    """Sliding (window only), CSA (window and the indexer's blocks) or HCA (window and all blocks), by layer."""

    def __init__(self, config: ModelConfig, layer: int, source: Source):
        super().__init__()
        self.heads, self.head_dim, self.groups = config.num_attention_heads, config.head_dim, config.o_groups
        self.rate, self.eps = config.rate(layer), config.rms_norm_eps
        hidden, rank, total = config.hidden_size, config.q_lora_rank, self.heads * self.head_dim
        low = self.groups * config.o_lora_rank
        overlap = config.layer_types[layer] == CSA
        inv_freq = config.inv_freq(layer).to(source.device)

        self.wq_a = source.linear("wq_a", rank, hidden)
        self.q_norm = RMSNorm(source.float32("q_norm.weight", (rank,)), self.eps)
        self.wq_b = source.linear("wq_b", total, rank)
        self.wkv = source.linear("wkv", self.head_dim, hidden)
        self.register_buffer("kv_norm", source.float32("kv_norm.weight", (self.head_dim,)))
        self.register_buffer("sinks", source.float32("attn_sink", (self.heads,)))
        self.register_buffer("inv_freq", inv_freq)
        self.wo_a = source.linear("wo_a", low, total // self.groups, groups=self.groups)
        self.wo_b = source.linear("wo_b", hidden, low)
        self.compressor = self.indexer = None
        if self.rate:
            self.compressor = Compressor(config, source.at("compressor"), self.rate, self.head_dim, overlap, inv_freq)
        if overlap:
            self.indexer = Indexer(config, source.at("indexer"), self.rate, inv_freq)

    def project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        """x [T, H] -> everything that the batch alone determines: q [T, heads, D], kv [T, D]; with a compressor its
        c, z; with an indexer its q, weights and its compressor's c, z."""
        qr = self.q_norm(self.wq_a(x))
        q = ops.q_rope(self.wq_b(qr).unflatten(-1, (self.heads, self.head_dim)), self.inv_freq, positions, self.eps)
        kv = ops.kv_rope(self.wkv(x), self.kv_norm, self.inv_freq, positions, self.eps)
        projected = (q, kv)
        if self.compressor is not None:
            projected += self.compressor.project(x)
        if self.indexer is not None:
            projected += self.indexer.project(x, qr, positions) + self.indexer.compressor.project(x)
        return projected

    def append(self, projected: tuple[Tensor, ...], positions: Tensor, slots: Tensor, cache: LayerCache) -> None:
        """Append the blocks that this batch completes. This comes before `attend`: a token sees the block it completes."""
        if self.compressor is not None:
            c, z = projected[2:4]
            self.compressor.append(c, z, positions, slots, cache.compressor)
        if self.indexer is not None:
            c, z = projected[6:8]
            self.indexer.compressor.append(c, z, positions, slots, cache.indexer)

    def attend(self, projected: tuple[Tensor, ...], positions: Tensor, slots: Tensor, cache: LayerCache) -> Tensor:
        """-> [T, H]. Reads the cache and changes nothing."""
        q, kv = projected[:2]
        entries = indices = None
        if self.compressor is not None:
            entries = cache.compressor.entries
        if self.indexer is not None:
            index_q, weights = projected[4:6]
            indices = self.indexer.select(index_q, weights, positions, slots, cache.indexer)
        o = ops.attend(q, kv, cache.ring, entries, indices, self.sinks, self.inv_freq, positions, slots, self.rate)
        o = o.flatten(1) if self.groups == 1 else o.flatten(1).unflatten(1, (self.groups, -1))
        return self.wo_b(self.wo_a(o))

    def write(self, projected: tuple[Tensor, ...], positions: Tensor, slots: Tensor, cache: LayerCache) -> None:
        """Put the batch's rows into the window ring. This comes after `attend` (see ops.kv_write)."""
        ops.kv_write(projected[1], positions, slots, cache.ring)

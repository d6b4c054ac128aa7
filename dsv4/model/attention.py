"""Attention of all three layer types (paper section 2.3): low-rank query, one shared key/value row, window plus
compressed entries, sink, grouped low-rank output."""

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
            self.compressor = Compressor(
                config, source.at("compressor"), self.rate, self.head_dim, overlap, inv_freq
            )
        if overlap:
            self.indexer = Indexer(config, source.at("indexer"), self.rate, inv_freq)

    def forward(self, x: Tensor, positions: Tensor, slots: Tensor, cache: LayerCache) -> Tensor:
        """x [T, H] -> [T, H]. Blocks that this batch completes are appended before it attends, since a token sees
        the block it completes; the window ring is written after it attended (see ops.kv_write)."""
        qr = self.q_norm(self.wq_a(x))
        q = ops.q_rope(self.wq_b(qr).unflatten(-1, (self.heads, self.head_dim)), self.inv_freq, positions, self.eps)
        kv = ops.kv_rope(self.wkv(x), self.kv_norm, self.inv_freq, positions, self.eps)
        entries = indices = None
        if self.compressor is not None:
            self.compressor(x, positions, slots, cache.compressor)
            entries = cache.compressor.entries
        if self.indexer is not None:
            indices = self.indexer(x, qr, positions, slots, cache.indexer)
        o = ops.attend(
            q, kv, cache.ring, entries, indices, self.sinks, self.inv_freq, positions, slots, self.rate
        )
        ops.kv_write(kv, positions, slots, cache.ring)
        o = o.flatten(1) if self.groups == 1 else o.flatten(1).unflatten(1, (self.groups, -1))
        return self.wo_b(self.wo_a(o))

"""The compressor of CSA and HCA layers, and the lightning indexer of CSA layers (paper sections 2.3.1, 2.3.2)."""

from torch import Tensor, nn

from dsv4 import ops
from dsv4.model.cache import CompressorCache
from dsv4.model.config import ModelConfig
from dsv4.model.source import Source


class Compressor(nn.Module):
    """Projects tokens to candidates and gates in float32 and pools finished blocks into cache entries of width `dim`.

    With `overlap` (CSA) the projections are 2*dim wide: first halves serve the next block, second halves their own.
    """

    def __init__(self, config: ModelConfig, source: Source, rate: int, dim: int, overlap: bool, inv_freq: Tensor):
        super().__init__()
        width = 2 * dim if overlap else dim
        self.rate, self.eps = rate, config.rms_norm_eps
        self.wkv = source.linear("wkv", width, config.hidden_size)
        self.wgate = source.linear("wgate", width, config.hidden_size)
        self.register_buffer("ape", source.float32("ape", (rate, width)))
        self.register_buffer("norm", source.float32("norm.weight", (dim,)))
        self.register_buffer("inv_freq", inv_freq)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, H] -> candidates and gates, float32 [T, width] each."""
        return self.wkv.fp32(x), self.wgate.fp32(x)

    def append(self, c: Tensor, z: Tensor, positions: Tensor, slots: Tensor, cache: CompressorCache) -> None:
        """Advance the cache by this batch's projections; afterwards it holds every block that the batch completes."""
        ops.compress(
            c,
            z,
            self.ape,
            self.norm,
            self.inv_freq,
            positions,
            slots,
            cache.c_ring,
            cache.z_ring,
            cache.entries,
            self.rate,
            self.eps,
        )


class Indexer(nn.Module):
    """Scores the compressed blocks for each token with small heads of its own, on keys from its own compressor."""

    def __init__(self, config: ModelConfig, source: Source, rate: int, inv_freq: Tensor):
        super().__init__()
        self.heads, self.dim, self.topk = config.index_n_heads, config.index_head_dim, config.index_topk
        self.rate = rate
        self.wq_b = source.linear("wq_b", self.heads * self.dim, config.q_lora_rank)
        self.weights_proj = source.linear("weights_proj", self.heads, config.hidden_size)
        self.compressor = Compressor(config, source.at("compressor"), rate, self.dim, True, inv_freq)
        self.register_buffer("inv_freq", inv_freq)

    def project(self, x: Tensor, qr: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, H], qr [T, q_lora_rank] (the normalised low-rank query) -> queries [T, heads, dim] and their scaled
        weights float32 [T, heads]. The keys' projections are the compressor's."""
        q = ops.q_rope(self.wq_b(qr).unflatten(-1, (self.heads, self.dim)), self.inv_freq, positions, norm=False)
        return q, self.weights_proj.fp32(x) * (self.dim**-0.5 * self.heads**-0.5)

    def select(self, q: Tensor, weights: Tensor, positions: Tensor, slots: Tensor, cache: CompressorCache) -> Tensor:
        """Block numbers int32 [T, topk] for each token, -1 where fewer are visible."""
        return ops.index_topk(q, weights, cache.entries, positions, slots, self.rate, self.topk)

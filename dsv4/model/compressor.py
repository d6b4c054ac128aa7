"""The compressor of CSA and HCA layers, and the lightning indexer of CSA layers (paper sections 2.3.1, 2.3.2).

They hold what pooling and scoring need. Their projections read the same inputs as attention's and are merged with those
(see Attention).
"""

from torch import nn

from dsv4.model.config import ModelConfig
from dsv4.model.source import Source


class Compressor(nn.Module):
    """The position bias and the norm with which finished blocks of `rate` tokens become cache entries of width `dim`; the
    pooling itself is in `Attention.advance`.

    With `overlap` (CSA) the projections are 2*dim wide: first halves serve the next block, second halves their own.
    """

    def __init__(self, source: Source, rate: int, dim: int, overlap: bool):
        super().__init__()
        self.width = 2 * dim if overlap else dim
        self.register_buffer("ape", source.float32("ape", (rate, self.width)))
        self.register_buffer("norm", source.float32("norm.weight", (dim,)))

    def linears(self, source: Source, hidden: int) -> list[nn.Module]:
        """The projections to candidates and to gates, [H] -> [width] each."""
        return [source.linear(name, self.width, hidden) for name in ("wkv", "wgate")]


class Indexer(nn.Module):
    """What scores the compressed blocks for each token: small heads of its own, on keys from its own compressor."""

    def __init__(self, config: ModelConfig, source: Source, rate: int):
        super().__init__()
        self.heads, self.dim, self.topk = config.index_n_heads, config.index_head_dim, config.index_topk
        self.compressor = Compressor(source.at("compressor"), rate, self.dim, True)

    def query(self, source: Source, rank: int) -> nn.Module:
        """The projection to the heads' queries, [rank] -> [heads * dim]."""
        return source.linear("wq_b", self.heads * self.dim, rank)

    def head_weights(self, source: Source, hidden: int) -> nn.Module:
        """The projection to the heads' weights, [H] -> [heads]."""
        return source.linear("weights_proj", self.heads, hidden)

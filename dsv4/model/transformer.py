"""DeepSeek-V4 over a flat token batch: one forward for prefill chunks and for decode.

`tokens`, `positions`, `slots` are int64 [T] on the device: T tokens of one or more sequences, the tokens of one slot side
by side in ascending consecutive positions, slot -1 for padding. Every length follows from `positions`; nothing branches on
the host, so each T is one static graph.
"""

import torch
from torch import Tensor, nn

from dsv4 import ops
from dsv4.model.attention import Attention
from dsv4.model.cache import Cache, LayerCache
from dsv4.model.config import ModelConfig
from dsv4.model.moe import MoE
from dsv4.model.source import Source

# Between sublayers: the output y [T, H] of the last one, not yet mixed in, the streams [T, N, H] before it, and how it is
# to be mixed: post float32 [T, N], logits of comb float32 [T, N, N] (see ops.hyper_connection).
Residual = tuple[Tensor, Tensor, Tensor, Tensor]


class HyperConnection(nn.Module):
    """The mixing around one sublayer (ops.hyper_connection), with the sublayer's input norm folded in."""

    def __init__(self, config: ModelConfig, source: Source, name: str, norm: str):
        super().__init__()
        n = config.hc_mult
        count = (2 + n) * n
        self.eps, self.hc_eps, self.iterations = config.rms_norm_eps, config.hc_eps, config.hc_sinkhorn_iters
        self.register_buffer("fn", source.float32(f"{name}_fn", (count, n * config.hidden_size)))
        self.register_buffer("base", source.float32(f"{name}_base", (count,)))
        self.register_buffer("scale", source.float32(f"{name}_scale", (3,)))
        self.register_buffer("norm", source.float32(f"{norm}.weight", (config.hidden_size,)))

    def forward(self, residual: Residual) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Mix the sublayer before in -> the streams [T, N, H], this sublayer's input [T, H], and post, logits for it."""
        return ops.hc_mix(*residual, self.fn, self.base, self.scale, self.norm, self.eps, self.hc_eps, self.iterations)


class Block(nn.Module):
    """One decoder layer: attention, then experts, each inside its hyper-connection."""

    def __init__(self, config: ModelConfig, layer: int, source: Source):
        super().__init__()
        self.hc_attn = HyperConnection(config, source, "hc_attn", "attn_norm")
        self.attn = Attention(config, layer, source.at("attn"))
        self.hc_ffn = HyperConnection(config, source, "hc_ffn", "ffn_norm")
        self.ffn = MoE(config, layer, source.at("ffn"))

    def forward(
        self, residual: Residual, tokens: Tensor, positions: Tensor, slots: Tensor, cache: LayerCache, decode: bool
    ) -> Residual:
        """The residual after this layer; the layer's cache advances."""
        streams, post, logits, *projected = self._before(*residual)
        advanced = self.attn.advance(projected, positions, slots, cache, decode)
        residual = self._after(advanced, streams, post, logits, tokens, positions, slots, cache)
        if not decode:
            self.attn.write(advanced, positions, slots, cache)
        return residual

    # A region is compiled once for all layers that look alike, so 61 layers do not cost 61 compilations. It may not
    # change its inputs, which is why the cache is written between the two and after them.
    @torch.compiler.nested_compile_region
    def _before(self, y: Tensor, streams: Tensor, post: Tensor, logits: Tensor) -> tuple[Tensor, ...]:
        streams, x, post, logits = self.hc_attn((y, streams, post, logits))
        return streams, post, logits, *self.attn.project(x)

    @torch.compiler.nested_compile_region
    def _after(
        self,
        advanced: tuple[Tensor, ...],
        streams: Tensor,
        post: Tensor,
        logits: Tensor,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        cache: LayerCache,
    ) -> Residual:
        y = self.attn.attend(advanced, positions, slots, cache)
        streams, x, post, logits = self.hc_ffn((y, streams, post, logits))
        return self.ffn(x, tokens, slots), streams, post, logits


class Transformer(nn.Module):
    """The whole model, built by asking `source` for every weight by its native name."""

    def __init__(self, config: ModelConfig, source: Source):
        super().__init__()
        self.config = config
        hidden, n = config.hidden_size, config.hc_mult
        self.register_buffer("embed", source.tensor("embed.weight", (config.vocab_size, hidden), source.dtype))
        layers = source.at("layers")
        self.layers = nn.ModuleList(Block(config, i, layers.at(str(i))) for i in range(config.num_hidden_layers))
        self.register_buffer("hc_head_fn", source.float32("hc_head_fn", (n, n * hidden)))
        self.register_buffer("hc_head_base", source.float32("hc_head_base", (n,)))
        self.register_buffer("hc_head_scale", source.float32("hc_head_scale", (1,)))
        self.register_buffer("norm", source.float32("norm.weight", (hidden,)))
        self.head = source.linear("head", config.vocab_size, hidden)

    def forward(self, tokens: Tensor, positions: Tensor, slots: Tensor, cache: Cache, decode: bool = False) -> Tensor:
        """-> [T, H]: the final normalised hidden state, what `logits` takes. The cache advances by this batch.

        `decode` promises that no slot has more than one token in the batch; the caches are then written in one launch."""
        config = self.config
        count, n = len(tokens), config.hc_mult
        # As if the embedding were a sublayer's output: mixed into streams of zeros it is what all of them begin as.
        y = self.embed[tokens]
        streams = y.new_zeros((count, n, config.hidden_size))
        post = torch.ones((count, n), device=y.device)
        logits = torch.zeros((count, n, n), device=y.device)
        residual = y, streams, post, logits
        for block, state in zip(self.layers, cache.layers, strict=True):
            residual = block(residual, tokens, positions, slots, state, decode)
        return ops.hc_mix_head(
            *residual,
            self.hc_head_fn,
            self.hc_head_base,
            self.hc_head_scale,
            self.norm,
            config.rms_norm_eps,
            config.hc_eps,
            config.hc_sinkhorn_iters,
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """[T, H] -> float32 [T, vocab]."""
        return self.head.fp32(hidden)

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

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """streams [T, N, H] -> the sublayer's input [T, H], and post [T, N], comb [T, N, N] for `ops.hc_post`."""
        return ops.hc_pre(streams, self.fn, self.base, self.scale, self.norm, self.eps, self.hc_eps, self.iterations)


class Block(nn.Module):
    """One decoder layer: attention, then experts, each inside its hyper-connection."""

    def __init__(self, config: ModelConfig, layer: int, source: Source):
        super().__init__()
        self.hc_attn = HyperConnection(config, source, "hc_attn", "attn_norm")
        self.attn = Attention(config, layer, source.at("attn"))
        self.hc_ffn = HyperConnection(config, source, "hc_ffn", "ffn_norm")
        self.ffn = MoE(config, layer, source.at("ffn"))

    def forward(self, streams: Tensor, tokens: Tensor, positions: Tensor, slots: Tensor, cache: LayerCache) -> Tensor:
        """streams [T, N, H] -> the same; the layer's cache advances."""
        post, comb, *projected = self._before(streams, positions)
        self.attn.append(projected, positions, slots, cache)
        after = self._after(streams, post, comb, projected, tokens, positions, slots, cache)
        self.attn.write(projected, positions, slots, cache)
        return after

    # A region is compiled once for all layers that look alike, so 61 layers do not cost 61 compilations. It may not
    # change its inputs, which is why the cache is written between the two.
    @torch.compiler.nested_compile_region
    def _before(self, streams: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        x, post, comb = self.hc_attn(streams)
        return post, comb, *self.attn.project(x, positions)

    @torch.compiler.nested_compile_region
    def _after(
        self,
        streams: Tensor,
        post: Tensor,
        comb: Tensor,
        projected: list[Tensor],
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        cache: LayerCache,
    ) -> Tensor:
        streams = ops.hc_post(self.attn.attend(projected, positions, slots, cache), streams, post, comb)
        x, post, comb = self.hc_ffn(streams)
        return ops.hc_post(self.ffn(x, tokens, slots), streams, post, comb)


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

    def forward(self, tokens: Tensor, positions: Tensor, slots: Tensor, cache: Cache) -> Tensor:
        """-> [T, H]: the final normalised hidden state, what `logits` takes. The cache advances by this batch."""
        config = self.config
        streams = self.embed[tokens][:, None].expand(-1, config.hc_mult, -1).contiguous()
        for block, state in zip(self.layers, cache.layers, strict=True):
            streams = block(streams, tokens, positions, slots, state)
        return ops.hc_head(
            streams,
            self.hc_head_fn,
            self.hc_head_base,
            self.hc_head_scale,
            self.norm,
            config.rms_norm_eps,
            config.hc_eps,
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """[T, H] -> float32 [T, vocab]."""
        return self.head.fp32(hidden)

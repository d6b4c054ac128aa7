"""What a release of DeepSeek-V4 consists of: the name, shape and dtype of every tensor, from the configuration alone.

    native     the original release: routed experts MXFP4 (FP8 block in the Base models), most linears FP8 block, the
               rest BF16 and F32
    NVFP4      NVIDIA's exports: the same, but for the routed experts

The draft head (`mtp.0`, one more sliding layer that predicts the token after the next) is part of the releases and is
left out when models are loaded.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from dsv4.model.config import CSA, SLIDING, ModelConfig
from dsv4.ops import fp8, mxfp4, nvfp4

EXPERT_FORMATS = ("MXFP4", "FP8", "NVFP4")


@dataclass(frozen=True)
class Expected:
    """One tensor of a release. `dtype` is spelt as in safetensors headers: BF16, F32, I64, I8, U8, F8_E4M3, F8_E8M0."""

    name: str
    shape: tuple[int, ...]
    dtype: str


def native_release(config: ModelConfig, mtp: bool = True, experts: str = "MXFP4") -> Iterator[Expected]:
    """The tensors of the original release, 69,187 for Flash and 145,116 for Pro; with experts="FP8" those of a Base
    model. Without `mtp`, the draft head is left out."""
    yield from _release(config, experts, experts if mtp else None)


def nvfp4_experts_release(config: ModelConfig, mtp: bool = True, mtp_experts: str = "MXFP4") -> Iterator[Expected]:
    """The tensors of NVIDIA's NVFP4 export: routed experts NVFP4, all else as in the original release. Of the draft
    head's experts (`mtp_experts`) some exports are NVFP4 too."""
    yield from _release(config, "NVFP4", mtp_experts if mtp else None)


def _release(config: ModelConfig, experts: str, mtp_experts: str | None) -> Iterator[Expected]:
    for form in (experts, mtp_experts):
        if form is not None and form not in EXPERT_FORMATS:
            raise ValueError(f"experts: found {form!r}, expected one of {', '.join(EXPERT_FORMATS)}")
    hidden = config.hidden_size
    yield Expected("embed.weight", (config.vocab_size, hidden), "BF16")
    yield from _hyper_head(config, "")
    yield Expected("norm.weight", (hidden,), "BF16")
    yield Expected("head.weight", (config.vocab_size, hidden), "BF16")
    for layer, (attention, mlp) in enumerate(zip(config.layer_types, config.mlp_layer_types, strict=True)):
        yield from _layer(config, f"layers.{layer}.", attention, mlp == "hash_moe", experts)
    if mtp_experts is not None:
        yield from _layer(config, "mtp.0.", SLIDING, False, mtp_experts)
        for name in ("e_proj", "h_proj"):
            yield from _fp8(f"mtp.0.{name}", hidden, hidden)
        for name in ("enorm", "hnorm", "norm"):
            yield Expected(f"mtp.0.{name}.weight", (hidden,), "BF16")
        yield from _hyper_head(config, "mtp.0.")


def _hyper_head(config: ModelConfig, prefix: str) -> Iterator[Expected]:
    n = config.hc_mult
    for name, shape in (("fn", (n, n * config.hidden_size)), ("base", (n,)), ("scale", (1,))):
        yield Expected(f"{prefix}hc_head_{name}", shape, "F32")


def _layer(config: ModelConfig, prefix: str, attention: str, hashed: bool, experts: str) -> Iterator[Expected]:
    hidden, inter, n = config.hidden_size, config.moe_intermediate_size, config.hc_mult
    count = (2 + n) * n
    for site in ("attn", "ffn"):
        yield Expected(f"{prefix}{site}_norm.weight", (hidden,), "BF16")
        for name, shape in (("fn", (count, n * hidden)), ("base", (count,)), ("scale", (3,))):
            yield Expected(f"{prefix}hc_{site}_{name}", shape, "F32")
    yield from _attention(config, f"{prefix}attn.", attention)
    yield Expected(f"{prefix}ffn.gate.weight", (config.n_routed_experts, hidden), "BF16")
    if hashed:
        yield Expected(f"{prefix}ffn.gate.tid2eid", (config.vocab_size, config.num_experts_per_tok), "I64")
    else:
        yield Expected(f"{prefix}ffn.gate.bias", (config.n_routed_experts,), "F32")
    sizes = {"w1": (inter, hidden), "w2": (hidden, inter), "w3": (inter, hidden)}
    write = {"MXFP4": _mxfp4, "FP8": _fp8, "NVFP4": _nvfp4}[experts]
    for expert in range(config.n_routed_experts):
        for name, size in sizes.items():
            yield from write(f"{prefix}ffn.experts.{expert}.{name}", *size)
    for name, size in sizes.items():
        yield from _fp8(f"{prefix}ffn.shared_experts.{name}", *size)


def _attention(config: ModelConfig, prefix: str, attention: str) -> Iterator[Expected]:
    hidden, dim, rank = config.hidden_size, config.head_dim, config.q_lora_rank
    total, low = config.num_attention_heads * dim, config.o_groups * config.o_lora_rank
    yield Expected(f"{prefix}attn_sink", (config.num_attention_heads,), "F32")
    yield from _fp8(f"{prefix}wq_a", rank, hidden)
    yield Expected(f"{prefix}q_norm.weight", (rank,), "BF16")
    yield from _fp8(f"{prefix}wq_b", total, rank)
    yield from _fp8(f"{prefix}wkv", dim, hidden)
    yield Expected(f"{prefix}kv_norm.weight", (dim,), "BF16")
    yield from _fp8(f"{prefix}wo_a", low, total // config.o_groups)
    yield from _fp8(f"{prefix}wo_b", hidden, low)
    if attention == SLIDING:
        return
    rate = config.csa_rate if attention == CSA else config.hca_rate
    yield from _compressor(config, f"{prefix}compressor.", rate, dim)
    if attention == CSA:
        heads, dim = config.index_n_heads, config.index_head_dim
        yield from _fp8(f"{prefix}indexer.wq_b", heads * dim, rank)
        yield Expected(f"{prefix}indexer.weights_proj.weight", (heads, hidden), "BF16")
        yield from _compressor(config, f"{prefix}indexer.compressor.", rate, dim)


def _compressor(config: ModelConfig, prefix: str, rate: int, dim: int) -> Iterator[Expected]:
    width = 2 * dim if rate == config.csa_rate else dim
    for name in ("wkv", "wgate"):
        yield Expected(f"{prefix}{name}.weight", (width, config.hidden_size), "BF16")
    yield Expected(f"{prefix}ape", (rate, width), "F32")
    yield Expected(f"{prefix}norm.weight", (dim,), "BF16")


def _fp8(name: str, out_features: int, in_features: int) -> Iterator[Expected]:
    blocks = -(-out_features // fp8.BLOCK), -(-in_features // fp8.BLOCK)
    yield Expected(f"{name}.weight", (out_features, in_features), "F8_E4M3")
    yield Expected(f"{name}.scale", blocks, "F8_E8M0")


def _mxfp4(name: str, out_features: int, in_features: int) -> Iterator[Expected]:
    yield Expected(f"{name}.weight", (out_features, in_features // 2), "I8")
    yield Expected(f"{name}.scale", (out_features, in_features // mxfp4.GROUP), "F8_E8M0")


def _nvfp4(name: str, out_features: int, in_features: int) -> Iterator[Expected]:
    yield Expected(f"{name}.weight", (out_features, in_features // 2), "U8")
    yield Expected(f"{name}.weight_scale", (out_features, in_features // nvfp4.GROUP), "F8_E4M3")
    yield Expected(f"{name}.weight_scale_2", (), "F32")
    yield Expected(f"{name}.input_scale", (), "F32")

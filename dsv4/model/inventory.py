"""What a release of DeepSeek-V4 consists of: the name, shape and dtype of every tensor, from the configuration alone.

    native     the original release: routed experts MXFP4 (FP8 block in the Base models), most linears FP8 block, the
               rest BF16 and F32
    NVFP4      NVIDIA's exports: the same, but for the routed experts
    all NVFP4  every linear but the router and the head NVFP4, under transformers' names

A draft head is part of every release and is left out when models are loaded:

    MTP        of the first releases: `mtp.0`, one more sliding layer that predicts the token after the next
    DSpark     of Flash-0731 and Pro-0813: `mtp.0` to `mtp.2`, three sliding layers with one input projection of the
               states of three layers, a low-rank table of token pairs, and a head that tells how sure a draft is
"""

from collections.abc import Iterator
from dataclasses import dataclass

from dsv4.model import names
from dsv4.model.config import CSA, SLIDING, ModelConfig
from dsv4.ops import fp8, mxfp4, nvfp4

EXPERT_FORMATS = ("MXFP4", "FP8", "NVFP4")
DRAFTS = ("MTP", "DSpark")
DSPARK_RANK = 256  # of the table of token pairs; config.json's dspark_markov_rank


@dataclass(frozen=True)
class Expected:
    """One tensor of a release. `dtype` is spelt as in safetensors headers: BF16, F32, I64, I8, U8, F8_E4M3, F8_E8M0."""

    name: str
    shape: tuple[int, ...]
    dtype: str


def native_release(config: ModelConfig, draft: str | None = "MTP", experts: str = "MXFP4") -> Iterator[Expected]:
    """The tensors of the original release, 69,187 for Flash and 145,116 for Pro; 72,317 for Flash with draft="DSpark";
    with experts="FP8" those of a Base model. With draft=None, the draft head is left out."""
    yield from _release(config, experts, draft, experts)


def nvfp4_experts_release(
    config: ModelConfig, draft: str | None = "MTP", draft_experts: str = "MXFP4"
) -> Iterator[Expected]:
    """The tensors of NVIDIA's NVFP4 export: routed experts NVFP4, all else as in the original release. Of the draft
    head's experts (`draft_experts`) some exports are NVFP4 too."""
    yield from _release(config, "NVFP4", draft, draft_experts)


def all_nvfp4_release(config: ModelConfig) -> Iterator[Expected]:
    """The tensors of the all-NVFP4 variant, without draft head: 2-d weights but embedding, head and router are NVFP4,
    with one tensor for each expert and projection, and `position_bias` is BF16."""
    for tensor in _release(config, "MXFP4", None, "MXFP4"):
        name, shape = names.native_to_hf(tensor.name), tensor.shape
        if tensor.dtype == "F8_E8M0":
            continue
        plain = tensor.name in ("embed.weight", "head.weight") or tensor.name.endswith("ffn.gate.weight")
        if len(shape) == 2 and name.endswith(".weight") and not plain:
            width = shape[1] * (2 if tensor.dtype == "I8" else 1)
            yield from _nvfp4(name.removesuffix(".weight"), shape[0], width)
        else:
            yield Expected(name, shape, "BF16" if name.endswith("position_bias") else tensor.dtype)


def _release(config: ModelConfig, experts: str, draft: str | None, draft_experts: str) -> Iterator[Expected]:
    for form in (experts, draft_experts):
        if form not in EXPERT_FORMATS:
            raise ValueError(f"experts: found {form!r}, expected one of {', '.join(EXPERT_FORMATS)}")
    if draft not in (None, *DRAFTS):
        raise ValueError(f"draft: found {draft!r}, expected None or one of {', '.join(DRAFTS)}")
    hidden = config.hidden_size
    yield Expected("embed.weight", (config.vocab_size, hidden), "BF16")
    yield from _hyper_head(config, "")
    yield Expected("norm.weight", (hidden,), "BF16")
    yield Expected("head.weight", (config.vocab_size, hidden), "BF16")
    for layer, (attention, mlp) in enumerate(zip(config.layer_types, config.mlp_layer_types, strict=True)):
        yield from _layer(config, f"layers.{layer}.", attention, mlp == "hash_moe", experts)
    if draft == "MTP":
        yield from _mtp(config, draft_experts)
    elif draft == "DSpark":
        yield from _dspark(config, draft_experts)


def _mtp(config: ModelConfig, experts: str) -> Iterator[Expected]:
    hidden = config.hidden_size
    yield from _layer(config, "mtp.0.", SLIDING, False, experts)
    for name in ("e_proj", "h_proj"):
        yield from _fp8(f"mtp.0.{name}", hidden, hidden)
    for name in ("enorm", "hnorm", "norm"):
        yield Expected(f"mtp.0.{name}.weight", (hidden,), "BF16")
    yield from _hyper_head(config, "mtp.0.")


def _dspark(config: ModelConfig, experts: str) -> Iterator[Expected]:
    hidden, vocab = config.hidden_size, config.vocab_size
    for block in range(3):
        yield from _layer(config, f"mtp.{block}.", SLIDING, False, experts)
    yield from _fp8("mtp.0.main_proj", hidden, 3 * hidden)
    yield Expected("mtp.0.main_norm.weight", (hidden,), "BF16")
    yield Expected("mtp.2.norm.weight", (hidden,), "BF16")
    yield from _hyper_head(config, "mtp.2.")
    for name in ("markov_w1", "markov_w2"):
        yield Expected(f"mtp.2.markov_head.{name}.weight", (vocab, DSPARK_RANK), "BF16")
    yield Expected("mtp.2.confidence_head.proj.weight", (1, hidden + DSPARK_RANK), "BF16")


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

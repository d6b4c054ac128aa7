"""What a model will take before anything is loaded: bytes of weights, cache and working memory on each GPU, the bytes
that a decode step has to read, and the longest context that fits.

Weights come as bytes by name: of a built model's buffers (`buffer_bytes`; on the meta device they cost nothing), or of
the tensors of a checkpoint under their native names. Cache sizes are those of a real Cache on the meta device, so there
is no second formula that could differ from what is allocated.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from dsv4.model.cache import LONG_CONTEXT, Cache, LayerCache, choose_formats, index_key, kv_row
from dsv4.model.config import CSA, ModelConfig
from dsv4.ops.index_topk import FEW, local_blocks

GIB = 2**30
MAX_GPUS = 1  # that an engine spreads a model over today; beyond it a plan is of the tensor-parallel layout to come
LOOKED_UP = ("embed", "embed.weight")  # read by row, never whole
# What tensor parallelism shards: query heads with their output groups, experts along the intermediate dimension, the
# head over the vocabulary. All else, the cache included, is held by every GPU.
SHARDED = (".attn.wq_b.", ".attn.wo_a.", ".attn.wo_b.", ".ffn.experts.", ".ffn.shared_experts.")
CONTEXT_BYTES = GIB // 2  # of a CUDA context as it is made
LIBRARY_BYTES = GIB // 4  # of libraries' workspaces, loaded kernels and what the allocator cannot fill
LAYERS_HELD = 1.8  # layers' intermediate results for which PyTorch holds memory, as measured on an H200
PREFILL_CHUNK = 2048  # tokens, as `dsv4.load` has it on a GPU unless told otherwise


@dataclass(frozen=True)
class Sizes:
    """What `dsv4.load` is asked for, as far as memory depends on it; kv and index are formats of the cache, or "auto"."""

    batch: int = 1
    context: int = 4096
    dtype: torch.dtype = torch.bfloat16
    kv: str = "auto"
    index: str = "auto"
    chunk: int = PREFILL_CHUNK

    def formats(self, config: ModelConfig) -> tuple[str, str]:
        """kv and index as the model's cache will have them."""
        return choose_formats(config, self.kv, self.index, self.context)


def buffer_bytes(model: nn.Module) -> dict[str, int]:
    """Bytes of each buffer by name: all that a loaded model holds."""
    return {name: buffer.nbytes for name, buffer in model.named_buffers()}


def is_looked_up(name: str) -> bool:
    """Whether a step reads only the rows of its tokens: the embedding and the tables of hash routing."""
    return name in LOOKED_UP or name.endswith("tid2eid")


def step_bytes(weights: Mapping[str, int], config: ModelConfig, sizes: Sizes) -> int:
    """Bytes that a decode step has to read at position `context`: every weight once, but of tables looked up by token only
    the rows, and of the experts the distinct ones that `batch` tokens pick when they route independently; and each
    sequence's visible cache rows."""
    batch, context = sizes.batch, sizes.context
    experts = config.n_routed_experts
    distinct = experts * (1 - (1 - config.num_experts_per_tok / experts) ** batch)
    total = batch * config.hidden_size * float(sizes.dtype.itemsize)
    apart = {name.partition(".ffn.")[0] for name in weights if ".ffn.shared_experts." in name}
    for name, nbytes in weights.items():
        if is_looked_up(name):
            continue
        layer, stack, _ = name.partition(".ffn.experts.")
        shared = layer not in apart  # then it is the last of the stack
        total += nbytes * ((distinct + shared) / (experts + shared) if stack else 1.0)
    kv, index = sizes.formats(config)
    row, key = kv_row(config, kv, sizes.dtype).nbytes, index_key(config, index, sizes.dtype).nbytes
    for layer in range(config.num_hidden_layers):
        rate = config.rate(layer)
        blocks = context // rate if rate else 0
        csa = config.layer_types[layer] == CSA
        seen = min(blocks, config.index_topk) if csa else blocks
        total += batch * ((min(context, config.sliding_window) + seen) * row + (blocks * key if csa else 0))
    return int(total)


def cache_bytes(config: ModelConfig, sizes: Sizes) -> int:
    """Bytes of the cache of `batch` sequences of at most `context` tokens."""
    return Cache(config, sizes.batch, sizes.context, sizes.dtype, "meta", sizes.kv, sizes.index).nbytes()


@dataclass(frozen=True)
class LayerState:
    """The cache of one sequence in all layers of one type: what does not grow, and what each token adds on average."""

    layers: int
    fixed_bytes: int
    bytes_per_token: float


def layer_states(config: ModelConfig, sizes: Sizes) -> dict[str, LayerState]:
    """LayerState by layer type, for the types that the model has."""
    states = {}
    kv, index = sizes.formats(config)
    kinds = kv_row(config, kv, sizes.dtype), index_key(config, index, sizes.dtype)
    for kind in dict.fromkeys(config.layer_types):
        layer, count = config.layer_types.index(kind), config.layer_types.count(kind)
        tokens = max(config.rate(layer), 1) * 64
        buffers = dict(LayerCache(config, layer, 1, tokens, *kinds, "meta").named_buffers())
        growing = sum(buffer.nbytes for name, buffer in buffers.items() if name.endswith("entries"))
        fixed = sum(buffer.nbytes for buffer in buffers.values()) - growing
        states[kind] = LayerState(count, count * fixed, count * growing / tokens)
    return states


def on_each_gpu(weights: Mapping[str, int], gpus: int) -> dict[str, int]:
    """Bytes by name on each of `gpus` GPUs in the tensor-parallel layout."""
    return {
        name: math.ceil(nbytes / gpus) if name.startswith("head.") or any(part in name for part in SHARDED) else nbytes
        for name, nbytes in weights.items()
    }


def check_gpus(config: ModelConfig, gpus: int) -> None:
    """ValueError for a number of GPUs that does not divide the heads and the output groups."""
    if config.o_groups % gpus or config.num_attention_heads % gpus:
        raise ValueError(
            f"{gpus} GPUs do not divide the model's {config.num_attention_heads} heads and {config.o_groups} output groups"
        )


def score_bytes(config: ModelConfig, tokens: int, context: int) -> int:
    """Of the index scores that leave the chip: those of a few tokens with long contexts (see ops.index_topk)."""
    blocks = context // config.csa_rate if CSA in config.layer_types else 0
    return 4 * tokens * blocks if tokens <= FEW and blocks > local_blocks(tokens) else 0


def working_bytes(config: ModelConfig, sizes: Sizes) -> int:
    """An estimate of what an engine needs beside weights and cache: the CUDA context and its libraries, the state of the
    decode step, and the intermediate results of the largest step; all steps share their memory.

    Of a prefill chunk that is what one layer makes: streams before and after, queries as projected and as attended with,
    attention's result and what follows it, of each picked expert its input, its intermediate values twice and its result in
    float32, and its attention weights in bf16."""
    item, hidden = sizes.dtype.itemsize, config.hidden_size
    heads = config.num_attention_heads * config.head_dim
    index = config.index_n_heads * config.index_head_dim if CSA in config.layer_types else 0
    low = config.o_groups * config.o_lora_rank
    streams = 2 * (config.hc_mult + 1) * hidden
    attention = 2 * (heads + index) + heads + low + 2 * hidden
    experts = (config.num_experts_per_tok + 1) * ((4 + item) * hidden + 2 * item * config.moe_intermediate_size)
    weights = (heads + index) * config.q_lora_rank + heads * low // config.o_groups + low * hidden
    chunk = LAYERS_HELD * sizes.chunk * ((streams + attention) * item + experts) + weights * item
    chunk += score_bytes(config, sizes.chunk, sizes.context)
    logits = 4 * sizes.batch * config.vocab_size
    decode = 3 * logits + score_bytes(config, sizes.batch, sizes.context)
    state = logits + sizes.batch * config.vocab_size  # kept logits, and the tokens seen
    return CONTEXT_BYTES + LIBRARY_BYTES + state + int(max(chunk, decode))


@dataclass(frozen=True)
class Plan:
    """What one GPU has to hold, in bytes, for an engine of these sizes."""

    gpus: int
    sizes: Sizes
    weights: int
    cache: int
    working: int  # an estimate, see working_bytes

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.working


def plan(weights: Mapping[str, int], config: ModelConfig, sizes: Sizes, gpus: int = 1) -> Plan:
    """The plan for a model of these weights. ValueError for sizes that the model or the layout does not allow."""
    check_gpus(config, gpus)
    shares = sum(on_each_gpu(weights, gpus).values())
    return Plan(gpus, sizes, shares, cache_bytes(config, sizes), working_bytes(config, sizes))


def longest_context(weights: Mapping[str, int], config: ModelConfig, sizes: Sizes, memory: int, gpus: int = 1) -> int:
    """The longest context that fits `memory` bytes a GPU, at most the model's own limit; 0 when none does."""
    check_gpus(config, gpus)
    room, limit = memory - sum(on_each_gpu(weights, gpus).values()), config.max_position_embeddings

    def fits(context: int) -> bool:
        longer = replace(sizes, context=context)
        return cache_bytes(config, longer) + working_bytes(config, longer) <= room

    # The cache grows with the context, but "auto" makes it smaller where long contexts begin.
    for shorter, longest in ((LONG_CONTEXT, limit), (0, min(LONG_CONTEXT, limit))):
        fitting, above = shorter, longest + 1
        while above - fitting > 1:
            middle = (fitting + above) // 2
            fitting, above = (middle, above) if fits(middle) else (fitting, middle)
        if fitting > shorter:
            return fitting
    return 0


def fit_text(need: Plan, longest: int, memory: int) -> str:
    """Whether a plan fits `memory` bytes a GPU, in words, with the `longest_context` that does."""
    where = f"{memory / GIB:.4g} GiB" + (f" on each of {need.gpus} GPUs" if need.gpus > 1 else "")
    what, left = f"{need.sizes.batch} x {need.sizes.context} tokens", (memory - need.total) / GIB
    if left >= 0:
        return f"{what} fit {where}, {left:.2f} GiB are left; the longest context that fits is {longest}"
    at_most = f"; at most {longest} tokens fit" if longest else ", and no shorter context fits"
    return f"{what} do not fit {where}, {-left:.2f} GiB are lacking{at_most}"

"""What a model will take before anything is loaded: bytes of weights, cache and working memory on each GPU, the bytes
that a decode step has to read, and the longest context that fits.

Weights come as bytes by name: of a built model's buffers (`buffer_bytes`; on the meta device they cost nothing), or of
the tensors of a checkpoint under their native names. Cache sizes are those of a real Cache on the meta device, so there
is no second formula that could differ from what is allocated.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from dsv4.model.cache import Cache, LayerCache
from dsv4.model.config import CSA, ModelConfig

GIB = 2**30
MAX_GPUS = 1  # that an engine spreads a model over today; beyond it a plan is of the tensor-parallel layout to come
LOOKED_UP = ("embed", "embed.weight")  # read by row, never whole
# What tensor parallelism shards: query heads with their output groups, experts along the intermediate dimension, the
# head over the vocabulary. All else, the cache included, is held by every GPU.
SHARDED = (".attn.wq_b.", ".attn.wo_a.", ".attn.wo_b.", ".ffn.experts.", ".ffn.shared_experts.")
CONTEXT_BYTES = GIB  # of a CUDA context with its libraries, kernels and the allocator's slack
PREFILL_CHUNK = 512  # tokens, as `dsv4.load` has it unless told otherwise


def buffer_bytes(model: nn.Module) -> dict[str, int]:
    """Bytes of each buffer by name: all that a loaded model holds."""
    return {name: buffer.nbytes for name, buffer in model.named_buffers()}


def is_looked_up(name: str) -> bool:
    """Whether a step reads only the rows of its tokens: the embedding and the tables of hash routing."""
    return name in LOOKED_UP or name.endswith("tid2eid")


def step_bytes(weights: Mapping[str, int], config: ModelConfig, batch: int, context: int, itemsize: int = 2) -> int:
    """Bytes that a decode step has to read: every weight once, but of tables looked up by token only the rows, and of the
    experts the distinct ones that `batch` tokens pick when they route independently; and each sequence's visible cache
    rows of `itemsize` bytes a number."""
    experts = config.n_routed_experts
    distinct = experts * (1 - (1 - config.num_experts_per_tok / experts) ** batch)
    total = batch * config.hidden_size * float(itemsize)
    for name, nbytes in weights.items():
        if not is_looked_up(name):
            total += nbytes * (distinct / experts if ".ffn.experts." in name else 1.0)
    row, key = itemsize * config.head_dim, itemsize * config.index_head_dim
    for layer in range(config.num_hidden_layers):
        rate = config.rate(layer)
        blocks = context // rate if rate else 0
        csa = config.layer_types[layer] == CSA
        seen = min(blocks, config.index_topk) if csa else blocks
        total += batch * ((min(context, config.sliding_window) + seen) * row + (blocks * key if csa else 0))
    return int(total)


def cache_bytes(config: ModelConfig, batch: int, context: int, dtype: torch.dtype = torch.bfloat16) -> int:
    """Bytes of the cache of `batch` sequences of at most `context` tokens."""
    return Cache(config, batch, context, dtype, "meta").nbytes()


@dataclass(frozen=True)
class LayerState:
    """The cache of one sequence in all layers of one type: what does not grow, and what each token adds on average."""

    layers: int
    fixed_bytes: int
    bytes_per_token: float


def layer_states(config: ModelConfig, dtype: torch.dtype = torch.bfloat16) -> dict[str, LayerState]:
    """LayerState by layer type, for the types that the model has."""
    states = {}
    for kind in dict.fromkeys(config.layer_types):
        layer, count = config.layer_types.index(kind), config.layer_types.count(kind)
        tokens = max(config.rate(layer), 1) * 64
        buffers = dict(LayerCache(config, layer, 1, tokens, dtype, "meta").named_buffers())
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


def working_bytes(config: ModelConfig, batch: int, itemsize: int = 2, chunk: int = PREFILL_CHUNK) -> int:
    """An estimate of what an engine needs beside weights and cache: the CUDA context, the activations of one prefill
    chunk at the widest places of a layer, its largest linear dequantised to bf16, the logits of a decode step."""
    heads = config.num_attention_heads * config.head_dim
    streams = 3 * config.hc_mult * config.hidden_size * itemsize
    attention = 3 * heads * itemsize
    experts = config.num_experts_per_tok * (3 * config.moe_intermediate_size + config.hidden_size) * 4
    widest = max(heads * config.q_lora_rank, config.o_groups * config.o_lora_rank * config.hidden_size)
    logits = 4 * batch * config.vocab_size * 4
    return CONTEXT_BYTES + chunk * (streams + attention + experts) + 2 * widest + logits


@dataclass(frozen=True)
class Plan:
    """What one GPU has to hold, in bytes, for `batch` sequences of `context` tokens."""

    gpus: int
    batch: int
    context: int
    weights: int
    cache: int
    working: int  # an estimate, see working_bytes

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.working


def plan(
    weights: Mapping[str, int],
    config: ModelConfig,
    batch: int = 1,
    context: int = 4096,
    gpus: int = 1,
    dtype: torch.dtype = torch.bfloat16,
) -> Plan:
    """The plan for a model of these weights. ValueError for sizes that the model or the layout does not allow."""
    check_gpus(config, gpus)
    return Plan(
        gpus,
        batch,
        context,
        sum(on_each_gpu(weights, gpus).values()),
        cache_bytes(config, batch, context, dtype),
        working_bytes(config, batch, dtype.itemsize),
    )


def longest_context(
    weights: Mapping[str, int],
    config: ModelConfig,
    memory: int,
    batch: int = 1,
    gpus: int = 1,
    dtype: torch.dtype = torch.bfloat16,
) -> int:
    """The longest context that fits `memory` bytes a GPU, at most the model's own limit; 0 when none does."""
    check_gpus(config, gpus)
    room = memory - sum(on_each_gpu(weights, gpus).values()) - working_bytes(config, batch, dtype.itemsize)
    fits, above = 0, config.max_position_embeddings + 1
    while above - fits > 1:  # the cache grows with the context
        middle = (fits + above) // 2
        if cache_bytes(config, batch, middle, dtype) <= room:
            fits = middle
        else:
            above = middle
    return fits

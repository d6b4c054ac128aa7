"""Whole checkpoints with random weights, as transformers saves them, and transformers' model as the oracle for them.

    tiny   4 layers: sliding with hash routing, CSA, HCA, CSA; window 16, 6 picked blocks; has a tokenizer
    wide   3 layers: sliding with hash routing, CSA, HCA; the released head sizes: head_dim 512 with 64 rope dims, index
           heads of 128, window 128
    pro    5 layers in Pro's order: HCA, HCA, CSA, HCA, CSA; the first three hashed; 4 output groups
    small  the first 2 layers of a model like tiny, where compiling costs time
    formats  like tiny in widths that every weight format divides, for format_checkpoints.py

Weights are the same in every run; tokens are not (`clear_tokens`). Everything is built once a session and kept.
"""

import atexit
import functools
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4IndexerScorer, DeepseekV4TopKRouter

import dsv4
from dsv4.compile.engine import Engine
from dsv4.model.cache import Cache
from dsv4.model.checkpoint import load_folder
from dsv4.model.config import CSA, HCA, SLIDING, ModelConfig
from dsv4.model.export import save_nvfp4_experts
from dsv4.model.linear import PlainExperts, PlainLinear
from dsv4.model.names import HF_ORIGINAL
from dsv4.model.source import Source
from dsv4.model.transformer import Transformer
from dsv4.ops.fp8 import decode_e8m0, dequantize_fp8_block
from dsv4.ops.nvfp4 import dequantize_nvfp4
from dsv4.ops.sample import gumbel_noise
from tests.model import test_tokenizer
from tests.ops.cases import Draw

NAMES = ("tiny", "wide", "pro")
VOCAB = {"tiny": 448, "wide": 96, "pro": 80, "small": 50, "formats": 64}
LENGTH = 300
WEIGHT_SEED = 20

_SHARED = dict(
    bos_token_id=0, eos_token_id=1, dtype="float32", max_position_embeddings=4096, routed_scaling_factor=1.5,
    rope_parameters={
        "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 256, "beta_fast": 32.0,
        "beta_slow": 1.0,
    },
)  # fmt: skip
SETTINGS = {
    "tiny": _SHARED | dict(
        vocab_size=VOCAB["tiny"], hidden_size=64, num_hidden_layers=4, num_attention_heads=4, head_dim=128,
        layer_types=[SLIDING, CSA, HCA, CSA], mlp_layer_types=["hash_moe", "moe", "moe", "moe"],
        partial_rotary_factor=16 / 128, q_lora_rank=32, sliding_window=16, index_n_heads=32, index_head_dim=64,
        index_topk=6, o_groups=2, o_lora_rank=16, n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=32,
    ),
    "wide": _SHARED | dict(
        vocab_size=VOCAB["wide"], hidden_size=96, num_hidden_layers=3, num_attention_heads=2, head_dim=512,
        layer_types=[SLIDING, CSA, HCA], mlp_layer_types=["hash_moe", "moe", "moe"],
        partial_rotary_factor=64 / 512, q_lora_rank=48, sliding_window=128, index_n_heads=16, index_head_dim=128,
        index_topk=9, o_groups=2, o_lora_rank=24, n_routed_experts=6, num_experts_per_tok=3, moe_intermediate_size=48,
        rope_parameters=_SHARED["rope_parameters"] | {"original_max_position_embeddings": 65536},
        max_position_embeddings=1048576,
    ),
    "pro": _SHARED | dict(
        vocab_size=VOCAB["pro"], hidden_size=64, num_hidden_layers=5, num_attention_heads=8, head_dim=64,
        layer_types=[HCA, HCA, CSA, HCA, CSA], mlp_layer_types=["hash_moe"] * 3 + ["moe"] * 2,
        partial_rotary_factor=16 / 64, q_lora_rank=40, sliding_window=32, index_n_heads=24, index_head_dim=32,
        index_topk=7, o_groups=4, o_lora_rank=12, n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=48,
        routed_scaling_factor=2.5,
    ),
}  # fmt: skip
SETTINGS["small"] = SETTINGS["tiny"] | dict(
    num_hidden_layers=2, layer_types=[SLIDING, CSA], mlp_layer_types=["hash_moe", "moe"], vocab_size=VOCAB["small"]
)
SETTINGS["formats"] = SETTINGS["tiny"] | dict(
    vocab_size=VOCAB["formats"], hidden_size=160, moe_intermediate_size=128, n_routed_experts=4
)


def randomise(model: DeepseekV4ForCausalLM, seed: int) -> None:
    """Weights of such size that every part of the model matters: linears N(0, 4 / fan_in), hyper-connection scales 0.7,
    norms about 1, and nothing left at zero. Rows of the hash table are distinct experts, as in the real tables."""
    generator = torch.Generator().manual_seed(seed)

    def normal(tensor: Tensor, std: float, mean: float = 0.0) -> None:
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * std + mean)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            leaf = name.rpartition(".")[2]
            if "norm" in name:
                normal(parameter, 0.1, mean=1.0)
            elif leaf in ("scale", "hc_scale"):
                parameter.fill_(0.7)
            elif name == "model.embed_tokens.weight" or parameter.ndim == 1 or leaf == "position_bias":
                normal(parameter, 1.0)
            else:
                normal(parameter, 2 * parameter.shape[-1] ** -0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                normal(buffer, 0.3)
            elif name.endswith("tid2eid"):
                experts = model.config.n_routed_experts
                buffer.copy_(torch.rand(len(buffer), experts, generator=generator).argsort(-1)[:, : buffer.shape[1]])


@functools.cache
def oracle(name: str) -> DeepseekV4ForCausalLM:
    """transformers' model in float32."""
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**SETTINGS[name])).eval()
    randomise(model, WEIGHT_SEED)
    return model


@functools.cache
def folder(name: str) -> Path:
    """The oracle's checkpoint folder. Copy it before changing anything in it."""
    path = Path(_directory()) / name
    path.mkdir()
    if name == "tiny":
        test_tokenizer.build(path)
    oracle(name).save_pretrained(path)
    return path


@functools.cache
def nvfp4_folder(name: str) -> Path:
    """The same checkpoint in NVIDIA's experts-only format: native names, experts NVFP4, most linears FP8, the rest
    BF16 and F32."""
    path = Path(_directory()) / f"{name}-nvfp4"
    stored = load_file(folder(name) / "model.safetensors")
    native = {HF_ORIGINAL.to_native(key): value for key, value in stored.items()}
    save_nvfp4_experts(path, ModelConfig.from_folder(folder(name)).to_json(), native)
    return path


@functools.cache
def dequantised_oracle(name: str) -> DeepseekV4ForCausalLM:
    """transformers' model in float32 with the weights that nvfp4_folder holds, dequantised."""
    stored = load_file(nvfp4_folder(name) / "model.safetensors")
    weights = {}
    for key, value in stored.items():
        module = key.removesuffix(".weight")
        if not key.endswith(("scale", "scale_2")) or "hc_" in key:
            if value.dtype == torch.uint8:
                scales = stored[f"{module}.weight_scale"], stored[f"{module}.weight_scale_2"]
                value = dequantize_nvfp4(value, *scales)
            elif value.dtype == torch.float8_e4m3fn:
                value = dequantize_fp8_block(value, decode_e8m0(stored[f"{module}.scale"]))
            value = value.float() if value.is_floating_point() else value
            weights[HF_ORIGINAL.from_native(key)] = value.contiguous()
    path = Path(_directory()) / f"{name}-dequantised"
    oracle(name).config.save_pretrained(path)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    model, report = DeepseekV4ForCausalLM.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    return model.eval()


@functools.cache
def _directory() -> str:
    directory = tempfile.TemporaryDirectory(prefix="dsv4-tests-")
    atexit.register(directory.cleanup)
    return directory.name


@functools.cache
def engine(name: str = "tiny", max_batch: int = 1, max_context: int = 384, prefill_chunk: int = 130) -> Engine:
    """An eager float32 engine, shared by all tests that ask for the same one."""
    return dsv4.load(
        folder(name), "cpu", torch.float32, max_batch=max_batch, max_context=max_context, prefill_chunk=prefill_chunk,
        compile=False,
    )  # fmt: skip


@functools.cache
def _compiled() -> tuple[Engine, int]:
    before = graphs_compiled()
    engine = dsv4.load(folder("tiny"), "cpu", torch.float32, max_batch=3, max_context=1200, prefill_chunk=96)
    return engine, graphs_compiled() - before


def compiled_engine() -> Engine:
    """The one compiled engine of the session: two prefill shapes (64 and 96 tokens) and a decode batch of 3."""
    return _compiled()[0]


def graphs_of_compiled_engine() -> int:
    """How many graphs its load compiled."""
    return _compiled()[1]


def graphs_compiled() -> int:
    """Graphs that torch.compile has made in this process."""
    return counters["stats"]["unique_graphs"]


@functools.cache
def model(name: str) -> Transformer:
    """The float32 model alone, for tests that bring their own cache."""
    config = ModelConfig.from_folder(folder(name))
    return load_folder(folder(name), lambda source: Transformer(config, source), "cpu", torch.float32)[0]


def new_cache(name: str, slots: int = 1, max_context: int = 384, fill: float = 0.0) -> Cache:
    cache = Cache(model(name).config, slots, max_context, torch.float32)
    for buffer in cache.buffers():
        buffer.fill_(fill)
    return cache


def run(name: str, cache: Cache, segments: Sequence[tuple[int, int, Sequence[int]]]) -> list[Tensor]:
    """One flat batch of segments (slot, first position, tokens), slot -1 for padding; logits [len, vocab] of each."""
    tokens, positions, slots = [], [], []
    for slot, start, ids in segments:
        tokens += ids
        positions += range(start, start + len(ids))
        slots += [slot] * len(ids)
    batch = (torch.tensor(row, dtype=torch.int64) for row in (tokens, positions, slots))
    logits = model(name).logits(model(name)(*batch, cache))
    return list(logits.split([len(ids) for _, _, ids in segments]))


def run_in_chunks(name: str, cache: Cache, slot: int, ids: Sequence[int], size: int, start: int = 0) -> Tensor:
    """Logits [len, vocab] of a sequence that goes through the model `size` tokens at a time."""
    parts = [run(name, cache, [(slot, i + start, ids[i : i + size])])[0] for i in range(0, len(ids), size)]
    return torch.cat(parts)


def expected(name: str, ids: Sequence[int]) -> Tensor:
    """Logits [len, vocab] of transformers' model."""
    return oracle(name)(torch.tensor([list(ids)]), use_cache=False).logits[0]


class MetaSource(Source):
    """Weights of any shape without data, for what depends on shapes alone."""

    dtype, device = torch.float32, torch.device("meta")

    def at(self, name: str) -> "MetaSource":
        return self

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def linear(self, name: str, out_features: int, in_features: int, groups: int = 1) -> PlainLinear:
        return PlainLinear(self.tensor(name, (out_features, in_features), self.dtype), groups)

    def experts(
        self, name: str, num_experts: int, hidden: int, intermediate: int, shared: str | None = None
    ) -> PlainExperts:
        gate_up = self.tensor(name, (num_experts, 2 * intermediate, hidden), self.dtype)
        return PlainExperts(gate_up, self.tensor(name, (num_experts, hidden, intermediate), self.dtype))


def config_of(name: str, **changes) -> ModelConfig:
    """A checkpoint's configuration with changes: `layer_types` and `mlp_layer_types` of another length, for example."""
    values = SETTINGS[name] | changes
    values["num_hidden_layers"] = len(values["layer_types"])
    return ModelConfig.from_json(json.loads(DeepseekV4Config(**values).to_json_string()))


# --- tokens without near ties -----------------------------------------------------------------------------------------

MARGIN = 3e-5  # of the spread of the values; rounding moves them by about 1e-6 of it


def clear_tokens(name: str, length: int, draw: Draw, theirs: DeepseekV4ForCausalLM | None = None) -> list[int]:
    """Random tokens for which no choice of the model (`theirs`, with these settings, or the oracle) is closer than MARGIN.

    The indexer and the router pick the largest of some scores. Where two scores at the border are equal but for their
    last bits, two right evaluations of the model may pick differently and then give quite different logits. Those
    prompts are not drawn.
    """
    for _ in range(40):
        ids = draw.integers(2, VOCAB[name], length).tolist()
        if min_gap(name, ids, theirs) > MARGIN:
            return ids
    raise AssertionError("found no tokens without near ties")


def min_gap(name: str, ids: Sequence[int], theirs: DeepseekV4ForCausalLM | None = None) -> float:
    """The smallest distance between the last score picked and the first one left out, relative to their spread."""
    theirs = theirs or oracle(name)
    gaps = [1.0]
    hooks = []
    for module in theirs.modules():
        if isinstance(module, DeepseekV4IndexerScorer):
            hooks.append(module.register_forward_hook(lambda _m, _i, out: gaps.extend(_index_gaps(out[0], name))))
        elif isinstance(module, DeepseekV4TopKRouter):
            hooks.append(module.register_forward_hook(lambda m, _i, out: gaps.append(_router_gap(m, out[0]))))
    try:
        theirs(torch.tensor([list(ids)]), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return min(gaps)


def _index_gaps(scores: Tensor, name: str) -> Iterator[float]:
    topk = SETTINGS[name]["index_topk"]
    visible = ((torch.arange(len(scores)) + 1) // 4)[:, None]
    scores = torch.where(torch.arange(scores.shape[1]) < visible, scores, -torch.inf)
    scores = scores[visible[:, 0] > topk]
    if len(scores):
        ordered = scores.sort(-1, descending=True).values
        yield ((ordered[:, topk - 1] - ordered[:, topk]) / ordered[:, 0].abs().clamp(min=1e-3)).min().item()


def _router_gap(router: DeepseekV4TopKRouter, logits: Tensor) -> float:
    ordered = (router.score_fn(logits) + router.e_score_correction_bias).sort(-1, descending=True).values
    return (ordered[:, router.top_k - 1] - ordered[:, router.top_k]).min().item()


def assert_same_tokens(name: str, prompt: Sequence[int], a: Sequence[int], b: Sequence[int], seed: int | None = None):
    """Two generations for one prompt are equal, or go apart at a near tie: greedy ones, or drawn at temperature 1 with
    this seed. Right evaluations in different batches differ in their last bits, so such a tie may fall either way."""
    common = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    if list(a) == list(b):
        return
    assert common < min(len(a), len(b)), f"one of them goes on: {len(a)} and {len(b)} tokens"
    ids = [*prompt, *a[:common]]
    scores = expected(name, ids)[-1]
    if seed is not None:
        scores = scores + gumbel_noise(torch.tensor([seed]), torch.tensor([len(ids)]), len(scores))[0]
    first, second = scores.topk(2).values.tolist()
    tie = min(first - second, min_gap(name, ids))
    assert tie < MARGIN, f"after {common} equal tokens {a[common]} and {b[common]}, but nothing is nearer than {tie:.1e}"

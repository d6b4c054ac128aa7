"""The model's configuration: one frozen dataclass with transformers' field names, checked when it is built.

Reading and writing `config.json` is in config_json.py; `flash()` and `pro()` are the two released models.
"""

import json
import math
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch

SLIDING = "sliding_attention"
CSA = "compressed_sparse_attention"
HCA = "heavily_compressed_attention"
LAYER_TYPES = (SLIDING, CSA, HCA)
MLP_LAYER_TYPES = ("hash_moe", "moe")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def require(condition: bool, name: str, found, expected: str) -> None:
    """ValueError with the setting's name, what was found and what is expected, unless `condition` holds."""
    if not condition:
        raise ValueError(f"{name}: found {found!r}, expected {expected}")


def integer(name: str, value, at_least: int) -> int:
    """`value` if it is an int (a bool is not) of at least `at_least`, else ValueError."""
    good = isinstance(value, int) and not isinstance(value, bool) and value >= at_least
    require(good, name, value, f"an integer of at least {at_least}")
    return value


def number(name: str, value) -> float:
    """`value` as a float if it is a finite number above 0, else ValueError."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
    require(good, name, value, "a positive number")
    return float(value)


def read_json_object(file: Path) -> dict:
    """The object in a JSON file that exists. ValueError with the path if it holds anything else."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
        raise ValueError(f"{file}: not valid JSON ({error})") from error
    require(isinstance(values, dict), str(file), type(values).__name__, "a JSON object")
    return values


@dataclass(frozen=True)
class Yarn:
    """YaRN frequency scaling of the compressed layers' rope. It has no magnitude factor in this model."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def __post_init__(self):
        integer("original_max_position_embeddings", self.original_max_position_embeddings, at_least=1)
        for name in ("factor", "beta_fast", "beta_slow"):
            number(f"rope {name}", getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Everything about DeepSeek-V4 that the forward pass needs to know. Construction checks every field.

    `layer_types` and `mlp_layer_types` have one entry for each of the `num_hidden_layers` layers. `csa_rate` and
    `hca_rate` are the tokens that one compressed entry stands for. Raises ValueError with the field, what was found
    and what is expected.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    layer_types: tuple[str, ...]
    csa_rate: int = 4
    hca_rate: int = 128
    mlp_layer_types: tuple[str, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int = 1
    moe_intermediate_size: int
    routed_scaling_factor: float
    swiglu_limit: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    rope_theta: float
    compress_rope_theta: float
    yarn: Yarn | None
    max_position_embeddings: int
    bos_token_id: int
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self):
        for field in fields(self):
            if field.type is int:
                integer(field.name, getattr(self, field.name), at_least=0 if field.name == "bos_token_id" else 1)
            elif field.type is float:
                number(field.name, getattr(self, field.name))
        for name, allowed in (("layer_types", LAYER_TYPES), ("mlp_layer_types", MLP_LAYER_TYPES)):
            types = getattr(self, name)
            require(isinstance(types, tuple), name, types, "a list with one entry for each layer")
            length = f"num_hidden_layers ({self.num_hidden_layers}) entries"
            require(len(types) == self.num_hidden_layers, name, f"{len(types)} entries", length)
            for found in types:
                require(found in allowed, name, found, f"entries out of {', '.join(allowed)}")
        self._check_relations()

    def _check_relations(self) -> None:
        """Conditions that tie fields to each other."""
        rope, heads, experts = self.qk_rope_head_dim, self.num_attention_heads, self.num_experts_per_tok
        require(rope % 2 == 0, "qk_rope_head_dim", rope, "an even number")
        for name in ("head_dim", "index_head_dim"):
            size = getattr(self, name)
            require(rope <= size, "qk_rope_head_dim", rope, f"at most {name} ({size})")
        for name in ("rope_theta", "compress_rope_theta"):
            require(getattr(self, name) > 1, name, getattr(self, name), "a number above 1")
        require(heads % self.o_groups == 0, "num_attention_heads", heads, f"a multiple of o_groups ({self.o_groups})")
        at_most = f"at most n_routed_experts ({self.n_routed_experts})"
        require(experts <= self.n_routed_experts, "num_experts_per_tok", experts, at_most)
        require(self.n_shared_experts == 1, "n_shared_experts", self.n_shared_experts, "1")
        for name in ("csa_rate", "hca_rate"):
            require(getattr(self, name) > 1, name, getattr(self, name), "at least 2")
        require(self.csa_rate != self.hca_rate, "hca_rate", self.hca_rate, f"other than csa_rate ({self.csa_rate})")
        require(len(self.eos_token_ids) > 0, "eos_token_id", [], "at least one token id")
        for token in self.eos_token_ids:
            integer("eos_token_id", token, at_least=0)
        for name, token in [("bos_token_id", self.bos_token_id)] + [("eos_token_id", t) for t in self.eos_token_ids]:
            require(token < self.vocab_size, name, token, f"an id below vocab_size ({self.vocab_size})")
        require(self.dtype in DTYPES.values(), "dtype", self.dtype, f"one of {', '.join(DTYPES)}")

    def rate(self, layer: int) -> int:
        """Tokens per compressed entry of a layer: 0 for sliding attention, else `csa_rate` or `hca_rate`."""
        return {SLIDING: 0, CSA: self.csa_rate, HCA: self.hca_rate}[self.layer_types[layer]]

    def inv_freq(self, layer: int) -> torch.Tensor:
        """Rope frequencies of a layer, fp32 [qk_rope_head_dim / 2] on the CPU.

        Sliding layers use `rope_theta` as it is. Compressed layers use `compress_rope_theta` with YaRN for everything
        they rotate, at all positions. The steps follow transformers' one by one, so the result has the same bits.
        """
        dim = self.qk_rope_head_dim
        compressed = self.layer_types[layer] != SLIDING
        theta = self.compress_rope_theta if compressed else self.rope_theta
        wavelengths = theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)
        inv_freq = 1.0 / wavelengths
        yarn = self.yarn
        if not compressed or yarn is None:
            return inv_freq

        def correction_dim(rotations: float) -> float:
            turns = yarn.original_max_position_embeddings / (rotations * 2 * math.pi)
            return (dim * math.log(turns)) / (2 * math.log(theta))

        low = max(math.floor(correction_dim(yarn.beta_fast)), 0)
        high = min(math.ceil(correction_dim(yarn.beta_slow)), dim - 1)
        if low == high:
            high += 0.001  # a ramp of width 0 would divide by zero
        ramp = torch.clamp((torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low), 0, 1)
        keep = 1 - ramp
        return 1.0 / (yarn.factor * wavelengths) * (1 - keep) + inv_freq * keep

    @classmethod
    def from_folder(cls, path) -> "ModelConfig":
        """Read `config.json` of a checkpoint folder. ValueError with the path if it is missing or not valid JSON."""
        folder = Path(path)
        file = folder / "config.json"
        if not folder.is_dir():
            raise ValueError(f"{folder}: no such folder, expected a checkpoint folder with a config.json")
        if not file.is_file():
            raise ValueError(f"{file}: no such file, a checkpoint folder must hold a config.json")
        return cls.from_json(read_json_object(file), source=str(file))

    @classmethod
    def from_json(cls, values: dict, source: str = "config.json") -> "ModelConfig":
        """Build from the content of a `config.json` in either spelling; `source` names the file in error messages."""
        from dsv4.model.config_json import (
            read,
        )  # it needs this class's fields, so it cannot be imported before the class

        try:
            return cls(**read(values))
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from error

    def to_json(self) -> dict:
        """The content of a `config.json` in the native spelling, which transformers reads as well."""
        from dsv4.model.config_json import write

        return write(self)


_RELEASE = dict(  # what Flash and Pro share
    vocab_size=129280,
    head_dim=512,
    qk_rope_head_dim=64,
    o_lora_rank=1024,
    sliding_window=128,
    index_n_heads=64,
    index_head_dim=128,
    num_experts_per_tok=6,
    swiglu_limit=10.0,
    hc_mult=4,
    hc_sinkhorn_iters=20,
    hc_eps=1e-6,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    compress_rope_theta=160000.0,
    yarn=Yarn(factor=16.0, original_max_position_embeddings=65536),
    max_position_embeddings=1048576,
    bos_token_id=0,
    eos_token_ids=(1,),
)


def flash() -> ModelConfig:
    """DeepSeek-V4-Flash: 43 layers, 284 B parameters."""
    return ModelConfig(
        **_RELEASE,
        hidden_size=4096,
        num_hidden_layers=43,
        num_attention_heads=64,
        q_lora_rank=1024,
        o_groups=8,
        layer_types=(SLIDING, SLIDING) + (CSA, HCA) * 20 + (CSA,),
        mlp_layer_types=("hash_moe",) * 3 + ("moe",) * 40,
        index_topk=512,
        n_routed_experts=256,
        moe_intermediate_size=2048,
        routed_scaling_factor=1.5,
    )


def pro() -> ModelConfig:
    """DeepSeek-V4-Pro: 61 layers, 1.6 T parameters. It has no layer that is sliding attention only."""
    return ModelConfig(
        **_RELEASE,
        hidden_size=7168,
        num_hidden_layers=61,
        num_attention_heads=128,
        q_lora_rank=1536,
        o_groups=16,
        layer_types=(HCA, HCA) + (CSA, HCA) * 29 + (CSA,),
        mlp_layer_types=("hash_moe",) * 3 + ("moe",) * 58,
        index_topk=1024,
        n_routed_experts=384,
        moe_intermediate_size=3072,
        routed_scaling_factor=2.5,
    )


def excerpt(config: ModelConfig, layers: int, first: int = 2, **changed) -> ModelConfig:
    """Fewer layers of a model, all with top-k routing: those from `first` on, where both releases begin to alternate CSA
    and HCA. `changed` replaces other fields."""
    return replace(
        config,
        num_hidden_layers=layers,
        layer_types=config.layer_types[first : first + layers],
        mlp_layer_types=("moe",) * layers,
        **changed,
    )

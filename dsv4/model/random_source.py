"""Random weights of a release's formats, and random cache state, made on the device: what benchmarks and capacity tests
run on."""

import copy
import math

import torch
from torch import Tensor, nn

from dsv4.model.cache import Cache
from dsv4.model.config import ModelConfig
from dsv4.model.linear import Fp8BlockLinear, Nvfp4Experts, Nvfp4Linear, PlainExperts, PlainLinear
from dsv4.model.source import Source
from dsv4.ops.fp8 import BLOCK
from dsv4.ops.nvfp4 import GROUP
from dsv4.ops.row_formats import stored

FORMATS = ("nvfp4-experts", "mxfp4", "all-nvfp4", "bf16")
E2M1_RMS = 2.92  # root mean square of E2M1 codes drawn uniformly
FILLED = 16384  # rows of a cache that are drawn at a time


class RandomSource(Source):
    """Weights that keep activations near unit size, in the layout of a format as a model holds it:

    nvfp4-experts   routed experts NVFP4; attention linears, the indexer's queries and the shared expert FP8-block; the
                    rest bf16
    mxfp4           the native release: the same, with the powers of two for scales that MXFP4 experts are cast to
    all-nvfp4       every linear but router and head NVFP4
    bf16            all plain
    """

    def __init__(self, device: torch.device | str, dtype: torch.dtype = torch.bfloat16, form: str = FORMATS[0], seed=0):
        if form not in FORMATS:
            raise ValueError(f"format must be one of {', '.join(FORMATS)}, found {form!r}")
        self.device, self.dtype, self.form = torch.device(device), dtype, form
        # On the meta device weights have no values.
        self._generator = None if self.device.type == "meta" else torch.Generator(self.device).manual_seed(seed)
        self._path: tuple[str, ...] = ()

    def at(self, name: str) -> "RandomSource":
        child = copy.copy(self)
        child._path = (*self._path, name)
        return child

    def _normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=dtype, generator=self._generator)

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if name.endswith("tid2eid"):
            vocab, k = shape  # k different experts a token: consecutive ones from a random start
            experts = self._experts
            start = torch.randint(experts, (vocab, 1), device=self.device, generator=self._generator)
            return (start + torch.arange(k, device=self.device)) % experts
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=dtype, device=self.device)
        if name.endswith("_scale"):
            return torch.full(shape, 0.7, dtype=dtype, device=self.device)
        if name == "gate.bias":  # a random one would choose the same experts for every token
            return torch.zeros(shape, dtype=dtype, device=self.device)
        if name == "gate.weight":
            self._experts = shape[0]
        fan_in = shape[-1] if len(shape) > 1 else 1
        return (self._normal(*shape) / math.sqrt(fan_in)).to(dtype)

    def linear(self, name: str, out_features: int, in_features: int, groups: int = 1) -> nn.Module:
        if self.form == "all-nvfp4" and name != "head":
            return Nvfp4Linear(*self._codes(out_features, in_features), self._scale_2(in_features), groups)
        weight = self._normal(out_features, in_features, dtype=torch.bfloat16)
        if self.form in ("bf16", "all-nvfp4") or "compressor" in self._path or name in ("weights_proj", "head"):
            return PlainLinear((weight / math.sqrt(in_features)).to(self.dtype), groups)
        blocks = (math.ceil(out_features / BLOCK), math.ceil(in_features / BLOCK))
        scale = torch.full(blocks, in_features**-0.5, device=self.device)
        return Fp8BlockLinear(weight.to(torch.float8_e4m3fn), scale, groups)

    def experts(self, name: str, num_experts: int, hidden: int, intermediate: int, shared: str | None = None) -> nn.Module:
        shared_last = shared is not None and self.form in ("bf16", "all-nvfp4")
        count = num_experts + shared_last
        shapes = (count, 2 * intermediate, hidden), (count, hidden, intermediate)
        if self.form == "bf16":
            weights = (self._normal(*shape, dtype=self.dtype) / math.sqrt(shape[-1]) for shape in shapes)
            return PlainExperts(*weights, shared_last)
        gate_up, down = (self._codes(*shape) for shape in shapes)
        scales_2 = self._scale_2(hidden, count, 2), self._scale_2(intermediate, count)
        return Nvfp4Experts(*gate_up, scales_2[0], *down, scales_2[1], shared_last)

    def _codes(self, *shape: int) -> tuple[Tensor, Tensor]:
        """Random NVFP4 codes of [..., K] with block scales of 1."""
        *rows, k = shape
        packed = torch.randint(256, (*rows, k // 2), dtype=torch.uint8, device=self.device, generator=self._generator)
        return packed, torch.ones(*rows, k // GROUP, device=self.device).to(torch.float8_e4m3fn)

    def _scale_2(self, k: int, *shape: int) -> Tensor:
        """Global scales that give rows of K random codes unit norm, or nearly, where they must be powers of two."""
        value = 1 / (E2M1_RMS * math.sqrt(k))
        return torch.full(shape, 2.0 ** round(math.log2(value)) if self.form == "mxfp4" else value, device=self.device)


@torch.no_grad()
def fill_cache(cache: Cache, config: ModelConfig, seed: int = 0) -> None:
    """Random state of unit size in place of everything that a cache holds, in its formats."""
    generator = None
    for name, buffer in cache.named_buffers():
        generator = generator or torch.Generator(buffer.device).manual_seed(seed)
        if buffer.is_floating_point():
            buffer.normal_(generator=generator)
            continue
        dim, rope = config.head_dim, config.qk_rope_head_dim
        if ".indexer." in name:
            dim = rope = config.index_head_dim
        for slot in range(cache.num_slots):
            for start in range(0, buffer.shape[1], FILLED):
                count = min(FILLED, buffer.shape[1] - start)
                rows = torch.randn(count, dim, device=buffer.device, generator=generator)
                for view, values in stored(rows, buffer, rope):
                    view[slot, start : start + count] = values

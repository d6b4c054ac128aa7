"""Tensor names: the native ones, and the two ways in which transformers writes them.

dsv4 speaks native names only (`layers.3.attn.wq_a.weight`). A folder of another naming is translated when it is opened:

    native       the original release and NVIDIA's NVFP4 exports: no prefix, `layers.3.attn.wq_a.weight`
    hf           transformers' own module names: `model.layers.3.self_attn.q_a_proj.weight`
    hf-original  what transformers 5 writes with save_pretrained by default: native names under `model.`, except that
                 the embedding is hf's, the key-value norm becomes `attn.norm` and the head has no prefix

Names are compared whole, after their numbers are replaced by `*`. So `layers.1` cannot match `layers.10`, `norm` in one
module cannot match `norm` in another, and `w1.weight` cannot match `w1.weight_scale`.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

SKIPPED_PREFIXES = ("mtp.", "model.mtp.")  # the draft heads of both namings; nothing else may be left out

# Modules: the name of what owns a `.weight` and, if quantised, its scales. native -> hf.
TOP_MODULES = {
    "embed": "model.embed_tokens",
    "head": "lm_head",
    "norm": "model.norm",
}
LAYER_MODULES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn.wq_a": "self_attn.q_a_proj",
    "attn.q_norm": "self_attn.q_a_norm",
    "attn.wq_b": "self_attn.q_b_proj",
    "attn.wkv": "self_attn.kv_proj",
    "attn.kv_norm": "self_attn.kv_norm",
    "attn.wo_a": "self_attn.o_a_proj",
    "attn.wo_b": "self_attn.o_b_proj",
    "attn.compressor.wkv": "self_attn.compressor.kv_proj",
    "attn.compressor.wgate": "self_attn.compressor.gate_proj",
    "attn.compressor.norm": "self_attn.compressor.kv_norm",
    "attn.indexer.compressor.wkv": "self_attn.compressor.indexer.kv_proj",
    "attn.indexer.compressor.wgate": "self_attn.compressor.indexer.gate_proj",
    "attn.indexer.compressor.norm": "self_attn.compressor.indexer.kv_norm",
    "attn.indexer.wq_b": "self_attn.compressor.indexer.q_b_proj",
    "attn.indexer.weights_proj": "self_attn.compressor.indexer.scorer.weights_proj",
    "ffn.gate": "mlp.gate",
    "ffn.experts.*.w1": "mlp.experts.*.gate_proj",
    "ffn.experts.*.w2": "mlp.experts.*.down_proj",
    "ffn.experts.*.w3": "mlp.experts.*.up_proj",
    "ffn.shared_experts.w1": "mlp.shared_experts.gate_proj",
    "ffn.shared_experts.w2": "mlp.shared_experts.down_proj",
    "ffn.shared_experts.w3": "mlp.shared_experts.up_proj",
}
# Read as well as the hf names above, never written: seen in exports made with other versions of transformers.
LAYER_MODULE_ALIASES = {
    "self_attn.compressor.indexer.weights_proj": "attn.indexer.weights_proj",
    "mlp.experts.*.w1": "ffn.experts.*.w1",
    "mlp.experts.*.w2": "ffn.experts.*.w2",
    "mlp.experts.*.w3": "ffn.experts.*.w3",
}

# Plain tensors: whole names, no suffix. native -> hf.
TOP_TENSORS = {
    "hc_head_fn": "model.hc_head.hc_fn",
    "hc_head_base": "model.hc_head.hc_base",
    "hc_head_scale": "model.hc_head.hc_scale",
}
LAYER_TENSORS = {
    "hc_attn_fn": "attn_hc.fn",
    "hc_attn_base": "attn_hc.base",
    "hc_attn_scale": "attn_hc.scale",
    "hc_ffn_fn": "ffn_hc.fn",
    "hc_ffn_base": "ffn_hc.base",
    "hc_ffn_scale": "ffn_hc.scale",
    "attn.attn_sink": "self_attn.sinks",
    "attn.compressor.ape": "self_attn.compressor.position_bias",
    "attn.indexer.compressor.ape": "self_attn.compressor.indexer.position_bias",
    "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
    "ffn.gate.tid2eid": "mlp.gate.tid2eid",
}
# Fused expert stacks exist in hf only; their native spelling here is ours. The weight itself ends in nothing or is a
# module with a `.weight`; scales follow a dot, or an underscore and then are tensors of their own.
FUSED_EXPERTS = ("gate_up_proj", "down_proj")
FUSED_ENDINGS = (
    *("", "_weight", "_packed", "_weight_packed", "_scale", "_scale_inv", "_weight_scale", "_weight_scale_inv"),
    *("_weight_scale_2", "_weight_global_scale", "_input_scale", "_input_global_scale"),
)
LAYER_MODULES |= {f"ffn.experts.{leaf}": f"mlp.experts.{leaf}" for leaf in FUSED_EXPERTS}
LAYER_TENSORS |= {
    f"ffn.experts.{leaf}{ending}": f"mlp.experts.{leaf}{ending}" for leaf in FUSED_EXPERTS for ending in FUSED_ENDINGS
}

# Where hf-original is neither `model.` + native nor, for the top tensors, hf.
HF_ORIGINAL_MODULES = {
    "embed": "model.embed_tokens",
    "head": "head",
    "layers.*.attn.kv_norm": "model.layers.*.attn.norm",
}

# The block scale of a module: native suffix, hf suffix. Every other suffix is the same in all namings.
NATIVE_SCALE, HF_SCALE = "scale", "weight_scale_inv"
_NUMBER = re.compile(r"(?<![^.])[0-9]+(?![^.])")  # a whole component of a name


@dataclass(frozen=True, eq=False)
class Naming:
    """One way of spelling the names of a checkpoint, as maps between patterns (numbers replaced by `*`)."""

    name: str
    modules: dict[str, str]  # native pattern -> this naming's pattern
    tensors: dict[str, str]
    scale: str
    aliases: dict[str, str] = field(default_factory=dict)  # further module patterns of this naming -> native pattern

    def __post_init__(self):
        native_modules = {theirs: native for native, theirs in self.modules.items()} | self.aliases
        object.__setattr__(self, "_native_modules", native_modules)
        object.__setattr__(self, "_native_tensors", {theirs: native for native, theirs in self.tensors.items()})

    def to_native(self, name: str) -> str | None:
        """The native name of a tensor of this naming, or None when this naming has no such tensor."""
        return self._translate(name, self._native_tensors, self._native_modules, self.scale, NATIVE_SCALE)

    def from_native(self, name: str) -> str | None:
        """This naming's name of a tensor given by its native name, or None when there is no such tensor."""
        return self._translate(name, self.tensors, self.modules, NATIVE_SCALE, self.scale)

    @staticmethod
    def _translate(name: str, tensors: dict, modules: dict, scale: str, new_scale: str) -> str | None:
        pattern, numbers = _pattern(name)
        if pattern in tensors:
            return _fill(tensors[pattern], numbers)
        module, _, suffix = pattern.rpartition(".")
        # A suffix is a word: `layers.*` or `experts.*` end in a number and name no tensor.
        if module not in modules or suffix == "*":
            return None
        return _fill(modules[module], numbers) + "." + (new_scale if suffix == scale else suffix)


def _pattern(name: str) -> tuple[str, list[str]]:
    """`layers.10.ffn.experts.3.w1.weight` -> (`layers.*.ffn.experts.*.w1.weight`, ["10", "3"])."""
    return _NUMBER.sub("*", name), _NUMBER.findall(name)


def _fill(pattern: str, numbers: list[str]) -> str:
    pieces = pattern.split("*")
    return pieces[0] + "".join(number + piece for number, piece in zip(numbers, pieces[1:], strict=True))


def _join(top: dict[str, str], layer: dict[str, str], ours: str, theirs: str) -> dict[str, str]:
    return top | {ours + native: theirs + other for native, other in layer.items()}


def _namings() -> tuple[Naming, Naming, Naming]:
    modules = _join(TOP_MODULES, LAYER_MODULES, "layers.*.", "model.layers.*.")
    tensors = _join(TOP_TENSORS, LAYER_TENSORS, "layers.*.", "model.layers.*.")
    aliases = _join({}, LAYER_MODULE_ALIASES, "model.layers.*.", "layers.*.")
    native = Naming("native", {name: name for name in modules}, {name: name for name in tensors}, NATIVE_SCALE)
    hf = Naming("hf", modules, tensors, HF_SCALE, aliases)
    original_modules = {name: "model." + name for name in modules} | HF_ORIGINAL_MODULES
    original_tensors = {name: "model." + name for name in tensors} | TOP_TENSORS
    return native, hf, Naming("hf-original", original_modules, original_tensors, HF_SCALE)


NATIVE, HF, HF_ORIGINAL = NAMINGS = _namings()


def native_to_hf(name: str) -> str:
    """`layers.0.attn.wq_a.scale` -> `model.layers.0.self_attn.q_a_proj.weight_scale_inv`. ValueError if unknown.

    Experts keep one name each (`mlp.experts.3.gate_proj.weight`): stacking them is not a matter of names.
    """
    return _required(HF.from_native(name), name, NATIVE)


def hf_to_native(name: str) -> str:
    """The converse of `native_to_hf`; also accepts the known other spellings. ValueError if unknown."""
    return _required(HF.to_native(name), name, HF)


def _required(translated: str | None, name: str, naming: Naming) -> str:
    if translated is None:
        raise ValueError(f"{name!r} is not a {naming.name} tensor name of DeepSeek-V4")
    return translated


def is_skipped(name: str) -> bool:
    """Whether a tensor belongs to a draft head (`mtp.`), which dsv4 does not load."""
    return name.startswith(SKIPPED_PREFIXES)


def draft_kind(names: Iterable[str]) -> str | None:
    """What kind of draft head a checkpoint has, by the projection that only this kind has: "MTP" (one block, the first
    release), "DSpark" (three blocks, the later ones), "unknown kind", or None without one."""
    drafts = [name for name in names if is_skipped(name)]
    for module, kind in (("e_proj", "MTP"), ("main_proj", "DSpark")):
        if any(module in name.split(".") for name in drafts):
            return kind
    return "unknown kind" if drafts else None


def recognise(names: Iterable[str]) -> Naming:
    """The one naming in which a folder's tensor names (without skipped ones) are spelt.

    Names that no naming knows are left for the accounting at the end of the load. ValueError when none is known, or
    when two known names are of different namings.
    """
    examples = {_pattern(name)[0]: name for name in names}.values()
    known = {naming: {name for name in examples if naming.to_native(name)} for naming in NAMINGS}
    everything = set().union(*known.values())
    if not everything:
        first = min(examples, default=None)
        raise ValueError(f"no tensor has a name of DeepSeek-V4 (the first is {first!r}): this is another model")
    best = max(NAMINGS, key=lambda naming: len(known[naming]))
    if known[best] != everything:
        ours = min(known[best])
        other = min(everything - known[best])
        kind = next(naming.name for naming in NAMINGS if other in known[naming])
        raise ValueError(
            f"mixed naming: {ours!r} is a {best.name} name and {other!r} a {kind} name; "
            "save the checkpoint again with one naming throughout"
        )
    return best

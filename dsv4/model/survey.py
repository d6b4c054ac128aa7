"""What is in a checkpoint folder, part by part, from file headers alone; also of folders that do not load.

`dsv4.model.checkpoint` stops at the first thing that is wrong. A survey goes on: it collects what is wrong in `problems`
(any of which stops a load) and what is merely odd in `oddities`, and counts what can be counted.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from dsv4.model import formats, names, stacks
from dsv4.model.config import ModelConfig, read_json_object
from dsv4.model.export import stored_kind
from dsv4.model.shards import INDEX_NAME, Folder, Stored, read_header

DRAFT = "draft head (mtp)"
UNKNOWN = "unknown"
# By what follows `layers.N.`: two components, else one. Then by the first component.
LAYER_PARTS = {
    "attn.indexer": "indexer",
    "attn.compressor": "compressors",
    "ffn.experts": "routed experts",
    "ffn.shared_experts": "shared experts",
    "ffn.gate": "router",
    "attn": "attention",
    "attn_norm": "norms",
    "ffn_norm": "norms",
}
TOP_PARTS = {"embed": "embeddings", "head": "head", "norm": "norms"}
PLAIN_DTYPES = {"float32": "F32", "bfloat16": "BF16", "int64": "I64"}
SHOWN = 3  # examples of problems of one kind
_NUMBER = re.compile(r"(?<![^.])[0-9]+(?![^.])")  # a whole component of a name


@dataclass
class Part:
    """One part of the model: tensors, bytes on disk, parameters, and bytes by format."""

    name: str
    tensors: int = 0
    bytes: int = 0
    parameters: int = 0
    formats: Counter = field(default_factory=Counter)


@dataclass
class Survey:
    """A folder's content. `tensors` holds all but the skipped ones, by native name where the naming has one."""

    path: Path
    folder: Folder
    naming: str | None = None
    tensors: dict[str, Stored] = field(default_factory=dict)
    parts: dict[str, Part] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    oddities: list[str] = field(default_factory=list)

    @property
    def files(self) -> int:
        return len({stored.file for stored in self.folder.tensors.values()})

    @property
    def bytes(self) -> int:
        return sum(stored.nbytes for stored in self.folder.tensors.values())

    def parameters(self) -> int:
        """Of the model without its draft head."""
        return sum(part.parameters for part in self.parts.values() if part.name != DRAFT)

    def active_parameters(self, config: ModelConfig) -> int:
        """Those that one token meets: all but the embedding table, and of the routed experts the picked ones."""
        routed, embeddings = (self.parts.get(name, Part(name)).parameters for name in ("routed experts", "embeddings"))
        picked = routed * config.num_experts_per_tok // config.n_routed_experts
        return self.parameters() - embeddings - routed + picked

    def weight_bytes(self) -> dict[str, int]:
        """Bytes on disk by native name, of what a model of this folder would hold."""
        ignored = {suffix for form in formats.FORMATS for suffix in form.ignored}
        return {name: stored.nbytes for name, stored in self.tensors.items() if name.rpartition(".")[2] not in ignored}


def survey(path: str | Path) -> Survey:
    """Read a folder's headers. ValueError only if there is no such folder."""
    path = Path(path)
    if not path.is_dir():
        raise ValueError(f"{path}: no such folder; give the folder that holds config.json and *.safetensors")
    try:
        result = Survey(path, Folder.open(path))
    except (ValueError, OSError) as error:
        result = Survey(path, Folder(path, {}, ()), problems=[str(error)])
        _read_what_can_be_read(result)
    folder = result.folder
    kept = {name: stored for name, stored in folder.tensors.items() if not names.is_skipped(name)}
    try:
        naming = names.recognise(kept)
        result.naming = naming.name
        result.tensors = {naming.to_native(name) or name: stored for name, stored in kept.items()}
    except ValueError as error:
        result.tensors = kept
        if folder.tensors:
            result.problems.append(f"{path}: {error}")
    skipped = {name: stored for name, stored in folder.tensors.items() if name not in kept}
    found, bad = _count(result.parts, result.tensors, part_of)
    result.problems += bad[:SHOWN] + ([f"{len(bad) - SHOWN} more weights like these"] if bad[SHOWN:] else [])
    _, bad = _count(result.parts, skipped, lambda name: DRAFT)
    if bad:  # a load does not look at what it skips
        result.oddities.append(f"skipped, but {bad[0]}" + (f"; and {len(bad) - 1} more" if bad[1:] else ""))
    _look_at_formats(result, found)
    _look_at_files(result)
    return result


def part_of(name: str) -> str:
    """The part of the model that a native tensor name belongs to."""
    top, _, rest = name.partition(".")
    if top != "layers":
        return "hyper-connections" if top.startswith("hc_head_") else TOP_PARTS.get(top, UNKNOWN)
    words = rest.split(".", 3)[1:3]
    found = LAYER_PARTS.get(".".join(words)) or LAYER_PARTS.get(words[0] if words else "")
    return found or ("hyper-connections" if words and words[0].startswith("hc_") else UNKNOWN)


def split_name(name: str) -> tuple[str, str | None]:
    """A native tensor name as module and suffix (of formats.SUFFIXES), or the whole name and None."""
    head, dot, tail = name.rpartition(".ffn.experts.")
    for leaf in stacks.FUSED if dot else ():
        if tail.startswith(leaf):
            endings = {ending: suffix for suffix in formats.SUFFIXES for ending in stacks.fused_endings(suffix)}
            return f"{head}{dot}{leaf}", endings.get(tail.removeprefix(leaf))
    module, _, suffix = name.rpartition(".")
    return (module, suffix) if suffix in formats.SUFFIXES else (name, None)


def _read_what_can_be_read(result: Survey) -> None:
    for file in sorted(result.path.glob("*.safetensors")):
        try:
            for name, stored in read_header(file).items():
                result.folder.tensors.setdefault(name, stored)
        except (ValueError, OSError) as error:
            if str(error) not in result.problems:
                result.problems.append(str(error))


def _count(
    parts: dict[str, Part], tensors: dict[str, Stored], part: Callable[[str], str]
) -> tuple[dict[str, str], list[str]]:
    """Count tensors into parts. Returns the format of each weight by name, dtypes standing for plain ones, and what is
    wrong with weights and their scales."""
    modules: dict[str, dict[str, Stored]] = {}
    found: dict[str, str] = {}
    for name, stored in tensors.items():
        which = part(name)
        here = parts.get(which) or parts.setdefault(which, Part(which))
        here.tensors += 1
        here.bytes += stored.nbytes
        module, suffix = split_name(name)
        if suffix is not None:
            modules.setdefault(module, {})[suffix] = stored
            continue
        here.formats[stored.dtype] += stored.nbytes
        found[name] = stored.dtype
        if stored.dtype not in ("I64", "I32"):
            here.parameters += math.prod(stored.shape)
    bad: list[str] = []
    for module, group in modules.items():
        here = parts[part(f"{module}.weight")]
        label, factor = "unknown", 1
        weight = next((group[suffix] for suffix in formats.WEIGHT_SUFFIXES if suffix in group), None)
        if weight is None:
            bad.append(f"{next(iter(group.values()))} is a scale without its weight")
        else:
            try:
                form = formats.recognise(group)
                plain = form is formats.PLAIN
                label = weight.dtype if plain else form.name
                factor = 1024**2 // math.prod(form.weight.shape(1024, 1024))
            except ValueError as error:
                bad.append(str(error))
            here.parameters += factor * math.prod(weight.shape)
            found[f"{module}.weight"] = label
        here.formats[label] += sum(stored.nbytes for stored in group.values())
    return found, bad


def _look_at_formats(result: Survey, found: dict[str, str]) -> None:
    """Oddities: weights of one kind in several formats, and plain tensors of another dtype than the releases have."""
    kinds: dict[str, Counter] = {}
    for name, label in found.items():
        kinds.setdefault(_NUMBER.sub("*", name), Counter())[label] += 1
    others: dict[tuple[str, str], list[str]] = {}
    for pattern, labels in kinds.items():
        if len(labels) > 1:
            counts = ", ".join(f"{label} in {count}" for label, count in labels.most_common())
            result.oddities.append(f"{pattern} is stored in several formats: {counts}")
        try:
            expected = PLAIN_DTYPES.get(stored_kind(pattern.replace("*", "0")))
        except ValueError:
            continue  # no tensor of this model: a problem, not an oddity
        for label in labels if expected else ():
            if label != expected:
                others.setdefault((label, expected), []).append(pattern)
    for (label, expected), patterns in others.items():
        more = f" and {len(patterns) - SHOWN} kinds more" if patterns[SHOWN:] else ""
        shown = ", ".join(sorted(patterns)[:SHOWN])
        result.oddities.append(f"{shown}{more} are {label}, where the releases have {expected}")


def _look_at_files(result: Survey) -> None:
    """Oddities of the folder: files nobody reads, skipped tensors, an index with another total, no tokenizer."""
    if unused := result.folder.unused_files:
        more = f" and {len(unused) - SHOWN} more" if len(unused) > SHOWN else ""
        result.oddities.append(f"files not used: {', '.join(unused[:SHOWN])}{more}")
    if draft := result.parts.get(DRAFT):
        kind = names.draft_kind(result.folder.tensors)
        result.oddities.append(f"{draft.tensors} tensors of the draft head (mtp.*, {kind}) are skipped")
    if not (result.path / "tokenizer.json").is_file():
        result.oddities.append("no tokenizer.json: prompts can only be given as token ids")
    try:
        total = json.loads((result.path / INDEX_NAME).read_bytes())["metadata"]["total_size"]
    except (OSError, ValueError, LookupError, TypeError):
        return
    if total != result.bytes and not result.problems:
        result.oddities.append(f"{INDEX_NAME} says total_size {total}, the shards hold {result.bytes} bytes")


def config_oddities(result: Survey) -> list[str]:
    """Where config.json describes other weights than the folder holds. dsv4 goes by the weights, other engines may not."""
    try:
        values = read_json_object(result.path / "config.json")
    except (ValueError, OSError):
        return []  # a problem, and reported as one
    out = []
    experts = set(result.parts.get("routed experts", Part("")).formats) - {"unknown"}
    every = {label for part in result.parts.values() if part.name != DRAFT for label in part.formats}
    quantised = sorted(every & {form.name for form in formats.FORMATS if form is not formats.PLAIN})
    settings = values.get("quantization_config")
    settings = settings if isinstance(settings, dict) else {}
    if not settings and quantised:
        out.append(f"config.json has no quantization_config, but there are {', '.join(quantised)} weights")
    algorithm = settings.get("moe_quant_algo")
    if algorithm is not None and experts and not any(label.startswith(str(algorithm)) for label in experts):
        out.append(f"config.json says moe_quant_algo {algorithm}, the routed experts are {', '.join(sorted(experts))}")
    if settings.get("quant_method") == "fp8" and formats.FP8_BLOCK.name not in every:
        out.append("config.json says quant_method fp8, but no weight is FP8")
    expert_dtype = values.get("expert_dtype")
    four_bits = any("FP4" in label for label in experts)
    if expert_dtype is not None and experts and (expert_dtype == "fp4") != four_bits:
        out.append(f"config.json says expert_dtype {expert_dtype}, the routed experts are {', '.join(sorted(experts))}")
    draft = values.get("num_nextn_predict_layers") or 0
    if bool(draft) != (DRAFT in result.parts) and result.tensors:
        has = "has" if DRAFT in result.parts else "has no"
        out.append(f"config.json says num_nextn_predict_layers {draft}, the folder {has} mtp.* tensors")
    return out

"""Conversion of a checkpoint to one of the formats of dsv4.model.targets, weight by weight.

`items` decides from the headers alone what becomes of every tensor of a folder: names, dtypes, shapes and sizes of the
result are known before anything is read. `convert` then does one item, holding little more than its weights in memory.
What is in its final format already is copied byte for byte; MXFP4 weights keep their codes and get other scales of the
same values; all else is dequantised to float32 and quantised or cast, and the error that this makes is measured.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dsv4.model import formats, names, stacks
from dsv4.model.export import shared_scale_2
from dsv4.model.formats import Format
from dsv4.model.linear import Fp8BlockLinear, Nvfp4Linear
from dsv4.model.shards import BITS, Folder, Reader, Stored
from dsv4.model.survey import split_name
from dsv4.model.targets import Target
from dsv4.ops.fp8 import BLOCK, dequantize_fp8_block, quantize_fp8_block
from dsv4.ops.mxfp4 import mxfp4_to_nvfp4
from dsv4.ops.nvfp4 import GROUP, dequantize_nvfp4, quantize_nvfp4

COPY_BYTES = 64 * 2**20  # of a tensor that is copied, at a time
PLAIN_DTYPES = {"float32": "F32", "bfloat16": "BF16", "int64": "I64"}


@dataclass(frozen=True)
class Weight:
    """A weight of the source by its native name without suffix: its format, its tensors by role, those not needed."""

    name: str
    form: Format
    parts: dict[str, Stored]
    ignored: dict[str, Stored] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.parts["weight"].shape
        return rows, columns * 1024 // self.form.weight.shape(1, 1024)[1]


@dataclass(frozen=True)
class Output:
    """One tensor of the result, as safetensors names dtypes."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * BITS[self.dtype] // 8


@dataclass(frozen=True)
class Item:
    """What is converted at a time. `kind`: copy (`stored` as it is), or nvfp4, fp8, bfloat16, float32, int64, made of
    `weights`."""

    kind: str
    outputs: tuple[Output, ...]
    weights: tuple[Weight, ...] = ()
    stored: tuple[Stored, ...] = ()

    @property
    def sources(self) -> tuple[Stored, ...]:
        return self.stored + tuple(stored for weight in self.weights for stored in weight.parts.values())

    @property
    def source_bytes(self) -> int:
        return sum(stored.nbytes for stored in self.sources)

    @property
    def output_bytes(self) -> int:
        return sum(output.nbytes for output in self.outputs)


def items(folder: Folder, target: Target, drop_mtp: bool = False) -> list[Item]:
    """Everything to do for a folder that loads, in the order of the source's files.

    Tensors of the draft head are copied as they are, under names without transformers' `model.` prefix. ValueError for a
    weight that the format has no place for.
    """
    kept = {name: stored for name, stored in folder.tensors.items() if not names.is_skipped(name)}
    naming = names.recognise(kept)
    found: list[Item] = []
    groups: dict[str, dict[str, Stored]] = {}
    for name, stored in kept.items():
        native = naming.to_native(name) or name
        module, suffix = split_name(native)
        if suffix is not None:
            groups.setdefault(module, {})[suffix] = stored
        else:
            found.append(_plain_item(native, stored, target.kind(native)))
    pairs: dict[str, dict[str, Weight]] = {}  # w1 and w3 of one expert share a scale
    for module, group in groups.items():
        form = formats.recognise(group)
        for weight in _weights(module, form, group):
            kind = target.kind(f"{weight.name}.weight")
            expert, _, part = weight.name.rpartition(".")
            if kind != "nvfp4":
                found.append(_fp8_item(weight) if kind == "fp8" else _dequantised_item(weight, kind))
            elif part in ("w1", "w3"):
                pairs.setdefault(expert, {})[part] = weight
            else:
                found.append(_nvfp4_item(weight))
    found += [_nvfp4_item(pair["w1"], pair["w3"]) for pair in pairs.values()]
    found = [_renamed(item, target) for item in found]
    if not drop_mtp:
        skipped = folder.tensors.keys() - kept.keys()
        found += [_copy((name.removeprefix("model."), folder.tensors[name])) for name in skipped]
    return sorted(found, key=lambda item: (item.sources[0].file.name, item.sources[0].start, item.outputs[0].name))


def _weights(module: str, form: Format, group: dict[str, Stored]) -> Iterator[Weight]:
    """The weight of a module, or those of all experts in a fused one, each as a slice of the fused tensors."""
    parts = {part.role: next(group[s] for s in part.suffixes if s in group) for part in form.parts}
    ignored = {suffix: group[suffix] for suffix in form.ignored if suffix in group}
    path, _, leaf = module.rpartition(".")
    if leaf not in stacks.FUSED:
        yield Weight(module, form, parts, ignored)
        return
    halves = ("w1", "w3") if leaf == stacks.FUSED[0] else ("w2",)
    count = parts["weight"].shape[0]
    scalars = {part.role for part in form.parts if part.shape(0, 0) == ()}
    for expert in range(count):
        for half, part in enumerate(halves):
            place = (expert, half, count, len(halves))
            yield Weight(
                f"{path}.{expert}.{part}",
                form,
                {role: (_scalar if role in scalars else _matrix)(stored, *place) for role, stored in parts.items()},
                {suffix: _scalar(stored, *place) for suffix, stored in ignored.items()},
            )


def _matrix(stored: Stored, expert: int, half: int, count: int, halves: int) -> Stored:
    """One half of an expert's rows in a fused tensor [E, rows, columns]."""
    nbytes = stored.nbytes // (count * halves)
    shape = (stored.shape[1] // halves, stored.shape[2])
    return replace(stored, shape=shape, start=stored.start + (expert * halves + half) * nbytes, nbytes=nbytes)


def _scalar(stored: Stored, expert: int, half: int, count: int, halves: int) -> Stored:
    """A matrix's scalar among one for all, one for each expert, or one for each half of an expert."""
    pieces = math.prod(stored.shape)
    index = 0 if pieces == 1 else expert if pieces == count else expert * halves + half
    nbytes = stored.nbytes // pieces
    return replace(stored, shape=(), start=stored.start + index * nbytes, nbytes=nbytes)


def _copy(*pairs: tuple[str, Stored]) -> Item:
    outputs = tuple(Output(name, stored.dtype, stored.shape) for name, stored in pairs)
    return Item("copy", outputs, stored=tuple(stored for _, stored in pairs))


def _renamed(item: Item, target: Target) -> Item:
    return replace(item, outputs=tuple(replace(output, name=target.spelt(output.name)) for output in item.outputs))


def _plain_item(name: str, stored: Stored, kind: str) -> Item:
    if kind not in PLAIN_DTYPES:
        raise ValueError(f"{stored}: a weight was expected, with or without scales")
    if stored.dtype == PLAIN_DTYPES[kind]:
        return _copy((name, stored))
    weight = Weight(name, formats.PLAIN, {"weight": stored})
    return Item(kind, (Output(name, PLAIN_DTYPES[kind], stored.shape),), (weight,))


def _dequantised_item(weight: Weight, kind: str) -> Item:
    stored, name = weight.parts["weight"], f"{weight.name}.weight"
    if weight.form is formats.PLAIN:
        return _plain_item(name, stored, kind)
    return Item(kind, (Output(name, PLAIN_DTYPES[kind], weight.shape),), (weight,))


def _fp8_item(weight: Weight) -> Item:
    name = weight.name
    if weight.form is formats.FP8_BLOCK:
        return _copy((f"{name}.weight", weight.parts["weight"]), (f"{name}.scale", weight.parts["scale"]))
    n, k = weight.shape
    blocks = -(-n // BLOCK), -(-k // BLOCK)
    return Item("fp8", (Output(f"{name}.weight", "F8_E4M3", (n, k)), Output(f"{name}.scale", "F8_E8M0", blocks)), (weight,))


def _nvfp4_item(*weights: Weight) -> Item:
    outputs = []
    for weight in weights:
        n, k = weight.shape
        if k % GROUP:
            raise ValueError(f"{weight.parts['weight']}: NVFP4 needs in_features divisible by {GROUP}, found {k}")
        outputs += [
            Output(f"{weight.name}.weight", "U8", (n, k // 2)),
            Output(f"{weight.name}.weight_scale", "F8_E4M3", (n, k // GROUP)),
            Output(f"{weight.name}.weight_scale_2", "F32", ()),
            Output(f"{weight.name}.input_scale", "F32", ()),
        ]
    return Item("nvfp4", tuple(outputs), weights)


@dataclass(frozen=True)
class Outcome:
    """What happened to one weight: copied, cast without loss, or quantised with an error against the source's values
    (relative root mean square, and the largest difference of two values)."""

    name: str
    how: str
    relative_rms: float = 0.0
    max_error: float = 0.0


def convert(
    item: Item, reader: Reader, outcomes: list[Outcome], device: torch.device | str = "cpu"
) -> Iterator[tuple[str, Tensor]]:
    """The item's output tensors by name (a copied one in pieces of bytes), and an Outcome for each weight. Values are
    computed on `device`.

    ValueError when the source holds numbers that are not finite where they matter.
    """
    match item.kind:
        case "copy":
            for output, stored in zip(item.outputs, item.stored, strict=True):
                yield from ((output.name, piece) for piece in _bytes(reader, stored))
            outcomes.append(Outcome(item.outputs[0].name, "copied"))
        case "nvfp4":
            yield from _to_nvfp4(item, reader, outcomes, device)
        case "fp8":
            [weight] = item.weights
            value = _dequantised(weight, _read(weight, reader, device))
            quantised, scale = quantize_fp8_block(value)
            yield from zip((output.name for output in item.outputs), (quantised, scale), strict=True)
            restored = dequantize_fp8_block(quantised, scale)
            outcomes.append(_outcome(item.outputs[0].name, "quantised to FP8", value, restored))
        case kind:
            [weight] = item.weights
            tensors = _read(weight, reader, device)
            value = tensors["weight"] if kind == "int64" else _dequantised(weight, tensors)
            result = value.to(getattr(torch, kind))
            yield item.outputs[0].name, result
            outcomes.append(_outcome(item.outputs[0].name, f"cast to {PLAIN_DTYPES[kind]}", value, result))


def _to_nvfp4(
    item: Item, reader: Reader, outcomes: list[Outcome], device: torch.device | str
) -> Iterator[tuple[str, Tensor]]:
    """Weights that share one scale_2: an expert's w1 with its w3, or one alone."""
    weights, forms = item.weights, {weight.form for weight in item.weights}
    how, values, result = "", [], None
    if forms == {formats.MXFP4}:
        how, result = "MXFP4 scales recast", _recast(weights, reader)
    if result is None:
        read = [_read(weight, reader, device) for weight in weights]
        if all("scale_2" in one for one in read) and all(one["scale_2"].equal(read[0]["scale_2"]) for one in read):
            how, result = "copied", [(one["weight"], one["scale"], one["scale_2"]) for one in read]
        else:
            values = [_dequantised(*pair) for pair in zip(weights, read, strict=True)]
            scale_2 = shared_scale_2(*values)
            how, result = "quantised to NVFP4", [quantize_nvfp4(value, scale_2) for value in values]
    input_scale = _input_scale(weights, reader)
    for index, (packed, scale, scale_2) in enumerate(result):
        outputs = [output.name for output in item.outputs[4 * index : 4 * index + 4]]  # in the order of _nvfp4_item
        yield from zip(outputs, (packed, scale, scale_2, input_scale), strict=True)
        if values:
            outcomes.append(_outcome(outputs[0], how, values[index], dequantize_nvfp4(packed, scale, scale_2)))
        else:
            outcomes.append(Outcome(outputs[0], how))


def _recast(weights: tuple[Weight, ...], reader: Reader) -> list[tuple[Tensor, Tensor, Tensor]] | None:
    """MXFP4 weights as NVFP4 ones of the same values and one common scale_2; None where their exponents lie too far apart
    for that (each weight alone may do)."""
    packed, scale = (torch.cat([reader.read(weight.parts[role]) for weight in weights]) for role in ("weight", "scale"))
    rows = [weight.shape[0] for weight in weights]
    try:
        codes, scales, scale_2 = mxfp4_to_nvfp4(packed, scale)
    except ValueError:
        return None  # NaN scales are found again, and refused, when the values are needed
    return [(codes, scales, scale_2) for codes, scales in zip(codes.split(rows), scales.split(rows), strict=True)]


def _input_scale(weights: tuple[Weight, ...], reader: Reader) -> Tensor:
    """The activation's scale, common to the weights; 1, the scale of no calibration, where the source has none."""
    found = []
    for weight in weights:
        for suffix, stored in weight.ignored.items():
            value = float(reader.read(stored).float().reshape(()))
            found.append(1 / value if suffix == "input_global_scale" and value else value)
    result = max(found, default=1.0)
    if not (math.isfinite(result) and result > 0):
        raise ValueError(f"{weights[0].parts['weight']}: its input scale is {result}, expected a positive number")
    return torch.tensor(result, dtype=torch.float32)


def _read(weight: Weight, reader: Reader, device: torch.device | str) -> dict[str, Tensor]:
    """The tensors of a weight by role, checked and repacked as a load does it, plain ones as stored."""
    tensors, at_fault = {}, weight.parts["weight"]
    try:
        for part in weight.form.parts:
            at_fault = weight.parts[part.role]
            stored = reader.read(at_fault)
            tensors[part.role] = stored if weight.form is formats.PLAIN else part.convert(stored, torch.float32)
        tensors = weight.form.repack(tensors) if weight.form.repack else tensors
    except ValueError as error:
        raise ValueError(f"{at_fault}: {error}") from error
    return {role: tensor.to(device) for role, tensor in tensors.items()}


def _dequantised(weight: Weight, tensors: dict[str, Tensor]) -> Tensor:
    """The weight in float32. ValueError if any of it is not finite."""
    value = tensors["weight"].float() if weight.form is formats.PLAIN else None
    if value is None:
        module = weight.form.linear(tensors, 1)
        if isinstance(module, Nvfp4Linear):
            value = dequantize_nvfp4(module.weight, module.scale, module.scale_2)
        elif isinstance(module, Fp8BlockLinear):
            value = dequantize_fp8_block(module.weight, module.scale)
        else:
            raise ValueError(f"{weight.parts['weight']}: {weight.form.name} weights cannot be converted")
    if not value.isfinite().all():
        raise ValueError(f"{weight.parts['weight']}: holds values that are not finite")
    return value


def _outcome(name: str, how: str, value: Tensor, result: Tensor) -> Outcome:
    difference, size = (result.float() - value.float()).abs(), value.float().norm().item()
    largest = difference.max().item() if difference.numel() else 0.0
    return Outcome(name, how, difference.norm().item() / size if size else 0.0, largest)


def _bytes(reader: Reader, stored: Stored) -> Iterator[Tensor]:
    """The tensor's bytes as they are, in pieces."""
    for start in range(0, stored.nbytes, COPY_BYTES):
        count = min(COPY_BYTES, stored.nbytes - start)
        yield reader.read(replace(stored, dtype="U8", shape=(count,), start=stored.start + start, nbytes=count))

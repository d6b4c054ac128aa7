"""Weight formats: how each is recognised in a checkpoint, checked, converted and turned into modules.

A format is one entry of FORMATS: the tensors that make up a weight on disk (a `Part` each: the suffixes it may have,
dtype, shape, conversion) and the modules that hold the converted tensors. The format of a weight is decided from the
dtype of its tensor and from the scales beside it, never from the config: a checkpoint mixes formats, and its config
describes only some of them. Adding a format means adding an entry; nothing else knows them by name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dsv4.model.linear import Fp8BlockLinear, Fp8Experts, Nvfp4Experts, Nvfp4Linear, PlainExperts, PlainLinear
from dsv4.model.shards import Stored
from dsv4.ops import fp8, mxfp4, nvfp4

FLOATS = ("BF16", "F16", "F32")


@dataclass(frozen=True)
class Part:
    """One tensor of a weight. `role` names it in memory, `suffixes` are its possible names on disk."""

    role: str
    suffixes: tuple[str, ...]
    dtypes: tuple[str, ...]
    shape: Callable[[int, int], tuple[int, ...]]  # of out_features, in_features
    convert: Callable[[Tensor, torch.dtype], Tensor]  # of the stored tensor and the engine dtype; checks the values


@dataclass(frozen=True)
class Format:
    """A weight format. `weight` is the part whose presence and dtype it is recognised by, `scales` the rest.

    linear(tensors by role, groups) and experts(gate_up tensors by role, down tensors by role, whether the last expert is
    the shared one) build the modules; the experts' tensors are stacked: gate_up [E, 2I, ...] (w1's rows, then w3's) and
    down [E, H, ...], scalars [E, 2] and [E]. Where files and modules have different parts, `repack` turns the tensors of
    one weight from the one to the other, by role.
    """

    name: str
    weight: Part
    linear: Callable[[dict[str, Tensor], int], nn.Module]
    experts: Callable[[dict[str, Tensor], dict[str, Tensor], bool], nn.Module]
    scales: tuple[Part, ...] = ()
    ignored: tuple[str, ...] = ()  # suffixes accounted for but not read
    in_multiple: int = 1  # in_features must be a multiple
    out_block: int = 1  # rows that share a scale: w1 and w3 stored as one tensor must meet at a multiple
    repack: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None

    @property
    def parts(self) -> tuple[Part, ...]:
        return (self.weight, *self.scales)


def _as_stored(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor


def _to_engine(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype)


def _e4m3_scale(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    # By bytes: 0x7f and 0xff are the NaNs, above 0x80 (-0) are the negatives. torch has no isnan for this dtype, and a
    # checkpoint has gigabytes of these: one reduction passes all usual scales.
    byte = tensor.view(torch.uint8)
    if byte.is_meta or byte.numel() == 0 or byte.max() > 0x7E:
        _require((byte < 0x7F) | (byte == 0x80), tensor)
    return tensor


def _float_scale(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    _require(tensor.isfinite() & (tensor >= 0), tensor)
    return tensor


def _scalar_scale(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return _float_scale(tensor, dtype).reshape(())


def _reciprocal_scale(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    # A subnormal's reciprocal is infinite in float32.
    _require(tensor.isfinite() & (tensor > 0) & tensor.reciprocal().isfinite(), tensor, "above zero")
    return tensor.reciprocal().reshape(())


def _e8m0_scale(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    byte = tensor.view(torch.uint8)
    if byte.is_meta or byte.numel() == 0 or byte.max() == 255:
        _require(byte != 255, tensor)
    return tensor


def _block_scale(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.dtype == torch.float8_e8m0fnu:
        tensor = fp8.decode_e8m0(tensor)
    return _float_scale(tensor, dtype)


def _require(good: Tensor, values: Tensor, range_: str = "that is not negative") -> None:
    """ValueError with the first value that is not good. Headers alone (meta tensors) hold no values to check."""
    if good.is_meta or bool(good.all()):
        return
    position = (~good.flatten()).nonzero()[0].item()
    raise ValueError(
        f"element {position} of this scale is {values.float().flatten()[position].item()}, expected a finite "
        f"number {range_}; the file is damaged or the export was wrong"
    )


def _packed(out_features: int, in_features: int) -> tuple[int, int]:
    return out_features, in_features // 2


def _blocks(out_features: int, in_features: int) -> tuple[int, int]:
    return -(-out_features // fp8.BLOCK), -(-in_features // fp8.BLOCK)


def _nvfp4_linear(tensors: dict[str, Tensor], groups: int) -> nn.Module:
    return Nvfp4Linear(tensors["weight"], tensors["scale"], tensors["scale_2"], groups)


def _nvfp4_experts(gate_up: dict[str, Tensor], down: dict[str, Tensor], shared_last: bool) -> nn.Module:
    stacks = (stack[role] for stack in (gate_up, down) for role in ("weight", "scale", "scale_2"))
    return Nvfp4Experts(*stacks, shared_last)


def _mxfp4_to_nvfp4(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(zip(("weight", "scale", "scale_2"), mxfp4.mxfp4_to_nvfp4(tensors["weight"], tensors["scale"]), strict=True))


_NVFP4_SCALE = Part("scale", ("weight_scale",), ("F8_E4M3",), lambda n, k: (n, k // nvfp4.GROUP), _e4m3_scale)

NVFP4 = Format(
    name="NVFP4",
    weight=Part("weight", ("weight",), ("U8",), _packed, _as_stored),
    scales=(_NVFP4_SCALE, Part("scale_2", ("weight_scale_2",), ("F32",), lambda n, k: (), _scalar_scale)),
    ignored=("input_scale",),  # the activation's, for engines that quantise activations too
    in_multiple=nvfp4.GROUP,
    linear=_nvfp4_linear,
    experts=_nvfp4_experts,
)
# As compressed-tensors (llm-compressor) writes it: the global scale divides, where ModelOpt's scale_2 multiplies.
NVFP4_RECIPROCAL = Format(
    name="NVFP4 (compressed-tensors)",
    weight=Part("weight", ("weight_packed",), ("U8",), _packed, _as_stored),
    scales=(_NVFP4_SCALE, Part("scale_2", ("weight_global_scale",), ("F32",), lambda n, k: (), _reciprocal_scale)),
    ignored=("input_global_scale",),
    in_multiple=nvfp4.GROUP,
    linear=_nvfp4_linear,
    experts=_nvfp4_experts,
)
FP8_BLOCK = Format(
    name="FP8 block",
    weight=Part("weight", ("weight",), ("F8_E4M3",), lambda n, k: (n, k), _as_stored),
    # "inv" or not, the scale multiplies.
    scales=(Part("scale", ("scale", "weight_scale_inv", "weight_scale"), ("F8_E8M0", "F32"), _blocks, _block_scale),),
    ignored=("input_scale",),
    out_block=fp8.BLOCK,
    linear=lambda t, groups: Fp8BlockLinear(t["weight"], t["scale"], groups),
    experts=lambda up, down, last: Fp8Experts(up["weight"], up["scale"], down["weight"], down["scale"], last),
)
# Held as NVFP4, to which it is cast without loss, so that there is one 4-bit format to run.
MXFP4 = Format(
    name="MXFP4",
    weight=Part("weight", ("weight",), ("I8",), _packed, _as_stored),
    scales=(Part("scale", ("scale", "weight_scale"), ("F8_E8M0",), lambda n, k: (n, k // mxfp4.GROUP), _e8m0_scale),),
    in_multiple=mxfp4.GROUP,
    repack=_mxfp4_to_nvfp4,
    linear=_nvfp4_linear,
    experts=_nvfp4_experts,
)
PLAIN = Format(
    name="plain",
    weight=Part("weight", ("weight",), FLOATS, lambda n, k: (n, k), _to_engine),
    linear=lambda t, groups: PlainLinear(t["weight"], groups),
    experts=lambda gate_up, down, shared_last: PlainExperts(gate_up["weight"], down["weight"], shared_last),
)
FORMATS = (NVFP4, NVFP4_RECIPROCAL, FP8_BLOCK, MXFP4, PLAIN)

WEIGHT_SUFFIXES = tuple(dict.fromkeys(suffix for form in FORMATS for suffix in form.weight.suffixes))
SUFFIXES = tuple(
    dict.fromkeys(suffix for form in FORMATS for part in form.parts for suffix in part.suffixes)
    | dict.fromkeys(suffix for form in FORMATS for suffix in form.ignored)
)


def recognise(found: Mapping[str, Stored]) -> Format:
    """The format of a weight from its tensors on disk, by suffix; `found` holds at least one of WEIGHT_SUFFIXES.

    ValueError when the weight's dtype belongs to no format, when its scales are not beside it, or when scales of
    another format are: a quantised weight is never read as if it were plain, nor a plain one as if it were quantised.
    """
    weight = next(found[suffix] for suffix in WEIGHT_SUFFIXES if suffix in found)
    candidates = [form for form in FORMATS if weight_of(form, found) is not None]
    if not candidates:
        known = ", ".join(f"{'/'.join(form.weight.dtypes)} ({form.name})" for form in FORMATS)
        raise ValueError(f"{weight} has dtype {weight.dtype}, expected one of {known}; this format is not read")
    form = next((one for one in candidates if all(_suffix(part, found) for part in one.scales)), None)
    if form is None:
        scales = [part.suffixes for part in candidates[0].scales if not _suffix(part, found)]
        expected = " and ".join(" or ".join("." + suffix for suffix in suffixes) for suffixes in scales)
        raise ValueError(
            f"{weight} is {weight.dtype} ({candidates[0].name}) without its scale, expected {expected} beside it; "
            "the checkpoint is incomplete or names its scales in an unknown way"
        )
    extra = set(found) - {_suffix(part, found) for part in form.parts} - set(form.ignored)
    if extra:
        names = ", ".join(found[suffix].name for suffix in sorted(extra))
        raise ValueError(
            f"{weight} is {weight.dtype} ({form.name}), but beside it is {names}, which that format has no use for; "
            "the export is inconsistent"
        )
    return form


def weight_of(form: Format, found: Mapping[str, Stored]) -> Stored | None:
    """The weight itself among its tensors on disk, None if there is none that the format can read."""
    stored = [found[suffix] for suffix in form.weight.suffixes if suffix in found]
    return next((one for one in stored if one.dtype in form.weight.dtypes), None)


def _suffix(part: Part, found: Mapping[str, Stored]) -> str | None:
    return next((suffix for suffix in part.suffixes if suffix in found), None)


def find_parts(
    form: Format,
    found: Mapping[str, Stored],
    out_features: int,
    in_features: int,
    count: int | None = None,
    halves: int = 1,
) -> dict[str, Stored]:
    """The tensors on disk of a weight [out_features, in_features] by role, after `recognise`.

    With `count`, they are those of so many experts' weights in one tensor [count, out_features, in_features], of which
    each is `halves` matrices one above the other (2: w1 and w3); then there may be one scalar for all, one for each
    expert, or one for each matrix. ValueError when a part has another dtype or shape than the format defines.
    """
    weight = weight_of(form, found)
    if in_features % form.in_multiple:
        raise ValueError(
            f"{weight}: {form.name} needs in_features divisible by {form.in_multiple}, "
            f"config.json asks for {in_features}; they are of different models"
        )
    if halves > 1 and out_features // halves % form.out_block:
        raise ValueError(
            f"{weight}: w1 and w3 in one {form.name} tensor need rows divisible by {form.out_block}, "
            f"config.json asks for {out_features // halves}; store them apart"
        )
    parts = {part.role: found[_suffix(part, found)] for part in form.parts}
    for part in form.parts:
        shape, others = part.shape(out_features, in_features), ((1,),)
        if count is not None and shape:
            shape = (count, *shape)
        elif count is not None:
            others = tuple((*one, *tail) for one in ((), (count,), (count, halves)) for tail in ((), (1,), (1, 1)))
        what = f" ({form.name} {part.role}{'' if count is None else ' of stacked experts'})"
        check(parts[part.role], part.dtypes, shape, what, others if shape == () else ())
    return parts


def check(
    stored: Stored,
    dtypes: tuple[str, ...],
    shape: tuple[int, ...],
    what: str = "",
    others: tuple[tuple[int, ...], ...] = (),
) -> None:
    """ValueError unless the tensor has one of the dtypes, and the shape or one of the others."""
    if stored.dtype not in dtypes:
        raise ValueError(
            f"{stored}{what} has dtype {stored.dtype}, expected {' or '.join(dtypes)}; "
            "the checkpoint is in a format that is not read"
        )
    if stored.shape != shape and stored.shape not in others:
        raise ValueError(
            f"{stored}{what} has shape {list(stored.shape)}, expected {list(shape)}; "
            "config.json and the weights are of different models"
        )

"""transformers' own DeepseekV4ForCausalLM on the weights of a checkpoint folder, dequantised: what the engine is compared
with. It runs one sequence at a time, without a cache and eagerly, and keeps every weight in the activations' dtype."""

import re
from collections.abc import Iterable

import torch
from torch import Tensor

from dsv4.compile.scoring import Score
from dsv4.model import conversion, names
from dsv4.model.config import ModelConfig
from dsv4.model.shards import Folder, Reader
from dsv4.model.targets import Target

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
_DEQUANTISED = Target(lambda name: "int64" if name.endswith("tid2eid") else "float32", names.native_to_hf, lambda _: {})


@torch.no_grad()
def load(folder: str, dtype: torch.dtype, device: torch.device):
    """The model in eval mode, every parameter taken from the folder. ValueError if one of them has no tensor there, or a
    tensor no place."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    config = DeepseekV4Config(**ModelConfig.from_folder(folder).to_json(), attn_implementation="eager")
    model = DeepseekV4ForCausalLM(config).to(dtype).to(device).eval()
    places = model.state_dict()
    left = {name: place.numel() for name, place in places.items()}
    reader = Reader()
    for item in conversion.items(Folder.open(folder), _DEQUANTISED, drop_mtp=True):
        for name, value in _tensors(item, reader):
            target, place = _place(places, name, config.moe_intermediate_size)
            if place is None or place.shape != value.shape:
                raise ValueError(f"{folder}: transformers' model has no place for {name} {tuple(value.shape)}")
            place.copy_(value)
            left[target] -= place.numel()
    missing = min((name for name, count in left.items() if count), default=None)
    if missing is not None:
        raise ValueError(f"{folder}: lacks tensors for {missing} of transformers' model")
    return model


def _tensors(item: conversion.Item, reader: Reader) -> Iterable[tuple[str, Tensor]]:
    """An item's tensors, of copied ones the whole."""
    if item.kind == "copy":
        return ((out.name, reader.read(stored)) for out, stored in zip(item.outputs, item.stored, strict=True))
    return conversion.convert(item, reader, [])


def _place(places: dict[str, Tensor], name: str, inter: int) -> tuple[str, Tensor | None]:
    """The parameter that a tensor belongs to, and the part of it that it fills: experts are stacked, gate above up."""
    match = _EXPERT.fullmatch(name)
    if match is None:
        return name, places.get(name)
    stack, expert, part = match.groups()
    target = f"{stack}.{'down_proj' if part == 'down_proj' else 'gate_up_proj'}"
    place = places[target][int(expert)] if target in places else None
    if place is None or part == "down_proj":
        return target, place
    return target, place[:inter] if part == "gate_proj" else place[inter:]


@torch.no_grad()
def score(model, requests: list[tuple[list[int], list[int]]]) -> list[Score]:
    """As Engine.score. The logits of a whole sequence are in memory at a time."""
    results = []
    for context, continuation in requests:
        ids = torch.tensor([[*context, *continuation[:-1]]], device=model.device)
        logits = model(ids, use_cache=False).logits[0, len(context) - 1 :].float()
        tokens = torch.tensor(continuation, device=model.device)
        logprobs = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0].tolist()
        best = logits.argmax(-1).tolist()
        results.append(Score(sum(logprobs), best == list(continuation), tuple(logprobs), tuple(best)))
    return results

"""Routed experts on their way from a file into the stacked tensors of a module, whatever the file's layout.

A file holds one tensor per expert and projection (`experts.3.w1.weight`), or all experts in one tensor with w1 above w3
(`experts.gate_up_proj`, transformers' layout), whose scales have the same name and an ending.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from dsv4.model import formats
from dsv4.model.shards import Stored

FUSED = ("gate_up_proj", "down_proj")  # w1 above w3, and w2
# What a scale of a fused tensor may be called after `gate_up_proj`, beside its usual name after a dot or underscore.
_OTHER_ENDINGS = {"weight": ("",), "weight_packed": ("_packed",), "weight_scale_inv": ("_scale_inv",)}


def fused_endings(suffix: str) -> tuple[str, ...]:
    """All ways to write a suffix of formats.SUFFIXES after the name of a fused tensor."""
    return (f".{suffix}", f"_{suffix}", *_OTHER_ENDINGS.get(suffix, ()))


def find_fused(tensors: Mapping[str, Stored], name: str) -> dict[str, str]:
    """The tensors of a fused weight that there are: suffix -> native name. ValueError if one is there twice."""
    found = {}
    for suffix in formats.SUFFIXES:
        keys = [name + ending for ending in fused_endings(suffix) if name + ending in tensors]
        if len(keys) > 1:
            raise ValueError(
                f"{tensors[keys[1]]} and {tensors[keys[0]].name} are two names of one tensor; remove one of them"
            )
        if keys:
            found[suffix] = keys[0]
    return found


def split_scalars(values: Tensor, count: int, halves: int) -> Iterator[tuple[Tensor, ...]]:
    """Scalars of a fused weight, one for all, for each expert or for each of its halves -> those of each expert."""
    values = values.flatten()
    values = values.view(count, halves) if len(values) == count * halves else values[:, None].expand(-1, halves)
    for row in values.expand(count, halves):
        yield row.unbind()


class ExpertStack:
    """One projection of all experts by role, on the device: [E, ...], or [E, 2, ...] where an expert has two halves.

    The first tensors that are put show the shapes. Without data (meta) the others need not be put.
    """

    def __init__(self, count: int, halves: int, device: torch.device):
        self.halves = halves
        self._leading = (count,) if halves == 1 else (count, halves)
        self._device = device
        self._stacks: dict[str, Tensor] = {}

    @property
    def is_complete(self) -> bool:
        """Whether there is nothing to learn from further tensors."""
        return self._device.type == "meta" and bool(self._stacks)

    def put(self, expert: int, half: int, tensors: Mapping[str, Tensor]) -> None:
        """Copy the converted tensors of one matrix to their place."""
        place = (expert, half)[: len(self._leading)]
        for role, tensor in tensors.items():
            if role not in self._stacks:
                shape = self._leading + tensor.shape
                self._stacks[role] = torch.empty(shape, dtype=tensor.dtype, device=self._device)
            self._stacks[role][place].copy_(tensor)

    def tensors(self) -> dict[str, Tensor]:
        """By role, halves one above the other: [E, 2I, ...] for two; scalars [E] or [E, 2]."""
        if len(self._leading) == 1:
            return self._stacks
        return {role: stack.flatten(1, 2) if stack.ndim > 2 else stack for role, stack in self._stacks.items()}

"""Where weights come from: the interface through which the model's modules ask for them."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn


class Source(ABC):
    """Hands out weights by native name below a prefix. `dtype` is that of activations and plain weights.

    Every request states the shape it needs, so a source can check a whole checkpoint before it reads any of it.
    """

    dtype: torch.dtype
    device: torch.device

    @abstractmethod
    def at(self, name: str) -> "Source":
        """The source below `name`: source.at("layers").at("0").at("attn")."""

    @abstractmethod
    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A plain tensor of this shape, converted to `dtype`."""

    @abstractmethod
    def linear(self, name: str, out_features: int, in_features: int, groups: int = 1) -> nn.Module:
        """A module of dsv4.model.linear for `name`.weight [out, in], in whatever format it is stored."""

    @abstractmethod
    def experts(self, name: str, num_experts: int, hidden: int, intermediate: int, shared: str | None = None) -> nn.Module:
        """An expert stack of dsv4.model.linear from `name`.E.{w1,w2,w3}, or from its fused form.

        Where the expert `shared`.{w1,w2,w3} is in the stack's format, it becomes the stack's last, and the module's
        `shared_last` is true; otherwise it is left to be asked for."""

    def float32(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """`tensor` in float32, for what is computed in float32 whatever the activations' dtype."""
        return self.tensor(name, shape, torch.float32)

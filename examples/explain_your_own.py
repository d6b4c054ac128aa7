"""Something to try `dsv4 explain` on: a small attention with three things in it that cost more than they seem to.

dsv4 explain examples/explain_your_own.py:attend --inputs examples/explain_your_own.py:inputs
dsv4 explain examples/explain_your_own.py:attend_better --inputs examples/explain_your_own.py:inputs

The first names the line of each and what to do about it; the second has had it done, and is one graph that nothing
compiles again.
"""

import torch
from torch import Tensor, nn


class Attention(nn.Module):
    """One head over a cache that grows by a row a call."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.keys, self.values = [], []

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        self.keys.append(self.key(x))  # a list of another length is another graph: each call compiles again
        self.values.append(self.value(x))
        scale = self.key.weight.norm().item()  # Python waits for the value, and the graph ends here
        scores = self.query(x) @ torch.cat(self.keys).T / scale
        if scores.max() > 80:  # and here
            scores = scores.clamp(max=80)
        return scores.softmax(-1) @ torch.cat(self.values)


class BetterAttention(nn.Module):
    """The same head over a cache of fixed size, with all that changes in tensors."""

    def __init__(self, width: int = 32, length: int = 256):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.register_buffer("keys", torch.zeros(length, width))
        self.register_buffer("values", torch.zeros(length, width))
        self.register_buffer("position", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("rows", torch.arange(length))

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        self.keys.index_copy_(0, self.position, self.key(x))
        self.values.index_copy_(0, self.position, self.value(x))
        scores = self.query(x) @ self.keys.T / self.key.weight.norm()
        scores = scores.masked_fill(self.rows > self.position, float("-inf"))
        scores = torch.where(scores.max() > 80, scores.clamp(max=80), scores)
        self.position.add_(1)
        return scores.softmax(-1) @ self.values


attend = Attention()
attend_better = BetterAttention()


def inputs() -> tuple[Tensor]:
    """The arguments of one call; explain calls several times."""
    return (torch.randn(1, 32),)

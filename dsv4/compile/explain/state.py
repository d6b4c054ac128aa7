"""Running the same call twice from the same state: tensors and random numbers are put back."""

import torch
from torch import Tensor

from dsv4.compile.explain.subject import Call, Subject


class Snapshot:
    """Copies of the tensors that a call may change and that it reaches by name. What lies elsewhere (a list that grows, a
    number on an object) is not put back."""

    def __init__(self, subject: Subject, call: Call):
        self.tensors = subject.state(call)
        self.copies = {name: tensor.detach().clone() for name, tensor in self.tensors.items()}

    @torch.no_grad()
    def restore(self) -> None:
        """Write the copies back, and reseed the random generators."""
        for name, tensor in self.changed().items():
            tensor.detach().copy_(self.copies[name])
        torch.manual_seed(0)

    def changed(self) -> dict[str, Tensor]:
        """The tensors that no longer hold what they held."""
        return {name: t for name, t in self.tensors.items() if not same_bits(t, self.copies[name])}


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same bytes: NaN equals itself, and float8 can be compared."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = (t.detach().contiguous().reshape(-1) for t in (a, b))
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))

"""RMSNorm with a float32 weight and float32 arithmetic, rounded once. Inductor fuses it with its neighbours."""

from torch import Tensor, nn

from dsv4.ops.rope import rms_norm


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, in x's dtype; weight float32 [dim]."""

    def __init__(self, weight: Tensor, eps: float):
        super().__init__()
        self.eps = eps
        self.register_buffer("weight", weight)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps).to(x.dtype)

"""What a kernel requires of its tensors, checked before its launch: a kernel given something else reads elsewhere."""

import torch
from torch import Tensor


def require(op: str, condition: bool, message: str) -> None:
    """ValueError that names the op and what it does not support."""
    if not condition:
        raise ValueError(f"{op}: {message}")


def require_tensors(op: str, dtype: torch.dtype, **tensors: Tensor) -> None:
    """Each tensor has this dtype, is contiguous, and starts at a multiple of 16 bytes if it is read in vectors."""
    for name, tensor in tensors.items():
        require(op, tensor.dtype == dtype, f"{name} must be {dtype}, found {tensor.dtype}")
        require(op, tensor.is_contiguous(), f"{name} must be contiguous, found strides {tensor.stride()}")
        aligned = tensor.dim() < 2 or tensor.data_ptr() % 16 == 0
        require(op, aligned, f"{name} must start at a multiple of 16 bytes")

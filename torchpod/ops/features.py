"""Integers and bytes as what networks see."""

import torch
from torch import Tensor


def one_hot(x: Tensor, num_values: int) -> Tensor:
    """Integers `[...]` as `[..., num_values]` float32; unlike torch's it compiles without a look at the values."""
    return (x[..., None] == torch.arange(num_values, device=x.device)).float()


def scaled(x: Tensor) -> Tensor:
    """Float32; bytes between 0 and 1."""
    return x.float() / 255 if x.dtype == torch.uint8 else x.float()

"""What networks see of an observed tensor: numbers side by side."""

import math
from typing import Any

import torch
from torch import Tensor

from torchpod.specs import Discrete, MultiDiscrete

MOST_VALUES = 10_000
"""Of an observed choice: a first layer has a column for each."""


def width(spec: Any) -> int:
    """How many numbers `features` gives.

    Raises:
      ValueError: for a choice of more than `MOST_VALUES`.
    """
    values = (spec.num_values,) if isinstance(spec, Discrete) else spec.nvec if isinstance(spec, MultiDiscrete) else ()
    if max(values, default=0) > MOST_VALUES:
        raise ValueError(
            f"an observation is one of {max(values)} values, and networks see one number for each of up to "
            f"{MOST_VALUES}; observe something smaller, or a Box."
        )
    return sum(values) if values else math.prod(spec.shape)


def features(x: Tensor, spec: Any) -> Tensor:
    """A tensor `[..., *spec.shape]` as `[..., width(spec)]`: a choice as a 1 among zeros, bytes scaled to [0, 1]."""
    if isinstance(spec, Discrete):
        return one_hot(x, spec.num_values)
    if isinstance(spec, MultiDiscrete):
        return torch.cat([one_hot(part, n) for part, n in zip(x.unbind(-1), spec.nvec, strict=True)], -1)
    return scaled(x).reshape(*x.shape[: x.ndim - len(spec.shape)], -1)


def one_hot(x: Tensor, num_values: int) -> Tensor:
    """Integers `[...]` as `[..., num_values]` float32; unlike torch's it compiles without a look at the values."""
    return (x[..., None] == torch.arange(num_values, device=x.device)).float()


def scaled(x: Tensor) -> Tensor:
    """Float32; bytes between 0 and 1."""
    return x.float() / 255 if x.dtype == torch.uint8 else x.float()

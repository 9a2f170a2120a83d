"""Mean and variance of batches that come one after the other, and from several ranks."""

from typing import NamedTuple

import torch
from torch import Tensor


class Moments(NamedTuple):
    """Of what was seen so far; float64."""

    total: Tensor
    """Scalar."""
    mean: Tensor
    """`[*shape]`."""
    variance: Tensor
    """`[*shape]`, of the population, not of a sample."""


def sums_about(mean: Tensor, x: Tensor, weight: Tensor | None = None) -> Tensor:
    """What `merge` needs of a batch: number, sum and sum of squares of `x - mean`, to be added up over batches.

    Args:
      mean: `[*shape]` float64, near the mean of `x`, or rounding errors grow.
      x: `[..., *shape]`.
      weight: `[...]`, how often each counts; None: once.

    Returns:
      `[1 + 2 * n]` float64, n entries in `shape`.
    """
    rows = x.reshape(-1, mean.numel()).double() - mean.reshape(-1)
    if weight is None:
        count = torch.full((1,), rows.shape[0], dtype=torch.float64, device=x.device)
        return torch.cat([count, rows.sum(0), rows.square().sum(0)])
    share = weight.reshape(-1, 1).double()
    return torch.cat([share.sum(0), (share * rows).sum(0), (share * rows.square()).sum(0)])


def merge(moments: Moments, sums: Tensor) -> Moments:
    """Moments of everything, of those so far and the sums about their mean.

    Eq. 2.1 of Chan, Golub and LeVeque 1983 (https://doi.org/10.1080/00031305.1983.10483115), with both parts' sums
    taken about the same point.

    Args:
      moments: so far.
      sums: `[1 + 2 * n]`, of `sums_about(moments.mean, x)`.
    """
    first, second = (part.reshape(moments.mean.shape) for part in sums[1:].chunk(2))
    total = moments.total + sums[0]
    divisor = torch.where(total > 0, total, 1.0)  # of nothing, if nothing was seen
    shift = first / divisor
    variance = (moments.variance * moments.total + second) / divisor - shift.square()
    variance = torch.where(total > 0, variance.clamp(min=0.0), moments.variance)
    return Moments(total, moments.mean + shift, variance)

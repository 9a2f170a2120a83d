"""Schedules: what a number is after so many steps."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor


def piecewise_linear(points: Sequence[Sequence[float]], step: Tensor) -> Tensor:
    """Straight lines from point to point, constant before the first and after the last, `[...]` float32.

    Args:
      points: `(step, value)`, with growing steps.
      step: `[...]`, of any dtype; exact up to 2^53.
    """
    step = step.double()
    value = torch.full_like(step, points[0][1])
    for (left, before), (right, after) in pairwise(points):
        value = value + (after - before) * ((step - left) / (right - left)).clamp(0.0, 1.0)
    return value.float()

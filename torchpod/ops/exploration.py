"""How much an agent explores."""

import torch
from torch import Tensor


def falling(last: Tensor, remaining: Tensor, fraction: Tensor) -> Tensor:
    """From 1 at the start linearly to `last` after a part of the run, and `last` from then on, `[...]`.

    Args:
      last: `[...]` float32, e.g. the final epsilon of each environment.
      remaining: scalar, of the run, from 1 to 0.
      fraction: scalar, the part in which it falls; 0: none.
    """
    share = torch.where(fraction > 0, ((1.0 - remaining) / fraction.clamp(min=1e-6)).clamp(max=1.0), 1.0)
    return 1.0 + share * (last - 1.0)

"""Returns and lengths of the episodes that end inside a trajectory."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchpod.ops.returns import discounted_sum
from torchpod.types import LAST, TimeStep


class Episodes(NamedTuple):
    """What `count_episodes` found in a trajectory."""

    sums: Tensor
    """`[4]` float64: episodes that ended, sum of their returns, sum of their lengths, transitions."""
    running_return: Tensor
    running_length: Tensor


def count_episodes(timestep: TimeStep, running_return: Tensor, running_length: Tensor) -> Episodes:
    """Returns and lengths of the episodes that end in a trajectory, on raw rewards and true game over.

    Args:
      timestep: `[T + 1, B, ...]`.
      running_return: `[B]`, of the episodes under way at the first timestep.
      running_length: `[B]`.
    """
    over = timestep.extras["game_over"][1:]  # [T, B]
    real = timestep.step_type[:-1] != LAST
    leaves = pytree.tree_leaves(timestep.extras["raw_reward"])  # groups: sum over groups of the mean over agents
    reward = sum(leaf[1:].reshape(*over.shape, -1).mean(-1) for leaf in leaves)
    gains = torch.stack([reward.double(), real.double()])  # [2, T, B]
    gains[:, 0] += torch.stack([running_return.double(), running_length.double()])
    keep = torch.cat([torch.zeros_like(over[:1]), over[:-1]]).logical_not().double().expand_as(gains)
    total = discounted_sum(gains.movedim(0, 1), keep.movedim(0, 1), reverse=False).movedim(1, 0)
    ended = torch.where(over, total, 0.0).sum((1, 2))
    running = torch.where(over[-1], 0.0, total[:, -1])
    sums = torch.stack([over.sum().double(), ended[0], ended[1], real.sum().double()])
    return Episodes(sums, running[0].float(), running[1].long())


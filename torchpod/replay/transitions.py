"""Rows that are learned from one by one, of the windows that replay gives."""

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchpod.ops.returns import n_step
from torchpod.types import LAST, Trajectory, Tree


def transitions(trajectory: Trajectory, reward: Tensor, *, discount: Tensor) -> dict[str, Tree]:
    """One row per window of n steps: where it begins, what it earns, and where it ends.

    Args:
      trajectory: `timestep [n + 1, K, ...]`, `output [n, K, ...]`.
      reward: of its transitions, `[n, K]`, clipped or scaled as the agent likes.
      discount: scalar, per step.

    Returns:
      `[1, K, ...]`: observation, action, reward, discount (of the value at the end; 0 if that is terminal),
      next_observation; weight, 0 for resets.
    """
    t, out = trajectory.timestep, trajectory.output
    is_last = t.step_type == LAST
    reward, factor, steps = n_step(reward, t.discount[1:], is_last[1:], discount=discount)
    envs = torch.arange(steps.shape[0], device=steps.device)
    rows = {
        "observation": pytree.tree_map(lambda x: x[0], t.observation),
        "action": out.action[0],
        "reward": reward,
        "discount": factor,
        "next_observation": pytree.tree_map(lambda x: x[steps, envs], t.observation),
        "weight": (~is_last[0]).to(reward.dtype),
    }
    return pytree.tree_map(lambda x: x[None], rows)

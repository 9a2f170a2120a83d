"""Whole episodes of classic control in float64 beside Gymnasium's."""

from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch

from torchpod import random
from torchpod.env import TensorEnv
from torchpod.specs import Discrete
from torchpod.types import FIRST, LAST


class Episodes(NamedTuple):
    """What was seen."""

    lengths: list[int]
    positions: list[float]
    """The first entry of Gymnasium's state after each step."""


def free_run(
    env: TensorEnv,
    task: str,
    policy: Callable[[Any, int], Any],
    num_episodes: int,
    *,
    tolerance: float = 1e-9,
    reward_tolerance: float = 0.0,
    compared_steps: int = 10_000,
) -> Episodes:
    """Plays both, each acting on its own state, and compares states, rewards and endings.

    Args:
      env: ours, whose state is one tensor.
      task: Gymnasium's id.
      policy: from a state and the number of the step to an action.
      num_episodes: how many to play to their end.
      tolerance: of states.
      reward_tolerance: of rewards.
      compared_steps: of each episode whose states are compared; where rounding errors grow, numbers part in the end.
    """
    theirs, keys = gymnasium.make(task), random.split(random.key(0), 1)
    inside: Any = theirs.unwrapped
    discrete = isinstance(env.spec.action, Discrete)
    (inner, count, was_last), timestep = env.init(random.at(keys, 0))
    state, lengths, positions, length = (inner.double(), count, was_last), [], [], 0
    theirs.reset(seed=0)
    inside.state = state[0][0].numpy()
    step = 0
    while len(lengths) < num_episodes:
        step += 1
        action, their_action = policy(state[0][0].numpy(), step), policy(inside.state, step)
        ours = torch.tensor([action]) if discrete else torch.tensor([[action]], dtype=torch.float64)
        state, timestep = env.step(state, ours, random.at(keys, step))
        assert state[0].dtype == torch.float64
        if timestep.step_type == FIRST:
            theirs.reset(seed=0)
            inside.state = state[0][0].numpy()
            continue
        given = their_action if discrete else np.array([their_action], np.float64)
        _, reward, terminated, truncated, _ = theirs.step(given)
        length += 1
        if length <= compared_steps:
            np.testing.assert_allclose(state[0][0].numpy(), np.array(inside.state), rtol=0, atol=tolerance)
        np.testing.assert_allclose(timestep.reward.item(), float(reward), rtol=0, atol=reward_tolerance)
        assert (timestep.step_type == LAST) == (terminated or truncated)
        assert (timestep.discount == 0) == terminated
        positions.append(float(inside.state[0]))
        if terminated or truncated:
            lengths.append(length)
            length = 0
    return Episodes(lengths, positions)

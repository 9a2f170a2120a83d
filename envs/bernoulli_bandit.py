"""BernoulliBandit: find out within an episode which arm pays most, and pull it.

Wang et al. 2017, "Learning to reinforcement learn" (https://arxiv.org/abs/1611.05763): the chances are drawn anew for
each episode, so that an agent without memory knows no more than its last pull.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from torchpod import random
from torchpod.env import TensorEnv
from torchpod.envs.arguments import at_least
from torchpod.specs import Box, Discrete, EnvSpec

DEPENDENT = {"easy": 0.1, "medium": 0.25, "hard": 0.4}
"""The chance of the worse of two dependent arms."""
ARMS = ("independent", "uniform", *DEPENDENT)


class BernoulliBanditState(NamedTuple):
    """One episode."""

    chances: Tensor
    """`[B, num_arms]` float32: the probability that each arm pays."""
    last_action: Tensor
    """`[B]` int64; -1 before the first pull."""
    last_reward: Tensor
    """`[B]` float32."""
    num_steps: Tensor
    """`[B]` int64, pulls so far."""


class BernoulliBandit(TensorEnv):
    """A pull pays 1 with the chance of its arm, else 0. The episode is truncated after `max_episode_steps` pulls.

    Observation `[B, num_arms + 2]`: the last reward; the last action, one-hot, all 0 before the first pull; the
    time, which rises from -1 to 1. Actions: the arm to pull.

    With `arms="independent"` each chance is uniform in [0, 1). All other arms are two that depend on each other:
    the second chance is 1 minus the first, which is uniform in [0, 1) with "uniform", 0.1 or 0.9 with "easy", 0.25
    or 0.75 with "medium", 0.4 or 0.6 with "hard". The default is that of gymnax's BernoulliBandit-misc, which differs
    in the first observation of an episode: it shows arm 0 as pulled.
    """

    def __init__(self, num_arms: int = 2, arms: str = "easy", max_episode_steps: int = 100) -> None:
        at_least(2, num_arms=num_arms)
        at_least(1, max_episode_steps=max_episode_steps)
        if arms not in ARMS:
            raise ValueError(f"arms={arms!r} is not known; use one of {', '.join(ARMS)}.")
        if arms != "independent" and num_arms != 2:
            raise ValueError(f"num_arms={num_arms} does not go with arms={arms!r}; use 2, or arms='independent'.")
        self.num_arms, self.arms, self.max_episode_steps = num_arms, arms, max_episode_steps
        self.spec = EnvSpec("bernoulli_bandit", Box((num_arms + 2,), -1.0, 1.0), Discrete(num_arms), max_episode_steps)

    def reset(self, keys: Tensor) -> BernoulliBanditState:
        """New chances."""
        if self.arms == "independent":
            chances = random.uniform(keys, self.num_arms)
        else:
            first = random.uniform(keys, 1)
            if self.arms in DEPENDENT:
                worse = DEPENDENT[self.arms]
                first = torch.where(first < 0.5, worse, 1 - worse)
            chances = torch.cat([first, 1 - first], -1)
        zero = torch.zeros_like(keys[..., 0])
        return BernoulliBanditState(chances, zero - 1, torch.zeros_like(chances[..., 0]), zero)

    def transition(
        self, state: BernoulliBanditState, action: Tensor, keys: Tensor
    ) -> tuple[BernoulliBanditState, Tensor, Tensor]:
        """One pull."""
        chance = torch.where(self._one_hot(action), state.chances, 0.0).sum(-1)
        reward = (random.uniform(keys, 1)[..., 0] < chance).float()
        state = state._replace(last_action=action, last_reward=reward, num_steps=state.num_steps + 1)
        return state, reward, torch.zeros_like(action, dtype=torch.bool)

    def observe(self, state: BernoulliBanditState) -> Tensor:
        """Last reward, last action, time."""
        time = 2 * state.num_steps / self.max_episode_steps - 1
        pulled = self._one_hot(state.last_action).float()
        return torch.cat([state.last_reward[..., None], pulled, time[..., None]], -1)

    def _one_hot(self, action: Tensor) -> Tensor:
        """`[B, num_arms]` bool."""
        return torch.arange(self.num_arms, device=action.device) == action[..., None]

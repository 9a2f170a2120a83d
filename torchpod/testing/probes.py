"""Probe environments: the smallest tasks that an agent must solve, in the order in which to try them.

After Andy Jones, "Debugging reinforcement learning systems" (https://andyljones.com/posts/rl-debugging.html).
The first probe that an agent fails names the broken part: each adds one thing to those before. A probe is
done in seconds, and it knows the right answers: what the value of each observation is, and which action is
best.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from torchpod import random
from torchpod.env import TensorEnv
from torchpod.specs import Box, Discrete, EnvSpec, Traits


class Probe(TensorEnv):
    """Base of the probes. Observation `[B, 1]`, here also the state."""

    traits = Traits()
    num_actions: int = 1
    max_episode_steps: int | None = None
    observations: tuple[float, ...] = (0.0,)
    """What an agent decides on."""
    best_actions: tuple[int, ...] | None = None
    """The right action at each of `observations`; None if actions do not matter."""

    def __init__(self) -> None:
        name = f"probe_{type(self).__name__}"
        self.spec = EnvSpec(name, Box((1,), -1.0, 1.0), Discrete(self.num_actions), self.max_episode_steps)

    def values(self, discount: float) -> tuple[float, ...]:
        """The value of each of `observations` under the best policy, for an agent's discount (gamma)."""
        raise NotImplementedError

    def reset(self, keys: Tensor) -> Tensor:
        """State `[B, 1]`: 0."""
        return torch.zeros(keys.shape[0], 1, device=keys.device)

    def observe(self, state: Tensor) -> Tensor:
        """The state itself."""
        return state


class ConstantReward(Probe):
    """One step, reward 1. Fails if the value loss or its optimizer is broken."""

    def values(self, discount: float) -> tuple[float, ...]:
        """1."""
        return (1.0,)

    def transition(self, state: Tensor, action: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The end."""
        return state, torch.ones_like(state[:, 0]), _yes(state)


class ObservationReward(Probe):
    """One step, the reward is the observation, -1 or 1. Fails if the value does not learn from observations."""

    observations = (-1.0, 1.0)

    def values(self, discount: float) -> tuple[float, ...]:
        """-1 and 1."""
        return (-1.0, 1.0)

    def reset(self, keys: Tensor) -> Tensor:
        """State `[B, 1]`: -1 or 1."""
        return _sign(keys)

    def transition(self, state: Tensor, action: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The end."""
        return state, state[:, 0].clone(), _yes(state)


class DelayedReward(Probe):
    """Two steps, observations 0 and 1, reward 1 after the second. Fails if the discount or bootstrap is wrong."""

    observations = (0.0, 1.0)

    def values(self, discount: float) -> tuple[float, ...]:
        """Gamma, and 1."""
        return (discount, 1.0)

    def transition(self, state: Tensor, action: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """From 0 to 1, from 1 to the end."""
        second = state[:, 0] == 1
        return torch.ones_like(state), second.float(), second


class ActionReward(Probe):
    """One step, reward 1 for action 1 and -1 for action 0. Fails if advantage or policy loss is broken."""

    num_actions = 2
    best_actions = (1,)

    def values(self, discount: float) -> tuple[float, ...]:
        """1."""
        return (1.0,)

    def transition(self, state: Tensor, action: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The end."""
        return state, torch.where(action == 1, 1.0, -1.0), _yes(state)


class ObservationActionReward(Probe):
    """One step, reward 1 for action 1 at observation 1 and action 0 at -1, else -1.

    Fails if policy and value do not learn together, or if actions, observations and rewards are out of line.
    """

    num_actions = 2
    observations = (-1.0, 1.0)
    best_actions = (0, 1)

    def values(self, discount: float) -> tuple[float, ...]:
        """1 and 1."""
        return (1.0, 1.0)

    def reset(self, keys: Tensor) -> Tensor:
        """State `[B, 1]`: -1 or 1."""
        return _sign(keys)

    def transition(self, state: Tensor, action: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The end."""
        right = (action == 1) == (state[:, 0] == 1)
        return state, torch.where(right, 1.0, -1.0), _yes(state)


class TruncatedReward(Probe):
    """One step, reward 1. It leads from -1 to 1, where the time is up; from 1 it terminates.

    The value of 1 is 1. That of -1 is 1 + gamma, bootstrapped from the final observation; it comes out as 1
    if truncation is taken for termination, as 1 / (1 - gamma) if the bootstrap is the value of the
    observation before, and the value of 1 comes out too high if termination bootstraps or the reset is taken
    for a transition.
    """

    max_episode_steps = 1
    observations = (-1.0, 1.0)

    def values(self, discount: float) -> tuple[float, ...]:
        """1 + gamma, and 1."""
        return (1.0 + discount, 1.0)

    def reset(self, keys: Tensor) -> Tensor:
        """State `[B, 1]`: -1 or 1."""
        return _sign(keys)

    def transition(self, state: Tensor, action: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """To 1; from 1 to the end."""
        return torch.ones_like(state), torch.ones_like(state[:, 0]), state[:, 0] == 1


LADDER: dict[str, Callable[[], Probe]] = {
    "constant_reward": ConstantReward,
    "observation_reward": ObservationReward,
    "delayed_reward": DelayedReward,
    "action_reward": ActionReward,
    "observation_action_reward": ObservationActionReward,
    "truncated_reward": TruncatedReward,
}
"""All probes, the easiest first."""


def _sign(keys: Tensor) -> Tensor:
    """-1 or 1, `[B, 1]` float32."""
    return random.to_integer(random.bits(keys, 1), 2).float() * 2 - 1


def _yes(state: Tensor) -> Tensor:
    return torch.ones_like(state[:, 0], dtype=torch.bool)

"""MountainCar-v0: a car too weak to climb a hill must first swing back.

Moore 1990, "Efficient memory-based learning for robot control"
(https://www.cl.cam.ac.uk/techreports/UCAM-CL-TR-209.pdf). Equations, constants and limits are those of
Gymnasium's MountainCar-v0. They have no units: time counts steps.
"""

import torch
from torch import Tensor

from torchpod import random
from torchpod.env import TensorEnv
from torchpod.envs.arguments import at_least
from torchpod.specs import Box, Discrete, EnvSpec, Traits

FORCE = 0.001
GRAVITY = 0.0025
MIN_POSITION, MAX_POSITION = -1.2, 0.6
MAX_SPEED = 0.07
GOAL = 0.5


class MountainCar(TensorEnv):
    """Reward -1 for every step; terminates when the car is at 0.5 or beyond and does not roll back.

    Observation `[B, 2]`: position, in [-1.2, 0.6] with the bottom of the valley at -pi / 6, and velocity per
    step, in [-0.07, 0.07]. Actions: 0 push left, 1 none, 2 push right.
    """

    traits = Traits(differentiable=False)

    def __init__(self, max_episode_steps: int = 200) -> None:
        at_least(1, max_episode_steps=max_episode_steps)
        self.spec = EnvSpec("mountain_car", Box((2,), MIN_POSITION, MAX_POSITION), Discrete(3), max_episode_steps)

    def reset(self, keys: Tensor) -> Tensor:
        """See `start`."""
        return start(keys)

    def transition(self, state: Tensor, action: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One push."""
        position, velocity = roll(state, FORCE * (action.to(state.dtype) - 1))
        terminated = (position >= GOAL) & (velocity >= 0)
        return torch.stack([position, velocity], -1), torch.full_like(position, -1.0), terminated

    def observe(self, state: Tensor) -> Tensor:
        """The state itself."""
        return state


def start(keys: Tensor) -> Tensor:
    """State `[B, 2]`: position uniform in [-0.6, -0.4), at rest."""
    position = random.uniform(keys, 1, -0.6, -0.4)
    return torch.cat([position, torch.zeros_like(position)], -1)


def roll(state: Tensor, push: Tensor) -> tuple[Tensor, Tensor]:
    """Position and velocity, each `[B]`, one step after `state` `[B, 2]`, accelerated by `push` `[B]` and the slope."""
    position, velocity = state.unbind(-1)
    velocity = (velocity + push - GRAVITY * (3 * position).cos()).clamp(-MAX_SPEED, MAX_SPEED)
    position = position + velocity
    # The left end is a wall that stops the car; at the right end only the position is held.
    velocity = torch.where((position <= MIN_POSITION) & (velocity < 0), 0.0, velocity)
    return position.clamp(MIN_POSITION, MAX_POSITION), velocity

"""MountainCarContinuous-v0: the car of `mountain_car`, pushed by a continuous force. Read mountain_car.py first.

Equations, constants and limits are those of Gymnasium's MountainCarContinuous-v0. Gymnasium rounds its state to
float32 after every step, even where it computed in float64; here the state keeps the dtype it has.
"""

import torch
from torch import Tensor

from torchpod.env import TensorEnv
from torchpod.envs.arguments import at_least
from torchpod.envs.classic.mountain_car import MAX_POSITION, MIN_POSITION, roll, start
from torchpod.specs import Box, EnvSpec, Traits

POWER = 0.0015
GOAL = 0.45
BONUS = 100.0


class MountainCarContinuous(TensorEnv):
    """Reward -0.1 action^2, and 100 at the goal; terminates at 0.45 or beyond, unless the car rolls back.

    Observation `[B, 2]`: position, in [-1.2, 0.6] with the bottom of the valley at -pi / 6, and velocity per
    step, in [-0.07, 0.07]. Action `[B, 1]`: the force is the action clamped to [-1, 1], but its cost is, as in
    Gymnasium, that of the action before the clamp.
    """

    # The dynamics have gradients, but the bonus is a jump: the gradient of the reward does not know of the goal, and
    # a learner that followed it would stand still.
    traits = Traits(differentiable=False)

    def __init__(self, max_episode_steps: int = 999) -> None:
        at_least(1, max_episode_steps=max_episode_steps)
        self.spec = EnvSpec(
            "mountain_car_continuous",
            observation=Box((2,), MIN_POSITION, MAX_POSITION),
            action=Box((1,), -1.0, 1.0),
            max_episode_steps=max_episode_steps,
        )

    def reset(self, keys: Tensor) -> Tensor:
        """See `mountain_car.start`."""
        return start(keys)

    def transition(self, state: Tensor, action: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One push."""
        action = action[..., 0]
        position, velocity = roll(state, POWER * action.clamp(-1.0, 1.0))
        terminated = (position >= GOAL) & (velocity >= 0)
        reward = torch.where(terminated, BONUS, 0.0) - 0.1 * action.square()
        return torch.stack([position, velocity], -1), reward, terminated

    def observe(self, state: Tensor) -> Tensor:
        """The state itself."""
        return state

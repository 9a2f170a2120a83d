"""A point mass in the plane, pushed by a force, that must reach the origin and stay there: the double integrator.

Linear dynamics and quadratic costs, so that the best controller is known but for the limit of the force: the
linear-quadratic regulator. Gradients flow through any number of steps.
"""

import torch
from torch import Tensor

from torchpod import random
from torchpod.env import TensorEnv
from torchpod.envs.arguments import at_least
from torchpod.specs import Array, Box, EnvSpec, Traits

TAU_S = 0.1
MASS = 1.0
MAX_FORCE = 1.0


class PointMass(TensorEnv):
    """Reward -(|position|^2 + 0.1 |velocity|^2 + 0.01 |force|^2), before the step; never terminates.

    Observation `[B, 4]`: position (m) and velocity (m/s), x and y each. Action `[B, 2]`: force (N) on a mass of 1 kg,
    each component clamped to [-1, 1]. A step takes 0.1 s.
    """

    traits = Traits(differentiable=True)

    def __init__(self, max_episode_steps: int = 100) -> None:
        at_least(1, max_episode_steps=max_episode_steps)
        self.spec = EnvSpec(
            "point_mass",
            observation=Array((4,)),
            action=Box((2,), -MAX_FORCE, MAX_FORCE),
            max_episode_steps=max_episode_steps,
        )

    def reset(self, keys: Tensor) -> Tensor:
        """State `[B, 4]`: position uniform in [-1, 1) m, velocity in [-0.5, 0.5) m/s, per component."""
        position, velocity = random.uniform(keys, 4, -1.0, 1.0).chunk(2, -1)
        return torch.cat([position, 0.5 * velocity], -1)

    def transition(self, state: Tensor, action: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One semi-implicit Euler step of 100 ms."""
        position, velocity = state.chunk(2, -1)
        force = action.clamp(-MAX_FORCE, MAX_FORCE)
        cost = position.square() + 0.1 * velocity.square() + 0.01 * force.square()
        velocity = velocity + TAU_S / MASS * force
        position = position + TAU_S * velocity
        never = torch.zeros_like(position[..., 0], dtype=torch.bool)
        return torch.cat([position, velocity], -1), -cost.sum(-1), never

    def observe(self, state: Tensor) -> Tensor:
        """The state itself."""
        return state

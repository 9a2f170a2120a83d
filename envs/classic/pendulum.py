"""Pendulum-v1: swing a pendulum up and hold it there, with too weak a motor.

Equations, constants and limits are those of Gymnasium's Pendulum-v1
(https://gymnasium.farama.org/environments/classic_control/pendulum/). Everything but the two clamps is
smooth, so gradients flow through many steps.
"""

import math

import torch
from torch import Tensor

from torchpod import random
from torchpod.env import TensorEnv
from torchpod.envs.arguments import at_least, number
from torchpod.specs import Box, EnvSpec, Traits

GRAVITY, MASS, LENGTH = 10.0, 1.0, 1.0
TAU_S = 0.05
MAX_SPEED = 8.0
MAX_TORQUE = 2.0


class Pendulum(TensorEnv):
    """Reward -(angle^2 + 0.1 speed^2 + 0.001 torque^2), before the step; never terminates.

    Observation `[B, 3]`: cosine and sine of the angle (0 is upright), angular velocity (rad/s). Action `[B,
    1]`: torque (N m), clamped to [-2, 2].

    Args:
      max_episode_steps: time limit.
      max_start_angle: episodes start at most this far from upright (rad); pi, Gymnasium's, is anywhere. With a
        small one the task is to balance.
    """

    traits = Traits(differentiable=True)

    def __init__(self, max_episode_steps: int = 200, max_start_angle: float = math.pi) -> None:
        at_least(1, max_episode_steps=max_episode_steps)
        self.max_start_angle = number("max_start_angle", max_start_angle, 0.0, math.pi)
        self.spec = EnvSpec(
            "pendulum",
            observation=Box((3,), -MAX_SPEED, MAX_SPEED),
            action=Box((1,), -MAX_TORQUE, MAX_TORQUE),
            max_episode_steps=max_episode_steps,
        )

    def reset(self, keys: Tensor) -> Tensor:
        """State `[B, 2]`: angle uniform in [-max_start_angle, max_start_angle), angular velocity in [-1, 1)."""
        angle, velocity = random.uniform(keys, 2, -1.0, 1.0).unbind(-1)
        return torch.stack([self.max_start_angle * angle, velocity], -1)

    def transition(self, state: Tensor, action: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One semi-implicit Euler step of 50 ms."""
        theta, theta_dot = state.unbind(-1)
        torque = action[..., 0].clamp(-MAX_TORQUE, MAX_TORQUE)
        angle = torch.remainder(theta + math.pi, 2 * math.pi) - math.pi
        reward = -(angle.square() + 0.1 * theta_dot.square() + 0.001 * torque.square())
        acceleration = 3 * GRAVITY / (2 * LENGTH) * theta.sin() + 3.0 / (MASS * LENGTH**2) * torque
        theta_dot = (theta_dot + acceleration * TAU_S).clamp(-MAX_SPEED, MAX_SPEED)
        theta = theta + theta_dot * TAU_S
        return torch.stack([theta, theta_dot], -1), reward, torch.zeros_like(theta, dtype=torch.bool)

    def observe(self, state: Tensor) -> Tensor:
        """Cosine, sine and angular velocity `[B, 3]`."""
        theta, theta_dot = state.unbind(-1)
        return torch.stack([theta.cos(), theta.sin(), theta_dot], -1)

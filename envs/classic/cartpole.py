"""CartPole-v1: a pole on a cart, Barto, Sutton and Anderson 1983 (https://doi.org/10.1109/TSMC.1983.6313077).

Equations, constants, limits and Euler steps are those of Gymnasium's CartPole-v1.
"""

import math

import torch
from torch import Tensor

from torchpod import random
from torchpod.env import TensorEnv
from torchpod.envs.arguments import at_least
from torchpod.specs import Array, Discrete, EnvSpec, Traits

GRAVITY = 9.8
MASS_CART, MASS_POLE = 1.0, 0.1
MASS = MASS_CART + MASS_POLE
HALF_LENGTH = 0.5
FORCE = 10.0
TAU_S = 0.02
THETA_LIMIT = 12 * 2 * math.pi / 360
X_LIMIT = 2.4


class CartPole(TensorEnv):
    """Reward 1 for every step; terminates when the pole leans past 12 degrees or the cart leaves +-2.4.

    Observation `[B, 4]`: position (m), velocity (m/s), angle (rad), angular velocity (rad/s). Actions: 0
    left, 1 right.
    """

    traits = Traits(differentiable=False)

    def __init__(self, max_episode_steps: int = 500) -> None:
        at_least(1, max_episode_steps=max_episode_steps)
        self.spec = EnvSpec("cartpole", Array((4,)), Discrete(2), max_episode_steps)

    def reset(self, keys: Tensor) -> Tensor:
        """State `[B, 4]`, each entry uniform in [-0.05, 0.05)."""
        return random.uniform(keys, 4, -0.05, 0.05)

    def transition(self, state: Tensor, action: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One Euler step of 20 ms."""
        x, x_dot, theta, theta_dot = state.unbind(-1)
        force = torch.where(action == 1, FORCE, -FORCE)
        cos, sin = theta.cos(), theta.sin()
        temp = (force + MASS_POLE * HALF_LENGTH * theta_dot.square() * sin) / MASS
        theta_acc = (GRAVITY * sin - cos * temp) / (HALF_LENGTH * (4.0 / 3.0 - MASS_POLE * cos.square() / MASS))
        x_acc = temp - MASS_POLE * HALF_LENGTH * theta_acc * cos / MASS
        x, theta = x + TAU_S * x_dot, theta + TAU_S * theta_dot
        x_dot, theta_dot = x_dot + TAU_S * x_acc, theta_dot + TAU_S * theta_acc
        state = torch.stack([x, x_dot, theta, theta_dot], -1)
        terminated = (x.abs() > X_LIMIT) | (theta.abs() > THETA_LIMIT)
        return state, torch.ones_like(x), terminated

    def observe(self, state: Tensor) -> Tensor:
        """The state itself."""
        return state

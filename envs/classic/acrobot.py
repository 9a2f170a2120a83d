"""Acrobot-v1: swing up two links that hang from a bar, with a motor only between them.

Sutton 1996, "Generalization in reinforcement learning: successful examples using sparse coarse coding"
(https://proceedings.neurips.cc/paper/1995/hash/8f1d43620bc6bb580df6e80b0dc05c48-Abstract.html). Equations, constants
and limits are those of Gymnasium's Acrobot-v1: the dynamics of Sutton and Barto's book, with a term that the paper
lacks, integrated by one Runge-Kutta step of fourth order. Gymnasium's cos(x - pi / 2) is written sin(x).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torchpod import random
from torchpod.env import TensorEnv
from torchpod.envs.arguments import at_least
from torchpod.specs import Box, Discrete, EnvSpec, Traits

GRAVITY = 9.8
MASS_1, MASS_2 = 1.0, 1.0
LENGTH_1 = 1.0
CENTRE_1, CENTRE_2 = 0.5, 0.5  # from each joint to its link's centre of mass
INERTIA_1, INERTIA_2 = 1.0, 1.0
TAU_S = 0.2
MAX_SPEED_1, MAX_SPEED_2 = 4 * math.pi, 9 * math.pi
HEIGHT = 1.0


class Acrobot(TensorEnv):
    """Reward -1 for every step but the last; terminates, with 0, when the tip is higher than 1 m above the bar.

    Observation `[B, 6]`: cosine and sine of the first angle (0 hangs down), cosine and sine of the second, which
    is relative to the first, and both angular velocities (rad/s), clamped to 4 pi and 9 pi. Actions: torque
    -1, 0 or 1 (N m).
    """

    traits = Traits(differentiable=False)

    def __init__(self, max_episode_steps: int = 500) -> None:
        at_least(1, max_episode_steps=max_episode_steps)
        self.spec = EnvSpec("acrobot", Box((6,), -MAX_SPEED_2, MAX_SPEED_2), Discrete(3), max_episode_steps)

    def reset(self, keys: Tensor) -> Tensor:
        """State `[B, 4]`, two angles and two velocities, each uniform in [-0.1, 0.1)."""
        return random.uniform(keys, 4, -0.1, 0.1)

    def transition(self, state: Tensor, action: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One Runge-Kutta step of 200 ms; wraps the angles, clamps the velocities."""
        torque = action.to(state.dtype) - 1
        theta_1, theta_2, theta_dot_1, theta_dot_2 = _runge_kutta(state.unbind(-1), torque)
        theta_1, theta_2 = _wrap(theta_1), _wrap(theta_2)
        theta_dot_1 = theta_dot_1.clamp(-MAX_SPEED_1, MAX_SPEED_1)
        theta_dot_2 = theta_dot_2.clamp(-MAX_SPEED_2, MAX_SPEED_2)
        terminated = -theta_1.cos() - (theta_1 + theta_2).cos() > HEIGHT
        reward = torch.where(terminated, 0.0, -1.0)
        return torch.stack([theta_1, theta_2, theta_dot_1, theta_dot_2], -1), reward, terminated

    def observe(self, state: Tensor) -> Tensor:
        """Cosine and sine of each angle, velocities `[B, 6]`."""
        theta_1, theta_2, theta_dot_1, theta_dot_2 = state.unbind(-1)
        return torch.stack([theta_1.cos(), theta_1.sin(), theta_2.cos(), theta_2.sin(), theta_dot_1, theta_dot_2], -1)


def _runge_kutta(state: Sequence[Tensor], torque: Tensor) -> list[Tensor]:
    """Angles and velocities after one step with constant torque."""

    def slope_at(tau_s: float, slope: Sequence[Tensor]) -> list[Tensor]:
        return _slope([x + tau_s * k for x, k in zip(state, slope, strict=True)], torque)

    k1 = _slope(state, torque)
    k2 = slope_at(TAU_S / 2, k1)
    k3 = slope_at(TAU_S / 2, k2)
    k4 = slope_at(TAU_S, k3)
    slopes = zip(state, k1, k2, k3, k4, strict=True)
    return [x + TAU_S / 6 * (a + 2 * b + 2 * c + d) for x, a, b, c, d in slopes]


def _slope(state: Sequence[Tensor], torque: Tensor) -> list[Tensor]:
    """Time derivatives of angles and velocities; d and phi are named as in the book."""
    theta_1, theta_2, theta_dot_1, theta_dot_2 = state
    cos, sin = theta_2.cos(), theta_2.sin()
    coupling = MASS_2 * LENGTH_1 * CENTRE_2
    inertia_2 = MASS_2 * CENTRE_2**2 + INERTIA_2
    d_1 = MASS_1 * CENTRE_1**2 + MASS_2 * LENGTH_1**2 + INERTIA_1 + inertia_2 + 2 * coupling * cos
    d_2 = inertia_2 + coupling * cos
    phi_2 = MASS_2 * CENTRE_2 * GRAVITY * (theta_1 + theta_2).sin()
    phi_1 = (
        -coupling * (theta_dot_2 + 2 * theta_dot_1) * theta_dot_2 * sin
        + (MASS_1 * CENTRE_1 + MASS_2 * LENGTH_1) * GRAVITY * theta_1.sin()
        + phi_2
    )
    ratio = d_2 / d_1
    torques = torque + ratio * phi_1 - coupling * theta_dot_1.square() * sin - phi_2
    acceleration_2 = torques / (inertia_2 - ratio * d_2)
    acceleration_1 = -(d_2 * acceleration_2 + phi_1) / d_1
    return [theta_dot_1, theta_dot_2, acceleration_1, acceleration_2]


def _wrap(angle: Tensor) -> Tensor:
    """The angle within [-pi, pi]; one that is there already keeps every bit, as in Gymnasium."""
    return angle - 2 * math.pi * (angle / (2 * math.pi)).round()

"""Analytic policy gradient: the return of an unroll, differentiated through the environment.

The estimator is that of SVG(infinity) (Heess et al. 2015, https://arxiv.org/abs/1510.09142, eq. 9 and 10 along a whole
trajectory) with the true dynamics instead of a learned model, as in Brax (Freeman et al. 2021,
https://arxiv.org/abs/2106.13281, section 4.2, "APG"). Read agent.py first; how gradients flow: torchpod/through_env.py.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchpod import random
from torchpod.agent import Agent, Bound
from torchpod.algos.unfit import unfit
from torchpod.bounds import bounded
from torchpod.nets import Encoder, orthogonal
from torchpod.ops.returns import discounted_sum
from torchpod.specs import Box, EnvSpec
from torchpod.types import FIRST, LAST, ActorOutput, Batch, LossOutput, TimeStep, Trajectory, Tree


@dataclass(frozen=True)
class APGConfig:
    """The horizon is `algo.unroll_length`."""

    hidden: tuple[int, ...] = (64, 64)
    """Units of each hidden layer."""
    activation: str = "tanh"
    """Of hidden layers: tanh, relu or silu."""
    initial_log_std: float | None = None
    """Of the noise on actions before the squashing, log of its standard deviation; null: a deterministic policy, which
    explores by its starting states alone."""
    discount: float = bounded(0.99, least=0, most=1)
    """Gamma: what a reward is worth one step later."""


class APG(Agent):
    """See the module."""

    through_env = True
    recurrent = True  # it has no memory, but `loss` needs the steps in order

    def __init__(self, spec: EnvSpec, config: APGConfig = APGConfig()) -> None:
        super().__init__()
        if not isinstance(spec.action, Box):
            raise ValueError(unfit(type(self).__name__, "one Box action, which has gradients", spec))
        self.action_spec = spec.action
        self.hyperparameter("discount", config.discount)
        self.encoder = Encoder(spec.observation, config.hidden, config.activation)
        size = math.prod(spec.action.shape)
        self.policy = orthogonal(nn.Linear(self.encoder.out_features, size), 0.01)
        self.log_std = None
        if config.initial_log_std is not None:
            self.log_std = nn.Parameter(torch.full((size,), config.initial_log_std))

    def act(self, timestep: TimeStep, state: Tree, keys: Tensor, explore: bool = True) -> tuple[ActorOutput, Tree]:
        """A reparameterised sample: `tanh(mean + std * noise)`, scaled to the range of the action if it has one."""
        raw = self.policy(self.encoder(timestep.observation))
        if explore and self.log_std is not None:
            raw = raw + self.log_std.exp() * random.normal(keys, raw.shape[-1])
        low, high = self.action_spec.low, self.action_spec.high
        if math.isfinite(low) and math.isfinite(high):
            raw = (high + low) / 2 + (high - low) / 2 * raw.tanh()
        return ActorOutput(raw.reshape(*raw.shape[:-1], *self.action_spec.shape), {}), state

    def prepare(self, trajectory: Trajectory, keys: Tensor) -> Batch:
        """Rewards and discounts, with their graph; resets get weight 0."""
        t = trajectory.timestep
        starts = t.step_type[:-1] == FIRST
        steps = {
            "reward": t.reward[1:],
            "discount": t.discount[1:] * self.discount,
            "is_last": t.step_type[1:] == LAST,
            # The rows from which returns are counted: that of the unroll, and those of the episodes that start in it.
            "starts": torch.cat([torch.ones_like(starts[:1]), starts[1:]]),
            "weight": (t.step_type[:-1] != LAST).float(),
        }
        return Batch(steps)

    def loss(self, batch: Batch, keys: Tensor, target: Bound | None) -> LossOutput:
        """`-sum_t gamma^t r_t` of each episode, or the part of it that lies in the unroll; nothing is bootstrapped."""
        loss = self._policy_loss(batch, torch.zeros_like(batch.steps["reward"]))
        return LossOutput(loss, {})

    def _policy_loss(self, batch: Batch, tail: Tensor) -> Tensor:
        """Minus the discounted rewards from each start to the end of its episode or of the unroll, and `tail` there."""
        b = batch.steps
        ends = b["is_last"] | (torch.arange(len(tail), device=tail.device) == len(tail) - 1)[:, None]
        reward = b["reward"] + b["discount"] * tail * ends
        returns = discounted_sum(reward, b["discount"] * ~b["is_last"])
        return -(returns * b["starts"] * b["weight"]).sum()

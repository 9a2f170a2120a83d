"""Deep deterministic policy gradient: Lillicrap et al. 2016 (https://arxiv.org/abs/1509.02971).

For actions in a box: a policy without noise of its own, and a critic that it climbs. The noise is added when it acts,
and may be correlated in time. What ddpg, td3 and sac share is at the end of this file: the critic.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchpod import random
from torchpod.agent import Agent, Bound
from torchpod.algos.unfit import has_bounds, unfit
from torchpod.bounds import bounded
from torchpod.nets import Encoder, orthogonal
from torchpod.replay import transitions
from torchpod.specs import Box, EnvSpec
from torchpod.types import FIRST, ActorOutput, Batch, LossOutput, TimeStep, Trajectory, Tree


@dataclass(frozen=True)
class DDPGConfig:
    """Section 7 of the paper has layers of 400 and 300, noise="ou" with noise_std=0.2, and target_rate=0.001."""

    hidden: tuple[int, ...] = (256, 256)
    """Units of each hidden layer, of policy and critic; images are flattened."""
    activation: str = "relu"
    """Of hidden layers: tanh, relu or silu."""
    n_step: int = 1
    """Rewards that are added up before the value of what follows."""
    discount: float = bounded(0.99, least=0, most=1)
    """Gamma: what a reward is worth one step later."""
    reward_scale: float = 1.0
    """Multiplies rewards before they are learned from."""
    noise: str = "gaussian"
    """gaussian, new in every step; or ou, an Ornstein-Uhlenbeck process that starts at 0 in every episode."""
    noise_std: float = bounded(0.1, least=0)
    """Standard deviation of what `noise` adds in a step, in units of half the action range."""
    ou_rate: float = bounded(0.15, least=0)
    """Part of the Ornstein-Uhlenbeck process that is forgotten in a step, with noise=ou."""
    target_rate: float = bounded(0.005, least=0, most=1)
    """How far the targets follow after an update: tau of the paper."""


class DDPG(Agent):
    """See the module."""

    replayed = 1
    max_lag = None
    num_critics = 1

    def __init__(self, spec: EnvSpec, config: DDPGConfig = DDPGConfig()) -> None:
        super().__init__()
        self.center, self.scale = box_range(type(self).__name__, spec)
        if config.n_step < 1 or not config.hidden:
            raise ValueError(f"n_step={config.n_step} and the number of layers in hidden must be at least 1.")
        if config.noise not in ("gaussian", "ou"):
            raise ValueError(f"noise={config.noise} is not known; use gaussian or ou.")
        self.config, self.action_shape, self.num_actions = config, spec.action.shape, math.prod(spec.action.shape)
        self.replayed, self.target_rate = config.n_step, config.target_rate
        for name in ("discount", "reward_scale", "noise_std", "ou_rate"):
            self.hyperparameter(name, getattr(config, name))
        self.encoder = Encoder(spec.observation, config.hidden, config.activation)
        self.policy = orthogonal(nn.Linear(self.encoder.out_features, self.num_actions), 0.01)
        self.critics = nn.ModuleList(Critic(spec, config.hidden, config.activation) for _ in range(self.num_critics))

    def optimizer_groups(self) -> dict[str, tuple[str, ...]]:
        """Policy and critics."""
        return {"policy": ("encoder.", "policy."), "value": ("critics.",)}

    def initial_state(self, batch_size: int) -> Tree:
        """The Ornstein-Uhlenbeck process `[B, A]`, or nothing."""
        return torch.zeros(batch_size, self.num_actions) if self.config.noise == "ou" else ()

    def act(self, timestep: TimeStep, state: Tree, keys: Tensor, explore: bool = True) -> tuple[ActorOutput, Tree]:
        """The action of the policy, plus noise."""
        action = self.action_of(timestep.observation)
        if explore:
            noise = self.noise_std * random.normal(keys, self.num_actions)
            if self.config.noise == "ou":
                # Section 7 of the paper, in steps of 1.
                is_first = (timestep.step_type == FIRST).unsqueeze(-1)
                noise = state = (1.0 - self.ou_rate) * torch.where(is_first, 0.0, state) + noise
            action = (action + noise).clamp(-1.0, 1.0)
        action = (self.center + self.scale * action).reshape(*action.shape[:-1], *self.action_shape)
        return ActorOutput(action, {}), state

    def action_of(self, observation: Tree) -> Tensor:
        """What the policy does, `[..., A]` in [-1, 1]."""
        return self.policy(self.encoder(observation)).tanh()

    def values(self, observation: Tree, action: Tensor) -> Tensor:
        """What every critic says of actions `[..., A]` in [-1, 1]: `[C, ...]`."""
        return torch.stack([critic(observation, action) for critic in self.critics])

    def next_action(self, steps: dict[str, Tree], target: Bound) -> Tensor:
        """What the target critics are asked about where rows end, `[R, A]` in [-1, 1]."""
        return target("action_of", steps["next_observation"])

    def prepare(self, trajectory: Trajectory, keys: Tensor) -> Batch:
        """See `transitions`."""
        reward = trajectory.timestep.reward[1:] * self.reward_scale
        rows = transitions(trajectory, reward, discount=self.discount)
        rows["action"] = ((rows["action"] - self.center) / self.scale).unsqueeze(-1).flatten(2)
        return Batch(rows)

    def loss(self, batch: Batch, keys: Tensor, target: Bound | None) -> LossOutput:
        """Algorithm 1: the squared TD error of each critic, and what the first one says of the policy's actions.

        The smallest of the target critics counts, if there are several.
        """
        assert target is not None
        b = batch.steps
        next_value = target("values", b["next_observation"], self.next_action(b, target)).amin(0)
        value = self.values(b["observation"], b["action"])
        td = b["reward"] + b["discount"] * next_value - value
        policy_value = self.critics[0](b["observation"], self.action_of(b["observation"]))
        losses = {"policy": -policy_value, "value": 0.5 * td.square().sum(0)}
        metrics = {"action_value": value.mean(0), "td_error": td.abs().mean(0)}
        losses, metrics = ({k: (x * b["weight"]).sum() for k, x in rows.items()} for rows in (losses, metrics))
        return LossOutput(losses, metrics, td.detach().abs().mean(0))


class Critic(nn.Module):
    """Q(s, a): everything that is observed, and the action, side by side through an MLP.

    Args:
      spec: of the environment, with a Box action.
      hidden: sizes of the MLP.
      activation: of the MLP.
    """

    def __init__(self, spec: EnvSpec, hidden: Sequence[int], activation: str) -> None:
        super().__init__()
        action = Box((math.prod(spec.action.shape),), -1.0, 1.0)
        self.encoder = Encoder(_beside(spec.observation, action), hidden, activation)
        self.value = orthogonal(nn.Linear(self.encoder.out_features, 1), 1.0)

    def forward(self, observation: Tree, action: Tensor) -> Tensor:
        """The value `[...]` of actions `[..., A]` in [-1, 1]."""
        return self.value(self.encoder(_beside(observation, action))).squeeze(-1)


def _beside(observation: Tree, action: Tree) -> dict[str, Tree]:
    """One dict of both, or of their specs; an observation may well have an entry `action`, that of the step before."""
    return (observation if isinstance(observation, dict) else {"observation": observation}) | {"action taken": action}


def box_range(agent: str, spec: EnvSpec) -> tuple[float, float]:
    """Centre and half width of the actions, so that networks work in [-1, 1].

    Raises:
      ValueError: if the actions are not in a box with bounds.
    """
    box = spec.action
    if not has_bounds(box):
        raise ValueError(unfit(agent, "a Box action with bounds", spec))
    return (box.high + box.low) / 2, (box.high - box.low) / 2

"""Proximal policy optimisation, Schulman et al. 2017 (https://arxiv.org/abs/1707.06347).

Discrete and continuous actions, MLP, CNN or GRU. Read agent.py and learner.py first: this file is an actor-critic
network, `act`, `prepare` (advantages) and `loss`; everything else is the loop's.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchpod import random
from torchpod.agent import Agent, Bound
from torchpod.nets import Encoder, GRUCell, orthogonal
from torchpod.ops import distributions as dists
from torchpod.ops.returns import gae
from torchpod.specs import Box, Discrete, EnvSpec
from torchpod.types import FIRST, LAST, ActorOutput, Batch, LossOutput, TimeStep, Trajectory, Tree


@dataclass(frozen=True)
class PPOConfig:
    """Defaults: table 3 and section 5 of the paper, as run on classic control by CleanRL and purejaxrl."""

    hidden: tuple[int, ...] = (64, 64)
    activation: str = "tanh"
    channels: tuple[int, ...] = (16,)
    """Of the CNN for observations `[H, W, C]`, one 3x3 layer each; empty: flatten them for the MLP."""
    recurrent: int = 0
    """Units of a GRU between encoder and heads; 0 for none."""
    shared: bool = False
    """One encoder for policy and value instead of two. A GRU is always shared."""
    discount: float = 0.99
    gae_lambda: float = 0.95
    clip: float = 0.2
    value_clip: bool = True
    value_coefficient: float = 0.5
    entropy_coefficient: float = 0.01
    normalize_advantage: bool = True
    reward_scale: float = 1.0
    """Multiplies rewards before they are learned from (not those that are reported)."""
    initial_log_std: float = 0.0
    """Of continuous actions, in units of half the action range."""


class PPO(Agent):
    """See the module."""

    def __init__(self, spec: EnvSpec, config: PPOConfig = PPOConfig()) -> None:
        super().__init__()
        if not isinstance(spec.action, Discrete | Box):
            raise ValueError(
                f"{type(self).__name__} needs one Discrete or Box action, and {spec.name} has {spec.action}."
            )
        self.config, self.action_spec = config, spec.action
        self.recurrent = config.recurrent > 0
        self.standardise = ("advantage",) if config.normalize_advantage else ()
        for name in ("discount", "gae_lambda", "clip", "value_coefficient", "entropy_coefficient", "reward_scale"):
            self.hyperparameter(name, getattr(config, name))
        make = lambda: Encoder(spec.observation, config.hidden, config.activation, config.channels)  # noqa: E731
        self.encoder = make()
        self.value_encoder = None if config.shared or self.recurrent else make()
        features = self.encoder.out_features
        self.cell = GRUCell(features, config.recurrent) if self.recurrent else None
        features = config.recurrent or features
        if isinstance(spec.action, Discrete):
            self.policy = orthogonal(nn.Linear(features, spec.action.num_values), 0.01)
        else:
            self.policy = orthogonal(nn.Linear(features, math.prod(spec.action.shape)), 0.01)
            self.log_std = nn.Parameter(torch.full((math.prod(spec.action.shape),), config.initial_log_std))
        self.value = orthogonal(nn.Linear(features, 1), 1.0)

    def initial_state(self, batch_size: int) -> Tree:
        """Zeros `[B, recurrent]`, or nothing."""
        return torch.zeros(batch_size, self.config.recurrent) if self.recurrent else ()

    def act(self, timestep: TimeStep, state: Tree, keys: Tensor, explore: bool = True) -> tuple[ActorOutput, Tree]:
        """See `Agent.act`."""
        policy, value, state = self._step(timestep.observation, timestep.step_type == FIRST, state)
        if isinstance(self.action_spec, Discrete):
            action = random.categorical(keys, policy) if explore else policy.argmax(-1)
        else:
            noise = random.normal(keys, policy.shape[-1]) if explore else torch.zeros_like(policy)
            raw = policy + self.log_std.exp() * noise
            center, scale = self._range()
            action = (center + scale * raw).reshape(*raw.shape[:-1], *self.action_spec.shape)
        log_prob, _ = self._log_prob(policy, action)
        return ActorOutput(action, {"action_log_prob": log_prob, "state_value": value}), state

    def prepare(self, trajectory: Trajectory, keys: Tensor) -> Batch:
        """Advantages and value targets; resets get weight 0."""
        t, out = trajectory.timestep, trajectory.output
        v_tm1 = out.extras["state_value"]  # [T, B]
        last, observation = (pytree.tree_map(lambda x, i=i: x[i], t.observation) for i in (-1, slice(0, -1)))
        _, bootstrap, _ = self._step(last, t.step_type[-1] == FIRST, trajectory.last_actor_state)
        v_t = torch.cat([v_tm1[1:], bootstrap[None]])
        reward, discount = t.reward[1:] * self.reward_scale, t.discount[1:] * self.discount
        advantage = gae(reward, discount, t.step_type[1:] == LAST, v_tm1, v_t, lambda_=self.gae_lambda)
        steps = {
            "observation": observation,
            "first": t.step_type[:-1] == FIRST,
            "action": out.action,
            "action_log_prob": out.extras["action_log_prob"],
            "state_value": v_tm1,
            "advantage": advantage,
            "value_target": advantage + v_tm1,
            # LAST -> FIRST is a reset, no transition: mask it, or the value is learned across episodes.
            "weight": (t.step_type[:-1] != LAST).float(),
        }
        return Batch(steps, trajectory.actor_state)

    def loss(self, batch: Batch, keys: Tensor, target: Bound | None) -> LossOutput:
        """Clipped surrogate (eq. 7 of the paper), clipped value loss, entropy bonus (eq. 9)."""
        b, c = batch.steps, self.config
        policy, value = self._sequence(b["observation"], b["first"], batch.actor_state)
        log_prob, entropy = self._log_prob(policy, b["action"])
        log_ratio = log_prob - b["action_log_prob"]
        ratio, advantage = log_ratio.exp(), b["advantage"]
        policy_loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - self.clip, 1 + self.clip) * advantage)
        value_loss = (value - b["value_target"]).square()
        if c.value_clip:
            clipped = b["state_value"] + (value - b["state_value"]).clamp(-self.clip, self.clip)
            value_loss = torch.maximum(value_loss, (clipped - b["value_target"]).square())
        loss = policy_loss + self.value_coefficient * 0.5 * value_loss - self.entropy_coefficient * entropy
        metrics = {
            "policy_loss": policy_loss,
            "value_loss": 0.5 * value_loss,
            "entropy": entropy,
            "approx_kl": ratio - 1 - log_ratio,
            "clip_fraction": ((ratio - 1).abs() > self.clip).float(),
        }
        weight = b["weight"]
        return LossOutput((loss * weight).sum(), {k: (v * weight).sum() for k, v in metrics.items()})

    def _step(self, observation: Tree, first: Tensor, state: Tree) -> tuple[Tensor, Tensor, Tree]:
        """Policy output `[B, A]`, value `[B]` and next recurrent state, for one step."""
        features = self.encoder(observation)
        if self.cell is not None:
            features = state = self.cell(features, torch.where(first[..., None], 0.0, state))
        return *self._heads(features, observation), state

    def _sequence(self, observation: Tree, first: Tensor, state: Tree) -> tuple[Tensor, Tensor]:
        """Policy output `[..., A]` and value `[...]` of rows, or of sequences `[T, B, ...]` if recurrent."""
        features = self.encoder(observation)
        if self.cell is not None:
            gates, hidden = self.cell.input(features), []
            for t in range(gates.shape[0]):
                state = self.cell.step(gates[t], torch.where(first[t, :, None], 0.0, state))
                hidden.append(state)
            features = torch.stack(hidden)
        return self._heads(features, observation)

    def _heads(self, features: Tensor, observation: Tree) -> tuple[Tensor, Tensor]:
        value_features = features if self.value_encoder is None else self.value_encoder(observation)
        policy = self.policy(features)
        if isinstance(observation, dict) and "action_mask" in observation:
            policy = policy.masked_fill(~observation["action_mask"], -float("inf"))
        return policy, self.value(value_features).squeeze(-1)

    def _log_prob(self, policy: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability `[...]` of actions, and entropy `[...]`."""
        if isinstance(self.action_spec, Discrete):
            return dists.categorical_log_prob(policy, action), dists.categorical_entropy(policy)
        center, scale = self._range()
        raw = (action.reshape(policy.shape) - center) / scale
        log_std = self.log_std.expand_as(policy)
        return dists.normal_log_prob(policy, log_std, raw), dists.normal_entropy(log_std)

    def _range(self) -> tuple[float, float]:
        """Centre and half width of a bounded action, so that networks work in [-1, 1]; (0, 1) if unbounded."""
        spec = self.action_spec
        if isinstance(spec, Box) and math.isfinite(spec.low) and math.isfinite(spec.high):
            return (spec.high + spec.low) / 2, (spec.high - spec.low) / 2
        return 0.0, 1.0

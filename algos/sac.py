"""Soft actor-critic: Haarnoja et al. 2018 (https://arxiv.org/abs/1812.05905), for actions in a box.

Its form for discrete actions is that of Christodoulou 2019 (https://arxiv.org/abs/1910.07207). Read ddpg.py first.

Reward and entropy together are made large. What an entropy is worth, the temperature alpha, is learned as well, such
that the policy's entropy stays near a target.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchpod import random
from torchpod.actions import mask_of
from torchpod.agent import Agent, Bound
from torchpod.algos.ddpg import Critic, box_range
from torchpod.algos.unfit import unfit
from torchpod.bounds import bounded
from torchpod.nets import Encoder, choose_torso, orthogonal
from torchpod.ops.distributions import categorical_entropy
from torchpod.replay import transitions
from torchpod.specs import Discrete, EnvSpec
from torchpod.types import ActorOutput, Batch, LossOutput, TimeStep, Trajectory, Tree

LOG_STD = (-20.0, 2.0)
"""Range of the policy's log standard deviation, as in the authors' code."""


@dataclass(frozen=True)
class SACConfig:
    """Defaults: table 1 of Haarnoja et al."""

    hidden: tuple[int, ...] = (256, 256)
    """Units of each hidden layer, of policy and critics."""
    activation: str = "relu"
    """Of hidden layers: tanh, relu or silu."""
    torso: str = "small"
    """For images `[H, W, C]`: small, nature, impala_shallow or impala_deep; see `make_torso`. Critics of
    continuous actions flatten images."""
    channels: tuple[int, ...] = (16,)
    """Of the torso "small", one 3x3 layer each; empty: flatten images for the MLP."""
    discount: float = bounded(0.99, least=0, most=1)
    """Gamma: what a reward is worth one step later."""
    reward_scale: float = 1.0
    """Multiplies rewards before they are learned from."""
    initial_alpha: float = 1.0
    """What an entropy is worth at first; it stays so where the learning rate of `temperature` is 0."""
    target_entropy: float | None = None
    """In nats, of actions in the units of the environment. null: for actions `[A]` the paper's, -A where they lie in
    [-1, 1], which in a box of half width w is A (log w - 1); 0.98 of the largest, log A, for A discrete ones. Where an
    action mask leaves n of these, the same share of log n."""
    target_rate: float = bounded(0.005, least=0, most=1)
    """How far the target critics follow after an update: tau of the paper."""


class SAC(Agent):
    """See the module. The policy is a normal distribution, squashed by tanh into the box."""

    replayed = 1
    max_lag = None

    def __init__(self, spec: EnvSpec, config: SACConfig = SACConfig()) -> None:
        super().__init__()
        num_outputs, target_entropy = self._take(spec)
        if not config.hidden or not config.initial_alpha > 0:
            raise ValueError(
                f"hidden={list(config.hidden)} must have a layer, and initial_alpha={config.initial_alpha} be above 0."
            )
        self.config, self.target_rate = config, config.target_rate
        self.hyperparameter("discount", config.discount)
        self.hyperparameter("reward_scale", config.reward_scale)
        given = config.target_entropy
        self.hyperparameter("target_entropy", target_entropy if given is None else given)
        torso = choose_torso(spec, config.torso, channels=config.channels, hidden=config.hidden[-1])
        make = functools.partial(Encoder, spec.observation, config.hidden, config.activation, torso)
        self.policy = _head(make(), num_outputs, 0.01)
        self.critics = nn.ModuleList(self._critic(spec, make) for _ in range(2))
        self.log_alpha = nn.Parameter(torch.tensor(math.log(config.initial_alpha)))

    def _take(self, spec: EnvSpec) -> tuple[int, float]:
        """Looks at the actions: outputs of the policy's network, and the target entropy."""
        self.center, self.scale = box_range(type(self).__name__, spec)
        self.action_shape, self.num_actions = spec.action.shape, math.prod(spec.action.shape)
        return 2 * self.num_actions, self.num_actions * (math.log(self.scale) - 1.0)

    def _critic(self, spec: EnvSpec, make: Callable[[], Encoder]) -> nn.Module:
        return Critic(spec, self.config.hidden, self.config.activation)

    def optimizer_groups(self) -> dict[str, tuple[str, ...]]:
        """Policy, critics and temperature."""
        return {"policy": ("policy.",), "value": ("critics.",), "temperature": ("log_alpha",)}

    def act(self, timestep: TimeStep, state: Tree, keys: Tensor, explore: bool = True) -> tuple[ActorOutput, Tree]:
        """A draw, or tanh of the mean."""
        mean, log_std = self.normal(timestep.observation)
        raw = mean + log_std.exp() * random.normal(keys, self.num_actions) if explore else mean
        action = (self.center + self.scale * raw.tanh()).reshape(*raw.shape[:-1], *self.action_shape)
        return ActorOutput(action, {}), state

    def normal(self, observation: Tree) -> tuple[Tensor, Tensor]:
        """Mean and log of the standard deviation, each `[..., A]`, before tanh."""
        mean, log_std = self.policy(observation).chunk(2, -1)
        return mean, log_std.clamp(*LOG_STD)

    def sample(self, observation: Tree, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Actions `[..., A]` in [-1, 1], and the log-density `[...]` of what the environment makes of them: appendix C.

        Args:
          observation: `[..., *shape]`.
          noise: standard normals `[..., A]`.
        """
        mean, log_std = self.normal(observation)
        raw = mean + log_std.exp() * noise
        # log(1 - tanh(x)^2), which rounds to log(0) from 9 on
        log_slope = 2.0 * (math.log(2.0) - raw - nn.functional.softplus(-2.0 * raw))
        log_normal = -0.5 * noise.square() - log_std - 0.5 * math.log(2.0 * math.pi)
        return raw.tanh(), (log_normal - log_slope - math.log(self.scale)).sum(-1)

    def values(self, observation: Tree, action: Tensor) -> Tensor:
        """What every critic says of actions `[..., A]`: `[2, ...]`."""
        return torch.stack([critic(observation, action) for critic in self.critics])

    def expected(self, steps: dict[str, Tree], side: str, critics: "Bound | SAC") -> tuple[Tensor, Tensor]:
        """What the policy is worth, by the smaller critic, and its entropy: estimates `[R]` from one action.

        Args:
          steps: of a batch.
          side: "" for where rows begin, "next_" for where they end.
          critics: whose: the agent itself, or its targets.
        """
        observation = steps[f"{side}observation"]
        action, log_prob = self.sample(observation, steps[f"{side}noise"])
        return critics("values", observation, action).amin(0), -log_prob

    def target_of(self, observation: Tree) -> Tensor:
        """The entropy that the temperature aims at: a scalar, or `[R]`."""
        return self.target_entropy

    def prepare(self, trajectory: Trajectory, keys: Tensor) -> Batch:
        """See `transitions`; and the noise that makes an action of each observation.

        Drawn here, because a program that computes gradients is slower to compile and to run with draws among them.
        """
        reward = trajectory.timestep.reward[1:] * self.reward_scale
        rows = transitions(trajectory, reward, discount=self.discount)
        noise, next_noise = random.normal(keys, 2 * self.num_actions)[None].chunk(2, -1)
        rows["action"] = ((rows["action"] - self.center) / self.scale).unsqueeze(-1).flatten(2)
        return Batch(rows | {"noise": noise, "next_noise": next_noise})

    def loss(self, batch: Batch, keys: Tensor, target: Bound | None) -> LossOutput:
        """Eq. 5 of the paper for the critics, 9 for the policy, 18 for the temperature.

        Every group follows its own loss alone, so that nothing else needs to be detached.
        """
        assert target is not None
        b, alpha = batch.steps, self.log_alpha.exp()
        next_value, next_entropy = self.expected(b, "next_", target)
        value = self.values(b["observation"], b["action"])
        td = b["reward"] + b["discount"] * (next_value + alpha * next_entropy) - value
        policy_value, entropy = self.expected(b, "", self)
        losses = {
            "policy": -(policy_value + alpha * entropy),
            "value": 0.5 * td.square().sum(0),
            "temperature": alpha * (entropy - self.target_of(b["observation"])),
        }
        metrics = {
            "action_value": value.mean(0),
            "td_error": td.abs().mean(0),
            "entropy": entropy,
            "alpha": alpha.expand_as(entropy),
        }
        losses, metrics = ({k: (x * b["weight"]).sum() for k, x in rows.items()} for rows in (losses, metrics))
        return LossOutput(losses, metrics, td.detach().abs().mean(0))


class DiscreteSAC(SAC):
    """Of a few actions the critics value each, and the policy gives each a probability: no action needs to be drawn."""

    def _take(self, spec: EnvSpec) -> tuple[int, float]:
        if not isinstance(spec.action, Discrete):
            raise ValueError(unfit(type(self).__name__, "a Discrete action", spec))
        self.num_actions = spec.action.num_values
        return self.num_actions, 0.98 * math.log(self.num_actions)

    def _critic(self, spec: EnvSpec, make: Callable[[], Encoder]) -> nn.Module:
        return _head(make(), self.num_actions, 1.0)

    def act(self, timestep: TimeStep, state: Tree, keys: Tensor, explore: bool = True) -> tuple[ActorOutput, Tree]:
        """A draw, or the most likely action."""
        logits = self.logits(timestep.observation)
        return ActorOutput(random.categorical(keys, logits) if explore else logits.argmax(-1), {}), state

    def logits(self, observation: Tree) -> Tensor:
        """Of the policy, `[..., A]`; -inf for actions that are not allowed."""
        logits = self.policy(observation)
        mask = mask_of(observation)
        return logits if mask is None else logits.masked_fill(~mask, -float("inf"))

    def all_values(self, observation: Tree) -> Tensor:
        """What every critic says of every action: `[2, ..., A]`."""
        return torch.stack([critic(observation) for critic in self.critics])

    def values(self, observation: Tree, action: Tensor) -> Tensor:
        """What every critic says of actions `[...]`: `[2, ...]`."""
        values = self.all_values(observation)
        return values.gather(-1, action.expand(values.shape[:-1]).unsqueeze(-1)).squeeze(-1)

    def expected(self, steps: dict[str, Tree], side: str, critics: Bound | SAC) -> tuple[Tensor, Tensor]:
        """As `SAC.expected`, exactly: eqs. 10 to 12 of Christodoulou."""
        observation = steps[f"{side}observation"]
        logits = self.logits(observation)
        values = critics("all_values", observation).amin(0)
        return (logits.softmax(-1) * values).sum(-1), categorical_entropy(logits)

    def target_of(self, observation: Tree) -> Tensor:
        """With a mask the same share of the largest entropy there is."""
        mask = mask_of(observation)
        if mask is None:
            return self.target_entropy
        largest = mask.sum(-1).clamp(min=1).to(self.target_entropy.dtype).log()
        return self.target_entropy * largest / math.log(max(self.num_actions, 2))

    def prepare(self, trajectory: Trajectory, keys: Tensor) -> Batch:
        """See `transitions`."""
        reward = trajectory.timestep.reward[1:] * self.reward_scale
        return Batch(transitions(trajectory, reward, discount=self.discount))


def sac_agent(spec: EnvSpec, config: SACConfig = SACConfig()) -> SAC:
    """The agent of `algo=sac`, by the actions of the environment."""
    return (DiscreteSAC if isinstance(spec.action, Discrete) else SAC)(spec, config)


def _head(encoder: Encoder, num_outputs: int, gain: float) -> nn.Module:
    return nn.Sequential(encoder, orthogonal(nn.Linear(encoder.out_features, num_outputs), gain))

"""Deep Q-networks: DQN, C51 and QR-DQN, with what Rainbow put together.

Mnih et al. 2015 (https://doi.org/10.1038/nature14236), and double, dueling, n-step and prioritised as in Hessel et al.
2018 (https://arxiv.org/abs/1710.02298). C51 and quantile regression are subclasses with an error of their own.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchpod import random
from torchpod.actions import any_allowed, mask_of
from torchpod.agent import Agent, Bound
from torchpod.algos.unfit import unfit
from torchpod.bounds import bounded
from torchpod.nets import Encoder, choose_torso, orthogonal
from torchpod.ops.exploration import falling
from torchpod.replay import transitions
from torchpod.specs import Discrete, EnvSpec
from torchpod.types import ActorOutput, Batch, LossOutput, TimeStep, Trajectory, Tree


@dataclass(frozen=True)
class DQNConfig:
    """Defaults for classic control; Atari and MinAtar want a torso."""

    hidden: tuple[int, ...] = (128, 128)
    """Units of each hidden layer."""
    activation: str = "relu"
    """Of hidden layers: tanh, relu or silu."""
    torso: str = "small"
    """For images `[H, W, C]`: small, nature, impala_shallow or impala_deep; see `make_torso`."""
    channels: tuple[int, ...] = (16,)
    """Of the torso "small", one 3x3 layer each; empty: flatten images for the MLP."""
    dueling: bool = False
    """Value and advantages apart (Wang et al. 2016, https://arxiv.org/abs/1511.06581, eq. 9)."""
    double: bool = True
    """The online network chooses the action that the target network values (van Hasselt et al. 2016,
    https://arxiv.org/abs/1509.06461)."""
    n_step: int = 3
    """Rewards that are added up before the value of what follows."""
    huber_delta: float = bounded(math.inf, least=1e-9)
    """Of DQN alone: larger errors count linearly; with inf none do. With 1, as in the paper, whose rewards are clipped,
    CartPole is not learnt: an error at the end of an episode is as large as the value there, up to 100, and would count
    as 1."""
    discount: float = bounded(0.99, least=0, most=1)
    """Gamma: what a reward is worth one step later."""
    epsilon: float = bounded(0.05, least=0, most=1)
    """Share of random actions at last; none in evaluation."""
    exploration_fraction: float = bounded(0.2, least=0, most=1)
    """Part of the run in which the share of random actions falls from 1 to epsilon."""
    epsilon_spread: float = bounded(0.0, least=0)
    """Every environment has its own `epsilon ** (1 + epsilon_spread * u)`, u uniform. Ape-X has 7, with epsilon 0.4
    (Horgan et al. 2018, https://arxiv.org/abs/1803.00933)."""
    reward_clip: float = bounded(math.inf, least=1e-9)
    """Rewards are learned from as clipped to [-reward_clip, reward_clip]."""
    target_rate: float = bounded(0.02, least=0, most=1)
    """The targets follow a little after every update (Lillicrap et al. 2016, https://arxiv.org/abs/1509.02971). With
    rate 1 and interval 200 they are copied now and then, as in the paper."""
    target_interval: int = bounded(1, least=1)
    """Updates until the targets follow."""


class DQN(Agent):
    """See the module."""

    annealed = ("remaining",)
    replayed = 1
    max_lag = None
    categorical = False
    """Whether outputs are the logits of returns between `low` and `high`, and not returns."""
    bounds_errors = True
    """Whether `huber_delta` has an effect."""

    def __init__(
        self, spec: EnvSpec, config: DQNConfig = DQNConfig(), *, outputs: int = 1, features: int | None = None
    ) -> None:
        super().__init__()
        if not isinstance(spec.action, Discrete):
            raise ValueError(unfit(type(self).__name__, "a Discrete action", spec))
        if config.n_step < 1 or not config.hidden:
            raise ValueError(f"n_step={config.n_step} and the number of layers in hidden must be at least 1.")
        if config.huber_delta != math.inf and not self.bounds_errors:
            raise ValueError(
                f"huber_delta={config.huber_delta:g} is of DQN, and {type(self).__name__} has a loss of its own; leave "
                "it out."
            )
        self.config, self.num_actions, self.outputs = config, spec.action.num_values, outputs
        self.replayed = config.n_step
        self.target_rate, self.target_interval = config.target_rate, config.target_interval
        for name in ("discount", "epsilon", "exploration_fraction", "reward_clip"):
            self.hyperparameter(name, getattr(config, name))
        if self.bounds_errors:
            self.hyperparameter("huber_delta", config.huber_delta)
        self.hyperparameter("remaining", 1.0)  # of the run
        torso = choose_torso(spec, config.torso, channels=config.channels, hidden=config.hidden[-1])
        self.encoder = Encoder(spec.observation, config.hidden, config.activation, torso)
        features = features or self.encoder.out_features
        self.advantage = orthogonal(nn.Linear(features, self.num_actions * outputs), 1.0)
        self.value = orthogonal(nn.Linear(features, outputs), 1.0) if config.dueling else None

    def outputs_of(self, observation: Tree) -> Tensor:
        """What the network says of every action, `[..., A, outputs]`."""
        return self.heads(self.encoder(observation))

    def heads(self, features: Tensor) -> Tensor:
        """The same, of features."""
        out = self.advantage(features).unflatten(-1, (self.num_actions, self.outputs))
        if self.value is None:
            return out
        return self.value(features).unsqueeze(-2) + out - out.mean(-2, keepdim=True)

    def values(self, outputs: Tensor) -> Tensor:
        """Action values `[..., A]`: the mean of the outputs, or of the returns whose logits they are."""
        return (outputs.softmax(-1) * self.atoms(outputs)).sum(-1) if self.categorical else outputs.mean(-1)

    def atoms(self, outputs: Tensor) -> Tensor:
        """The returns `[outputs]` that categorical outputs stand for."""
        return self.low + (self.high - self.low) * torch.linspace(0.0, 1.0, self.outputs, device=outputs.device)

    def error(self, outputs: Tensor, target: Tensor, reward: Tensor, discount: Tensor) -> tuple[Tensor, Tensor]:
        """How wrong the outputs of the actions taken are, `[R]`, and how urgent it is to learn more from them, `[R]`.

        Args:
          outputs: `[R, outputs]`.
          target: those of the target network for the best action in the state that followed, `[R, outputs]`.
          reward: the n-step return up to there, `[R]`.
          discount: of what follows, `[R]`.
        """
        td = reward + discount * target.squeeze(-1) - outputs.squeeze(-1)
        clipped = td.clamp(-self.huber_delta, self.huber_delta)
        return clipped * (td - 0.5 * clipped), td.abs()

    def greedy(self, observation: Tree) -> Tensor:
        """The best action `[...]` that is allowed."""
        return self.best(self.outputs_of(observation), observation)

    def best(self, outputs: Tensor, observation: Tree) -> Tensor:
        """The same, of outputs."""
        values, mask = self.values(outputs), mask_of(observation)
        return (values if mask is None else values.masked_fill(~mask, -float("inf"))).argmax(-1)

    def act(self, timestep: TimeStep, state: Tree, keys: Tensor, explore: bool = True) -> tuple[ActorOutput, Tree]:
        """Epsilon-greedy."""
        action = self.greedy(timestep.observation)
        return ActorOutput(self.explored(action, timestep.observation, keys) if explore else action, {}), state

    def explored(self, action: Tensor, observation: Tree, keys: Tensor) -> Tensor:
        """Some of the actions `[B]` replaced by random ones that are allowed."""
        # The same for an environment's whole life: its key without the counter.
        own = random.uniform(random.at(keys, 0), 1).squeeze(-1)
        last = self.epsilon ** (1.0 + self.config.epsilon_spread * own)
        words = random.bits(keys, 2)
        is_random = random.to_uniform(words[..., 0]) < falling(last, self.remaining, self.exploration_fraction)
        return torch.where(is_random, any_allowed(self.num_actions, observation, words[..., 1]), action)

    def prepare(self, trajectory: Trajectory, keys: Tensor) -> Batch:
        """One row per window of n steps: where it begins, what it earns, and where it ends."""
        reward = trajectory.timestep.reward[1:].clamp(-self.reward_clip, self.reward_clip)
        return Batch(transitions(trajectory, reward, discount=self.discount))

    def loss(self, batch: Batch, keys: Tensor, target: Bound | None) -> LossOutput:
        """Of eq. 1 of Rainbow."""
        assert target is not None
        b = batch.steps
        following = target("outputs_of", b["next_observation"])
        if self.config.double:
            best = self.greedy(b["next_observation"])
        else:
            best = target("greedy", b["next_observation"])
        outputs = self.outputs_of(b["observation"])
        taken = self._of(outputs, b["action"])
        error, priority = self.error(taken, self._of(following, best).detach(), b["reward"], b["discount"])
        value = self.values(outputs).gather(-1, b["action"].unsqueeze(-1)).squeeze(-1)
        metrics = {"value": (value * b["weight"]).sum(), "td_error": (priority * b["weight"]).sum()}
        return LossOutput((error * b["weight"]).sum(), metrics, priority)

    @staticmethod
    def _of(outputs: Tensor, action: Tensor) -> Tensor:
        """Outputs `[R, outputs]` of actions `[R]`."""
        return outputs.gather(-2, action[..., None, None].expand(*action.shape, 1, outputs.shape[-1])).squeeze(-2)


@dataclass(frozen=True)
class C51Config(DQNConfig):
    """The returns that it can tell apart lie between `low` and `high`."""

    num_atoms: int = 51
    """Returns that it can tell apart, evenly spaced from `low` to `high`."""
    low: float = -10.0
    """The least return that it can tell apart; discounted returns below count as this."""
    high: float = 10.0
    """The largest return that it can tell apart; discounted returns above count as this."""


class C51(DQN):
    """The categorical distribution of returns: Bellemare et al. 2017 (https://arxiv.org/abs/1707.06887)."""

    categorical = True
    bounds_errors = False

    def __init__(self, spec: EnvSpec, config: C51Config = C51Config()) -> None:
        super().__init__(spec, config, outputs=config.num_atoms)
        if not (config.low < config.high and config.num_atoms > 1):
            raise ValueError(
                f"low={config.low} must be below high={config.high}, and num_atoms={config.num_atoms} at least 2."
            )
        self.hyperparameter("low", config.low)
        self.hyperparameter("high", config.high)

    def error(self, outputs: Tensor, target: Tensor, reward: Tensor, discount: Tensor) -> tuple[Tensor, Tensor]:
        """The cross entropy with the target's distribution, moved and projected back onto the atoms: algorithm 1."""
        atoms, step = self.atoms(outputs), (self.high - self.low) / (self.outputs - 1)
        moved = (reward[:, None] + discount[:, None] * atoms).clamp(self.low, self.high)
        share = (1.0 - (moved[:, None, :] - atoms[:, None]).abs() / step).clamp(min=0.0)  # of atom j for atom i
        projected = (share * target.softmax(-1)[:, None, :]).sum(-1)
        cross = -(projected * outputs.log_softmax(-1)).sum(-1)
        return cross, cross.detach()


@dataclass(frozen=True)
class QRDQNConfig(DQNConfig):
    """Quantiles of the returns."""

    num_quantiles: int = bounded(50, least=1)
    """Quantiles of the returns that are learned, of equal weight."""


class QRDQN(DQN):
    """Quantile regression: Dabney et al. 2018 (https://arxiv.org/abs/1710.10044)."""

    bounds_errors = False

    def __init__(self, spec: EnvSpec, config: QRDQNConfig = QRDQNConfig()) -> None:
        super().__init__(spec, config, outputs=config.num_quantiles)

    def error(self, outputs: Tensor, target: Tensor, reward: Tensor, discount: Tensor) -> tuple[Tensor, Tensor]:
        """The quantile Huber loss, eq. 10, summed over quantiles, mean over those of the target."""
        td = (reward[:, None] + discount[:, None] * target)[:, None, :] - outputs[:, :, None]  # [R, own, target]
        huber = nn.functional.huber_loss(td, torch.zeros_like(td), reduction="none")
        middle = (torch.arange(self.outputs, device=td.device) + 0.5) / self.outputs
        loss = ((middle[:, None] - (td.detach() < 0).to(td.dtype)).abs() * huber).mean(-1).sum(-1)
        return loss, loss.detach()

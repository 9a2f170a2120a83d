"""Losses of TorchRL by name, with networks of the usual kind: `algo=torchrl loss=ClipPPOLoss`.

With networks or a loss of your own write what `torchrl_agent` does at the end of this file: build an actor, and a loss
of it, and hand them to `LossAgent` (docs/torchrl-losses.md).
"""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from torchpod.agent import Agent
from torchpod.nets import MLP
from torchpod.specs import Box, Discrete, EnvSpec

if TYPE_CHECKING:  # torchrl takes seconds to import
    from tensordict.nn import TensorDictModuleBase
    from torchrl.objectives import LossModule


@dataclass(frozen=True)
class TorchRLConfig:
    """Which loss, and the networks that it is built of."""

    loss: str = "ClipPPOLoss"
    """A class of torchrl.objectives, one of `LOSSES`."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """More arguments of its constructor, e.g. `{clip_epsilon: 0.1}`."""
    hidden: tuple[int, ...] = (64, 64)
    activation: str = "tanh"
    discount: float = 0.99
    gae_lambda: float = 0.95
    normalize_advantage: bool = True
    """Of losses with advantages: mean 0 and std 1 per minibatch."""
    target_rate: float = 0.005
    target_interval: int = 1
    epsilon: float = 0.05
    """Share of random actions at last, of losses whose actor takes the best of discrete ones."""
    exploration_fraction: float = 0.2
    """Part of the run in which it falls from 1."""
    noise: float = 0.1
    """Added to the actions of losses with a deterministic actor, in units of half their range."""


class Parts(NamedTuple):
    """Of an agent."""

    actor: "TensorDictModuleBase"
    loss: "LossModule"


class _Builder:
    """Networks for the losses, from the spec of an environment.

    Raises:
      ValueError: if a loss has no use for such observations or actions.
    """

    def __init__(self, spec: EnvSpec, config: TorchRLConfig) -> None:
        observation = spec.observation
        if isinstance(observation, dict) or isinstance(observation, Discrete):
            raise ValueError(
                f"algo=torchrl has networks for one tensor of observations, and {spec.name} has {observation}; build "
                "actor and loss yourself (docs/torchrl-losses.md)."
            )
        self.spec, self.config, self.shape = spec, config, observation.shape

    @property
    def num_actions(self) -> int:
        if not isinstance(self.spec.action, Discrete):
            raise ValueError(
                f"{self.config.loss} is for discrete actions, and {self.spec.name} has {self.spec.action}."
            )
        return self.spec.action.num_values

    @property
    def box(self) -> Box:
        box = self.spec.action
        if not isinstance(box, Box) or len(box.shape) != 1:
            raise ValueError(f"{self.config.loss} is for actions of shape [A], and {self.spec.name} has {box}.")
        if not (math.isfinite(box.low) and math.isfinite(box.high)):
            raise ValueError(f"{self.config.loss} needs bounds of the actions, and {self.spec.name} has {box}.")
        return box

    def net(self, out_features: int, extra: int = 0) -> nn.Module:
        """Of an observation, and of `extra` numbers beside it, to `[..., out_features]`."""
        body = MLP(math.prod(self.shape) + extra, self.config.hidden, self.config.activation)
        return _Net(len(self.shape), body, nn.Linear(body.out_features, out_features))

    def module(self, net: nn.Module, *, to: Sequence[str], of: tuple[str, ...] = ("observation",)) -> Any:
        from tensordict.nn import TensorDictModule

        return TensorDictModule(net, in_keys=list(of), out_keys=list(to))

    def categorical(self) -> Any:
        """An actor for discrete actions."""
        from torchrl.modules import ProbabilisticActor

        return ProbabilisticActor(
            self.module(self.net(self.num_actions), to=["logits"]),
            in_keys=["logits"],
            distribution_class=torch.distributions.Categorical,
            return_log_prob=True,
        )

    def gaussian(self) -> Any:
        """An actor whose actions are bounded by tanh."""
        from tensordict.nn import NormalParamExtractor
        from torchrl.modules import ProbabilisticActor, TanhNormal

        box = self.box
        net = nn.Sequential(self.net(2 * box.shape[0]), NormalParamExtractor())
        return ProbabilisticActor(
            self.module(net, to=["loc", "scale"]),
            in_keys=["loc", "scale"],
            distribution_class=TanhNormal,
            distribution_kwargs={"low": box.low, "high": box.high},
            return_log_prob=True,
        )

    def stochastic(self) -> Any:
        """An actor for whatever the actions are."""
        return self.categorical() if isinstance(self.spec.action, Discrete) else self.gaussian()

    def deterministic(self) -> Any:
        """An actor without noise of its own."""
        net = nn.Sequential(self.net(self.box.shape[0]), _Within(self.box.low, self.box.high))
        return self.module(net, to=["action"])

    def value(self) -> Any:
        return self.module(self.net(1), to=["state_value"])

    def action_values(self, key: str) -> Any:
        """Of all discrete actions."""
        return self.module(self.net(self.num_actions), to=[key])

    def critic(self, num_values: int = 1) -> Any:
        """Of an observation and an action."""
        net = self.net(num_values, extra=self.box.shape[0])
        return self.module(net, to=["state_action_value"], of=("observation", "action"))

    def bounds(self) -> Any:
        """The actions, as TorchRL says it."""
        from torchrl.data import Bounded

        return Bounded(self.box.low, self.box.high, torch.Size(self.box.shape))

    def q_actor(self) -> Any:
        from torchrl.data import Categorical
        from torchrl.modules import QValueActor

        return QValueActor(self.net(self.num_actions), in_keys=["observation"], spec=Categorical(self.num_actions))

    def distributional_actor(self, num_atoms: int = 51, low: float = -10.0, high: float = 10.0) -> Any:
        from torchrl.data import OneHot
        from torchrl.modules import DistributionalQValueActor

        net = nn.Sequential(self.net(num_atoms * self.num_actions), _Atoms(num_atoms))
        support = torch.linspace(low, high, num_atoms)
        return DistributionalQValueActor(net, in_keys=["observation"], support=support, spec=OneHot(self.num_actions))


class _Net(nn.Module):
    """Observations `[..., *shape]`, and what else there is, through a body and a head."""

    def __init__(self, num_dims: int, body: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.num_dims, self.body, self.head = num_dims, body, head

    def forward(self, observation: Tensor, *extra: Tensor) -> Tensor:
        flat = observation.reshape(*observation.shape[: observation.ndim - self.num_dims], -1)
        if not flat.is_floating_point():
            flat = flat.float() / (255 if flat.dtype == torch.uint8 else 1)
        return self.head(self.body(torch.cat([flat, *extra], -1) if extra else flat))


class _Within(nn.Module):
    """`[low, high]` by tanh."""

    def __init__(self, low: float, high: float) -> None:
        super().__init__()
        self.center, self.scale = (high + low) / 2, (high - low) / 2

    def forward(self, x: Tensor) -> Tensor:
        return self.center + self.scale * x.tanh()


class _Atoms(nn.Module):
    """Log-probabilities `[..., atoms, A]`, as TorchRL wants them."""

    def __init__(self, num_atoms: int) -> None:
        super().__init__()
        self.num_atoms = num_atoms

    def forward(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_atoms, -1)).log_softmax(-2)


Maker = Callable[[_Builder, Callable[..., Any]], Parts]


def _on_policy(b: _Builder, loss: Callable[..., Any]) -> Parts:
    actor = b.stochastic()
    return Parts(actor, loss(actor, b.value()))


def _deterministic(b: _Builder, loss: Callable[..., Any]) -> Parts:
    actor = b.deterministic()
    return Parts(actor, loss(actor, b.critic(), action_spec=b.bounds()))


def _ddpg(b: _Builder, loss: Callable[..., Any]) -> Parts:
    actor = b.deterministic()
    return Parts(actor, loss(actor, b.critic(), delay_actor=True, delay_value=True))


def _soft(b: _Builder, loss: Callable[..., Any], num_values: int = 1) -> Parts:
    actor = b.gaussian()
    return Parts(actor, loss(actor, b.critic(num_values), action_spec=b.bounds()))


def _quantiles(b: _Builder, loss: Callable[..., Any]) -> Parts:
    return _soft(b, loss, num_values=25)


def _soft_discrete(b: _Builder, loss: Callable[..., Any]) -> Parts:
    actor, values = b.categorical(), b.action_values("action_value")
    return Parts(actor, loss(actor, values, action_space="categorical", num_actions=b.num_actions))


def _iql(b: _Builder, loss: Callable[..., Any]) -> Parts:
    actor = b.gaussian()
    return Parts(actor, loss(actor, b.critic(), b.value()))


def _iql_discrete(b: _Builder, loss: Callable[..., Any]) -> Parts:
    actor, values = b.categorical(), b.action_values("state_action_value")
    return Parts(actor, loss(actor, values, b.value(), action_space="categorical"))


def _dqn(b: _Builder, loss: Callable[..., Any]) -> Parts:
    actor = b.q_actor()
    return Parts(actor, loss(actor, delay_value=True, action_space="categorical"))


def _distributional(b: _Builder, loss: Callable[..., Any]) -> Parts:
    actor = b.distributional_actor()
    return Parts(actor, loss(actor, gamma=b.config.discount, delay_value=True))


ON_POLICY: dict[str, Maker] = dict.fromkeys(
    ("A2CLoss", "ClipPPOLoss", "KLPENPPOLoss", "PPOLoss", "ReinforceLoss"), _on_policy
)
OFF_POLICY: dict[str, Maker] = {
    "CQLLoss": _soft,
    "CrossQLoss": _soft,
    "DDPGLoss": _ddpg,
    "DQNLoss": _dqn,
    "DiscreteIQLLoss": _iql_discrete,
    "DiscreteSACLoss": _soft_discrete,
    "DistributionalDQNLoss": _distributional,
    "IQLLoss": _iql,
    "REDQLoss": _soft,
    "SACLoss": _soft,
    "TD3Loss": _deterministic,
    "TQCLoss": _quantiles,
}
LOSSES = ON_POLICY | OFF_POLICY
EPSILON_GREEDY, NOISY = ("DQNLoss", "DistributionalDQNLoss"), ("DDPGLoss", "TD3Loss")
CONTINUOUS = ("CQLLoss", "CrossQLoss", "DDPGLoss", "IQLLoss", "REDQLoss", "SACLoss", "TD3Loss", "TQCLoss")
"""Those that are for continuous actions alone."""


def parts(spec: EnvSpec, config: TorchRLConfig) -> Parts:
    """Actor and loss for an environment.

    Raises:
      ValueError: if the loss is not known, or not for such an environment, or refuses an argument.
    """
    import torchrl.objectives

    if config.loss not in LOSSES:
        raise ValueError(f"loss={config.loss} is not known; use one of {', '.join(sorted(LOSSES))}.")
    if not hasattr(torchrl.objectives, config.loss):
        raise ValueError(f"torchrl {torchrl.__version__} has no {config.loss}; install a newer one.")
    cls = getattr(torchrl.objectives, config.loss)

    known = {name for base in cls.__mro__ for name in inspect.signature(base.__init__).parameters}
    for name in config.arguments:
        if name not in known:
            raise ValueError(f"{config.loss} has no argument {name}; it has {', '.join(sorted(known - {'self'}))}.")

    def make(*args: Any, **own: Any) -> Any:
        return cls(*args, **(own | config.arguments))

    return LOSSES[config.loss](_Builder(spec, config), make)


def torchrl_agent(spec: EnvSpec, config: TorchRLConfig = TorchRLConfig()) -> Agent:
    """The agent of `algo=torchrl`.

    Raises:
      ValueError: as `parts`.
    """
    from torchpod.interop.torchrl import LossAgent

    actor, loss = parts(spec, config)
    if config.loss in ON_POLICY and "normalize_advantage" not in config.arguments and config.normalize_advantage:
        cast(Any, loss).normalize_advantage = True
    return LossAgent(
        actor,
        loss,
        spec=spec,
        discount=config.discount,
        gae_lambda=config.gae_lambda,
        target_rate=config.target_rate,
        target_interval=config.target_interval,
        epsilon=config.epsilon if config.loss in EPSILON_GREEDY else 0.0,
        noise=config.noise if config.loss in NOISY else 0.0,
        exploration_fraction=config.exploration_fraction,
    )

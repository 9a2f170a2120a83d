"""Losses of TorchRL by name, with networks of the usual kind: `algo=torchrl loss=ClipPPOLoss`.

Where there are groups of agents every policy has a loss and networks of its own (multi_agent.py), to which its agents
are rows. The values of MAPPOLoss also look at what all agents observe.

With networks or a loss of your own write what `torchrl_agent` does at the end of this file: build an actor, and a loss
of it, and hand them to `LossAgent` (docs/torchrl-losses.md).
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from torchpod.agent import Agent
from torchpod.algos.multi_agent import Policies
from torchpod.bounds import bounded
from torchpod.interop.unfit import UNSUPPORTED, for_actions, unsupported
from torchpod.nets import MLP
from torchpod.nets.nets import STATE
from torchpod.ops.features import scaled
from torchpod.specs import Box, Discrete, EnvSpec, MultiDiscrete
from torchpod.types import ACTION_MASK

if TYPE_CHECKING:  # torchrl takes seconds to import
    from tensordict.nn import TensorDictModuleBase
    from torchrl.objectives import LossModule


@dataclass(frozen=True)
class LossConfig:
    """Which loss, and the networks that it is built of."""

    loss: str = "ClipPPOLoss"
    """A class of torchrl.objectives, one of `torchpod list losses`."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """More arguments of its constructor, e.g. `{clip_epsilon: 0.1}`."""
    hidden: tuple[int, ...] = (64, 64)
    """Units of each hidden layer, of all networks."""
    activation: str = "tanh"
    """Of hidden layers: tanh, relu or silu."""
    discount: float = bounded(0.99, least=0, most=1)
    """Gamma: what a reward is worth one step later."""
    gae_lambda: float = bounded(0.95, least=0, most=1)
    """Of the estimators of advantages, where they have one."""
    normalize_advantage: bool = True
    """Of losses with advantages: mean 0 and std 1 per minibatch."""
    target_rate: float = bounded(0.005, least=0, most=1)
    """How far the targets of a loss follow, if it has any."""
    target_interval: int = bounded(1, least=1)
    """Updates until the targets of a loss follow."""
    epsilon: float = bounded(0.05, least=0, most=1)
    """Share of random actions at last, of losses whose actor takes the best of discrete ones."""
    exploration_fraction: float = bounded(0.2, least=0, most=1)
    """Part of the run in which the share of random actions falls from 1 to epsilon."""
    noise: float = 0.1
    """Added to the actions of losses with a deterministic actor, in units of half their range."""
    num_atoms: int = 51
    """Of DistributionalDQNLoss: returns that it can tell apart, between `low` and `high`."""
    low: float = -10.0
    """Of DistributionalDQNLoss: the least return that it can tell apart."""
    high: float = 10.0
    """Of DistributionalDQNLoss: the largest return that it can tell apart."""


@dataclass(frozen=True)
class TorchRLConfig(LossConfig):
    """The settings of an agent, or of every policy that says nothing else."""

    policies: dict[str, Any] | None = None
    """Of environments with groups: who follows which, as of `algo=ippo`."""


class Parts(NamedTuple):
    """Of an agent."""

    actor: "TensorDictModuleBase"
    loss: "LossModule"


class _Builder:
    """Networks for the losses, from the spec of an environment.

    Raises:
      ValueError: if a loss has no use for such observations or actions.
    """

    def __init__(self, spec: EnvSpec, config: LossConfig) -> None:
        observation = spec.observation
        leaves = (
            {("observation", name): x for name, x in observation.items()}
            if isinstance(observation, dict)
            else {"observation": observation}
        )
        if any(isinstance(x, dict | Discrete | MultiDiscrete) for x in leaves.values()):
            raise ValueError(
                f"algo=torchrl has networks for tensors of numbers, and {spec.name} has the observation {observation}; "
                "add '+env.transforms=[flatten]', or build actor and loss yourself (docs/torchrl-losses.md)."
            )
        self.spec, self.config = spec, config
        shapes = {key: x.shape for key, x in leaves.items()}
        self.is_central = shapes.pop(_STATE_KEY, None) is not None
        self.is_masked = shapes.pop(_MASK_KEY, None) is not None
        self.shapes = shapes
        self._mask = (_MASK_KEY,) if self.is_masked else ()

    @property
    def num_actions(self) -> int:
        if not isinstance(self.spec.action, Discrete):
            raise ValueError(f"{self.config.loss} is for discrete actions, and {self._has_actions}.")
        return self.spec.action.num_values

    @property
    def box(self) -> Box:
        box = self.spec.action
        if not isinstance(box, Box) or len(box.shape) != 1:
            raise ValueError(f"{self.config.loss} is for actions of shape [A], and {self._has_actions}.")
        if not box.bounded:
            raise ValueError(
                f"{self.config.loss} needs bounds of the actions, and {self.spec.name} has {box}; give the environment "
                "finite low and high."
            )
        return box

    @property
    def _has_actions(self) -> str:
        """What is told where a loss is for others."""
        action, other = self.spec.action, for_actions(self.config.loss, self.spec.action)
        repair = "build actor and loss yourself (docs/torchrl-losses.md)"
        return f"{self.spec.name} has {action}; {repair if other == self.config.loss else f'use loss={other}'}"

    def net(self, out_features: int, extra: tuple[tuple[int, ...], ...] = ()) -> nn.Module:
        """Of an observation, and of tensors of `extra` shapes beside it, to `[..., out_features]`."""
        shapes = [*self.shapes.values(), *extra]
        body = MLP(sum(map(math.prod, shapes)), self.config.hidden, self.config.activation)
        return _Net([len(shape) for shape in shapes], body, nn.Linear(body.out_features, out_features))

    def module(self, net: nn.Module, *, to: Sequence[str], extra: tuple[Any, ...] = ()) -> Any:
        from tensordict.nn import TensorDictModule

        return TensorDictModule(net, in_keys=[*self.shapes, *extra], out_keys=list(to))

    def categorical(self, sizes: tuple[int, ...] = ()) -> Any:
        """An actor for discrete actions; with `sizes` for several choices at once."""
        from torchrl.modules import ProbabilisticActor

        logits = _Logits(self.net(sum(sizes) or self.num_actions), self.is_masked, sizes)
        return ProbabilisticActor(
            self.module(logits, to=["logits"], extra=self._mask),
            in_keys=["logits"],
            distribution_class=Choices if sizes else torch.distributions.Categorical,
            return_log_prob=True,
        )

    def gaussian(self) -> Any:
        """An actor whose actions are bounded by tanh."""
        from tensordict.nn import NormalParamExtractor
        from torchrl.modules import ProbabilisticActor, TanhNormal

        box = self.box
        net = Sequential(self.net(2 * box.shape[0]), NormalParamExtractor())
        return ProbabilisticActor(
            self.module(net, to=["loc", "scale"]),
            in_keys=["loc", "scale"],
            distribution_class=TanhNormal,
            distribution_kwargs={"low": box.low, "high": box.high},
            return_log_prob=True,
        )

    def stochastic(self) -> Any:
        """An actor for whatever the actions are."""
        action = self.spec.action
        if isinstance(action, MultiDiscrete):
            return self.categorical(action.nvec)
        return self.categorical() if isinstance(action, Discrete) else self.gaussian()

    def deterministic(self) -> Any:
        """An actor without noise of its own."""
        net = Sequential(self.net(self.box.shape[0]), _Within(self.box.low, self.box.high))
        return self.module(net, to=["action"])

    def value(self) -> Any:
        return self.module(self.net(1), to=["state_value"])

    def central_value(self) -> Any:
        """Of what all agents observe, too."""
        if not self.is_central:
            raise ValueError(
                f"{self.config.loss} is for environments with groups of agents, and {self.spec.name} has one agent; "
                "use loss=ClipPPOLoss."
            )
        shape = cast(Any, self.spec.observation)[STATE].shape
        return self.module(self.net(1, extra=(shape,)), to=["state_value"], extra=(_STATE_KEY,))

    def action_values(self, key: str) -> Any:
        """Of all discrete actions."""
        return self.module(self.net(self.num_actions), to=[key])

    def critic(self, num_values: int = 1) -> Any:
        """Of an observation and an action."""
        net = self.net(num_values, extra=(self.box.shape,))
        return self.module(net, to=["state_action_value"], extra=("action",))

    def bounds(self) -> Any:
        """The actions, as TorchRL says it."""
        from torchrl.data import Bounded

        return Bounded(self.box.low, self.box.high, torch.Size(self.box.shape))

    def q_actor(self) -> Any:
        from torchrl.data import Categorical
        from torchrl.modules import QValueActor

        net = _Logits(self.net(self.num_actions), self.is_masked, ())
        return QValueActor(net, in_keys=[*self.shapes, *self._mask], spec=Categorical(self.num_actions))

    def distributional_actor(self) -> Any:
        from torchrl.data import OneHot
        from torchrl.modules import DistributionalQValueActor

        num_atoms, low, high = self.config.num_atoms, self.config.low, self.config.high
        if not (low < high and num_atoms > 1):
            raise ValueError(f"low={low} must be below high={high}, and num_atoms={num_atoms} at least 2.")
        net = _Atoms(self.net(num_atoms * self.num_actions), self.is_masked, num_atoms)
        support = torch.linspace(low, high, num_atoms)
        keys, spec = [*self.shapes, *self._mask], OneHot(self.num_actions)
        return DistributionalQValueActor(net, in_keys=keys, support=support, spec=spec)


_STATE_KEY, _MASK_KEY = ("observation", STATE), ("observation", ACTION_MASK)


class _Net(nn.Module):
    """Tensors `[..., *shape]`, of shapes with so many axes, side by side through a body and a head."""

    def __init__(self, num_dims: Sequence[int], body: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.num_dims, self.body, self.head = tuple(num_dims), body, head

    def forward(self, *inputs: Tensor) -> Tensor:
        flat = [_flat(x, num_dims) for x, num_dims in zip(inputs, self.num_dims, strict=True)]
        return self.head(self.body(flat[0] if len(flat) == 1 else torch.cat(flat, -1)))


def _flat(x: Tensor, num_dims: int) -> Tensor:
    x = x.reshape(*x.shape[: x.ndim - num_dims], -1)
    return x if x.is_floating_point() else scaled(x)


class Sequential(nn.Sequential):
    """Two modules, of which the first may take several tensors."""

    def forward(self, input: Tensor, *more: Tensor) -> Any:
        first, last = self
        return last(first(input, *more))


class _Logits(nn.Module):
    """Those of a network `[..., A]`; of several choices of such sizes `[..., choices, values]`.

    They are the lowest there are where a mask forbids an action, and beyond the size of a choice.
    """

    def __init__(self, net: nn.Module, is_masked: bool, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.net, self.is_masked, self.sizes = net, is_masked, sizes

    def forward(self, *inputs: Tensor) -> Tensor:
        if self.is_masked:
            *observation, mask = inputs
            logits = self.net(*observation)
            logits = logits.masked_fill(~mask, torch.finfo(logits.dtype).min)
        else:
            logits = self.net(*inputs)
        if not self.sizes:
            return logits
        size, low = max(self.sizes), torch.finfo(logits.dtype).min
        parts = logits.split(self.sizes, -1)
        return torch.stack([nn.functional.pad(x, (0, size - x.shape[-1]), value=low) for x in parts], -2)


class Choices(torch.distributions.Independent):
    """Several discrete choices at once, of logits `[..., choices, values]`."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__(torch.distributions.Categorical(logits=logits), 1)

    @torch.no_grad()
    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """By Gumbel's trick: unlike torch's own draw it keeps the axis of environments, which have keys (keyed.py)."""
        logits = cast(torch.distributions.Categorical, self.base_dist).logits
        noise = torch.rand_like(logits.expand(*sample_shape, *logits.shape)).clamp(min=2.0**-24)  # log(0) is -inf
        return (logits - (-noise.log()).log()).argmax(-1)


class _Within(nn.Module):
    """`[low, high]` by tanh."""

    def __init__(self, low: float, high: float) -> None:
        super().__init__()
        self.center, self.scale = (high + low) / 2, (high - low) / 2

    def forward(self, x: Tensor) -> Tensor:
        return self.center + self.scale * x.tanh()


class _Atoms(nn.Module):
    """Log-probabilities `[..., atoms, A]`, as TorchRL wants them; what a mask forbids is worth the lowest atom."""

    def __init__(self, net: nn.Module, is_masked: bool, num_atoms: int) -> None:
        super().__init__()
        self.net, self.is_masked, self.num_atoms = net, is_masked, num_atoms

    def forward(self, *inputs: Tensor) -> Tensor:
        *observation, mask = inputs if self.is_masked else (*inputs, None)
        logits = self.net(*observation).unflatten(-1, (self.num_atoms, -1))
        if mask is None:
            return logits.log_softmax(-2)
        others = torch.arange(self.num_atoms, device=logits.device).unsqueeze(-1) > 0
        lowest = torch.zeros_like(logits).masked_fill(others, torch.finfo(logits.dtype).min)
        return torch.where(mask.unsqueeze(-2), logits.log_softmax(-2), lowest)


Maker = Callable[[_Builder, Callable[..., Any]], Parts]


def _on_policy(b: _Builder, loss: Callable[..., Any]) -> Parts:
    actor = b.stochastic()
    return Parts(actor, loss(actor, b.value()))


def _central(b: _Builder, loss: Callable[..., Any]) -> Parts:
    actor = b.stochastic()
    return Parts(actor, loss(actor, b.central_value()))


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
    if b.is_masked and "target_entropy" not in b.config.arguments:
        raise ValueError(
            f"DiscreteSACLoss aims at an entropy of all {b.num_actions} actions, and {b.spec.name} has an action_mask; "
            "set +algo.agent.arguments.target_entropy=NUMBER that can be reached, or use algo=sac."
        )
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
    ("A2CLoss", "ClipPPOLoss", "IPPOLoss", "KLPENPPOLoss", "PPOLoss", "ReinforceLoss"), _on_policy
) | {"MAPPOLoss": _central}
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
    "TD3BCLoss": _deterministic,
    "TD3Loss": _deterministic,
    "TQCLoss": _quantiles,
}
LOSSES = ON_POLICY | OFF_POLICY
EPSILON_GREEDY, NOISY = ("DQNLoss", "DistributionalDQNLoss"), ("DDPGLoss", "TD3BCLoss", "TD3Loss")
CONTINUOUS = ("CQLLoss", "CrossQLoss", "DDPGLoss", "IQLLoss", "REDQLoss", "SACLoss", "TD3BCLoss", "TD3Loss", "TQCLoss")
"""Those that are for continuous actions alone."""
MULTI_AGENT = ("IPPOLoss", "MAPPOLoss")
"""Those that TorchRL has for groups of agents; the others that are on-policy can have them, too."""
_READERS: dict[str, Sequence[str]] = {
    **dict.fromkeys(("gae_lambda", "normalize_advantage"), tuple(ON_POLICY)),
    **dict.fromkeys(("target_rate", "target_interval"), tuple(x for x in OFF_POLICY if x != "CrossQLoss")),
    **dict.fromkeys(("epsilon", "exploration_fraction"), EPSILON_GREEDY),
    "noise": NOISY,
    **dict.fromkeys(("num_atoms", "low", "high"), ("DistributionalDQNLoss",)),
}
"""The losses that read a setting, for settings that not all of them do."""


def without_effect(settings: Mapping[str, Any], given: Sequence[str] = ()) -> str | None:
    """A sentence about the first setting of `algo.agent` that its loss, or that of a policy, does not read.

    Args:
      settings: of `algo.agent`; those that are not the default count.
      given: settings that count in any case, such as "algo.agent.noise".
    """
    own = {name: x for name, x in (settings.get("policies") or {}).items() if isinstance(x, Mapping)}
    for prefix, own_settings in (("", settings), *((f"policies.{name}.", x) for name, x in own.items())):
        loss = own_settings.get("loss", settings.get("loss", LossConfig.loss))
        for name, readers in _READERS.items():
            key, default = f"algo.agent.{prefix}{name}", getattr(LossConfig, name)
            value = own_settings.get(name, default)
            if loss in LOSSES and loss not in readers and (value != default or key in given):
                return f"{key}={value} has no effect on {loss}; leave it out. It is of {', '.join(readers)}."
    return None


def parts(spec: EnvSpec, config: LossConfig) -> Parts:
    """Actor and loss for an environment.

    Raises:
      ValueError: if the loss is not known, or not for such an environment, or refuses an argument.
    """
    import torchrl.objectives

    if config.loss in UNSUPPORTED:
        raise ValueError(unsupported(config.loss))
    if config.loss not in LOSSES:
        raise ValueError(f"loss={config.loss} is not known; use one of {', '.join(sorted(LOSSES))}.")
    if not hasattr(torchrl.objectives, config.loss):
        raise ValueError(f"torchrl {torchrl.__version__} has no {config.loss}; install a newer one.")
    cls = getattr(torchrl.objectives, config.loss)

    known = {name for base in cls.__mro__ for name in inspect.signature(base.__init__).parameters}
    given = {name for name in known if name.endswith("network")} | {"actor", "critic"}
    known -= given | {"self", "args", "kwargs", "device", "functional", "reduction"}
    for name in config.arguments:
        if name not in known:
            raise ValueError(f"{config.loss} has no argument {name} to set; it has {', '.join(sorted(known))}.")
        if setting := {"gamma": "discount", "lmbda": "gae_lambda"}.get(name):
            raise ValueError(f"algo.agent.arguments.{name} is a setting here; use algo.agent.{setting}.")

    def make(*args: Any, **own: Any) -> Any:
        try:
            return cls(*args, **(own | config.arguments))
        except Exception as error:
            if not config.arguments:
                raise
            told = str(error).strip().split("\n")[0].strip(" .")
            raise ValueError(f"{config.loss} cannot be made with arguments={config.arguments}: {told}.") from error

    return LOSSES[config.loss](_Builder(spec, config), make)


class LossPolicies(Policies):
    """A loss for every policy."""

    def __init__(self, spec: EnvSpec, config: TorchRLConfig = TorchRLConfig()) -> None:
        own = [x for x in (config.policies or {}).values() if isinstance(x, Mapping)]
        central = "MAPPOLoss" in {config.loss, *(x.get("loss") for x in own)}
        super().__init__(spec, config, _of_policy, LossConfig, central=central)


def torchrl_agent(spec: EnvSpec, config: TorchRLConfig = TorchRLConfig()) -> Agent:
    """The agent of `algo=torchrl`.

    Raises:
      ValueError: as `parts`, and as `Policies` where there are groups.
    """
    if spec.groups is not None:
        return LossPolicies(spec, config)
    if config.policies:
        raise ValueError(f"policies={config.policies} are for groups of agents, and {spec.name} has one agent.")
    return _agent(spec, config)


def _of_policy(spec: EnvSpec, config: LossConfig) -> Agent:
    if config.loss in OFF_POLICY:
        raise ValueError(
            f"{config.loss} learns from replay, which policies of many agents cannot, and {spec.name} is one; use "
            "loss=ClipPPOLoss."
        )
    return _agent(spec, config)


def _agent(spec: EnvSpec, config: LossConfig) -> Agent:
    from torchpod.interop.torchrl import LossAgent

    actor, loss = parts(spec, config)
    on_policy, is_greedy = config.loss in ON_POLICY, config.loss in EPSILON_GREEDY
    if on_policy and "normalize_advantage" not in config.arguments:
        cast(Any, loss).normalize_advantage = config.normalize_advantage
    try:
        return LossAgent(
            actor,
            loss,
            spec=spec,
            discount=config.discount,
            gae_lambda=config.gae_lambda if on_policy else None,
            target_rate=config.target_rate,
            target_interval=config.target_interval,
            epsilon=config.epsilon if is_greedy else 0.0,
            noise=config.noise if config.loss in NOISY else 0.0,
            exploration_fraction=config.exploration_fraction if is_greedy else 0.0,
        )
    except ValueError as error:
        if not config.arguments:
            raise
        raise ValueError(f"{error} It was made with algo.agent.arguments={config.arguments}.") from error

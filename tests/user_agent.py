"""Agents of a user's, in a file of their own. Tests name them as `algo=PATH:MyAgent`."""

from dataclasses import dataclass

import torch
from torch import Tensor

from torchpod.agent import Bound
from torchpod.algos.ppo import PPO, PPOConfig
from torchpod.bounds import bounded
from torchpod.specs import EnvSpec
from torchpod.types import ActorOutput, Batch, LossOutput, TimeStep, Trajectory, Tree


@dataclass(frozen=True)
class MyConfig(PPOConfig):
    """PPO with small networks, and a way to fail."""

    hidden: tuple[int, ...] = (8,)
    broken: bool = False


class MyAgent(PPO):
    """PPO by another name."""

    def __init__(self, spec: EnvSpec, config: MyConfig) -> None:
        super().__init__(spec, config)
        if config.broken:
            raise TypeError("the agent is broken")


class Heir(MyAgent):
    """Has the settings of its parent."""


@dataclass(frozen=True, kw_only=True)
class PickyConfig(MyConfig):
    """Has a setting without a default."""

    size: int


class Picky(PPO):
    """Wants to be told."""

    def __init__(self, spec: EnvSpec, config: PickyConfig) -> None:
        super().__init__(spec, config)


@dataclass(frozen=True)
class BoldConfig(MyConfig):
    """`beta` is a name that replay has, within bounds; `trust` has bounds of its own."""

    clip: float = 0.3
    beta: float = 5.0
    trust: float = bounded(0.5, least=0, most=1)


class Bold(PPO):
    """Has hyperparameters of its own."""

    def __init__(self, spec: EnvSpec, config: BoldConfig) -> None:
        super().__init__(spec, config)
        self.hyperparameter("beta", config.beta)
        self.hyperparameter("trust", config.trust)


class Shapeless(PPO):
    """Its settings are of no known class."""

    def __init__(self, spec, config) -> None:  # noqa: ANN001
        super().__init__(spec, config)


class Mean(MyAgent):
    """A mean where a weighted sum belongs."""

    def loss(self, batch: Batch, keys: Tensor, target: Bound | None) -> LossOutput:
        ones = torch.ones_like(batch.steps["weight"])
        return super().loss(batch._replace(steps=batch.steps | {"weight": ones / ones.numel()}), keys, target)


class Shouts(MyAgent):
    """Actions with one axis too many."""

    def act(self, timestep: TimeStep, state: Tree, keys: Tensor, explore: bool = True) -> tuple[ActorOutput, Tree]:
        output, state = super().act(timestep, state, keys, explore)
        return output._replace(action=output.action[:, None]), state


class Forgets(MyAgent):
    """A batch without weights."""

    def prepare(self, trajectory: Trajectory, keys: Tensor) -> Batch:
        steps = dict(super().prepare(trajectory, keys).steps)
        del steps["weight"]
        return Batch(steps)


class Clumsy(MyAgent):
    """Raises in its first decision."""

    def act(self, timestep: TimeStep, state: Tree, keys: Tensor, explore: bool = True) -> tuple[ActorOutput, Tree]:
        return timestep.extras["shape"], state


class NoAgent:
    """Not an agent."""


class Branches(MyAgent):
    """Runs uncompiled alone."""

    def prepare(self, trajectory: Trajectory, keys: Tensor) -> Batch:
        if trajectory.timestep.reward.sum() < -1e9:
            raise AssertionError
        return super().prepare(trajectory, keys)

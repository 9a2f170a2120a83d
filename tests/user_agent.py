"""Agents of a user's, in a file of their own. Tests name them as `algo=PATH:MyAgent`."""

from dataclasses import dataclass

from torchpod.algos.ppo import PPO, PPOConfig
from torchpod.specs import EnvSpec


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


class Shapeless(PPO):
    """Its settings are of no known class."""

    def __init__(self, spec, config) -> None:  # noqa: ANN001
        super().__init__(spec, config)


class NoAgent:
    """Not an agent."""

"""Environments, one file each. MAKERS maps a name to the class that makes it."""

if __name__ == "envs":
    raise ImportError("import torchpod.envs, not envs")

from collections.abc import Callable

from torchpod.env import Env
from torchpod.envs.cartpole import CartPole
from torchpod.envs.catch import Catch
from torchpod.envs.host import EnvPool, Gymnasium
from torchpod.envs.memory_chain import MemoryChain
from torchpod.envs.pendulum import Pendulum

MAKERS: dict[str, Callable[..., Env]] = {
    "cartpole": CartPole,
    "catch": Catch,
    "envpool": EnvPool,
    "gymnasium": Gymnasium,
    "memory_chain": MemoryChain,
    "pendulum": Pendulum,
}

__all__ = ["MAKERS", "CartPole", "Catch", "EnvPool", "Gymnasium", "MemoryChain", "Pendulum"]

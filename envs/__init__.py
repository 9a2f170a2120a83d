"""Environments, one file each. MAKERS maps a name to the class that makes it."""

if __name__ == "envs":
    raise ImportError("import torchpod.envs, not envs")

from collections.abc import Callable

from torchpod.env import TensorEnv
from torchpod.envs.cartpole import CartPole
from torchpod.envs.catch import Catch
from torchpod.envs.memory_chain import MemoryChain
from torchpod.envs.pendulum import Pendulum

MAKERS: dict[str, Callable[..., TensorEnv]] = {
    "cartpole": CartPole,
    "catch": Catch,
    "memory_chain": MemoryChain,
    "pendulum": Pendulum,
}

__all__ = ["MAKERS", "CartPole", "Catch", "MemoryChain", "Pendulum"]

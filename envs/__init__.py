"""Environments, one file each. MAKERS maps a name to the class that makes it."""

if __name__ == "envs":
    raise ImportError("import torchpod.envs, not envs")

from collections.abc import Callable

from torchpod.env import Env
from torchpod.envs.bsuite.catch import Catch
from torchpod.envs.bsuite.memory_chain import MemoryChain
from torchpod.envs.classic.cartpole import CartPole
from torchpod.envs.classic.pendulum import Pendulum
from torchpod.envs.delayed_chain import DelayedChain
from torchpod.envs.grids.four_rooms import FourRooms
from torchpod.envs.grids.grid_world import GridWorld
from torchpod.envs.host import EnvPool, Gymnasium

MAKERS: dict[str, Callable[..., Env]] = {
    "cartpole": CartPole,
    "catch": Catch,
    "delayed_chain": DelayedChain,
    "envpool": EnvPool,
    "four_rooms": FourRooms,
    "grid_world": GridWorld,
    "gymnasium": Gymnasium,
    "memory_chain": MemoryChain,
    "pendulum": Pendulum,
}

__all__ = [
    "MAKERS",
    "CartPole",
    "Catch",
    "DelayedChain",
    "EnvPool",
    "FourRooms",
    "GridWorld",
    "Gymnasium",
    "MemoryChain",
    "Pendulum",
]

"""Environments, one file each. MAKERS maps a name to the class that makes it."""

if __name__ == "envs":
    raise ImportError("import torchpod.envs, not envs")

from collections.abc import Callable

from torchpod.env import Env
from torchpod.envs.bsuite.catch import Catch
from torchpod.envs.bsuite.memory_chain import MemoryChain
from torchpod.envs.classic.cartpole import CartPole
from torchpod.envs.classic.pendulum import Pendulum
from torchpod.envs.host import EnvPool, Gymnasium
from torchpod.envs.minatar import Asterix, Breakout, Freeway, Seaquest, SpaceInvaders

MAKERS: dict[str, Callable[..., Env]] = {
    "cartpole": CartPole,
    "catch": Catch,
    "envpool": EnvPool,
    "gymnasium": Gymnasium,
    "memory_chain": MemoryChain,
    "minatar_asterix": Asterix,
    "minatar_breakout": Breakout,
    "minatar_freeway": Freeway,
    "minatar_seaquest": Seaquest,
    "minatar_space_invaders": SpaceInvaders,
    "pendulum": Pendulum,
}

__all__ = ["MAKERS", "CartPole", "Catch", "EnvPool", "Gymnasium", "MemoryChain", "Pendulum"]

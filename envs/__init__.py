"""Environments, one file each. MAKERS maps a name to the class that makes it."""

if __name__ == "envs":
    raise ImportError("import torchpod.envs, not envs")

from collections.abc import Callable

from torchpod.env import Env
from torchpod.envs.bernoulli_bandit import BernoulliBandit
from torchpod.envs.bsuite.catch import Catch
from torchpod.envs.bsuite.deep_sea import DeepSea
from torchpod.envs.bsuite.memory_chain import MemoryChain
from torchpod.envs.classic.acrobot import Acrobot
from torchpod.envs.classic.cartpole import CartPole
from torchpod.envs.classic.mountain_car import MountainCar
from torchpod.envs.classic.mountain_car_continuous import MountainCarContinuous
from torchpod.envs.classic.pendulum import Pendulum
from torchpod.envs.delayed_chain import DelayedChain
from torchpod.envs.grids.four_rooms import FourRooms
from torchpod.envs.grids.grid_world import GridWorld
from torchpod.envs.host import Brax, EnvPool, Gymnasium, PettingZoo
from torchpod.envs.minatar import Asterix, Breakout, Freeway, Seaquest, SpaceInvaders
from torchpod.envs.multi_agent.covid_economy import CovidEconomy
from torchpod.envs.multi_agent.tag_continuous import TagContinuous
from torchpod.envs.multi_agent.tag_gridworld import TagGridWorld
from torchpod.envs.point_mass import PointMass

MAKERS: dict[str, Callable[..., Env]] = {
    "acrobot": Acrobot,
    "bernoulli_bandit": BernoulliBandit,
    "brax": Brax,
    "cartpole": CartPole,
    "catch": Catch,
    "covid_economy": CovidEconomy,
    "deep_sea": DeepSea,
    "delayed_chain": DelayedChain,
    "envpool": EnvPool,
    "four_rooms": FourRooms,
    "grid_world": GridWorld,
    "gymnasium": Gymnasium,
    "memory_chain": MemoryChain,
    "minatar_asterix": Asterix,
    "minatar_breakout": Breakout,
    "minatar_freeway": Freeway,
    "minatar_seaquest": Seaquest,
    "minatar_space_invaders": SpaceInvaders,
    "mountain_car": MountainCar,
    "mountain_car_continuous": MountainCarContinuous,
    "pendulum": Pendulum,
    "pettingzoo": PettingZoo,
    "point_mass": PointMass,
    "tag_continuous": TagContinuous,
    "tag_gridworld": TagGridWorld,
}

__all__ = [
    "MAKERS",
    "Acrobot",
    "Asterix",
    "BernoulliBandit",
    "Brax",
    "Breakout",
    "CartPole",
    "Catch",
    "CovidEconomy",
    "DeepSea",
    "DelayedChain",
    "EnvPool",
    "FourRooms",
    "Freeway",
    "GridWorld",
    "Gymnasium",
    "MemoryChain",
    "MountainCar",
    "MountainCarContinuous",
    "Pendulum",
    "PettingZoo",
    "PointMass",
    "Seaquest",
    "SpaceInvaders",
    "TagContinuous",
    "TagGridWorld",
]

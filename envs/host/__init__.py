"""Host environments: those of other libraries, behind the contract of `torchpod.env.Env`."""

from torchpod.envs.host.brax import Brax
from torchpod.envs.host.envpool import EnvPool
from torchpod.envs.host.gymnasium import Gymnasium
from torchpod.envs.host.pettingzoo import PettingZoo
from torchpod.envs.host.torchrl import TorchRL

__all__ = ["Brax", "EnvPool", "Gymnasium", "PettingZoo", "TorchRL"]

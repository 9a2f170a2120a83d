"""Host environments: those of other libraries, behind the contract of `torchpod.env.Env`."""

from torchpod.envs.host.envpool import EnvPool
from torchpod.envs.host.gymnasium import Gymnasium

__all__ = ["EnvPool", "Gymnasium"]

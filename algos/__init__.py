"""Agents, one file each. `MAKERS` names them for `algo=NAME`."""

if __name__ == "algos":
    raise ImportError("import torchpod.algos, not algos")

from torchpod.algos.a2c import A2C, A2CConfig
from torchpod.algos.apg import APG, APGConfig
from torchpod.algos.impala import IMPALA, IMPALAConfig
from torchpod.algos.ppo import PPO, PPOConfig
from torchpod.algos.shac import SHAC, SHACConfig
from torchpod.algos.torchrl import TorchRLConfig, torchrl_agent

MAKERS = {
    "a2c": (A2C, A2CConfig),
    "apg": (APG, APGConfig),
    "impala": (IMPALA, IMPALAConfig),
    "ppo": (PPO, PPOConfig),
    "shac": (SHAC, SHACConfig),
    "torchrl": (torchrl_agent, TorchRLConfig),
}
"""Name to (agent class or function, config dataclass); an agent is built as `Agent(env.spec, config)`."""

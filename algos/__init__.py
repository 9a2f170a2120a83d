"""Agents, one file each. `MAKERS` names them for `algo=NAME`."""

if __name__ == "algos":
    raise ImportError("import torchpod.algos, not algos")

from torchpod.algos.a2c import A2C, A2CConfig
from torchpod.algos.apg import APG, APGConfig
from torchpod.algos.ddpg import DDPG, DDPGConfig
from torchpod.algos.dqn import C51, DQN, QRDQN, C51Config, DQNConfig, QRDQNConfig
from torchpod.algos.impala import IMPALA, IMPALAConfig
from torchpod.algos.multi_agent import IA2C, IPPO, MAPPO, IA2CConfig, IPPOConfig, MAPPOConfig
from torchpod.algos.ppo import PPO, PPOConfig
from torchpod.algos.r2d2 import R2D2, R2D2Config
from torchpod.algos.sac import SACConfig, sac_agent
from torchpod.algos.shac import SHAC, SHACConfig
from torchpod.algos.td3 import TD3, TD3Config
from torchpod.algos.torchrl import TorchRLConfig, torchrl_agent

MAKERS = {
    "a2c": (A2C, A2CConfig),
    "apg": (APG, APGConfig),
    "c51": (C51, C51Config),
    "ddpg": (DDPG, DDPGConfig),
    "dqn": (DQN, DQNConfig),
    "ia2c": (IA2C, IA2CConfig),
    "impala": (IMPALA, IMPALAConfig),
    "ippo": (IPPO, IPPOConfig),
    "mappo": (MAPPO, MAPPOConfig),
    "ppo": (PPO, PPOConfig),
    "qr_dqn": (QRDQN, QRDQNConfig),
    "r2d2": (R2D2, R2D2Config),
    "sac": (sac_agent, SACConfig),
    "shac": (SHAC, SHACConfig),
    "td3": (TD3, TD3Config),
    "torchrl": (torchrl_agent, TorchRLConfig),
}
"""Name to (agent class or function, config dataclass); an agent is built as `Agent(env.spec, config)`."""
REPLAYED = ("c51", "ddpg", "dqn", "qr_dqn", "r2d2", "sac", "td3")
"""Names of those that learn from replay. Of `torchrl` the loss says it."""

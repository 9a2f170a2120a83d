"""Small agents of every kind that learns from replay."""

from torchpod.algos.ddpg import DDPG, DDPGConfig
from torchpod.algos.dqn import C51, DQN, QRDQN, C51Config, DQNConfig, QRDQNConfig
from torchpod.algos.r2d2 import R2D2, R2D2Config
from torchpod.algos.sac import SACConfig, sac_agent
from torchpod.algos.td3 import TD3, TD3Config
from torchpod.algos.torchrl import TorchRLConfig, torchrl_agent

DISCRETE = {
    "c51": lambda spec: C51(spec, C51Config(hidden=(8,), n_step=2, num_atoms=5)),
    "discrete_sac": lambda spec: sac_agent(spec, SACConfig(hidden=(8,))),
    "dqn": lambda spec: DQN(spec, DQNConfig(hidden=(8,), n_step=2, target_interval=3)),
    "dqn_loss": lambda spec: torchrl_agent(spec, TorchRLConfig("DQNLoss", hidden=(8,))),
    "qr_dqn": lambda spec: QRDQN(spec, QRDQNConfig(hidden=(8,), n_step=2, num_quantiles=5)),
    "r2d2": lambda spec: R2D2(spec, R2D2Config(hidden=(8,), n_step=2, recurrent=4, burn_in=1, length=4)),
}
CONTINUOUS = {
    "ddpg": lambda spec: DDPG(spec, DDPGConfig(hidden=(8,), noise="ou")),
    "sac": lambda spec: sac_agent(spec, SACConfig(hidden=(8,))),
    "sac_loss": lambda spec: torchrl_agent(spec, TorchRLConfig("SACLoss", hidden=(8,))),
    "td3": lambda spec: TD3(spec, TD3Config(hidden=(8,), n_step=2)),
}
AGENTS = DISCRETE | CONTINUOUS
"""Name -> (spec) -> agent."""
WITHOUT_PRIORITIES = ("discrete_sac", "sac")

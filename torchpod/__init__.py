"""The Podracer architectures, Anakin and Sebulba, for reinforcement learning in PyTorch.

    import torchpod as tp
    run = tp.train(algo="ppo", env="cartpole", seed=0)

Reading path: types -> agent -> rollout -> anakin -> algos/ppo.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from torchpod.agent import Agent, bind
    from torchpod.commands.eval_run import load
    from torchpod.env import Env, TensorEnv
    from torchpod.main import train
    from torchpod.makers import make_env
    from torchpod.testing import check_agent, check_env
    from torchpod.types import ActorOutput, Batch, LossOutput, TimeStep, Trajectory

_WHERE = {
    "ActorOutput": "types",
    "Agent": "agent",
    "Batch": "types",
    "Env": "env",
    "LossOutput": "types",
    "TensorEnv": "env",
    "TimeStep": "types",
    "Trajectory": "types",
    "bind": "agent",
    "check_agent": "testing",
    "check_env": "testing",
    "load": "commands.eval_run",
    "make_env": "makers",
    "train": "main",
}

__all__ = [
    "ActorOutput",
    "Agent",
    "Batch",
    "Env",
    "LossOutput",
    "TensorEnv",
    "TimeStep",
    "Trajectory",
    "bind",
    "check_agent",
    "check_env",
    "load",
    "make_env",
    "train",
]


def __getattr__(name: str) -> Any:
    """Loads public names when they are first used: `import torchpod` alone is quick."""
    if name in _WHERE:
        return getattr(importlib.import_module(f"torchpod.{_WHERE[name]}"), name)
    raise AttributeError(f"module torchpod has no attribute {name}")

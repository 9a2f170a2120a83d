"""The program of a run, Anakin or Sebulba, from its settings."""

import copy
import os
from collections.abc import Callable
from typing import Any

import torch

from torchpod import algos, anakin, sebulba
from torchpod.agent import Agent
from torchpod.anakin import Anakin, RunState
from torchpod.compile import Compiler
from torchpod.compose import without_replay
from torchpod.config import ConfigError, TrainConfig
from torchpod.distributed import Ranks
from torchpod.env import Env
from torchpod.sebulba import Sebulba, devices_of


def make_loop(
    config: TrainConfig, env: Env, make: Callable[[], Agent], ranks: Ranks, device: torch.device
) -> Anakin | Sebulba:
    """The program of a run.

    Raises:
      ConfigError: if settings of replay were given, and the agent, one of a user's, has none.
    """
    # Only an agent that is made can say it; those whose settings are in configs/ have refused it in `load`.
    told = without_replay(f"algo={config.algo.name}", config.given)
    if told and config.algo.name not in algos.MAKERS and not make().replayed:
        raise ConfigError(told)
    settings: dict[str, Any] = {
        "num_envs": ranks.share(config.num_envs, "num_envs"),
        "unroll_length": config.algo.unroll_length,
        "learner": config.algo.learner,
        "num_iterations": config.num_iterations,
        "compiler": compiler_of(config),
        "ranks": ranks,
        "device": device,
        "replay": config.algo.replay,
    }
    if config.loop.name == "anakin":
        return Anakin(make, env, phases=config.logger.phases, **settings)
    return Sebulba(make, lambda: copy.copy(env), config=config.loop, actor_devices=split_of(config)[0], **settings)


def reports(config: TrainConfig, loop: Anakin | Sebulba, state: RunState, *, until: int | None = None) -> Any:
    """What `anakin.train` or `sebulba.train` yields, with as many iterations per call as the run has."""
    train: Callable[..., Any] = sebulba.train if isinstance(loop, Sebulba) else anakin.train
    calls = config.loop.iterations_per_call or (8 if loop.device.type == "cuda" and isinstance(loop, Anakin) else 1)
    return train(loop, state, until=until, iterations_per_call=calls)


def split_of(config: TrainConfig) -> tuple[list[torch.device], str]:
    """The GPUs on which this rank acts, if they are others than its own, and the device on which it learns."""
    if config.loop.split is None:
        return [], config.device
    if config.device != "cuda":
        raise ConfigError(f"loop.split={config.loop.split} shares out GPUs; add device=cuda.")
    local_rank, local_size = (int(os.environ.get(k, d)) for k, d in (("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)))
    actor_devices, learner_device = devices_of(config.loop.split, local_rank, local_size)
    return actor_devices, str(learner_device)


def compiler_of(config: TrainConfig) -> Compiler:
    """How the run compiles."""
    try:
        return Compiler(config.compile, config.population)
    except RuntimeError as error:  # there is no C++ compiler
        raise ConfigError(str(error)) from error

"""What a run looks at before it begins: whether an environment and an agent that are not ours keep the contract."""

import contextlib
import math
from collections.abc import Iterator

import torch

from torchpod import algos
from torchpod.agent import Agent
from torchpod.config import ConfigError, TrainConfig
from torchpod.env import Env
from torchpod.envs.transforms import Transform
from torchpod.makers import adapter_of, require_env
from torchpod.testing import ContractError, check_agent, check_env
from torchpod.watched import HostError, sentence, watched


def check_object(env: Env, config: TrainConfig) -> None:
    """Raises `ConfigError` for what was handed over as `env` and is no environment, or beside settings of one."""
    if isinstance(env, type):
        raise ConfigError(f"env={env.__name__} is a class; hand over an environment, e.g. env={env.__name__}().")
    kind = type(env).__name__
    if named := [key for key in config.given if key.partition(".")[0] == "env"]:
        raise ConfigError(
            f"{named[0]} is a setting of an environment that a run makes, and env={kind} is made already; make it as "
            "it is to be, with what torchpod.envs.transforms has around it."
        )
    base, adapter = adapter_of(env) or ("", "")
    if adapter and base != "pettingzoo.AECEnv":  # which nothing adapts
        raise ConfigError(
            f"env={kind} is one {base}, and a run needs many: hand over torchpod.envs.{adapter}({kind}) "
            'with loop="sebulba".'
        )
    require_env(env, "env is")


def check_users_env(env: Env, config: TrainConfig, device: torch.device) -> None:
    """A short `check_env`: a third of a second, against hours of training on rewards that belong to other actions."""
    with _contract(f"env={config.env['name']}", "within 100 steps"):
        seen = watched(env, "the check of its first 100 steps", config.loop.timeout_s)
        where = device if env.traits.pure else "cpu"
        pools, inner = max(1, config.loop.num_actor_threads) * config.loop.pools_per_actor, env
        while isinstance(inner, Transform):
            inner = inner.env
        # Ours make all they need in `init`.
        several = pools > 1 or config.loop.split is not None or config.evaluation.every is not None
        copies = several and not type(inner).__module__.startswith("torchpod.")
        check_env(seen, num_envs=_num_envs(env), num_steps=100, device=where, compile=False, copies=copies)


def check_users_agent(agent: Agent, env: Env, config: TrainConfig, device: torch.device) -> None:
    """A short `check_agent`."""
    name = type(agent).__name__ if config.algo.name in algos.MAKERS else config.algo.name
    length = max(min(config.algo.unroll_length, 64), agent.replayed)
    with _contract(f"algo={name}", "on its first trajectory"):
        seen = watched(env, "the check of the agent", config.loop.timeout_s)
        where = device if env.traits.pure else "cpu"
        check_agent(agent, seen, num_envs=_num_envs(env), unroll_length=length, device=where, quick=True)


def _num_envs(env: Env) -> int:
    """At least 4, of which `check_agent` can take half, in whole environments."""
    several = math.lcm(2, getattr(env, "rows_each", 1))
    return -(-4 // several) * several


@contextlib.contextmanager
def _contract(what: str, when: str) -> Iterator[None]:
    """Says in one sentence what a check has found."""
    try:
        yield
    except ContractError as error:
        raise ConfigError(f"{what} breaks the contract: {error}") from error
    except (Exception, SystemExit) as error:
        if isinstance(error, HostError) and error.__cause__ is None:  # it hangs
            raise
        cause = error.__cause__ if isinstance(error, HostError) and error.__cause__ else error
        raise ConfigError(f"{what} fails {when}: {sentence(cause)} TORCHPOD_TRACEBACK=1 shows where.") from cause

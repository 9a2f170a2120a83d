"""EnvPool as a host environment: Atari, MuJoCo, DMC, Procgen and more, all of a batch in one call, in C++ threads."""

import difflib
import importlib
import math
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchpod import random
from torchpod.envs.arguments import at_least
from torchpod.envs.host.gymnasium import action_of, host_timestep, spec_of, to_tensors
from torchpod.specs import HOST, Array, Discrete, EnvSpec
from torchpod.types import TimeStep, Tree

_RESERVED = {
    "num_envs": "init makes one environment per key",
    "seed": "the keys of init are the seeds",
    "env_seed": "the keys of init are the seeds",
    "batch_size": "a step is one of all environments; to overlap two, send() to one pool and recv() from another",
    "zero_discount_on_life_loss": "where the discount is 0 an episode ends; use episodic_life=True",
}
"""Options of EnvPool that a user may not give, and why."""
_RENDERING = {"from_pixels", "render_mode", "render_env_id", "render_width", "render_height", "render_camera_id"}


class EnvPool:
    """A pool of EnvPool's environments behind the contract of `Env`; state None, everything on the CPU.

    EnvPool resets at the step after the last and ignores its action, as the contract wants it. Observations of uint8,
    float32 and bool are EnvPool's own arrays, not copied; every step has new ones, so those held stay as they are.
    Images are views `[H, W, C]` of its `[C, H, W]`.
    The keys of `init` seed the environments, once; the keys of `step` are not used.

    With `episodic_life=True` a lost life of an Atari game is a termination; `extras["game_over"]` is the true end, and
    `extras["raw_reward"]` the reward before `reward_clip=True`. Where an episode terminates in the very step in which
    it meets its time limit, EnvPool itself says "truncated", except for Atari, MuJoCo Playground and Jumanji.

    Float actions are clipped to their bounds, which EnvPool does not check; where bounds differ from entry to entry,
    the spec says [-1, 1] and actions are scaled. Actions of several integers are numbered and become one Discrete.

    Args:
      task: one of `envpool.list_all_envs()`, such as "Pong-v5".
      num_threads: C++ threads; more than 1 pays where a step of one environment takes more than some microseconds.
      options: those of EnvPool: `max_episode_steps`, `stack_num`, `frame_skip`, `episodic_life`, `reward_clip`, ...

    Raises:
      ImportError: if envpool, or a system library that these environments need, is not installed.
      ValueError: for an unknown name or option, several players, or a space that no agent here could read or act in.
    """

    traits = HOST
    advice = "raise env.num_threads"
    """What makes steps faster, for the progress line."""

    def __init__(self, task: str, *, num_threads: int = 1, **options: Any) -> None:
        at_least(1, num_threads=num_threads)
        names = _envpool().list_all_envs()
        if task not in names:
            raise ValueError(f"EnvPool has no environment {task!r}; the nearest names are {_nearest(task, names)}.")
        for option in _RESERVED.keys() & options.keys():
            raise ValueError(f"EnvPool({task!r}) takes no {option}: {_RESERVED[option]}.")
        self._options = {"num_threads": num_threads, **options}
        self._pool: Any = None
        self._sent = False
        self._was_last = np.zeros(0, bool)
        with _making(task, options):
            spec = _envpool().make_spec(task, **options)
            config, observation_space, action_space = spec.config, spec.observation_space, spec.action_space
        if config.max_num_players > 1:
            raise ValueError(f"{task} has up to {config.max_num_players} players; choose an environment with one.")
        observation = spec_of(observation_space, f"{task}: observation_space")
        action, self._to_native = action_of(action_space, f"{task}: action_space")
        if isinstance(observation, dict) and "action_mask" in observation and isinstance(action, Discrete):
            if math.prod(mask := observation["action_mask"].shape) != action.num_values:
                wrong = f"action_mask is {list(mask)}, not one entry for each of {action.num_values} joint actions"
                raise ValueError(f"{task}: {wrong}; choose another environment.")
            observation["action_mask"] = Array((action.num_values,), torch.bool)
        limit = config.max_episode_steps if 0 < config.max_episode_steps < 2**31 - 1 else None
        self.spec = EnvSpec(task, observation, action, limit, truncates_early=True)
        self._episodic_life: bool = getattr(config, "episodic_life", False)

    def init(self, keys: Tensor) -> tuple[None, TimeStep]:
        """See `Env.init`; a second call begins again, with a new pool."""
        at_least(1, num_envs=keys.shape[0])
        self.close()
        seeds = (random.bits(keys, 1)[:, 0] >> 1).tolist()  # EnvPool takes int32
        with _making(self.spec.name, {}):
            pool = _envpool().make_gymnasium(self.spec.name, num_envs=len(seeds), seed=seeds, **self._options)
            observation, _ = pool.reset()
        self._pool = pool
        self._was_last = np.ones(len(seeds), bool)
        return None, self._timestep(observation, np.zeros(len(seeds)), ~self._was_last, ~self._was_last)

    def step(self, state: None, action: Tree, keys: Tensor) -> tuple[None, TimeStep]:
        """See `Env.step`."""
        self.send(action)
        return None, self.recv()

    def send(self, action: Tensor) -> None:
        """Starts a step and returns at once: the C++ threads work until `recv`, while the caller does other things."""
        if self._pool is None or self._sent:
            raise RuntimeError(f"{self.spec.name}: init() comes before send(), and recv() before the next send().")
        # A check, because EnvPool would read past the end of a batch that is too short, and kill the process.
        if action.shape != (len(self._was_last), *self.spec.action.shape):
            expected = [len(self._was_last), *self.spec.action.shape]
            raise ValueError(f"{self.spec.name} takes actions of shape {expected}; these are {list(action.shape)}.")
        self._pool.send(self._to_native(action.numpy()))
        self._sent = True

    def recv(self) -> TimeStep:
        """Waits for the step that `send` started."""
        if not self._sent:
            raise RuntimeError(f"{self.spec.name}: recv() comes after send().")
        observation, reward, terminated, truncated, info = self._pool.recv()
        self._sent = False
        raw_reward, game_over = info.get("reward"), None
        if "terminated" in info:
            over = info["terminated"] != 0
            game_over = truncated | over if self._episodic_life else None
            terminated = terminated | over
        return self._timestep(observation, reward, terminated, truncated, raw_reward, game_over)

    def close(self) -> None:
        """Lets go of the pool, which ends its threads."""
        self._pool, self._sent = None, False

    def limited(self, max_episode_steps: int) -> "EnvPool":
        """See `torchpod.envs.transforms.time_limit`."""
        return EnvPool(self.spec.name, **{**self._options, "max_episode_steps": max_episode_steps})

    def repeated(self, num: int) -> "EnvPool":
        """See `torchpod.envs.transforms.action_repeat`: `frame_skip` where EnvPool has it, times `num`."""
        config = _envpool().make_spec(self.spec.name, **self._options).config
        if "frame_skip" not in config._fields:
            raise ValueError(f"{self.spec.name} has no frame_skip in EnvPool, so that its actions cannot be repeated.")
        return EnvPool(self.spec.name, **{**self._options, "frame_skip": num * config.frame_skip})

    def _timestep(self, observation: Any, *outcome: Any) -> TimeStep:
        timestep, self._was_last = host_timestep(self._observation(observation), self._was_last, *outcome)
        return timestep

    def _observation(self, observation: Any) -> Tree:
        tensors = to_tensors(observation, self.spec.observation)
        if isinstance(tensors, dict) and "action_mask" in tensors:
            # Jumanji may allow nothing at LAST, where every action is ignored; a policy needs something to choose.
            mask = tensors["action_mask"].flatten(1)
            tensors["action_mask"] = mask | ~mask.any(-1, keepdim=True)
        return tensors


@contextmanager
def _making(name: str, options: dict[str, Any]) -> Iterator[None]:
    """One sentence for what EnvPool raises; Gymnasium's warnings about the precision of bounds are hidden."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*precision lowered", UserWarning)
            yield
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        if "unexpected keyword" in str(error):
            known = {*_envpool().make_spec(name).config._fields} - _RESERVED.keys() | _RENDERING
            for option in options.keys() - known:
                choice = f"the nearest options are {_nearest(option, known)}"
                raise ValueError(f"EnvPool({name!r}) has no option {option!r}; {choice}.") from error
        reason = str(error).split("\n")[0].strip(" .")
        raise ValueError(f"EnvPool cannot make {name}; check its options and its files. It says: {reason}.") from error


def _envpool() -> Any:
    try:
        return importlib.import_module("envpool")
    except ImportError as error:
        raise ImportError("EnvPool needs the package envpool: pip install torchpod-rl[envpool].") from error


def _nearest(name: str, names: Iterable[str]) -> str:
    return ", ".join(difflib.get_close_matches(name, names, cutoff=0.0))

"""EnvPool as a host environment: Atari, MuJoCo, DMC, Procgen and more, all of a batch in one call, in C++ threads."""

import copy
import dataclasses
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
from torch.utils import _pytree as pytree

from torchpod import random
from torchpod.actions import lead_of
from torchpod.envs.arguments import at_least
from torchpod.envs.host.batches import Batches, Stepped, handed_over
from torchpod.envs.host.spaces import action_of, spec_of, to_tensors
from torchpod.envs.host.timesteps import grouped_timestep, host_timestep
from torchpod.specs import HOST, Array, Box, EnvSpec, MultiDiscrete
from torchpod.types import ACTION_MASK, TimeStep, Tree

_RESERVED = {
    "num_envs": "init makes one environment per key",
    "seed": "the keys of init are the seeds",
    "env_seed": "the keys of init are the seeds",
    "batch_size": "a step is one of all environments; in_batches(num) steps some while others wait for their actions",
    "zero_discount_on_life_loss": "where the discount is 0 an episode ends; use episodic_life=True",
}
"""Options of EnvPool that a user may not give, and why."""
_CRASHING = ("Cig-v1", "MultiDuel-v1")
"""Games of several players of ViZDoom's, with which EnvPool (1.2.5) ends the process as they are made."""
PLAYER = "player"
"""The group of those who play in one environment."""
_NO_LIMIT = 2**31 - 1
"""`max_episode_steps` of EnvPool for never."""
_ENDLESS = ("Game2048-v1", "LaneKeeping-v0", "lane-keeping-v0")
"""Tasks that go on at the limit that EnvPool has for them: it only calls a true end truncated that comes so late."""
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
    the spec says [-1, 1] and actions are scaled. Actions of several integers are numbered and become one Discrete,
    unless there are more than 10,000 combinations or an `action_mask` has a row for each, which makes a MultiDiscrete.

    The players of a game are a group, `player`. In games of turns (chess, Go, poker) each observes the board from its
    own side, and who waits has an `action_mask` that leaves the first action alone, which nobody looks at.

    Args:
      task: one of `envpool.list_all_envs()`, such as "Pong-v5".
      num_threads: C++ threads; more than 1 pays where a step of one environment takes more than some microseconds.
      options: those of EnvPool: `max_episode_steps`, `stack_num`, `frame_skip`, `episodic_life`, `reward_clip`, ...

    Raises:
      ImportError: if envpool, or a system library that these environments need, is not installed.
      ValueError: for an unknown name or option, a space that no agent here could read or act in, or
        `max_episode_steps` where EnvPool does not look at it.
    """

    traits = HOST

    def __init__(self, task: str, *, num_threads: int = 1, **options: Any) -> None:
        at_least(1, num_threads=num_threads)
        names = _envpool().list_all_envs()
        if task not in names:
            raise ValueError(f"EnvPool has no environment {task!r}; the nearest names are {_nearest(task, names)}.")
        if task in _CRASHING:
            raise ValueError(f"EnvPool ends the process where it makes {task}; choose another environment.")
        for option in _RESERVED.keys() & options.keys():
            raise ValueError(f"EnvPool({task!r}) takes no {option}: {_RESERVED[option]}.")
        # With 0 of the first EnvPool takes the process down, and with 0 of the second every episode has one step.
        at_least(1, **{name: options[name] for name in ("noop_max", "max_episode_steps") if name in options})
        self._options = {"num_threads": num_threads, **options}
        self._native = _with_limit_of_envpool(task, self._options)
        self.num_threads = num_threads
        self._num_batches = 1
        self.batches: list[Batch] = []
        with _making(task, options):
            spec = _envpool().make_spec(task, **self._native)
            observation_space, action_space = spec.observation_space, spec.action_space
        self._translated = _Translated(task, spec, observation_space, action_space)
        self.spec = self._translated.spec

    def init(self, keys: Tensor) -> tuple[None, TimeStep]:
        """See `Env.init`; a second call begins again, with a new pool."""
        num_envs, num = keys.shape[0], self._num_batches
        at_least(1, num_envs=num_envs)
        if num_envs % num:
            raise ValueError(f"{self.spec.name}: {num_envs} environments are not {num} batches; use a multiple.")
        self.close()
        seeds = (random.bits(keys, 1)[:, 0] >> 1).tolist()  # EnvPool takes int32
        options = self._native | {"num_threads": self.num_threads * num}
        if num > 1:
            options["batch_size"] = handed_over(num_envs // num)
        with _making(self.spec.name, {}):
            pool = _envpool().make_gymnasium(self.spec.name, num_envs=num_envs, seed=seeds, **options)
            pool.async_reset()
            batches = Batches(pool, num_envs, num)
            first = [batches.recv(i) for i in range(num)]
        translated = self._translated.of_a_pool()
        self.batches = [Batch(translated, batches, i) for i in range(num)]
        return None, _side_by_side([batch.begin(seen) for batch, seen in zip(self.batches, first, strict=True)])

    def step(self, state: None, action: Tree, keys: Tensor) -> tuple[None, TimeStep]:
        """See `Env.step`."""
        self.send(action)
        return None, self.recv()

    def send(self, action: Tree) -> None:
        """Starts a step and returns at once: the C++ threads work until `recv`, while the caller does other things."""
        if not self.batches:
            raise RuntimeError(f"{self.spec.name}: init() comes before send().")
        if len(self.batches) == 1:
            return self.batches[0].send(action)
        for batch, part in zip(self.batches, action.split(self.batches[0].num_envs), strict=True):
            batch.send(part)

    def recv(self) -> TimeStep:
        """Waits for the step that `send` started."""
        if not self.batches:
            raise RuntimeError(f"{self.spec.name}: recv() comes after send().")
        return _side_by_side([batch.recv() for batch in self.batches])

    def close(self) -> None:
        """Lets go of the pool, which ends its threads."""
        for batch in self.batches[:1]:
            batch.close()
        self.batches = []

    def in_batches(self, num: int) -> "EnvPool":
        """These environments in `num` equal `batches`, once they are made, each with a `send` and a `recv` of its own.

        `num_threads` times `num` threads work on whatever parts have been sent, so that none of them stands still
        while a caller decides for one part.

        Raises:
          ValueError: for games of several players.
        """
        if self._translated.players:
            raise ValueError(
                f"{self.spec.name} is a game of several players, and these are stepped in one batch; leave out "
                "loop.pools_share_threads=true."
            )
        env = EnvPool(self.spec.name, **self._options)
        env._num_batches = num
        return env

    def limited(self, max_episode_steps: int) -> "EnvPool":
        """See `torchpod.envs.transforms.time_limit`."""
        return EnvPool(self.spec.name, **{**self._options, "max_episode_steps": max_episode_steps})

    def repeated(self, num: int) -> "EnvPool":
        """See `torchpod.envs.transforms.action_repeat`: `num` times `frame_skip`, whose rewards only Atari adds up."""
        if _family(self.spec.name) != "atari":
            raise ValueError(
                f"EnvPool adds up rewards of a repeated action in Atari alone, not in {self.spec.name}; leave out "
                "action_repeat, or use env=gymnasium or an environment of tensors."
            )
        config = _envpool().make_spec(self.spec.name, **self._options).config
        options = {**self._options, "frame_skip": num * config.frame_skip}
        if (limit := self.spec.max_episode_steps) is not None:  # EnvPool counts decisions
            options["max_episode_steps"] = -(-limit // num)
        return EnvPool(self.spec.name, **options)


class Batch:
    """Environments of an `EnvPool` that step together, behind the contract of `Env` but for `init`."""

    traits = HOST

    def __init__(self, translated: "_Translated", batches: Batches, index: int) -> None:
        self.spec, self.num_envs = translated.spec, batches.size
        self._translated, self._batches, self._index = translated, batches, index
        self._was_last, self._sent = np.ones(batches.size, bool), False

    def begin(self, seen: Stepped) -> TimeStep:
        """The first timestep, of what the reset gave."""
        zero, no = np.zeros_like(seen.reward), np.zeros(self.num_envs, bool)
        timestep, self._was_last = self._translated.timestep(Stepped(seen.observation, zero, no, no, seen.info), ~no)
        return timestep

    def step(self, state: None, action: Tree, keys: Tensor) -> tuple[None, TimeStep]:
        """See `Env.step`."""
        self.send(action)
        return None, self.recv()

    def send(self, action: Tree) -> None:
        """See `EnvPool.send`."""
        if self._sent:
            raise RuntimeError(f"{self.spec.name}: recv() comes before the next send().")
        self._batches.send(self._index, self._translated.native(action, self.num_envs))
        self._sent = True

    def recv(self) -> TimeStep:
        """See `EnvPool.recv`."""
        if not self._sent:
            raise RuntimeError(f"{self.spec.name}: recv() comes after send().")
        stepped = self._batches.recv(self._index)
        self._sent = False
        timestep, self._was_last = self._translated.timestep(stepped, self._was_last)
        return timestep

    def close(self) -> None:
        """See `EnvPool.close`: that of all batches."""
        self._batches.close()


class _Translated:
    """Between EnvPool's arrays and the contract, whatever batch they are of.

    Args:
      task: EnvPool's name.
      spec: EnvPool's.
      observation_space: of `spec`.
      action_space: of `spec`.
    """

    def __init__(self, task: str, spec: Any, observation_space: Any, action_space: Any) -> None:
        config = spec.config
        observation = spec_of(observation_space, f"{task}: observation_space")
        mask = observation[ACTION_MASK].shape if isinstance(observation, dict) and ACTION_MASK in observation else None
        self._choices_apart = mask is not None and _one_row_per_choice(mask, action_space)
        action, self._to_native = action_of(action_space, f"{task}: action_space", apart=self._choices_apart)
        if mask is not None and not isinstance(action, Box):
            choices = sum(action.nvec) if isinstance(action, MultiDiscrete) else action.num_values
            if math.prod(mask) != choices:
                wrong = f"action_mask is {list(mask)}, which does not fit {action}"
                raise ValueError(f"{task}: {wrong}; choose another environment.")
            observation[ACTION_MASK] = Array((choices,), torch.bool)
        self.spec = EnvSpec(task, observation, action, _limit(task, config), truncates_early=True)
        self.players: _Players | None = None
        if config.max_num_players > 1:
            self.players = _Players(self.spec, config.max_num_players, "info:current_player" in spec.state_array_spec)
            self.spec = self.players.spec
        self._episodic_life: bool = getattr(config, "episodic_life", False)

    def of_a_pool(self) -> "_Translated":
        """For one pool: who moves in a game of turns is remembered from one step to the next."""
        new = copy.copy(self)
        new.players = copy.copy(self.players)
        return new

    def native(self, action: Tree, num_envs: int) -> Any:
        """Actions as EnvPool takes them.

        Raises:
          ValueError: if they are not those of `num_envs` environments.
        """
        # A check, because EnvPool would read past the end of a batch that is too short, and kill the process.
        players = self.players
        given, spec = (action[PLAYER], self.spec.action[PLAYER]) if players else (action, self.spec.action)
        expected = [*lead_of(self.spec, PLAYER, num_envs), *spec.shape]
        if list(given.shape) != expected:
            raise ValueError(f"{self.spec.name} takes actions of shape {expected}; these are {list(given.shape)}.")
        return self._to_native((players.acting(given) if players else given).numpy())

    def timestep(self, stepped: Stepped, reset: np.ndarray) -> tuple[TimeStep, np.ndarray]:
        """Of what EnvPool said, and which episodes are over; `reset [b]`: which were over before."""
        observation, reward, terminated, truncated, info = stepped
        if self.players:
            return self.players.timestep(observation, info, reset, reward, terminated, truncated)
        game_over = None
        if "terminated" in info:
            over = info["terminated"] != 0
            game_over = truncated | over if self._episodic_life else None
            terminated = terminated | over
        if "steps_left" in info:  # gfootball is late, and EnvPool calls an end in the step before truncated too
            terminated = terminated | (truncated & (info["steps_left"] > 0))
        seen = self._observed(observation)
        return host_timestep(seen, reset, reward, terminated, truncated, info.get("reward"), game_over)

    def _observed(self, observation: Any) -> Tree:
        tensors = to_tensors(observation, self.spec.observation)
        if isinstance(tensors, dict) and ACTION_MASK in tensors:
            # Jumanji may allow nothing at LAST, where every action is ignored; a policy needs something to choose.
            mask = tensors[ACTION_MASK] if self._choices_apart else tensors[ACTION_MASK].flatten(1)
            tensors[ACTION_MASK] = (mask | ~mask.any(-1, keepdim=True)).flatten(1)
        return tensors


class _Players:
    """Between rows of EnvPool, one per player, and `{player: [B, N, ...]}`.

    Args:
      spec: of one player.
      num: N.
      in_turns: one of them moves in each step.
    """

    def __init__(self, spec: EnvSpec, num: int, in_turns: bool) -> None:
        self._seen, self._num, self._in_turns = spec.observation, num, in_turns
        self._mover = torch.zeros(0, dtype=torch.int64)
        observation = spec.observation
        if in_turns:
            self._waiting = np.arange(spec.action.num_values) == 0
            observation = {"observation": observation, ACTION_MASK: Array(self._waiting.shape, torch.bool)}
        self.spec = dataclasses.replace(
            spec, observation={PLAYER: observation}, action={PLAYER: spec.action}, groups={PLAYER: num}
        )

    def acting(self, action: Tensor) -> Tensor:
        """Of `[B, N, ...]` those that EnvPool wants: of all players, or of the one who moves."""
        return action[torch.arange(len(action)), self._mover] if self._in_turns else action.flatten(0, 1)

    def timestep(
        self,
        observation: np.ndarray,
        info: dict[str, Any],
        reset: np.ndarray,
        reward: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
    ) -> tuple[TimeStep, np.ndarray]:
        """As `host_timestep`."""
        order = np.argsort(info["env_id"])  # environments of several players come in the order in which they are done
        rows = order[:, None] * self._num + np.arange(self._num)
        seen: Tree = to_tensors(observation[rows.ravel()], self._seen).unflatten(0, rows.shape)
        if self._in_turns:
            mover = info["current_player"][order]
            self._mover = torch.from_numpy(mover)
            moves = (np.arange(self._num) == mover[:, None])[..., None]
            mask = np.where(moves, info["legal_action_mask"][order][:, None], self._waiting)
            seen = {"observation": seen, ACTION_MASK: torch.from_numpy(mask)}
        return grouped_timestep({PLAYER: seen}, reset, {PLAYER: reward[rows]}, terminated[order], truncated[order])


def _side_by_side(timesteps: list[TimeStep]) -> TimeStep:
    return timesteps[0] if len(timesteps) == 1 else pytree.tree_map(lambda *xs: torch.cat(xs), *timesteps)


def _one_row_per_choice(mask: tuple[int, ...], space: Any) -> bool:
    """Whether a mask `[N, A]` is of N integers below A; otherwise it has an entry for each combination of them."""
    bound = getattr(space, "high", None)  # of a Box
    return bound is not None and len(mask) == 2 and mask[0] == bound.size and bool((bound == mask[1] - 1).all())


def _with_limit_of_envpool(task: str, options: dict[str, Any]) -> dict[str, Any]:
    """Options with the `max_episode_steps` that makes the limit of EnvPool the one that is asked for.

    Raises:
      ValueError: where EnvPool does not look at it.
    """
    name, family, registered = task.removeprefix("Jumanji/"), _family(task), _registered(task)[2]
    given = "max_episode_steps" in options
    ignored = family in ("highway", "jumanji", "procgen") and name != "Sokoban-v0"
    if given and (ignored or "max_episode_steps" not in registered):
        in_seconds = family == "highway" and name not in _ENDLESS
        repair = "set duration, which is the limit over policy_frequency" if in_seconds else "leave both out"
        raise ValueError(
            f"EnvPool does not look at max_episode_steps for {task}, so that neither it nor time_limit ends an "
            f"episode; {repair}."
        )
    if name in _ENDLESS:
        return {**options, "max_episode_steps": _NO_LIMIT}
    if given and family == "gfootball":
        return {**options, "max_episode_steps": options["max_episode_steps"] - 1}
    return options


def _limit(task: str, config: Any) -> int | None:
    """The step in which EnvPool truncates an episode; `config` is that of its spec."""
    limit, family = config.max_episode_steps, _family(task)
    if family == "highway" and limit != _NO_LIMIT:
        limit = config.duration * config.policy_frequency
    if family == "gfootball":
        limit += 1
    return limit if 0 < limit < _NO_LIMIT else None


def _family(task: str) -> str:
    """The module of EnvPool, such as "atari" or "mujoco.gym"."""
    return _registered(task)[0].removeprefix("envpool.")


def _registered(task: str) -> tuple[str, str, dict[str, Any]]:
    """Module, class of the spec, and options of a task."""
    return _envpool().registration.registry.specs[task]


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
        raise ImportError("EnvPool needs the package envpool: pip install 'torchpod-rl[envpool]'.") from error


def _nearest(name: str, names: Iterable[str]) -> str:
    return ", ".join(difflib.get_close_matches(name, names, cutoff=0.0))

"""Gymnasium environments as host environments: any registered id, and classes or factories of one's own."""

import contextlib
import dataclasses
import fcntl
import functools
import math
import multiprocessing
import os
import pickle
import re
import signal
import weakref
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import connection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchpod import random
from torchpod.actions import mask_by_choice
from torchpod.specs import HOST, Array, Box, Discrete, EnvSpec, MultiDiscrete, SpecTree
from torchpod.types import MID, TimeStep, Tree

_UNBOUNDED = 1e6  # EnvPool writes "no bound" as 1e10, or as the range of a double; Gymnasium as infinity
_MAX_JOINT = 10_000  # a choice among more actions would be too wide
_ANSWERS = {
    "reset": ("observation", "info"),
    "step": ("observation", "reward", "terminated", "truncated", "info"),
}
_USUAL = [float, bool, bool]
"""Types of reward, terminated and truncated."""
MASK = "action_mask"
_LAST_STEP_S = 1.0
"""How long `close` waits for workers that are in a step."""
_STEPPED: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""The environments that are stepped in this process, by their `id`."""


class Gymnasium:
    """A batch of `gymnasium.Env` behind the contract of `Env`; state None, everything on the CPU.

    Gymnasium's vector environments reset at the step after the last (`AutoresetMode.NEXT_STEP`), as the contract
    wants it: the final observation is seen, and the step that resets is a `FIRST`. The keys of `init` seed the
    environments, once; from then on they draw from their own generators, and the keys of `step` are not used.
    Float actions are clipped to their bounds; where bounds differ from entry to entry, the spec says [-1, 1] and
    actions are scaled. Integers in a Box are numbered and become one Discrete, or a MultiDiscrete if that had more than
    10,000 values; a Tuple of Discrete is a MultiDiscrete. A Tuple that is observed is a dict, with the names "0", "1",
    ... An `action_mask` in a Dict that is observed, of any numbers, says which actions are allowed: one entry per value
    of a Discrete, of a MultiDiscrete those of all choices side by side.

    Args:
      task: a registered id such as "CartPole-v1", or a function without arguments that returns a `gymnasium.Env`
        (also the class itself).
      processes: step in worker processes (forkserver), for steps that take long beside a message to a process and
        back; otherwise in the calling thread.
      options: keyword arguments of `gymnasium.make`, for an id.

    Raises:
      ValueError: if Gymnasium cannot make it; if the observation is none of Box, Discrete, MultiBinary, and Dict and
        Tuple of these; if the action is none of Box, Discrete, MultiDiscrete and Tuple of Discrete, or an integer of
        more than 10,000 values; if options are given without an id; or, in `init`, if the function returns an
        environment that is stepped already. While it plays, if an observation has not the shape of its space, or if
        `reset` or `step` returns what those of Gym did before 0.26.
    """

    traits = HOST

    def __init__(self, task: str | Callable[[], Any], *, processes: bool = False, **options: Any) -> None:
        import gymnasium

        if isinstance(task, str) and re.search(r"\.py(:|$)", task):
            raise ValueError(
                f"task={task!r} looks like a file, and gymnasium.make takes registered ids; a class or a function in a "
                f"file is env={task}, in place of env=gymnasium."
            )
        if not isinstance(task, str) and not callable(task):
            raise ValueError(
                f"Gymnasium makes many of what it steps, and got one {type(task).__name__}; hand over its class, or a "
                "function that makes it."
            )
        if callable(task) and options:
            raise ValueError(f"{sorted(options)} are options of gymnasium.make; give them to {task} yourself.")
        self._make = task if callable(task) else lambda: gymnasium.make(task, **options)
        self._processes = processes
        self.advice = "raise loop.pools_per_actor" if processes else "set env.processes=true"
        """What makes steps faster, for the progress line."""
        self._envs: Any = None
        self._native: Any = None
        self._pending = ""
        self._was_last = np.zeros(0, bool)
        try:
            probe = self._make()
        except gymnasium.error.Error as error:
            raise ValueError(str(error)) from error
        name = task if isinstance(task, str) else getattr(task, "__name__", type(probe).__name__)
        self._spaces = probe.observation_space, probe.action_space
        self.spec, self._to_native = self._described(probe, name)
        probe.close()

    def init(self, keys: Tensor) -> tuple[None, TimeStep]:
        """See `Env.init`; a second call begins again, with new environments."""
        from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

        self.close()
        mode, size = AutoresetMode.NEXT_STEP, keys.shape[0]
        seeds = random.bits(keys, 1)[:, 0].tolist()
        with self._naming_what_went_wrong():
            if self._processes:
                make = functools.partial(_in_worker, self._make, self.spec.name, os.getpid(), self._spaces)
                self._envs = AsyncVectorEnv([make] * size, autoreset_mode=mode, context="forkserver")
            else:
                make = functools.partial(_checked, self._make, self.spec.name)
                self._envs = SyncVectorEnv([make] * size, autoreset_mode=mode)
                self._claim(self._envs.envs)
            self._pending = "reset"
            observation, _ = self._envs.reset(seed=seeds)
        self._pending = ""
        self._was_last = np.ones(len(seeds), bool)
        return None, self._timestep(observation, np.zeros(len(seeds)), ~self._was_last, ~self._was_last)

    def step(self, state: None, action: Tree, keys: Tensor) -> tuple[None, TimeStep]:
        """See `Env.step`."""
        self.send(action)
        return None, self.recv()

    def send(self, action: Tree) -> None:
        """Starts a step: with `processes`, they work until `recv`; otherwise the step is done there."""
        native = self._to_native(action)
        with self._naming_what_went_wrong():
            if self._processes:
                self._envs.step_async(native)
        self._native, self._pending = native, "step"

    def recv(self) -> TimeStep:
        """Waits for the step that `send` started."""
        with self._naming_what_went_wrong():
            result = self._envs.step_wait() if self._processes else self._envs.step(self._native)
        self._pending = ""  # not before: what interrupts the wait leaves answers in the pipes
        observation, reward, terminated, truncated, _ = result
        return self._timestep(observation, reward, terminated, truncated)

    @contextlib.contextmanager
    def _naming_what_went_wrong(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, ConnectionError) as error:
            if not self._processes:  # it is the environment's own
                raise
            raise RuntimeError(
                f"a worker process of {self.spec.name} is gone: was it killed, or out of memory?"
            ) from error
        except (ValueError, TypeError, AttributeError, LookupError) as error:  # perhaps of NumPy
            if not self._pending:  # as they are made
                raise
            space = self._envs.single_observation_space
            for observation in getattr(self._envs, "_env_obs", ()):
                if self._pending == "reset" and observation is None:  # not reset yet
                    continue
                if (wrong := misfit(observation, space)) is not None:
                    raise ValueError(f"{self.spec.name} gave an observation {wrong}; make them agree.") from error
            raise

    def close(self) -> None:
        """Ends worker processes and frees what the environments hold."""
        if self._envs is None:
            return
        envs, self._envs = self._envs, None
        pending, self._pending = self._pending, ""
        if not self._processes:
            for env in envs.envs:
                _STEPPED.pop(id(self._simulator(env)), None)
            envs.close()
            return
        try:
            if pending:  # and nobody waits for it any more; workers that answer end in order
                getattr(envs, f"{pending}_wait")(timeout=_LAST_STEP_S)
            envs.close()
        except Exception:  # a worker hangs, failed, or is gone
            for process in envs.processes:
                # Not process.terminate(), which asks a server whether there is one; a signal may have ended that too.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGTERM)
            for process in envs.processes:
                process.join(_LAST_STEP_S)
            envs.closed = True

    def _claim(self, envs: Iterable[Any]) -> None:
        for env in envs:
            simulator = self._simulator(env)
            if id(simulator) in _STEPPED:
                raise ValueError(
                    f"The function that makes {self.spec.name} returned one and the same {type(simulator).__name__} "
                    "again; return a new one from every call, for each is stepped on its own."
                )
            _STEPPED[id(simulator)] = simulator

    def _simulator(self, env: Any) -> Any:
        """What is inside all wrappers."""
        return env.unwrapped

    def limited(self, max_episode_steps: int) -> "Gymnasium":
        """See `torchpod.envs.transforms.time_limit`."""
        from gymnasium.wrappers import TimeLimit

        return self._wrapped(lambda env: TimeLimit(env, max_episode_steps), max_episode_steps)

    def repeated(self, num: int) -> "Gymnasium":
        """See `torchpod.envs.transforms.action_repeat`."""
        limit = self.spec.max_episode_steps
        return self._wrapped(lambda env: _repeating(env, num), None if limit is None else -(-limit // num))

    def _wrapped(self, wrap: Callable[[Any], Any], limit: int | None) -> "Gymnasium":
        make = self._make
        new = Gymnasium(lambda: wrap(make()), processes=self._processes)
        new.spec = dataclasses.replace(self.spec, max_episode_steps=limit)
        return new

    def _described(self, probe: Any, name: str) -> tuple[EnvSpec, Callable[[Tree], Any]]:
        """The spec, and the function that turns actions into those of the environments."""
        limit = probe.spec.max_episode_steps if probe.spec is not None else None
        observation = spec_of(probe.observation_space, f"{name}: observation_space")
        action, to_native = action_of(probe.action_space, f"{name}: action_space")
        observation = masked(observation, action, f"{name}: observation_space")
        spec = EnvSpec(name, observation, action, limit, truncates_early=True)
        return spec, lambda action: to_native(action.numpy())

    def _timestep(self, observation: Any, *outcome: np.ndarray) -> TimeStep:
        tensors = to_tensors(observation, self.spec.observation)
        timestep, self._was_last = host_timestep(tensors, self._was_last, *outcome)
        if isinstance(tensors, dict) and MASK in tensors:
            tensors[MASK], stuck = opened(tensors[MASK], self.spec.action, ~self._was_last)
            if stuck is not None:
                raise ValueError(
                    f"{self.spec.name} gave an action_mask that allows nothing in choice {stuck[1]}, in environment "
                    f"{stuck[0]}; allow something, or end the episode."
                )
        return timestep


def _repeating(env: Any, num: int) -> Any:
    """Takes each action `num` times, or until the episode ends; rewards add up."""
    import gymnasium

    class Repeating(gymnasium.Wrapper):
        def step(self, action: Any) -> Any:
            observation, total, terminated, truncated, info = self.env.step(action)
            for _ in range(num - 1):
                if terminated or truncated:
                    break
                observation, reward, terminated, truncated, info = self.env.step(action)
                total = float(total) + float(reward)
            return observation, total, terminated, truncated, info

    return Repeating(env)


def require_number(reward: Any, who: str) -> None:
    """Raises `ValueError`, with a sentence that begins with `who`, for what is no reward."""
    if isinstance(reward, float | int | np.number):
        return
    if (shape := np.shape(reward)) != ():
        raise ValueError(f"{who} a reward of shape {list(shape)}; give a number.")
    if isinstance(reward, str | bytes):
        raise ValueError(f"{who} the reward {reward!r}; give a number.")


def complete(answer: Any, method: str, name: str) -> Any:
    """What `reset` or `step` returned; raises `ValueError` if it is not what Gymnasium asks for."""
    wanted = _ANSWERS[method]
    if isinstance(answer, tuple) and len(answer) == len(wanted):
        if method == "step":
            _, reward, *ends, _ = answer
            require_number(reward, f"{name} gave")
            for what, end in zip(wanted[2:4], ends, strict=True):
                if type(end) is not bool and not (np.shape(end) == () and end in (0, 1)):
                    raise ValueError(f"{name} gave {what}={end!r}; give True or False.")
        return answer
    came = f"{len(answer)} values" if isinstance(answer, tuple) else f"a {type(answer).__name__}"
    raise ValueError(
        f"{method}() must return {', '.join(wanted)}, and that of {name} returned {came}; return all {len(wanted)}, as "
        "Gym asks for since 0.26."
    )


def misfit(observation: Any, space: Any) -> str | None:
    """Which part of an observation is not there, or has another shape or type than in its space; None if all fit."""
    from gymnasium import spaces

    if isinstance(space, spaces.Dict | spaces.Tuple):
        inner: dict[Any, Any] = dict(space.items() if isinstance(space, spaces.Dict) else enumerate(space))
        parts = observation if isinstance(observation, tuple | list) else ()
        there: dict[Any, Any] = observation if isinstance(observation, dict) else dict(enumerate(parts))
        if missing := inner.keys() - there.keys():
            return f"without {min(missing)!r}, which its space has"
        wrong = (misfit(there[name], part) for name, part in inner.items())
        return next((part for part in wrong if part is not None), None)
    if observation is None:
        return f"that is None, and the space says {list(space.shape)}"
    found = np.asarray(observation)
    if found.shape != space.shape:
        return f"of shape {list(found.shape)}, and the space says {list(space.shape)}"
    fits = space.dtype is None or np.can_cast(found.dtype, space.dtype, "same_kind")
    return None if fits else f"of {found.dtype}, and the space says {space.dtype}"


def _in_worker(make: Callable[[], Any], name: str, run: int, spaces: tuple[Any, Any]) -> Any:
    """Makes an environment in a process group of its own: a Ctrl-C is for the run, which ends its workers itself.

    Args:
      make: makes it.
      name: of it.
      run: the process of the run. If that ends without a word, the group is killed.
      spaces: of its observations and actions.
    """
    parent = multiprocessing.parent_process()
    if os.getpid() != run and parent is not None:  # Gymnasium makes one in the run's own process too, to look at
        os.setpgrp()
        kill_at_end_of(parent.sentinel)
    try:
        # The memory that processes share keeps sizes alone, and repeats a number.
        return _portable(_checked(make, name, observations=True))
    except Exception as error:
        if os.getpid() == run:
            raise
        return _portable(_unmade(error, *spaces))


def _unmade(error: Exception, observation_space: Any, action_space: Any) -> Any:
    """Raises at its reset what was raised as it was made: before that, a worker cannot tell what it was."""
    import gymnasium

    class Unmade(gymnasium.Env):
        def reset(self, **arguments: Any) -> Any:
            raise error

    env = Unmade()
    env.observation_space, env.action_space = observation_space, action_space
    return env


def _portable(env: Any) -> Any:
    """Raises what can be raised in another process, where Gymnasium makes it anew: `type(error)(error)`."""
    import gymnasium

    class Portable(gymnasium.Wrapper):
        def reset(self, **arguments: Any) -> Any:
            try:
                return self.env.reset(**arguments)
            except Exception as error:
                require_portable(error)
                raise

        def step(self, action: Any) -> Any:
            try:
                return self.env.step(action)
            except Exception as error:
                require_portable(error)
                raise

    return Portable(env)


def require_portable(error: Exception) -> None:
    """Raises a RuntimeError that says the same, if it cannot be pickled or takes other than one argument."""
    kind = type(error)
    try:
        kind(pickle.loads(pickle.dumps(error)))
    except Exception:  # whatever a class of somebody else's does when it is made anew
        told = f"{kind.__module__}.{kind.__qualname__}: {error}".removeprefix("builtins.")
        raise RuntimeError(told) from error


def kill_at_end_of(pipe: int) -> None:
    """The kernel kills this process group when nobody holds the other end of a pipe any more; on Linux alone.

    It needs no thread, which would wait for Python's lock where C code hangs with it. A signal at the death of the
    parent (prctl) would be at that of the fork server, which lives as long as its children.
    """
    if not hasattr(fcntl, "F_SETSIG"):
        return
    with contextlib.suppress(OSError):  # a kernel that does not
        fcntl.fcntl(pipe, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if connection.wait([pipe], 0):  # before the kernel was told
        os.killpg(0, signal.SIGKILL)


def _checked(make: Callable[[], Any], name: str, *, observations: bool = False) -> Any:
    """Looks at what an environment returns, and at the shapes of observations if nobody else does."""
    import gymnasium

    class Checked(gymnasium.Wrapper):
        def reset(self, **arguments: Any) -> Any:
            try:
                return self.seen(complete(self.env.reset(**arguments), "reset", name))
            except (ValueError, TypeError) as error:
                self.unwrap(error, "reset")
                raise

        def step(self, action: Any) -> Any:
            try:
                answer = self.env.step(action)
                usual = type(answer) is tuple and [*map(type, answer[1:4])] == _USUAL  # without a call: 1 us
                return self.seen(answer if usual and len(answer) == 5 else complete(answer, "step", name))
            except (ValueError, TypeError) as error:
                self.unwrap(error, "step", action)
                raise

        def unwrap(self, error: Exception, method: str, *action: Any) -> None:
            if "unpack" in str(error):  # a wrapper does, what the environment itself returns
                complete(getattr(self.unwrapped, method)(*action), method, name)

        def seen(self, answer: Any) -> Any:
            if observations and (wrong := misfit(answer[0], self.observation_space)) is not None:
                raise ValueError(f"{name} gave an observation {wrong}; make them agree.")
            return answer

    return Checked(make())


def host_timestep(
    observation: Tree,
    reset: np.ndarray,
    reward: np.ndarray,
    terminated: np.ndarray,
    truncated: np.ndarray,
    raw_reward: np.ndarray | None = None,
    game_over: np.ndarray | None = None,
) -> tuple[TimeStep, np.ndarray]:
    """`env.make_timestep` in NumPy, and which episodes are over. All `[B]`; they share memory, which nobody writes to.

    For small batches NumPy is faster than torch, and it never gives Python's lock away in between, which costs an actor
    thread more than its own work when others wait for it.
    """
    last = (terminated | truncated) & ~reset
    reward = np.where(reset, 0.0, reward).astype(np.float32)
    raw = reward if raw_reward is None else np.where(reset, 0.0, raw_reward).astype(np.float32)
    over = last if game_over is None else game_over & ~reset
    columns = (
        (MID + last.astype(np.int32) - reset).astype(np.int32),  # FIRST, MID, LAST = 0, 1, 2
        reward,
        1.0 - (terminated & ~reset).astype(np.float32),
    )
    step_type, reward_, discount = map(torch.from_numpy, columns)
    extras = {"raw_reward": torch.from_numpy(raw), "game_over": torch.from_numpy(over)}
    return TimeStep(step_type, reward_, discount, observation, extras), last


def grouped_timestep(
    observation: Tree,
    reset: np.ndarray,
    reward: dict[str, np.ndarray],
    terminated: np.ndarray,
    truncated: np.ndarray,
    alive: dict[str, np.ndarray] | None = None,
) -> tuple[TimeStep, np.ndarray]:
    """`host_timestep` for groups of agents: rewards, and who is alive if agents can leave, `{group: [B, N]}`."""
    timestep, last = host_timestep(observation, reset, np.zeros(len(reset)), terminated, truncated)
    rewards = {g: torch.from_numpy(np.where(reset[:, None], 0.0, r).astype(np.float32)) for g, r in reward.items()}
    discount = {g: timestep.discount[:, None].repeat(1, r.shape[1]) for g, r in rewards.items()}
    extras: dict[str, Tree] = timestep.extras | {"raw_reward": rewards}
    if alive is not None:
        extras["alive"] = {g: torch.from_numpy(x != 0) for g, x in alive.items()}
        first = torch.from_numpy(reset)[:, None]
        discount = {g: discount[g] * (extras["alive"][g] | first) for g in rewards}
    return timestep._replace(reward=rewards, discount=discount, extras=extras), last


def action_of(
    space: Any, where: str, *, apart: bool = False
) -> tuple[Box | Discrete | MultiDiscrete, Callable[[np.ndarray], Any]]:
    """The spec of an action space, and the function that turns actions of the spec `[B, ...]` into the space's.

    Args:
      space: of Gymnasium.
      where: it stands, for the error.
      apart: the integers of a Box are a MultiDiscrete, not numbered.

    Raises:
      ValueError: for a space that no agent here could act in.
    """
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        return Discrete(int(space.n)), lambda action: action + space.start
    if isinstance(space, spaces.MultiDiscrete):
        return MultiDiscrete(tuple(space.nvec.flatten().tolist())), lambda action: (
            action.reshape(-1, *space.shape) + space.start
        ).astype(space.dtype)
    if isinstance(space, spaces.Tuple) and all(isinstance(x, spaces.Discrete) for x in space) and len(space):
        starts = [int(x.start) for x in space]
        return MultiDiscrete(tuple(int(x.n) for x in space)), lambda action: tuple((action + starts).T)
    if not isinstance(space, spaces.Box):
        raise ValueError(f"{where} is {space}; use Box, Discrete, MultiDiscrete, or a Tuple of Discrete.")
    if 0 in space.shape:
        raise ValueError(f"{where} is {space}, of no numbers; give it some.")
    low, high = space.low, space.high
    if space.dtype is not None and space.dtype.kind != "f":
        shape, counts = space.shape, [int(b) - int(a) + 1 for a, b in zip(low.flat, high.flat, strict=True)]
        if max(counts) > _MAX_JOINT:
            raise ValueError(f"{where} is {space}, an integer of more than {_MAX_JOINT} values; choose another space.")
        if apart or math.prod(counts) > _MAX_JOINT:
            return MultiDiscrete(tuple(counts)), lambda action: (action.reshape(-1, *shape) + low).astype(space.dtype)
        return Discrete(math.prod(counts)), lambda action: (
            np.stack(np.unravel_index(action, counts), -1).reshape(-1, *shape) + low
        ).astype(space.dtype)
    if max(abs(low).max(), abs(high).max()) > _UNBOUNDED:
        return Box(space.shape), lambda action: action.clip(low, high)
    if (low == low.flat[0]).all() and (high == high.flat[0]).all():
        return Box(space.shape, float(low.flat[0]), float(high.flat[0])), lambda action: action.clip(low, high)
    center, half = (high + low) / 2, (high - low) / 2
    return Box(space.shape, -1.0, 1.0), lambda action: (center + half * action).clip(low, high)


def spec_of(space: Any, where: str) -> SpecTree:
    """The spec of an observation space. Images of bytes `[C, H, W]` become `[H, W, C]`, as everywhere here.

    Raises:
      ValueError: for a space that no agent here could read.
    """
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        return {name: spec_of(inner, f"{where}[{name!r}]") for name, inner in space.items()}
    if isinstance(space, spaces.Tuple):
        return {str(i): spec_of(inner, f"{where}[{i}]") for i, inner in enumerate(space)}
    if isinstance(space, spaces.Discrete) and space.start == 0:
        return Discrete(int(space.n))
    if isinstance(space, spaces.Discrete):
        return Array(())  # a number that may be negative, or never 0: no index
    if isinstance(space, spaces.Box | spaces.MultiBinary):
        dtype = torch.uint8 if space.dtype == np.uint8 else torch.float32
        channels_first = len(space.shape) == 3 and dtype == torch.uint8 and space.shape[0] < min(space.shape[1:])
        return Array((*space.shape[1:], space.shape[0]) if channels_first else space.shape, dtype)
    raise ValueError(f"{where} is {space}; use Box, Discrete, MultiBinary, or Dict and Tuple of these.")


def masked(observation: SpecTree, action: Box | Discrete | MultiDiscrete, where: str) -> SpecTree:
    """With a mask of bools, if there is one.

    Raises:
      ValueError: if it has not one entry per value.
    """
    if not isinstance(observation, dict) or MASK not in observation:
        return observation
    given = observation[MASK].shape
    if given != (sum(action.nvec) if isinstance(action, MultiDiscrete) else getattr(action, "num_values", 0),):
        raise ValueError(f"{where}: action_mask is {list(given)}, and the action {action}; give one entry per value.")
    return observation | {MASK: Array(given, torch.bool)}


def opened(mask: Tensor, action: SpecTree, acts: np.ndarray) -> tuple[Tensor, tuple[int, int] | None]:
    """A mask `[B, A]` that leaves a policy something in each choice: who does not act may do what it likes.

    Returns:
      The mask; and row and choice where somebody of `acts`, `[B]` bool, is allowed nothing, None if there is none.
    """
    parts, stuck = [], None
    for i, part in enumerate(mask_by_choice(mask, action)):
        nothing = ~part.any(-1)
        rows = np.flatnonzero(nothing.numpy() & acts)
        stuck = (int(rows[0]), i) if stuck is None and rows.size else stuck
        parts.append(part | nothing[:, None])
    return torch.cat(parts, -1), stuck


def to_tensors(observation: Any, spec: SpecTree) -> Tree:
    """Arrays as tensors of the spec's types, which share their memory where the type is right; images as views."""
    if isinstance(spec, dict):
        parts = dict(zip(spec, observation, strict=True)) if isinstance(observation, tuple) else observation
        return {name: to_tensors(parts[name], inner) for name, inner in spec.items()}
    tensor = torch.from_numpy(np.ascontiguousarray(observation)).to(spec.dtype)
    channels_first = tensor.shape[1:] != spec.shape and tensor.shape[1:] == (spec.shape[-1], *spec.shape[:-1])
    # Moving them costs many times what a copy does, which a device does better.
    return tensor.movedim(1, -1) if channels_first else tensor

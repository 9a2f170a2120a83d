"""Gymnasium environments as host environments: any registered id, and classes or factories of one's own."""

import contextlib
import dataclasses
import functools
import os
import re
import signal
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing import connection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchpod import random
from torchpod.envs.arguments import needs_nothing
from torchpod.envs.host.spaces import action_of, masked, misfit, opened, spec_of, to_tensors
from torchpod.envs.host.timesteps import host_timestep
from torchpod.envs.host.workers import in_worker, preload
from torchpod.processes import signal_group
from torchpod.specs import HOST, EnvSpec
from torchpod.types import ACTION_MASK, TimeStep, Tree

_ANSWERS = {
    "reset": ("observation", "info"),
    "step": ("observation", "reward", "terminated", "truncated", "info"),
}
_USUAL = [float, bool, bool, dict]
"""Types of reward, terminated, truncated and info."""
_TOLD = "info_keywords/"
"""Before a keyword, on its way through Gymnasium, which has names of its own."""
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
      info_keywords: numbers in the `info` of the last step of every episode, `["is_success"]`: each becomes the metric
        `episode_NAME`, by `extras["episode"][NAME]`, `[B]` float32, which is 0 at all other steps.
      options: keyword arguments of `gymnasium.make`, for an id.

    Raises:
      ValueError: if Gymnasium cannot make it; if the observation is none of Box, Discrete, MultiBinary, and Dict and
        Tuple of these; if the action is none of Box, Discrete, MultiDiscrete and Tuple of Discrete, or an integer of
        more than 10,000 values; if options are given without an id; if `info_keywords` are no names; or, in `init`, if
        the function returns an environment that is stepped already. While it plays, if an observation has not the shape
        of its space, if `reset` or `step` returns what those of Gym did before 0.26, or if `info` lacks a keyword.
    """

    traits = HOST

    def __init__(
        self,
        task: str | Callable[[], Any],
        *,
        processes: bool = False,
        info_keywords: Sequence[str] = (),
        **options: Any,
    ) -> None:
        import gymnasium

        if isinstance(task, str) and re.search(r"\.py(:|$)", task):
            raise ValueError(
                f"task={task!r} looks like a file, and gymnasium.make takes registered ids; a class or a function in a "
                f"file is env={task}, in place of env=gymnasium."
            )
        if not isinstance(task, str):
            needs_nothing(task, "Gymnasium")
        if callable(task) and options:
            kind, given = getattr(task, "__name__", "it"), ", ".join(f"{name}={x!r}" for name, x in options.items())
            raise ValueError(
                f"{sorted(options)} are options of gymnasium.make, for an id; give them to {kind} yourself: "
                f"Gymnasium(functools.partial({kind}, {given}))."
            )
        self._make = task if callable(task) else lambda: gymnasium.make(task, **options)
        self._processes, self._info_keywords = processes, _names(info_keywords)
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
        except ModuleNotFoundError as error:
            known = gymnasium.registry.get(task) if isinstance(task, str) else None
            kind = re.match(r"gymnasium\.envs\.(\w+)", str(known.entry_point) if known else "")
            if kind is None:
                raise
            extra = "jax" if kind[1] in ("phys2d", "tabular") else kind[1]
            raise ImportError(f"{error}, which {task} needs: pip install 'gymnasium[{extra}]'.") from error
        name = task if isinstance(task, str) else getattr(task, "__name__", type(probe.unwrapped).__name__)
        self._spaces = space_of(probe, "observation_space", name), space_of(probe, "action_space", name)
        self.spec, self._to_native = self._described(probe, name)
        probe.close()

    def init(self, keys: Tensor) -> tuple[None, TimeStep]:
        """See `Env.init`; a second call begins again, with new environments, or in worker processes with the old ones.

        Processes take seconds to start; they stay where there are to be as many environments as before.
        """
        seeds = random.bits(keys, 1)[:, 0].tolist()
        envs = self._envs if self._processes and not self._pending else None
        stay = envs is not None and envs.num_envs == len(seeds)
        with self._naming_what_went_wrong():
            if not stay:
                self.close()
                self._begin(len(seeds))
            self._pending = "reset"
            observation, info = self._envs.reset(seed=seeds)
        self._pending = ""
        self._was_last = np.ones(len(seeds), bool)
        timestep = self._timestep(observation, np.zeros(len(seeds)), ~self._was_last, ~self._was_last)
        return None, self._with_info(timestep, info)

    def _begin(self, size: int) -> None:
        from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

        # The memory that processes share keeps sizes alone, and repeats a number.
        make = functools.partial(
            _checked, self._make, self.spec.name, observations=self._processes, keywords=self._info_keywords
        )
        if self._processes:
            preload()
            make = functools.partial(in_worker, make, os.getpid(), self._spaces)
            self._envs = AsyncVectorEnv([make] * size, autoreset_mode=AutoresetMode.NEXT_STEP, context="forkserver")
        else:
            self._envs = SyncVectorEnv([make] * size, autoreset_mode=AutoresetMode.NEXT_STEP)
            self._claim(self._envs.envs)

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
        *answer, info = result
        return self._with_info(self._timestep(*answer), info)

    @contextlib.contextmanager
    def _naming_what_went_wrong(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, ConnectionError) as error:
            if not self._processes:  # it is the environment's own
                raise
            raise RuntimeError(
                f"a worker process of {self.spec.name} is gone{self._gone()}: was it killed, or out of memory?"
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

    def _gone(self) -> str:
        """Which, and how it ended, as far as that is known."""
        processes = getattr(self._envs, "processes", ())
        connection.wait([process.sentinel for process in processes], 0.1)
        ends = [(i, process.exitcode) for i, process in enumerate(processes)]
        told = [f"that of environment {i} with exit status {status}" for i, status in ends if status is not None]
        return f", {' and '.join(told)}" if told else ""

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
                signal_group(process, signal.SIGTERM)
            deadline = time.monotonic() + _LAST_STEP_S
            for process in envs.processes:
                process.join(max(0.0, deadline - time.monotonic()))
                signal_group(process, signal.SIGKILL)  # what it had started
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
        new = Gymnasium(lambda: wrap(make()), processes=self._processes, info_keywords=self._info_keywords)
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
        if isinstance(tensors, dict) and ACTION_MASK in tensors:
            tensors[ACTION_MASK], stuck = opened(tensors[ACTION_MASK], self.spec.action, ~self._was_last)
            if stuck is not None:
                raise ValueError(
                    f"{self.spec.name} gave an action_mask that allows nothing in choice {stuck[1]}, in environment "
                    f"{stuck[0]}; allow something, or end the episode."
                )
        return timestep

    def _with_info(self, timestep: TimeStep, info: dict[str, np.ndarray]) -> TimeStep:
        if not self._info_keywords:
            return timestep
        none = np.zeros(len(self._was_last), np.float32)
        told = {name: info.get(_TOLD + name, none).astype(np.float32) for name in self._info_keywords}
        episode = {name: torch.from_numpy(x) for name, x in told.items()}
        return timestep._replace(extras=timestep.extras | {"episode": episode})


def space_of(env: Any, space: str, name: str) -> Any:
    """The `space` of an environment; raises `ValueError` if it has none."""
    found = getattr(env, space) if hasattr(env, space) or hasattr(type(env.unwrapped), space) else None
    if found is None:
        raise ValueError(f"{name} has no {space}; set self.{space} in its __init__, of gymnasium.spaces.")
    return found


def _names(keywords: Any) -> tuple[str, ...]:
    """The `info_keywords`, if they are names of metrics."""
    listed = isinstance(keywords, list | tuple) and all(isinstance(name, str) and name for name in keywords)
    if not listed or {"return", "length"} & {*keywords}:
        raise ValueError(
            f"info_keywords={keywords!r} must be a list of names in info, e.g. [is_success], and none of return and "
            "length, which are counted from rewards and ends."
        )
    return tuple(keywords)


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


def _checked(make: Callable[[], Any], name: str, *, observations: bool = False, keywords: tuple[str, ...] = ()) -> Any:
    """Looks at what an environment returns, and at the shapes of observations if nobody else does.

    Of the info it keeps the keywords, in the last step of an episode.
    """
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
                usual = type(answer) is tuple and [*map(type, answer[1:])] == _USUAL  # without a call: 1 us
                return self.seen(answer if usual else complete(answer, "step", name))
            except (ValueError, TypeError) as error:
                self.unwrap(error, "step", action)
                raise

        def unwrap(self, error: Exception, method: str, *action: Any) -> None:
            if "unpack" in str(error):  # a wrapper does, what the environment itself returns
                complete(getattr(self.unwrapped, method)(*action), method, name)

        def seen(self, answer: Any) -> Any:
            if observations and (wrong := misfit(answer[0], self.observation_space)) is not None:
                raise ValueError(f"{name} gave an observation {wrong}; make them agree.")
            over = keywords and len(answer) == len(_ANSWERS["step"]) and (answer[2] or answer[3])
            # Nobody reads the rest of the info, and a batch of them may be impossible.
            return *answer[:-1], {_TOLD + key: _number(answer[-1], key, name) for key in keywords} if over else {}

    return Checked(make())


def _number(info: dict[str, Any], key: str, name: str) -> float:
    """What is told of an episode in the info of its last step."""
    if key not in info:
        there = ", ".join(map(str, info)) or "nothing"
        raise ValueError(
            f"{name} has no {key} in the info of the last step of an episode, but {there}; say it there, or leave it "
            "out of info_keywords."
        )
    try:
        if isinstance(info[key], str | bytes):
            raise TypeError
        return float(np.asarray(info[key]).item())
    except (TypeError, ValueError, OverflowError):
        told = f"info[{key!r}]={info[key]!r}, which info_keywords names"
        raise ValueError(f"{name} gave {told}; give a number.") from None


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
        if not isinstance(answer[-1], dict):
            raise ValueError(f"{name} gave info={answer[-1]!r}; give a dict, which may be empty.")
        return answer
    came = f"{len(answer)} values" if isinstance(answer, tuple) else f"a {type(answer).__name__}"
    raise ValueError(
        f"{method}() must return {', '.join(wanted)}, and that of {name} returned {came}; return all {len(wanted)}, as "
        "Gym asks for since 0.26."
    )


def require_number(reward: Any, who: str) -> None:
    """Raises `ValueError`, with a sentence that begins with `who`, for what is no reward."""
    if isinstance(reward, float | int | np.number):
        return
    if (shape := np.shape(reward)) != ():
        raise ValueError(f"{who} a reward of shape {list(shape)}; give a number.")
    try:
        if isinstance(reward, str | bytes):
            raise TypeError
        float(reward)
    except (TypeError, ValueError):
        raise ValueError(f"{who} the reward {reward!r}; give a number.") from None

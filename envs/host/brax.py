"""Brax as a host environment: its JAX programs stepped from torch, tensors shared by dlpack and nothing copied."""

import contextlib
import importlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchpod import random
from torchpod.envs.arguments import at_least, one_of, true_or_false
from torchpod.specs import HOST, Array, Box, EnvSpec, SpecTree
from torchpod.types import FIRST, LAST, MID, TimeStep, Tree


class Brax:
    """A batch of one of Brax's environments behind the contract of `Env`; state None, everything on the CPU.

    A step of the batch is one program of XLA, compiled once for each batch size; JAX keeps the state. Actions go in
    and observations come out as the same memory (dlpack), which nobody may write to. The step after the last of an
    episode ignores its action and returns the first observation of the next one, as the contract wants it, whereas
    Brax's own wrapper resets in the same step and loses the final observation. The keys of `init` seed everything; the
    keys of `step` are not used. Actions are in [-1, 1] and clipped there.

    Args:
      task: a name that Brax knows, such as "ant", also one of `brax.envs.register_environment`; or a
        `brax.envs.Env` of one's own, without wrappers.
      episode_length: steps of Brax after which an episode is truncated.
      action_repeat: steps of Brax for each step here, or until the episode ends; rewards add up.
      fresh_resets: every episode begins in a state drawn for it, which costs a reset of the whole batch after each
        step in which an episode began. False: always in the environment's first state, as in Brax's own training.
      options: those of the environment's class, for a name: `backend` (generalized, positional, spring or mjx), ...

    Raises:
      ImportError: if brax is not installed.
      ValueError: for an unknown name or option.
    """

    traits = HOST

    def __init__(
        self,
        task: str | Any,
        *,
        episode_length: int = 1000,
        action_repeat: int = 1,
        fresh_resets: bool = True,
        **options: Any,
    ) -> None:
        at_least(1, episode_length=episode_length, action_repeat=action_repeat)
        true_or_false(fresh_resets=fresh_resets)
        limit = -(-episode_length // action_repeat)
        self._arguments = {"episode_length": episode_length, "action_repeat": action_repeat, **options}
        self._task, self._fresh_resets = task, fresh_resets
        self._programs = _programs(task, options, limit, action_repeat)
        name = task if isinstance(task, str) else type(task).__name__
        self.spec = EnvSpec(name, self._programs.observation, self._programs.action, limit)
        self._batch: Any = None
        self._pending: Any = None
        self._num_resets = 0

    def init(self, keys: Tensor) -> tuple[None, TimeStep]:
        """See `Env.init`; a second call begins again."""
        at_least(1, num_envs=keys.shape[0])
        # Two words are a key of JAX.
        self._keys = self._programs.put(random.bits(keys, 2).numpy().astype(np.uint32))
        self._num_resets, self._pending = 0, None
        self._batch, columns = self._programs.begin(self._keys, np.uint32(0))
        self._first = self._batch.env if not self._fresh_resets else self._draw()
        return None, _timestep(self._batch.env.obs, columns)

    def step(self, state: None, action: Tree, keys: Tensor) -> tuple[None, TimeStep]:
        """See `Env.step`."""
        self.send(action)
        return None, self.recv()

    def send(self, action: Tensor) -> None:
        """Starts a step and returns at once: XLA's threads work until `recv`, while the caller does other things."""
        if self._batch is None or self._pending is not None:
            raise RuntimeError(f"{self.spec.name}: init() comes before send(), and recv() before the next send().")
        expected = [self._keys.shape[0], *self.spec.action.shape]
        if list(action.shape) != expected:
            raise ValueError(f"{self.spec.name} takes actions of shape {expected}; these are {list(action.shape)}.")
        shared = self._programs.share(action.detach().contiguous())
        self._pending = self._programs.step(self._batch, self._first, shared)

    def recv(self) -> TimeStep:
        """Waits for the step that `send` started."""
        if self._pending is None:
            raise RuntimeError(f"{self.spec.name}: recv() comes after send().")
        self._batch, columns = self._pending
        timestep = _timestep(self._batch.env.obs, columns)
        self._pending = None
        if self._fresh_resets and bool((timestep.step_type == FIRST).any()):
            self._first = self._draw()
        return timestep

    def close(self) -> None:
        """Waits for a step that is under way, for a process that ends meanwhile is aborted; lets go of the state."""
        if self._pending is not None:
            _wait_for(self._pending[1])
        self._batch = self._pending = self._first = None

    def limited(self, max_episode_steps: int) -> "Brax":
        """See `torchpod.envs.transforms.time_limit`."""
        return self._with(episode_length=max_episode_steps * self._arguments["action_repeat"])

    def repeated(self, num: int) -> "Brax":
        """See `torchpod.envs.transforms.action_repeat`."""
        return self._with(action_repeat=num * self._arguments["action_repeat"])

    def _with(self, **changed: int) -> "Brax":
        return Brax(self._task, fresh_resets=self._fresh_resets, **{**self._arguments, **changed})

    def _draw(self) -> Any:
        """States in which the next episodes will begin."""
        self._num_resets += 1
        return self._programs.begin(self._keys, np.uint32(self._num_resets))[0].env


class _Batch(NamedTuple):
    """What JAX keeps between two steps."""

    env: Any
    """Brax's own state, every leaf `[B, ...]`."""
    count: Any
    """`[B]` int32, steps since the episode began."""
    was_last: Any
    """`[B]` bool."""


class _Programs(NamedTuple):
    """An environment of Brax as functions that `jax.jit` compiles, for every batch size at its first call."""

    observation: SpecTree
    action: Box
    begin: Any
    """Keys `[B, 2]` uint32 and a number: a batch in its first states, and the columns of its timestep."""
    step: Any
    """Batch, states in which episodes begin, actions `[B, A]`: the next batch, and the columns of its timestep."""
    put: Callable[[np.ndarray], Any]
    """Onto the CPU, wherever else JAX could compute."""
    share: Callable[[Tensor], Any]
    """The tensor's memory as an array of JAX."""


# Shared in a process: a second pool compiles nothing anew. They hold their environment, so that its id stays its own.
_MADE: dict[Any, _Programs] = {}


def _programs(task: str | Any, options: Mapping[str, Any], limit: int, action_repeat: int) -> _Programs:
    key = (task if isinstance(task, str) else id(task), repr(sorted(options.items())), limit, action_repeat)
    if key not in _MADE:
        env = _make(task, options)
        _MADE[key] = _compiled(env, limit, action_repeat)
    return _MADE[key]


def _make(task: str | Any, options: Mapping[str, Any]) -> Any:
    envs = _brax()
    if not isinstance(task, str):
        if not isinstance(task, envs.Env) or options:
            raise ValueError(
                f"Brax takes the name of an environment, or a brax.envs.Env without options; not {task!r}."
            )
        return task
    one_of("task", task, envs._envs)  # Brax has no public list
    try:
        with _quiet():
            return envs.get_environment(task, **options)
    except Exception as error:
        reason = (str(error) or type(error).__name__).split("\n")[0].strip(" .")
        raise ValueError(f"Brax cannot make {task} with {dict(options)}; check them. It says: {reason}.") from error


def _compiled(env: Any, limit: int, action_repeat: int) -> _Programs:
    import jax
    import jax.numpy as jnp

    cpu = jax.devices("cpu")[0]

    def where(condition: Any, on_true: Any, on_false: Any) -> Any:
        def pick(a: Any, b: Any) -> Any:
            return jnp.where(condition.reshape(condition.shape + (1,) * (a.ndim - 1)), a, b)

        return jax.tree.map(pick, on_true, on_false)

    def strong(tree: Any) -> Any:
        # Types that JAX calls weak would come back strong, and the second step would compile again.
        return jax.tree.map(lambda x: jax.lax.convert_element_type(x, x.dtype), tree)

    def begin(keys: Any, number: Any) -> Any:
        state = jax.vmap(lambda key: env.reset(jax.random.fold_in(key, number)))(keys)
        size = keys.shape[0]
        no = jnp.zeros(size, bool)
        columns = (jnp.full(size, FIRST, jnp.int32), jnp.zeros(size), jnp.ones(size), no)
        return strong((_Batch(state, jnp.zeros(size, jnp.int32), no), columns))

    def step(batch: _Batch, first: Any, action: Any) -> Any:
        action = jnp.clip(action, -1.0, 1.0)

        def once(state: Any, _: None) -> Any:
            over = state.done > 0
            moved = jax.vmap(env.step)(state, action)
            return where(over, state, moved), jnp.where(over, 0.0, moved.reward)

        moved, rewards = jax.lax.scan(once, batch.env, None, action_repeat)
        count = jnp.where(batch.was_last, 0, batch.count + 1)
        terminated = (moved.done > 0) & ~batch.was_last
        last = (terminated | (count >= limit)) & ~batch.was_last
        columns = (
            jnp.where(batch.was_last, FIRST, jnp.where(last, LAST, MID)).astype(jnp.int32),
            jnp.where(batch.was_last, 0.0, rewards.sum(0)),
            1.0 - terminated.astype(jnp.float32),
            last,
        )
        return strong((_Batch(where(batch.was_last, first, moved), count, last), columns))

    def spec(observation: Any) -> SpecTree:
        if isinstance(observation, Mapping):
            return {name: spec(inner) for name, inner in observation.items()}
        return Array(observation.shape, torch.from_numpy(np.empty(0, observation.dtype)).dtype)

    return _Programs(
        observation=spec(jax.eval_shape(env.reset, jax.random.PRNGKey(0)).obs),
        action=Box((env.action_size,), -1.0, 1.0),
        # An argument that is left out would not bind the state to its device, and the second step would compile again.
        begin=jax.jit(begin, keep_unused=True),
        step=jax.jit(step),
        put=lambda x: jax.device_put(x, cpu),
        share=jax.dlpack.from_dlpack,
    )


def _timestep(observation: Any, columns: Any) -> TimeStep:
    """Waits for the arrays of JAX, and takes their memory."""
    _wait_for(columns)
    step_type, reward, discount, last = map(torch.from_dlpack, columns)
    return TimeStep(step_type, reward, discount, _tensors(observation), {"raw_reward": reward, "game_over": last})


def _wait_for(columns: Any) -> None:
    for array in columns:
        array.block_until_ready()  # they come from one program, and are ready together


def _tensors(observation: Any) -> Tree:
    if isinstance(observation, Mapping):
        return {name: _tensors(inner) for name, inner in observation.items()}
    return torch.from_dlpack(observation)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Brax tells of what it does without, and of packages that nobody maintains."""
    with warnings.catch_warnings(), open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        warnings.simplefilter("ignore")
        yield


def _brax() -> Any:
    try:
        with _quiet():
            return importlib.import_module("brax.envs")
    except ImportError as error:
        raise ImportError("Brax needs the package brax: pip install 'torchpod-rl[brax]'.") from error

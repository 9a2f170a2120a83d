"""`check_consistency`: a tensor environment beside a plain Python one, step by step, from the same starts.

Write the rules a second time, for one environment, with loops and `if`, and let the two play:

    class MyReference:
        def reset(self, state):  # the state that the tensor environment begins in, as NumPy arrays of one environment
            return observation

        def step(self, action):
            return observation, reward, terminated, truncated

    check_consistency(MyEnv(), MyReference())

Observations and actions are NumPy arrays, lists or numbers without the axis B; with groups of agents they, and rewards,
are dicts by group with arrays `[N, ...]`. Where the tensor environment draws random numbers within a step, write
`step(self, action, key)`: `key` `[3]` is the row's, and `torchpod.random` draws the same numbers from it.

Discounts are to be 0 where the episode terminates, else 1. Where agents can leave before the others, or discounts are
others, `reset` and `step` return one value more, a dict like Gymnasium's `info`, with any of these:

    {"alive": {group: [N]}, "discount": {group: [N]}}  # who is in the game, as in TimeStep.extras; what takes effect

Of who is not alive the discount is to be 0, but at the start of an episode, unless the dict has discounts.
"""

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchpod import random
from torchpod.actions import random_action
from torchpod.compile import CompileError, Compiler, RecompilationError
from torchpod.env import Env, is_begun
from torchpod.graph import Replay
from torchpod.specs import EnvSpec
from torchpod.testing.contract import ContractError, named_leaves, require_no_reading
from torchpod.trees import contiguous
from torchpod.types import FIRST, LAST, TimeStep, Tree
from torchpod.watched import sentence

UNSAID = "; where agents leave, or discounts are others, let it return them as one value more"
"""How to repair a discount of which the reference has told nothing."""


class ConsistencyError(ValueError):
    """A tensor environment and its reference differ; the message says where first."""


class FailedError(RuntimeError):
    """The environment or the reference raised an exception, which is the cause.

    Args:
      who: env or reference.
      what: it did, e.g. "fails at step 1 of an episode (step 1 in all), environment 0: KeyError: 'k'."
    """

    def __init__(self, who: str, what: str) -> None:
        super().__init__(f"the {who} {what}")
        self.who, self.what = who, what


class Report(NamedTuple):
    """What has been compared."""

    num_steps: int
    """Of all environments together, resets not counted."""
    num_episodes: int
    """That ended."""
    largest: float
    """The largest absolute difference of observations, rewards and discounts."""


def check_consistency(
    env: Env,
    reference: Any,
    *,
    num_envs: int = 8,
    num_steps: int | None = None,
    seed: int = 0,
    rtol: float = 1e-5,
    atol: float = 1e-6,
    reward_atol: float | None = None,
    compile: bool = False,
    capture: bool = False,
    device: torch.device | str = "cpu",
) -> Report:
    """Plays both with the same random actions and compares observations, rewards, discounts and ends.

    Args:
      env: a tensor environment.
      reference: see the module; each environment of the batch gets a deep copy.
      num_envs: B.
      num_steps: how long to play; by default past the time limit twice, at most 1000.
      seed: of starts and actions.
      rtol: relative tolerance of observations, rewards and discounts: |a - b| <= atol + rtol |b|.
      atol: absolute tolerance.
      reward_atol: that of rewards; by default the same.
      compile: compare the compiled step.
      capture: step as Anakin does, in static buffers, and on CUDA, with `compile`, in a graph (graph.py).
      device: of the tensor environment.

    Raises:
      ConsistencyError: names step, environment, agent and feature of the first difference.
      FailedError: either of them raised an exception.
      ContractError: the tensor environment branches on a tensor; says where.
      ValueError: for an environment on the host; if there is nothing to play; for capture on CUDA without `compile`.
    """
    if not isinstance(getattr(env, "spec", None), EnvSpec):
        raise ValueError(f"env={env!r} has no spec; hand over a tensor environment, made.")
    for name in ("reset", "step"):
        if isinstance(reference, type) or not callable(getattr(reference, name, None)):
            came = f"the class {reference.__name__}" if isinstance(reference, type) else f"a {type(reference).__name__}"
            raise ValueError(
                f"the reference is {came}; hand over an object with the methods reset(state) and step(action)."
            )
    if not env.traits.pure:
        raise ValueError(f"{env.spec.name} is stepped on the host; check_consistency takes tensor environments.")
    if num_envs < 1 or (num_steps is not None and num_steps < 1):
        raise ValueError(f"num_envs={num_envs} and num_steps={num_steps} must be at least 1.")
    if capture and not compile and torch.device(device).type == "cuda":
        raise ValueError("capture on a GPU is of compiled steps, as in Anakin; add compile (--compile).")
    num_steps = num_steps or min(2 * (env.spec.max_episode_steps or 100) + 2, 1000)
    tolerance = _Tolerance(rtol, atol, atol if reward_atol is None else reward_atol)
    with _failing("reference", "when it is copied"):
        references = [copy.deepcopy(reference) for _ in range(num_envs)]
    rows = [_Row(env, own, i, tolerance) for i, own in enumerate(references)]
    keys, action_keys = (random.split(random.fold_in(random.key(seed, device), i), num_envs) for i in range(2))

    def contiguous_step(state: Tree, action: Tree, keys: Tensor) -> tuple[Tree, TimeStep]:
        return contiguous(env.step(state, action, keys))  # as the loops do

    init, step = _told(lambda keys: contiguous(env.init(keys))), _told(Compiler(compile)(contiguous_step))
    with torch.no_grad():
        with _failing("env", "in reset()"):
            state, timestep = init(random.at(keys, 0))
        if capture:
            action = random_action(env.spec, timestep.observation, random.at(action_keys, 1))
            with _failing("env", "at step 1"):
                step = _captured(step, state, action, random.at(keys, 1))
        for row in rows:
            row.begin(0, _inner(env, state), timestep)
        for i in range(1, num_steps + 1):
            was_last = (timestep.step_type == LAST).tolist()
            action = random_action(env.spec, timestep.observation, random.at(action_keys, i))
            with _failing("env", f"at step {i}"):
                state, timestep = step(state, action, random.at(keys, i))
            for row, resets in zip(rows, was_last, strict=True):
                if resets:
                    row.begin(i, _inner(env, state), timestep)
                else:
                    row.follow(i, action, random.at(keys, i), timestep)
    return Report(
        sum(row.num_steps for row in rows), sum(row.num_episodes for row in rows), max(row.largest for row in rows)
    )


@contextlib.contextmanager
def _failing(who: str, when: str) -> Iterator[None]:
    """What the code of who wrote it raises, as a sentence; what torchpod says of it stays."""
    try:
        yield
    except (ContractError, CompileError, RecompilationError):
        raise
    except Exception as error:
        raise FailedError(who, f"fails {when}: {sentence(error)}") from error


def _told(fn: Callable[..., Tree]) -> Callable[..., Tree]:
    """The same, with torch's error about code that reads a tensor as the rule that it breaks."""

    def called(*args: Tree) -> Tree:
        try:
            return fn(*args)
        except RuntimeError as error:
            require_no_reading(error)
            raise

    return called


def _captured(step: Callable[..., Tree], *args: Tree) -> Callable[..., Tree]:
    """The same as a replayable program, whose results are copied out of its buffers."""
    capture = pytree.tree_leaves(args)[-1].is_cuda
    replay = Replay(lambda own: (own, step(*own)), args, capture=capture)

    def replayed(*args: Tree) -> Tree:
        replay.load(args)
        return pytree.tree_map(torch.clone, replay())

    return replayed


class _Tolerance(NamedTuple):
    rtol: float
    atol: float
    reward_atol: float


class _Row:
    """One environment of the batch beside its reference."""

    def __init__(self, env: Env, reference: Any, index: int, tolerance: _Tolerance) -> None:
        self._spec, self._reference, self._index, self._tolerance = env.spec, reference, index, tolerance
        self._takes_key = len(inspect.signature(reference.step).parameters) > 1
        self._began = 0
        self.num_steps, self.num_episodes, self.largest = 0, 0, 0.0

    def begin(self, step: int, state: Tree, timestep: TimeStep) -> None:
        """An episode starts."""
        self._began = step
        self._exactly(step, "step type", int(timestep.step_type[self._index]), FIRST)
        with _failing("reference", f"in reset() at step {step}, environment {self._index}"):
            result = self._reference.reset(self._of(state))
        informed = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)
        observation, told = result if informed else (result, None)
        self._compare(step, "observation", self._of(timestep.observation), observation)
        expected = self._discounts(step, timestep, False, told)
        self._compare(step, "discount", self._of(timestep.discount), expected, "" if told else UNSAID)

    def follow(self, step: int, action: Tree, keys: Tensor, timestep: TimeStep) -> None:
        """A transition."""
        self.num_steps += 1
        arguments = (self._of(action), keys[self._index].cpu()) if self._takes_key else (self._of(action),)
        with _failing("reference", f"at {self._when(step)}"):
            result = self._reference.step(*arguments)
        if not (isinstance(result, tuple) and len(result) in (4, 5)):
            raise ValueError(
                "step() of the reference must return (observation, reward, terminated, truncated[, info])."
            )
        observation, reward, terminated, truncated, told = (*result, None)[:5]
        self._compare(step, "observation", self._of(timestep.observation), observation)
        self._compare(step, "reward", self._of(timestep.reward), reward)
        last, came = bool(timestep.step_type[self._index] == LAST), self._of(timestep.discount)
        expected = self._discounts(step, timestep, bool(terminated), told)
        ended = last and _all_zero(came)
        ends = bool(terminated or (truncated and _all_zero(expected)))  # where nobody is left, both ends are alike
        self._exactly(step, "terminated", ended, ends)
        self._exactly(step, "truncated", last and not ended, bool(truncated) and not ends)
        self._compare(step, "discount", came, expected, "" if told else UNSAID)
        self.num_episodes += last

    def _discounts(self, step: int, timestep: TimeStep, terminated: bool, told: dict[str, Tree] | None) -> Tree:
        """What is expected, by what the reference has `told`; who is alive is compared here."""
        told = told or {}
        if not (isinstance(told, dict) and set(told) <= {"alive", "discount"}):
            raise ValueError(
                f"the reference returned {told!r} as its last value; use a dict of alive and discount alone."
            )
        discount = pytree.tree_map(lambda x: np.full_like(x, 0.0 if terminated else 1.0), self._of(timestep.discount))
        if "alive" in told:
            alive = self._of(timestep.extras.get("alive", {}))
            self._compare(step, "alive", alive, told["alive"])
            if step > self._began:  # at FIRST nobody's part has ended
                discount = pytree.tree_map(np.multiply, discount, alive)
        return told.get("discount", discount)

    def _of(self, tree: Tree) -> Tree:
        """Arrays of this environment, which nobody else writes to."""
        return pytree.tree_map(lambda x: x[self._index].detach().cpu().clone().numpy(), tree)

    def _exactly(self, step: int, what: str, came: Any, expected: Any) -> None:
        if came != expected:
            raise ConsistencyError(f"{self._where(step)}: {what} is {came}, the reference says {expected}.")

    def _compare(self, step: int, what: str, came: Tree, expected: Tree, repair: str = "") -> None:
        rtol, atol, reward_atol = self._tolerance
        atol = reward_atol if what == "reward" else atol
        leaves, others = named_leaves(came, what), dict(_entries(expected, what))
        names = [name for name, _ in leaves]
        if set(names) != set(others):
            raise ConsistencyError(
                f"{self._where(step)}: {', '.join(names) or 'nothing'} came, the reference has {', '.join(others)}."
            )
        for name, a in leaves:
            try:
                b = np.asarray(others[name])
                b = b if a.shape != b.shape else b.astype(np.float64)
            except (ValueError, TypeError) as error:
                raise ConsistencyError(
                    f"{self._where(step)}: {name} of the reference is {others[name]!r}, and must be numbers of shape "
                    f"{list(a.shape)}: {error}."
                ) from error
            if a.shape != b.shape:
                raise ConsistencyError(
                    f"{self._where(step)}: {name} has shape {list(a.shape)}, the reference gives {list(b.shape)}."
                )
            a = a.astype(np.float64)
            error = np.abs(a - b)
            wrong = ~(error <= atol + rtol * np.abs(b))  # NaN is wrong
            if wrong.any():
                index = tuple(int(i) for i in np.argwhere(wrong)[0])
                raise ConsistencyError(
                    f"{self._where(step)}{_place(self._spec, index)}: {name} is {a[index]:.9g}, the reference says "
                    f"{b[index]:.9g} (rtol={rtol:g}, atol={atol:g}; {wrong.sum()} of {wrong.size} differ)"
                    f"{repair}."
                )
            self.largest = max(self.largest, float(error.max(initial=0.0)))

    def _where(self, step: int) -> str:
        return f"{self._spec.name} at {self._when(step)}"

    def _when(self, step: int) -> str:
        return f"step {step - self._began} of an episode (step {step} in all), environment {self._index}"


def _all_zero(tree: Tree) -> bool:
    return all((np.asarray(x) == 0).all() for _, x in _entries(tree, ""))


def _entries(tree: Any, name: str) -> list[tuple[str, Any]]:
    """Names and values of nested dicts; all else, lists too, is an array."""
    if not isinstance(tree, dict):
        return [(name, tree)]
    return [entry for key in tree for entry in _entries(tree[key], f"{name}[{key!r}]")]


def _place(spec: EnvSpec, index: tuple[int, ...]) -> str:
    """Agent and feature in words."""
    agent = f", agent {index[0]}" if spec.groups is not None and index else ""
    feature = index[1:] if spec.groups is not None else index
    return agent + (f", feature {', '.join(map(str, feature))}" if feature else "")


def _inner(env: Env, state: Tree) -> Tree:
    """What `reset` returned, of environments that write that."""
    return state[0] if is_begun(env, state) else state

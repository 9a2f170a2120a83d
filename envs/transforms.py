"""Transforms: environments around an environment, tensor or host, that change what goes in or comes out.

A transform writes `start`, `before` and `after`; what it must remember of an episode is a tensor tree of its own, in
the state of a tensor environment, on itself around a host environment. They can be nested in any order.
Normalisation is not here: its statistics belong to the learner (`normalize_observation` and `normalize_reward` of the
agents).
"""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchpod import random
from torchpod.actions import mask_by_choice, mask_of
from torchpod.env import Env, TensorEnv, is_begun, where
from torchpod.envs.arguments import at_least, number
from torchpod.ops.features import one_hot
from torchpod.specs import Array, Box, Discrete, EnvSpec, MultiDiscrete, SpecTree, features, width
from torchpod.types import ACTION_MASK, FIRST, MID, TimeStep, Tree

_STICKY = 0x57C1
"""Folded into the keys of a step, for draws that are not the environment's; one more for each transform inside."""


class Transform:
    """Base: the environment as it is. Overrides get and return tensors `[B, ...]` and are pure.

    Args:
      env: a tensor environment, a host environment, or a transform of one.
    """

    def __init__(self, env: Env) -> None:
        self.env, self.spec, self.traits = env, env.spec, env.traits
        self._own: Tree = ()
        for name in ("advice", "num_threads", "rows_each"):  # what loops ask for, if it is there
            if hasattr(env, name):
                setattr(self, name, getattr(env, name))

    def start(self, timestep: TimeStep) -> tuple[Tree, TimeStep]:
        """What to remember, and what to show, of the first timestep."""
        return (), self.show(timestep)

    def before(self, own: Tree, action: Tree, keys: Tensor) -> tuple[Tree, Tree]:
        """What to remember, and the action that the environment gets."""
        return own, action

    def after(self, own: Tree, timestep: TimeStep) -> tuple[Tree, TimeStep]:
        """What to remember, and what to show, of a timestep."""
        return own, self.show(timestep)

    def show(self, timestep: TimeStep) -> TimeStep:
        """For transforms that remember nothing."""
        return timestep

    def init(self, keys: Tensor) -> tuple[Tree, TimeStep]:
        """See `Env.init`."""
        inner, timestep = self.env.init(keys)
        own, timestep = self.start(timestep)
        return self._keep(inner, own), timestep

    def step(self, state: Tree, action: Tree, keys: Tensor) -> tuple[Tree, TimeStep]:
        """See `Env.step`."""
        inner, own = state if self.traits.pure else (None, self._own)
        own, action = self.before(own, action, keys)
        inner, timestep = self.env.step(inner, action, keys)
        own, timestep = self.after(own, timestep)
        return self._keep(inner, own), timestep

    def send(self, action: Tree, keys: Tensor) -> None:
        """Starts a step of a host environment that has `send`; transforms may draw, so that they want keys."""
        self._own, action = self.before(self._own, action, keys)
        send(self.env, action, keys)

    def recv(self) -> TimeStep:
        """Waits for the step that `send` started."""
        self._own, timestep = self.after(self._own, self.env.recv())  # pyright: ignore[reportAttributeAccessIssue]
        return timestep

    def __copy__(self) -> "Transform":
        """With an environment of its own inside: each actor thread steps its own copy."""
        new = object.__new__(type(self))
        vars(new).update(vars(self), env=copy.copy(self.env))
        return new

    def close(self) -> None:
        """Closes the environment, if it can be closed."""
        getattr(self.env, "close", lambda: None)()

    def limited(self, max_episode_steps: int) -> "Transform":
        """See `time_limit`."""
        new = copy.copy(self)
        new.env = time_limit(self.env, max_episode_steps)
        new.spec = dataclasses.replace(self.spec, max_episode_steps=new.env.spec.max_episode_steps)
        return new

    def _keep(self, inner: Tree, own: Tree) -> Tree:
        if self.traits.pure:
            return inner, own
        self._own = own
        return None


class FrameStack(Transform):
    """Shows the last observations side by side, the newest last, along their last axis: `[F]` becomes `[num * F]`.

    Images `[H, W, C]` become `[H, W, num * C]`. At the start of an episode all are its first. Mnih et al. 2015
    (https://doi.org/10.1038/nature14236). An `action_mask` stays as it is.
    """

    def __init__(self, env: Env, num: int = 4) -> None:
        at_least(1, num=num)
        super().__init__(env)
        self.num = num
        self.spec = dataclasses.replace(env.spec, observation=_map_spec(self._widened, env.spec.observation))

    def start(self, timestep: TimeStep) -> tuple[Tree, TimeStep]:
        """All are the first."""
        own = self._each(lambda x: torch.cat([x] * self.num, -1), timestep.observation)
        return own, timestep._replace(observation=own)

    def after(self, own: Tree, timestep: TimeStep) -> tuple[Tree, TimeStep]:
        """The oldest leaves, the newest comes last."""
        first = timestep.step_type == FIRST
        shifted = self._each(lambda x, old: torch.cat([old[..., x.shape[-1] :], x], -1), timestep.observation, own)
        fresh = self._each(lambda x: torch.cat([x] * self.num, -1), timestep.observation)
        own = where(first, fresh, shifted)
        return own, timestep._replace(observation=own)

    def _widened(self, spec: Any) -> Any:
        if isinstance(spec, Discrete) or not spec.shape:
            raise ValueError(f"frame_stack needs observations with an axis, and {self.env.spec.name} has {spec}.")
        if isinstance(spec, MultiDiscrete):
            return dataclasses.replace(spec, nvec=spec.nvec * self.num)
        return dataclasses.replace(spec, shape=(*spec.shape[:-1], self.num * spec.shape[-1]))

    @staticmethod
    def _each(fn: Callable[..., Tensor], observation: Tree, *others: Tree) -> Tree:
        if not isinstance(observation, dict):
            return fn(observation, *others)
        return {
            k: x if k == ACTION_MASK else FrameStack._each(fn, x, *(o[k] for o in others))
            for k, x in observation.items()
        }


class StickyAction(Transform):
    """With some probability an action is the last one again, but for the first of an episode.

    Agents stick together, but for those whose action mask forbids the last one: they take the new one.
    Machado et al. 2018, "Revisiting the Arcade Learning Environment" (https://arxiv.org/abs/1709.06009), section 5.2.
    """

    def __init__(self, env: Env, probability: float = 0.25) -> None:
        super().__init__(env)
        self.probability = number("probability", probability, 0.0, 1.0)
        self._word = _STICKY + _num_inside(env, StickyAction)

    def start(self, timestep: TimeStep) -> tuple[Tree, TimeStep]:
        """Nothing to repeat yet."""
        size, device = timestep.step_type.shape[0], timestep.step_type.device
        groups = self.spec.groups
        if groups is None:
            action = _zeros(self.spec.action, (size,), device)
        else:
            action = {g: _zeros(self.spec.action[g], (size, n), device) for g, n in groups.items()}
        return (action, self._fresh(action, timestep)), timestep

    def before(self, own: Tree, action: Tree, keys: Tensor) -> tuple[Tree, Tree]:
        """The action that is taken is the one to be repeated next."""
        last, fresh = own
        sticks = random.uniform(random.fold_in(keys, self._word), 1)[:, 0] < self.probability
        if isinstance(fresh, dict):
            action = {g: where(sticks[:, None] & ~new, last[g], action[g]) for g, new in fresh.items()}
        else:
            action = where(sticks & ~fresh, last, action)
        return (action, fresh), action

    def after(self, own: Tree, timestep: TimeStep) -> tuple[Tree, TimeStep]:
        """After a reset there is nothing to repeat."""
        first = timestep.step_type == FIRST
        last = where(first, pytree.tree_map(torch.zeros_like, own[0]), own[0])
        return (last, self._fresh(last, timestep)), timestep

    def _fresh(self, last: Tree, timestep: TimeStep) -> Tree:
        """Who may not repeat `last`: bool `[B]`, by group `[B, N]` or `[B, 1]` if there are groups with masks."""
        first, spec, seen = timestep.step_type == FIRST, self.spec, timestep.observation
        if spec.groups is None:
            return first | _forbids(mask_of(seen), last, spec.action)
        if not _has_mask(spec):
            return first
        return {g: first[:, None] | _forbids(mask_of(seen[g]), last[g], spec.action[g]) for g in spec.groups}


class RewardClip(Transform):
    """Clips rewards to [low, high]; `extras["raw_reward"]` stays what the environment gave."""

    def __init__(self, env: Env, low: float = -1.0, high: float = 1.0) -> None:
        super().__init__(env)
        self.low = number("low", low)
        self.high = number("high", high, self.low)

    def show(self, timestep: TimeStep) -> TimeStep:
        """Clips all but the 0 of a reset."""
        first = timestep.step_type == FIRST

        def clipped(reward: Tensor) -> Tensor:
            return torch.where(first.view(-1, *[1] * (reward.ndim - 1)), reward, reward.clamp(self.low, self.high))

        return timestep._replace(reward=pytree.tree_map(clipped, timestep.reward))


class Flatten(Transform):
    """One float32 vector of all that is observed, in the order of the names.

    Bytes are scaled to [0, 1], and a Discrete is zeros with a single 1. An `action_mask` stays beside it: then the
    observation is `{"observation": ..., "action_mask": ...}`. Groups of agents stay apart.

    Raises:
      ValueError: for an `action_mask` in a dict in the observation.
    """

    def __init__(self, env: Env) -> None:
        super().__init__(env)
        spec = env.spec.observation
        for own in [spec] if env.spec.groups is None else spec.values():
            if (place := _nested_mask(own)) is not None:
                raise ValueError(
                    f"flatten found an action_mask in the part {place!r} of what {env.spec.name} observes, where it "
                    f"forbids nothing; put it beside {place!r}, or give it another name if it is no mask."
                )
        flat = self._flat_spec(spec) if env.spec.groups is None else {g: self._flat_spec(s) for g, s in spec.items()}
        self.spec = dataclasses.replace(env.spec, observation=flat)

    def show(self, timestep: TimeStep) -> TimeStep:
        """Flattens."""
        seen, spec = timestep.observation, self.env.spec.observation
        if self.spec.groups is None:
            return timestep._replace(observation=self._flat(seen, spec))
        return timestep._replace(observation={g: self._flat(x, spec[g]) for g, x in seen.items()})

    @staticmethod
    def _flat_spec(spec: SpecTree) -> SpecTree:
        flat = Array((sum(width(leaf) for _, leaf in _entries(spec)),))
        masked = isinstance(spec, dict) and ACTION_MASK in spec
        return {"observation": flat, ACTION_MASK: spec[ACTION_MASK]} if masked else flat

    @staticmethod
    def _flat(observation: Tree, spec: SpecTree) -> Tree:
        pairs = zip(_entries(observation), _entries(spec), strict=True)
        flat = torch.cat([features(x, leaf) for (_, x), (_, leaf) in pairs], -1)
        masked = isinstance(observation, dict) and ACTION_MASK in observation
        return {"observation": flat, ACTION_MASK: observation[ACTION_MASK]} if masked else flat


class OneHot(Transform):
    """Observed integers (`Discrete`) become float32 vectors of a single 1."""

    def __init__(self, env: Env) -> None:
        super().__init__(env)
        if not any(isinstance(leaf, Discrete) for _, leaf in _entries(env.spec.observation)):
            raise ValueError(f"one_hot needs a Discrete observation, and {env.spec.name} has {env.spec.observation}.")
        self.spec = dataclasses.replace(env.spec, observation=_map_spec(_one_hot_spec, env.spec.observation))

    def show(self, timestep: TimeStep) -> TimeStep:
        """Encodes."""

        def encode(spec: SpecTree, x: Tree) -> Tree:
            if isinstance(spec, dict):
                return {k: encode(s, x[k]) for k, s in spec.items()}
            if not isinstance(spec, Discrete):
                return x
            return one_hot(x, spec.num_values)

        return timestep._replace(observation=encode(self.env.spec.observation, timestep.observation))


class ActionRepeat(Transform):
    """Takes each action several times; rewards add up, and it stops where the episode ends.

    For tensor environments; `action_repeat` asks others to do it themselves. `max_episode_steps` counts decisions.
    Environments with an action mask are refused: it may forbid the action before it was taken so often.
    """

    def __init__(self, env: Env, num: int = 4) -> None:
        at_least(1, num=num)
        _refuse_masks(env)
        super().__init__(env)
        self.num, self._word = num, _num_inside(env, ActionRepeat) << 16
        limit = env.spec.max_episode_steps
        self.spec = dataclasses.replace(env.spec, max_episode_steps=None if limit is None else -(-limit // num))

    def step(self, state: Tree, action: Tree, keys: Tensor) -> tuple[Tree, TimeStep]:
        """See `Env.step`."""
        inner, own = state
        inner, timestep = self.env.step(inner, action, keys)
        for i in range(1, self.num):
            goes_on = timestep.step_type == MID  # neither the end, nor the reset after one
            moved, new = self.env.step(inner, action, random.fold_in(keys, self._word + i))

            def add(a: Tensor, b: Tensor) -> Tensor:
                return a + b

            total = new._replace(
                reward=pytree.tree_map(add, timestep.reward, new.reward),
                extras=new.extras
                | {"raw_reward": pytree.tree_map(add, timestep.extras["raw_reward"], new.extras["raw_reward"])},
            )
            inner, timestep = where(goes_on, moved, inner), where(goes_on, total, timestep)
        return (inner, own), timestep

    def limited(self, max_episode_steps: int) -> Transform:
        """See `time_limit`."""
        return ActionRepeat(time_limit(self.env, max_episode_steps * self.num), self.num)


def send(env: Any, action: Tree, keys: Tensor) -> None:
    """`Env.send`, of an environment that may be inside of transforms."""
    if isinstance(env, Transform):
        env.send(action, keys)
    else:
        env.send(action)


def innermost(env: Env, state: Tree) -> tuple[Env, Tree, bool]:
    """What a tensor environment is inside of its transforms, its own state, and whether that is as `reset` returns it.

    It is not where an environment's own `init` adds something to what `TensorEnv.begin` makes.
    """
    while isinstance(env, Transform):
        env, (state, _) = env.env, state
    as_reset = is_begun(env, state)
    return env, state[0] if as_reset else state, as_reset


def time_limit(env: Env, max_episode_steps: int) -> Env:
    """The environment with episodes truncated after so many steps, or earlier if it has a shorter limit.

    A tensor environment that knows its limit (`self.max_episode_steps`) is told the shorter one, and does at the end
    what it does at its own: Tag pays who is left, the economy with `terminal` ends.

    Raises:
      ValueError: for an environment that has no way to do so.
    """
    at_least(1, max_episode_steps=max_episode_steps)
    if env.spec.max_episode_steps is not None and env.spec.max_episode_steps <= max_episode_steps:
        return env
    if isinstance(env, TensorEnv):
        new = copy.copy(env)
        new.spec = dataclasses.replace(env.spec, max_episode_steps=max_episode_steps)
        if "max_episode_steps" in vars(new):  # one that knows how much time is left
            vars(new)["max_episode_steps"] = max_episode_steps
        return new
    if not hasattr(env, "limited"):
        raise ValueError(f"time_limit cannot shorten {env.spec.name}; give it a limit of its own.")
    return env.limited(max_episode_steps)  # pyright: ignore[reportAttributeAccessIssue]


def action_repeat(env: Env, num: int = 4) -> Env:
    """`ActionRepeat` for tensor environments; those on the host repeat in the environments themselves, or not at all.

    Raises:
      ValueError: for a host environment that cannot, and for any with an action mask.
    """
    at_least(1, num=num)
    _refuse_masks(env)
    if env.traits.pure:
        return ActionRepeat(env, num)
    if not hasattr(env, "repeated"):
        raise ValueError(
            f"action_repeat cannot hold single environments of {env.spec.name} back; put it first in `transforms`, "
            "or let the environment repeat actions itself."
        )
    return env.repeated(num)  # pyright: ignore[reportAttributeAccessIssue]


TRANSFORMS: dict[str, Callable[..., Env]] = {
    "action_repeat": action_repeat,
    "flatten": Flatten,
    "frame_stack": FrameStack,
    "one_hot": OneHot,
    "reward_clip": RewardClip,
    "sticky_action": StickyAction,
    "time_limit": time_limit,
}


def _num_inside(env: Env, kind: type[Transform]) -> int:
    """How many transforms of a kind an environment has: those of one kind must not draw the same words."""
    num = 0
    while isinstance(env, Transform):
        num, env = num + isinstance(env, kind), env.env
    return num


def _has_mask(spec: EnvSpec) -> bool:
    owners = [spec.observation] if spec.groups is None else spec.observation.values()
    return any(isinstance(seen, dict) and ACTION_MASK in seen for seen in owners)


def _nested_mask(spec: SpecTree) -> str | None:
    """The part of an observation in which a mask is, however deep; None if there is none, or only one beside all."""
    parts = spec.items() if isinstance(spec, dict) else ()
    inside = (k for k, s in parts if isinstance(s, dict) and (ACTION_MASK in s or _nested_mask(s) is not None))
    return next(inside, None)


def _refuse_masks(env: Env) -> None:
    if _has_mask(env.spec):
        raise ValueError(
            f"action_repeat would go on with what the action_mask of {env.spec.name} may forbid meanwhile; leave it "
            "out, or let the environment repeat actions itself."
        )


def _forbids(mask: Tensor | None, action: Tensor, spec: Any) -> Tensor | bool:
    """Whether a mask `[..., A]` forbids an action, or one of its choices, of a spec: bool `[...]`."""
    if mask is None:
        return False
    choices = action.unbind(-1) if isinstance(spec, MultiDiscrete) else (action,)
    pairs = zip(mask_by_choice(mask, spec), choices, strict=True)
    return ~torch.cat([part.gather(-1, x.long()[..., None]) for part, x in pairs], -1).all(-1)


def _map_spec(fn: Callable[[Any], Any], spec: SpecTree) -> SpecTree:
    if not isinstance(spec, dict):
        return fn(spec)
    return {k: s if k == ACTION_MASK else _map_spec(fn, s) for k, s in spec.items()}


def _one_hot_spec(spec: Any) -> Any:
    return Box((spec.num_values,), 0.0, 1.0) if isinstance(spec, Discrete) else spec


def _entries(tree: Tree, name: str = "") -> list[tuple[str, Any]]:
    """Leaves of an observation or its spec in the order of their names, without the mask."""
    if not isinstance(tree, dict):
        return [(name, tree)]
    return [entry for k in sorted(tree) if k != ACTION_MASK for entry in _entries(tree[k], k)]


def _zeros(spec: SpecTree, lead: tuple[int, ...], device: torch.device) -> Tree:
    if isinstance(spec, dict):
        return {k: _zeros(s, lead, device) for k, s in spec.items()}
    return torch.zeros((*lead, *spec.shape), dtype=spec.dtype, device=device)

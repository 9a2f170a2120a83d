"""Environments: the contract of the loops (`Env`), and the base that writes most of it (`TensorEnv`).

An environment is pure and batched: state goes in, state comes out, and randomness comes from keys.
"""

import copy
from typing import Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchpod.specs import EnvSpec, Traits
from torchpod.types import FIRST, LAST, MID, TimeStep, Tree


class Env(Protocol):
    """What the loops need. `torchpod.check_env` tests every rule.

    A host environment may also have `send(action)`, which starts a step, and `recv()`, which waits for it and returns
    its timestep: Sebulba's actors do other things in between. Actions and keys are valid until `recv`, or the end of
    `step`: an environment that keeps them copies them. `advice`, a few words, says what makes its steps faster.
    `rows_each`, 1 if it is not there, is how many it makes at once: `init` gets a multiple of that many keys.
    Transforms pass these on.

    Each of Sebulba's pools steps a copy of its own, of `copy.copy`, before anything was begun: what steps change in
    place, a simulator or a generator of random numbers, is to be made in `init`, or in `__copy__`.
    """

    spec: EnvSpec
    traits: Traits

    def init(self, keys: Tensor) -> tuple[Tree, TimeStep]:
        """Starts one episode per key `[B, 3]`. Host environments return None as state."""
        ...

    def step(self, state: Tree, action: Tree, keys: Tensor) -> tuple[Tree, TimeStep]:
        """One step; where the last step was `LAST`, a reset that ignores the action. Keys `[B, 3]` are fresh."""
        ...


class TensorEnv:
    """Base of environments written as tensor programs: write `reset`, `transition` and `observe`; the rest is here.

    `init` and `step` add the time limit, the auto-reset and the bookkeeping. A subclass may keep parameters as plain
    numbers on `self`; what differs from one environment of the batch to the next belongs into the state.
    """

    spec: EnvSpec
    traits = Traits()

    def reset(self, keys: Tensor) -> Tree:
        """The state at the start of an episode, one row per key `[B, 3]`."""
        raise NotImplementedError(f"{type(self).__name__} must define reset(self, keys).")

    def restart(self, state: Tree, keys: Tensor) -> Tree:
        """The state at the start of every episode but the first.

        Override it where something is kept from one episode to the next, such as a maze drawn once per environment.
        """
        return self.reset(keys)

    def transition(self, state: Tree, action: Tree, keys: Tensor) -> tuple[Tree, Tree, Tensor]:
        """Next state, reward `[B]` float32 (or per group) and termination `[B]` bool."""
        raise NotImplementedError(f"{type(self).__name__} must define transition(self, state, action, keys).")

    def observe(self, state: Tree) -> Tree:
        """The observation of a state."""
        raise NotImplementedError(f"{type(self).__name__} must define observe(self, state).")

    def truncated(self, state: Tree) -> Tensor | None:
        """Which episodes are cut in a state by a rule of the environment's own, `[B]` bool; None if there is none.

        The time limit is not meant, and `spec.truncates_early` must say so. A termination wins.
        """
        return None

    def extras(self, state: Tree) -> dict[str, Tree]:
        """What else a timestep says, such as `alive` (see `TimeStep.extras`); by default nothing."""
        return {}

    def init(self, keys: Tensor) -> tuple[Tree, TimeStep]:
        """See `Env.init`."""
        return self.begin(self.reset(keys), keys)

    def begin(self, state: Tree, keys: Tensor) -> tuple[Tree, TimeStep]:
        """What `init` returns when the first episodes start in `state`."""
        size, device = keys.shape[0], keys.device
        zero = torch.zeros(size, device=device)
        count = torch.zeros(size, dtype=torch.int32, device=device)
        no = torch.zeros(size, dtype=torch.bool, device=device)
        groups = self.spec.groups
        reward = zero if groups is None else {g: zero[:, None].expand(-1, n) for g, n in groups.items()}
        yes = torch.ones_like(no)
        timestep = make_timestep(
            self.observe(state), reward, reset=yes, terminated=no, truncated=no, extras=self.extras(state)
        )
        return (state, count, no), timestep

    def step(self, state: Tree, action: Tree, keys: Tensor) -> tuple[Tree, TimeStep]:
        """See `Env.step`."""
        inner, count, was_last = state
        # `restart` and `transition` may use the same words: each environment keeps the outcome of only one of them.
        moved, reward, terminated = self.transition(inner, action, keys)
        inner = where(was_last, self.restart(inner, keys), moved)
        count = torch.where(was_last, 0, count + 1)
        limit = self.spec.max_episode_steps
        truncated = count >= limit if limit is not None else torch.zeros_like(was_last)
        cut = self.truncated(inner)
        timestep = make_timestep(
            self.observe(inner),
            reward,
            reset=was_last,
            terminated=terminated,
            truncated=truncated if cut is None else truncated | cut,
            extras=self.extras(inner),
        )
        return (inner, count, timestep.step_type == LAST), timestep


def is_begun(env: Env, state: Tree) -> bool:
    """Whether a state is `(what reset returned, count, was_last)`, as `TensorEnv.begin` makes it and overrides keep it.

    It looks at the state: which methods are overridden says nothing about what they add to it.
    """
    if not isinstance(env, TensorEnv) or type(env).reset is TensorEnv.reset or type(state) is not tuple:
        return False
    return len(state) == 3 and [getattr(x, "dtype", None) for x in state[1:]] == [torch.int32, torch.bool]


def make_timestep(
    observation: Tree,
    reward: Tree,
    *,
    reset: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    extras: dict[str, Tree] | None = None,
) -> TimeStep:
    """Puts a `TimeStep` together from what most environments know.

    Args:
      observation: `[B, ...]`.
      reward: `[B]` float32, or `{group: [B, N]}`; set to 0 on resets.
      reset: `[B]` bool, True where this step starts an episode; it wins over the next two.
      terminated: `[B]` bool, the episode ended by its own rules: no value after it.
      truncated: `[B]` bool, the episode was cut: its value goes on. Termination wins.
      extras: added to `raw_reward` and `game_over`. Where `alive` is False, the discount is 0, but at FIRST: that
        agent's part ended.
    """
    last = (terminated | truncated) & ~reset
    step_type = torch.where(reset, FIRST, torch.where(last, LAST, MID)).to(torch.int32)
    reward = pytree.tree_map(lambda r: r.masked_fill(_like(reset, r), 0.0), reward)
    ended = terminated & ~reset
    discount = pytree.tree_map(lambda r: torch.ones_like(r).masked_fill(_like(ended, r), 0.0), reward)
    extras = {"raw_reward": reward, "game_over": last} | (extras or {})
    if "alive" in extras:
        if set(extras["alive"]) != set(discount):
            raise ValueError(
                f"make_timestep needs extras['alive'] for the groups of the reward, {sorted(discount)}, and it has "
                f"{sorted(extras['alive'])}; give each group a bool tensor [B, N], all True where nobody dies."
            )
        discount = where(reset, discount, pytree.tree_map(torch.mul, discount, extras["alive"]))
    return TimeStep(step_type, reward, discount, observation, extras)


def where(condition: Tensor, on_true: Tree, on_false: Tree) -> Tree:
    """`torch.where` over trees; `condition` `[B]` is broadcast over the trailing axes of each leaf."""
    return pytree.tree_map(lambda a, b: torch.where(_like(condition, a), a, b), on_true, on_false)


def _like(mask: Tensor, leaf: Tensor) -> Tensor:
    return mask.reshape(mask.shape + (1,) * (leaf.ndim - mask.ndim))


class HostEnv:
    """A tensor environment behind the host contract: it keeps its state itself and hands out None.

    For parity tests and debugging: the loops treat it like any environment that lives outside the program.
    """

    def __init__(self, env: TensorEnv) -> None:
        self._env = copy.copy(env)
        self._state: Tree = None
        self.spec = env.spec
        self.traits = Traits(pure=False, capturable=False, differentiable=False, vmappable=False)

    def init(self, keys: Tensor) -> tuple[None, TimeStep]:
        """See `Env.init`."""
        self._state, timestep = self._env.init(keys)
        return None, timestep

    def step(self, state: None, action: Tree, keys: Tensor) -> tuple[None, TimeStep]:
        """See `Env.step`."""
        action, keys = pytree.tree_map(torch.clone, (action, keys))  # which the state may keep
        self._state, timestep = self._env.step(self._state, action, keys)
        return None, timestep

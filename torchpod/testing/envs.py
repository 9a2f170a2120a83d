"""`check_env`: plays an environment with random actions and requires every rule of the contract in env.py."""

import copy
import difflib
import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchpod import random
from torchpod.actions import closed_masks, lead_of, random_action
from torchpod.compile import Compiler
from torchpod.env import Env, TensorEnv, where
from torchpod.specs import EnvSpec, MultiDiscrete, Traits
from torchpod.testing.contract import (
    ContractError,
    attributes,
    clone,
    difference,
    form,
    named_leaves,
    outline,
    raised,
    require,
    require_batched,
    require_no_reading,
    require_spec,
    require_tensor,
    rows,
    written,
)
from torchpod.testing.kernels import compare_with_fakes
from torchpod.trees import contiguous
from torchpod.types import ACTION_MASK, FIRST, LAST, MID, TimeStep, Tree
from torchpod.watched import close_all

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
"""Between eager, vmapped and compiled floats: kernels differ in the last bits."""
KEPT = 64
"""Timesteps that are looked at once more at the end: loops stack an unroll when it is over."""


class _Call(NamedTuple):
    """One call of `step`, kept to be made again in other ways."""

    state: Tree
    action: Tree
    keys: Tensor
    was_last: Tensor
    result: tuple[Tree, TimeStep]


def check_env(
    env: Env,
    *,
    num_envs: int = 8,
    num_steps: int | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    compile: bool = True,
    copies: bool = True,
) -> None:
    """Tests that an environment keeps the contract which the loops rely on.

    Plays with random actions and looks at every step; then, as far as the environment's traits promise it,
    repeats steps to see that they are pure, that rows do not influence each other, that gradients flow, that
    operators of the user's own return what they promise to the compiler, and that vmapped and compiled steps give
    the same. A host environment has no traits: it is played, and copies of it side by side, as pools of Sebulba are;
    a warning says if it does not repeat with the same keys. Another one, of a tensor environment, says if a method that
    nobody calls has nearly the name of one that torchpod would.

    Args:
      env: the environment; its state is left as the last step left it.
      num_envs: B.
      num_steps: how long to play; by default past the time limit, at most 1000.
      seed: of environment and actions.
      device: where the environment is to run.
      compile: False leaves out compilation, the slowest part.
      copies: False leaves out copies of a host environment.

    Raises:
      ContractError: with the rule that is broken.
    """
    if num_envs < 2:
        raise ValueError(f"num_envs={num_envs} is too small to see whether rows influence each other; use 2 or more.")
    for name, kind in (("spec", EnvSpec), ("traits", Traits)):
        value = getattr(env, name, None)
        require(isinstance(value, kind), f"env.{name} must be of {kind.__name__}; it is {value!r}.")
    _check_groups(env.spec)
    base: Any = env
    while not isinstance(base, TensorEnv) and hasattr(base, "env"):
        base = base.env  # of a transform
    if isinstance(base, TensorEnv) and type(base).step is TensorEnv.step:
        keys = random.split(random.key(seed, device), num_envs)
        for told in _misnamed(type(base)):
            warnings.warn(told, stacklevel=2)
        _watched(env, lambda: _check_methods(base, keys))
    if num_steps is None:
        num_steps = min(env.spec.max_episode_steps or 200, 1000) + 2
    root = random.key(seed, device)
    env_keys, action_keys = (random.split(random.fold_in(root, i), num_envs) for i in range(2))
    others = [] if env.traits.pure or not copies else [copy.copy(env) for _ in range(4)]  # before anything is begun
    calls = _play(env, env_keys, action_keys, num_steps)
    if not env.traits.pure:
        _check_copies(others, env_keys, action_keys)
        return
    _check_pure(env, random.at(env_keys, 0), calls)
    _check_rows(env, random.at(env_keys, 0), calls, root)
    _check_reset_ignores_action(env, calls, random.split(random.fold_in(root, 2), num_envs))
    if env.traits.differentiable:
        _check_gradients(env, calls)
    if env.traits.vmappable:
        _watched(env, lambda: _check_vmap(env, random.at(env_keys, 0), calls))
    if env.traits.capturable and compile:
        _check_compiled(env, env_keys, action_keys, num_steps)


def _check_groups(spec: EnvSpec) -> None:
    if spec.groups is None:
        return
    for name, tree in (("observation", spec.observation), ("action", spec.action)):
        require(
            isinstance(tree, dict) and set(tree) == set(spec.groups),
            f"spec.{name} must be a dict with one entry per group, {sorted(spec.groups)}.",
        )


def _check_methods(env: TensorEnv, keys: Tensor) -> None:
    """What a subclass writes, before its base makes more of it."""

    def called(name: str, **arguments: Tree) -> Any:
        before, method = clone(arguments), getattr(env, name)
        _require_taken(method, name, tuple(arguments), type(env).__name__)
        result = method(*arguments.values())
        _require_unwritten(f"{name}()", arguments, before)
        return result

    require(
        not env.spec.truncates_early or type(env).truncated is not TensorEnv.truncated,
        "spec.truncates_early=True needs truncated(state), which says where an episode is cut; write it, or leave "
        "truncates_early out.",
    )
    state = called("reset", keys=keys)
    _check_state(state, True, keys)
    observation = called("observe", state=state)
    _check_observation(env.spec, observation, keys.shape[0], keys.device)
    called("extras", state=state)
    if (cut := called("truncated", state=state)) is not None:
        require_tensor(cut, (keys.shape[0],), torch.bool, keys.device, "truncated()")
    _require_alike("restart", called("restart", state=state, keys=keys), state, keys)
    action = random_action(env.spec, observation, keys)
    result = called("transition", state=state, action=action, keys=keys)
    require(
        isinstance(result, tuple) and len(result) == 3,
        "transition() must return (state, reward, terminated); it returned "
        + (f"{len(result)} values." if isinstance(result, tuple) else f"a {type(result).__name__}."),
    )
    _require_alike("transition", result[0], state, keys)
    _check_signal(env.spec, result[1], keys.shape[0], keys.device, "reward")
    require_tensor(result[2], (keys.shape[0],), torch.bool, keys.device, "terminated")


def _require_taken(method: Any, name: str, arguments: tuple[str, ...], who: str) -> None:
    """That a method takes so many arguments, as far as that can be known."""
    require(callable(method), f"{name} of {who} must be a method, {name}(self, {', '.join(arguments)}).")
    try:
        signature = inspect.signature(method, follow_wrapped=False)
    except ValueError:  # of C
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        told = f"{name}() must take {', '.join(arguments)}; that of {who} is {name}{signature}."
        raise ContractError(told) from error


def _misnamed(cls: type[TensorEnv]) -> list[str]:
    """Sentences about methods that nobody calls, with names near to those of methods that are as they were."""
    told = []
    own = [x for x in dir(cls) if x[0] != "_" and not hasattr(TensorEnv, x) and callable(getattr(cls, x))]
    for name in ("restart", "extras", "truncated"):
        near = difflib.get_close_matches(name, own, 1, 0.85) if getattr(cls, name) is getattr(TensorEnv, name) else []
        told += [f"torchpod does not call {cls.__name__}.{x}; did you mean {name}?" for x in near]
    return told


def _require_alike(method: str, state: Tree, first: Tree, keys: Tensor) -> None:
    """A step takes each row from the one or the other."""
    none = torch.zeros(keys.shape[0], dtype=torch.bool, device=keys.device)
    try:
        alike = form(where(none, first, state)) == form(first)
    except (RuntimeError, TypeError, ValueError):
        alike = False
    require(
        alike,
        f"{method}() must return a state like reset()'s, {outline(first)}; it returned {outline(state)}.",
    )


def _require_unwritten(who: str, arguments: dict[str, Tree], before: dict[str, Tree]) -> None:
    for name in arguments:
        changed = difference(arguments[name], before[name], name)
        require(
            changed is None,
            f"step() must not modify its arguments; {who} changed {changed}: make a new tensor, x = x + y, not x += y.",
        )


def _play(env: Env, env_keys: Tensor, action_keys: Tensor, num_steps: int) -> list[_Call]:
    """Plays, checks each timestep, and returns some calls: the first, the last, one at LAST and one after LAST."""
    spec, pure = env.spec, env.traits.pure
    keys = random.at(env_keys, 0)
    state, timestep = _pair(_watched(env, lambda: env.init(keys)), "init")
    _check_timestep(spec, timestep, keys)
    require(
        (timestep.step_type == FIRST).all(),
        "init() must return FIRST for every environment: episodes begin there.",
    )
    _check_first(timestep)
    _check_state(state, pure, keys)
    state_form, timestep_form = form(state) if pure else None, form(timestep)
    count = torch.zeros_like(timestep.step_type)
    calls: list[_Call] = []
    kept: list[tuple[TimeStep, TimeStep]] = []
    seen_last = seen_reset = False
    for i in range(1, num_steps + 1):
        keys = random.at(env_keys, i)
        action = random_action(spec, timestep.observation, random.at(action_keys, i))
        arguments = {"state": state if pure else (), "action": action, "keys": keys}
        before, timestep_before = clone((arguments, timestep))
        if len(kept) < KEPT:
            kept.append((timestep, timestep_before))
        step = functools.partial(env.step, state, action, keys)
        new_state, new = _pair(_watched(env, step) if i == 1 else step(), "step")
        _require_unwritten("it", arguments, before)
        changed = difference(timestep, timestep_before, "timestep")
        require(
            changed is None,
            f"step() must return new tensors; it wrote into {changed}, which it had returned before.",
        )
        _check_timestep(spec, new, keys)
        _require_form(timestep_form, new, "timestep")
        if state_form is not None:
            _require_form(state_form, new_state, "state")
        was_last = timestep.step_type == LAST
        count = torch.where(was_last, 0, count + 1)
        _check_transition(spec, was_last, count, new)
        is_last, is_reset = bool((new.step_type == LAST).any()), bool(was_last.any())
        if pure and (i in (1, num_steps) or (is_last and not seen_last) or (is_reset and not seen_reset)):
            calls.append(_Call(**before, was_last=was_last.clone(), result=clone((new_state, new))))
        seen_last, seen_reset = seen_last or is_last, seen_reset or is_reset
        state, timestep = new_state, new
    for i, (early, early_before) in enumerate(kept):
        changed = difference(early, early_before, "timestep")
        require(
            changed is None,
            f"step() must return new tensors; it wrote into {changed} of step {i}, which it had returned before: loops "
            "keep those of an unroll.",
        )
    return calls


def _check_copies(copies: list[Env], env_keys: Tensor, action_keys: Tensor, num_steps: int = 10) -> None:
    """Whether one of four copies plays as it does by itself while another plays something else."""

    def played(env: Env, other: Env | None) -> list[TimeStep]:
        envs, seen = [env] if other is None else [env, other], []
        keys = [(random.fold_in(env_keys, j), random.fold_in(action_keys, j)) for j in range(2)]
        timesteps = [env.init(random.at(own, 0))[1] for env, (own, _) in zip(envs, keys, strict=False)]
        for i in range(1, num_steps + 1):
            seen.append(clone(timesteps[0]))
            for j, env in enumerate(envs):
                own, of_actions = (random.at(x, i) for x in keys[j])
                action = random_action(env.spec, timesteps[j].observation, of_actions)
                _, timesteps[j] = env.step(None, action, own)
        return [*seen, timesteps[0]]

    if not copies:
        return
    alone, again, shared, other = copies
    try:
        expected = played(alone, None)
        other_again = difference(played(again, None), expected, "timesteps")  # what does not repeat cannot be compared
        changed = other_again is None and difference(played(shared, other), expected, "timesteps")
    finally:
        close_all(copies)
    if other_again is not None:
        warnings.warn(
            f"the environment gave other {other_again} when it was played again with the same keys and actions: runs "
            "in it do not repeat; draw from what the seed of reset() sets (of Gymnasium's, self.np_random).",
            stacklevel=3,
        )
    require(
        not changed,
        "Copies of an environment on the host (copy.copy, as each of Sebulba's pools steps one) must not share what "
        f"their steps change, and one gave other {changed} while another was stepped; make simulators, buffers and "
        "generators of their own (not np.random's) in init(), or in __copy__, or have one pool alone "
        "(loop.num_actor_threads=1 loop.pools_per_actor=1, and no evaluation.every).",
    )


def _watched(env: Env, call: Callable[[], Any]) -> Any:
    """Calls as `_compared` does, and says where code of the user's reads a tensor."""
    try:
        return _compared(env, call)
    except (RuntimeError, TypeError, ValueError) as error:
        if env.traits.pure:
            require_no_reading(error)
        raise


def _compared(env: Env, call: Callable[[], Any]) -> Any:
    """Calls, and compares operators of the user's own with what they promise, if the environment may be compiled."""
    try:
        return call()
    finally:
        if env.traits.pure and env.traits.capturable:
            compare_with_fakes(call)


def _pair(result: Any, name: str) -> tuple[Tree, TimeStep]:
    good = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], TimeStep)
    require(good, f"{name}() must return (state, TimeStep).")
    return result


def _check_state(state: Tree, pure: bool, keys: Tensor) -> None:
    if not pure:
        require(state is None, "An environment without the trait `pure` must return None as state.")
        return
    for name, leaf in named_leaves(state, "state"):
        require_batched(leaf, keys.shape[0], name)
        require(
            leaf.device.type == keys.device.type,
            f"{name} must be on the device of the keys, {keys.device}; it is on {leaf.device}.",
        )


def _require_form(expected: tuple[Any, ...], tree: Tree, name: str) -> None:
    actual = form(tree)
    require(
        actual[0] == expected[0],
        f"The {name} must have the same names and structure at every step (extras are a fixed dict): "
        f"{expected[0]} came from init() and {actual[0]} from step().",
    )
    for (leaf, _), was, now in zip(named_leaves(tree, name), expected[1:], actual[1:], strict=True):
        require(
            was == now,
            f"{leaf} must keep its shape and dtype: init() gave {was[1]} {list(was[0])} and step() gave {now[1]} "
            f"{list(now[0])}.",
        )


def _check_timestep(spec: EnvSpec, timestep: TimeStep, keys: Tensor) -> None:
    """The rules that one timestep must keep by itself."""
    size, device = keys.shape[0], keys.device
    require_tensor(timestep.step_type, (size,), torch.int32, device, "step_type")
    known = (timestep.step_type >= FIRST) & (timestep.step_type <= LAST)
    require(known.all(), "step_type must be FIRST, MID or LAST (0, 1 or 2).")
    _check_signal(spec, timestep.reward, size, device, "reward")
    _check_signal(spec, timestep.discount, size, device, "discount")
    for name, discount in named_leaves(timestep.discount, "discount"):
        require(((discount >= 0) & (discount <= 1)).all(), f"{name} must be in [0, 1].")
    _check_observation(spec, timestep.observation, size, device)
    extras = timestep.extras
    require(
        isinstance(extras, dict) and {"raw_reward", "game_over"} <= set(extras),
        "extras must be a dict that holds at least raw_reward and game_over.",
    )
    for name, leaf in named_leaves(extras, "extras"):
        require_batched(leaf, size, name)
    _check_signal(spec, extras["raw_reward"], size, device, "extras['raw_reward']")
    require_tensor(extras["game_over"], (size,), torch.bool, device, "extras['game_over']")
    require(isinstance(extras.get("episode", {}), dict), "extras['episode'] must be a dict of numbers by name.")
    for name in ("return", "length"):
        require(
            name not in extras.get("episode", {}),
            f"extras['episode'][{name!r}] must have another name: these two are counted from rewards and ends.",
        )
    for name, leaf in named_leaves(extras.get("episode", {}), "extras['episode']"):
        require_tensor(leaf, (size,), torch.float32, device, name)
    if "alive" in extras:
        _check_alive(spec, timestep, size, device)
    is_last = timestep.step_type == LAST
    require(
        (is_last | ~extras["game_over"]).all(),
        "extras['game_over'] may be True only at LAST: the episode ends there.",
    )


def _check_signal(spec: EnvSpec, value: Tree, size: int, device: torch.device, name: str) -> None:
    if spec.groups is None:
        require_tensor(value, (size,), torch.float32, device, name)
        require(value.isfinite().all(), f"{name} must be finite; it holds NaN or infinity.")
        return
    require(
        isinstance(value, dict) and set(value) == set(spec.groups),
        f"{name} must be a dict with one entry per group, {sorted(spec.groups)}.",
    )
    for group in spec.groups:
        leaf = f"{name}[{group!r}]"
        require_tensor(value[group], lead_of(spec, group, size), torch.float32, device, leaf)
        require(value[group].isfinite().all(), f"{leaf} must be finite; it holds NaN or infinity.")


def _check_alive(spec: EnvSpec, timestep: TimeStep, size: int, device: torch.device) -> None:
    alive, groups = timestep.extras["alive"], spec.groups or {}
    require(
        bool(groups),
        "extras['alive'] is of groups of agents, and spec.groups is None; leave it out, or give the spec groups.",
    )
    require(
        isinstance(alive, dict) and set(alive) == set(groups),
        f"extras['alive'] must be a dict with one entry per group, {sorted(groups)}.",
    )
    for group, discount in timestep.discount.items():
        name = f"extras['alive'][{group!r}]"
        require_tensor(alive[group], lead_of(spec, group, size), torch.bool, device, name)
        wrong = ~alive[group] & (discount != 0) & (timestep.step_type != FIRST)[:, None]
        require(
            not wrong.any(),
            f"discount[{group!r}] must be 0 where {name} is False, but at FIRST: that agent's part ended; it is not 0 "
            f"for {wrong.sum()} of {wrong.numel()} agents. make_timestep sets it, of the extras that it is given.",
        )


def _check_observation(spec: EnvSpec, observation: Tree, size: int, device: torch.device) -> None:
    if spec.groups is None:
        require_spec(observation, spec.observation, (size,), device, "observation")
        _check_mask(observation, spec.action, (size,), device, "observation")
    else:
        require(
            isinstance(observation, dict) and set(observation) == set(spec.groups),
            f"observation must be a dict with one entry per group, {sorted(spec.groups)}.",
        )
        for group in spec.groups:
            lead, name = lead_of(spec, group, size), f"observation[{group!r}]"
            require_spec(observation[group], spec.observation[group], lead, device, name)
            _check_mask(observation[group], spec.action[group], lead, device, name)
    closed = closed_masks(spec, observation)
    require(not closed, " ".join(closed))


def _check_mask(observation: Tree, action: Any, lead: tuple[int, ...], device: torch.device, name: str) -> None:
    if not isinstance(observation, dict) or ACTION_MASK not in observation:
        return
    name, mask = f"{name}['action_mask']", observation[ACTION_MASK]
    choices = list(action.nvec) if isinstance(action, MultiDiscrete) else [getattr(action, "num_values", 0)]
    require(sum(choices) > 0, f"{name} needs a Discrete or MultiDiscrete action; the spec has {action}.")
    require_tensor(mask, (*lead, sum(choices)), torch.bool, device, name)


def _check_first(timestep: TimeStep) -> None:
    first = timestep.step_type == FIRST
    for reward in pytree.tree_leaves(timestep.reward):
        require((reward[first] == 0).all(), "reward must be 0 at FIRST: no action led there.")
    for reward in pytree.tree_leaves(timestep.extras["raw_reward"]):
        require((reward[first] == 0).all(), "extras['raw_reward'] must be 0 at FIRST: no action led there.")
    for discount in pytree.tree_leaves(timestep.discount):
        require((discount[first] == 1).all(), "discount must be 1 at FIRST.")


def _check_transition(spec: EnvSpec, was_last: Tensor, count: Tensor, timestep: TimeStep) -> None:
    """The rules about what may follow what.

    Args:
      spec: of the environment.
      was_last: `[B]` bool, the timestep before was LAST.
      count: `[B]`, steps since FIRST.
      timestep: what came.
    """
    step_type, limit = timestep.step_type, spec.max_episode_steps
    is_last = step_type == LAST
    require((step_type[was_last] == FIRST).all(), "step() must return FIRST after LAST.")
    require((step_type[~was_last] != FIRST).all(), "step() must return FIRST only after LAST.")
    _check_first(timestep)
    discounts = [d.reshape(d.shape[0], -1) for d in pytree.tree_leaves(timestep.discount)]
    discount = torch.cat(discounts, 1)  # [B, all agents]
    ended = (discount == 0).all(1)  # of who is still alive too; of the others it is 0 anyway
    require(
        not ((step_type == MID) & ended).any(),
        "step() must return LAST where the discount is 0: the episode terminated.",
    )
    cut = is_last & ~ended
    early = cut if limit is None else cut & (count < limit)
    require(
        spec.truncates_early or not early.any(),
        f"LAST with a discount above 0 means truncation, which comes only after spec.max_episode_steps={limit} steps; "
        "a termination has discount 0, of every agent, and an environment that truncates by rules of its own has "
        "spec.truncates_early=True.",
    )
    if limit is None:
        return
    require(
        (is_last | (count < limit)).all(),
        f"step() must return LAST after spec.max_episode_steps={limit} steps, with discount 1 unless the episode "
        "terminated.",
    )


def _check_pure(env: Env, keys: Tensor, calls: list[_Call]) -> None:
    changed = difference(env.init(keys), env.init(keys), "result")
    require(changed is None, f"init() must be a function of its keys; two equal calls differ in {changed}.")
    before = attributes(env)
    for call in calls:
        changed = difference(env.step(call.state, call.action, call.keys), call.result, "result")
        require(
            changed is None,
            f"step() must be a function of state, action and keys; two equal calls differ in {changed}. Draw from "
            "the keys and keep nothing on self.",
        )
    changed = written(env, before)
    require(changed is None, f"step() must keep nothing on self, but in the state; it wrote {changed}.")


def _check_rows(env: Env, keys: Tensor, calls: list[_Call], root: Tensor) -> None:
    """Some rows in another order must give the same as all of them: B is a batch, and nothing else."""
    size = keys.shape[0]
    index = random.permutation(random.fold_in(root, 3), size)[: (size + 1) // 2]
    rule = "rows must be independent: permuting and leaving out environments changed"
    changed = difference(env.init(keys[index]), rows(env.init(keys), index), "result", **TOLERANCE)
    require(changed is None, f"init(): {rule} {changed}.")
    for call in calls:
        alone = env.step(*rows((call.state, call.action, call.keys), index))
        changed = difference(alone, rows(call.result, index), "result", **TOLERANCE)
        require(changed is None, f"step(): {rule} {changed}.")


def _check_reset_ignores_action(env: Env, calls: list[_Call], keys: Tensor) -> None:
    for call in calls:
        other = random_action(env.spec, call.result[1].observation, keys)
        result = env.step(call.state, other, call.keys)
        changed = difference(rows(result, call.was_last), rows(call.result, call.was_last), "result")
        require(changed is None, f"step() must ignore the action after LAST; it changed {changed}.")


def _check_gradients(env: Env, calls: list[_Call]) -> None:
    for call in calls:
        leaves, structure = pytree.tree_flatten((call.state, call.action))
        leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in leaves]
        inputs = [x for x in leaves if x.requires_grad]
        with torch.enable_grad():
            state, action = pytree.tree_unflatten(leaves, structure)
            arguments = state, action, call.keys
            _, timestep = _promised("differentiable", "env.step with gradients", lambda a=arguments: env.step(*a))
            outputs = pytree.tree_leaves((timestep.reward, timestep.observation))
            outputs = [x.sum() for x in outputs if x.requires_grad]
        rule = "The trait `differentiable` promises gradients from reward and observation to state and action"
        require(bool(inputs and outputs), f"{rule}; there is no path.")
        gradients = torch.autograd.grad(outputs, inputs, allow_unused=True)
        require(all(g is None or g.isfinite().all() for g in gradients), f"{rule}; they are not finite.")


def _check_vmap(env: Env, keys: Tensor, calls: list[_Call]) -> None:
    def both(tree: Tree) -> Tree:  # two members that differ: the second has its rows in reverse
        return pytree.tree_map(lambda x: torch.stack([x, x.flip(0)]), tree)

    init = _promised("vmappable", "torch.vmap(env.init)", lambda: torch.vmap(env.init)(both(keys)))
    changed = difference(init, both(env.init(keys)), "result", **TOLERANCE)
    require(changed is None, f"torch.vmap(env.init) must give what init() gives; they differ in {changed}.")
    for call in calls:
        arguments = both((call.state, call.action, call.keys))
        result = _promised("vmappable", "torch.vmap(env.step)", lambda a=arguments: torch.vmap(env.step)(*a))
        changed = difference(result, both(call.result), "result", **TOLERANCE)
        require(changed is None, f"torch.vmap(env.step) must give what step() gives; they differ in {changed}.")


def _check_compiled(env: Env, env_keys: Tensor, action_keys: Tensor, num_steps: int) -> None:
    """Plays again with a compiled step, fed with its own results as in the loops, and compares some steps."""

    def contiguous_step(state: Tree, action: Tree, keys: Tensor) -> tuple[Tree, TimeStep]:
        return contiguous(env.step(state, action, keys))

    step = Compiler(enabled=True)(contiguous_step)
    state, timestep = contiguous(env.init(random.at(env_keys, 0)))  # as the loops do
    left = 8
    for i in range(1, num_steps + 1):
        action = random_action(env.spec, timestep.observation, random.at(action_keys, i))
        arguments = (state, action, random.at(env_keys, i))
        result = _promised("capturable", "the compiled step", lambda a=arguments: step(*a))
        if left and (i <= 2 or (result[1].step_type != MID).any()):
            left -= 1
            changed = difference(result, env.step(*arguments), "result", **TOLERANCE)
            require(changed is None, f"The compiled step must give what step() gives; they differ in {changed}.")
        state, timestep = result


def _promised(trait: str, what: str, call: Callable[[], Any]) -> Any:
    """Calls; any exception breaks the promise of a trait."""
    try:
        return call()
    except Exception as error:
        require_no_reading(error)
        raise ContractError(f"The trait `{trait}` promises that {what} works; it raised {raised(error)[0]}.") from error

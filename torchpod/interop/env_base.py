"""Tensor environments as `torchrl.envs.EnvBase`: for TorchRL's collectors, transforms and checks.

The other direction, a TorchRL environment to train in here, is `torchpod.envs.host.TorchRL`.
"""

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torch.utils import _pytree as pytree
from torchrl.data import Bounded, Categorical, Composite, MultiCategorical, TensorSpec, Unbounded
from torchrl.envs import EnvBase

from torchpod import random
from torchpod.actions import require_finite
from torchpod.compile import Compiler
from torchpod.env import TensorEnv, where
from torchpod.specs import Box, Discrete, EnvSpec, MultiDiscrete, SpecTree
from torchpod.trees import contiguous
from torchpod.types import LAST, TimeStep, Tree


def to_torchrl(
    env: TensorEnv, num_envs: int, seed: int = 0, device: torch.device | str = "cpu", *, compile: bool = False
) -> "TorchRLEnv":
    """A batch of a tensor environment as a TorchRL environment of batch size `[num_envs]`.

    Keys are those of `torchpod.interop.to_tensordict`: `observation` `[B, ...]`, nested if it is a dict; `action` `[B]`
    int64 or `[B, A]` float32; `reward` `[B, 1]`; `done`, `terminated` and `truncated` `[B, 1]` bool. TorchRL resets at
    once where an episode is done, so that there is no row between two episodes: the last observation of an episode is
    in `("next", "observation")` and the first of the next one in `observation` of the row after it.

    Groups of agents are named as TorchRL's multi-agent environments do: `("tagger", "observation")` `[B, N, ...]`,
    `("tagger", "action")` `[B, N]`, `("tagger", "reward")` `[B, N, 1]`, and its `done`, `terminated` and `truncated`
    `[B, N, 1]` beside those of the environment, for an agent may be out of the game before the others. Where agents may
    be so, `("tagger", "mask")` `[B, N]` says who plays. `env.group_map` has the names of the agents of every group.

    A step refuses actions of another shape or kind; on the CPU also integers out of range, NaN and infinity: on a GPU
    the host would have to wait for the values. Floats outside the bounds go to the environment; torchpod's own clip.

    Args:
      env: such as `torchpod.envs.CartPole()`.
      num_envs: B.
      seed: the same as `set_seed` later; the same seed and actions give the same episodes.
      device: of everything.
      compile: compile the step, which takes seconds at the first one.

    Raises:
      ValueError: for an environment on the host, or one with a dict of actions (of a group of agents, too); if there
        is no environment.
    """
    if num_envs < 1:
        raise ValueError(f"num_envs={num_envs} must be at least 1.")
    if not isinstance(getattr(env, "spec", None), EnvSpec):
        found = f"the class {env.__name__}" if isinstance(env, type) else repr(env)
        raise ValueError(f"to_torchrl takes an environment such as torchpod.envs.CartPole(), and got {found}.")
    if not env.traits.pure:
        raise ValueError(
            f"{env.spec.name} is stepped on the host; to_torchrl takes environments that are tensor programs."
        )
    for group, action in {"": env.spec.action}.items() if env.spec.groups is None else env.spec.action.items():
        if isinstance(action, dict):
            raise ValueError(
                f"{env.spec.name} has a dict of actions{group and f' of {group}'}, {sorted(action)}, and to_torchrl "
                "takes one Box, Discrete or MultiDiscrete; make it one."
            )
    return TorchRLEnv(env, num_envs, seed, torch.device(device), compile)


class TorchRLEnv(EnvBase):
    """What `to_torchrl` returns. It keeps the state of the environments, as all of TorchRL's do."""

    def __init__(self, env: TensorEnv, num_envs: int, seed: int, device: torch.device, compile: bool) -> None:
        super().__init__(device=device, batch_size=torch.Size([num_envs]))
        self._env, self._groups = env, env.spec.groups
        self._compile = compile
        self._stepped = Compiler(compile)(self._one_step)
        lead = self.batch_size
        if self._groups is None:
            seen = {"observation": torchrl_spec(env.spec.observation, lead, device)}
            self.observation_spec = Composite(seen, shape=lead, device=device)
            self.action_spec = torchrl_spec(env.spec.action, lead, device)
            self.reward_spec = Unbounded(torch.Size([num_envs, 1]), device=device)
            self.done_spec = Composite(_flag_specs(lead, device), shape=lead, device=device)
        else:
            self._make_specs_of_groups(self._groups)
        self._first_action: Tree = torch.zeros_like(self.action_spec.zero())
        if self._groups is not None:
            self._first_action = {group: self._first_action[group, "action"] for group in self._groups}
        self._state: Tree = None
        self._seen: dict[str, Any] = {}
        self._was_last = torch.zeros(num_envs, dtype=torch.bool, device=device)
        self._discount: Tree = None
        self._set_seed(seed)

    def to(self, device: torch.device | str | int) -> EnvBase:
        """See `EnvBase.to`; the game goes on there."""
        for name in ("_keys", "_state", "_seen", "_discount", "_was_last", "_first_action"):
            setattr(self, name, pytree.tree_map(lambda x: x if x is None else x.to(device), getattr(self, name)))
        self._stepped = Compiler(self._compile)(self._one_step)  # a program is of one device
        return super().to(device)

    def _one_step(self, state: Tree, action: Tree, keys: Tensor) -> tuple[Tree, TimeStep]:
        return contiguous(self._env.step(state, action, keys))

    def _make_specs_of_groups(self, groups: dict[str, int]) -> None:
        env, lead, device = self._env, self.batch_size, self.device
        self.group_map = {group: [f"{group}_{i}" for i in range(size)] for group, size in groups.items()}
        mortal = "alive" in env.init(random.split(random.key(0, device), 1))[1].extras
        seen, acts, rewards, done = {}, {}, {}, {}
        for group, size in groups.items():
            wide = torch.Size([*lead, size])
            own: dict[str, TensorSpec] = {"observation": torchrl_spec(env.spec.observation[group], wide, device)}
            if mortal:
                own["mask"] = Categorical(2, shape=wide, dtype=torch.bool, device=device)
            seen[group] = Composite(own, shape=wide, device=device)
            action = torchrl_spec(env.spec.action[group], wide, device)
            acts[group] = Composite(action=action, shape=wide, device=device)
            reward = Unbounded(torch.Size([*wide, 1]), device=device)
            rewards[group] = Composite(reward=reward, shape=wide, device=device)
            done[group] = Composite(_flag_specs(wide, device), shape=wide, device=device)
        self.observation_spec = Composite(seen, shape=lead, device=device)
        self.action_spec = Composite(acts, shape=lead, device=device)
        self.reward_spec = Composite(rewards, shape=lead, device=device)
        self.done_spec = Composite(_flag_specs(lead, device) | done, shape=lead, device=device)

    def _set_seed(self, seed: int | None) -> None:
        if seed is not None:
            self._keys = random.split(random.key(seed, self.device), self.batch_size[0])
            self._count = -1

    def _next_keys(self) -> Tensor:
        self._count += 1
        return random.at(self._keys, self._count)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        keys = self._next_keys()
        with torch.no_grad():
            if mask is None or self._state is None:
                state, timestep = self._env.init(keys)
                self._state, seen = contiguous(state), self._named(timestep)
                self._was_last = torch.zeros_like(self._was_last)
                self._discount = timestep.discount
            else:
                chosen = mask.reshape(-1)
                # The step after the last begins the next episode, and keeps what outlives one (`TensorEnv.restart`).
                state, timestep = self._stepped(self._state, self._first_action, keys)
                if bool((chosen & ~self._was_last).any()):  # cut by whoever collects, in the middle of an episode
                    fresh, first = self._env.init(keys)
                    state, timestep = where(self._was_last, (state, timestep), (fresh, first))
                self._state = contiguous(where(chosen, state, self._state))
                seen = where(chosen, self._named(timestep), self._seen)
                self._discount = where(chosen, timestep.discount, self._discount)
                self._was_last = self._was_last & ~chosen
        self._seen = seen
        return self._written(None)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        action = self._actions(tensordict)
        if self._state is None:
            raise RuntimeError(f"{self._env.spec.name}: call reset() before step().")
        with torch.no_grad():
            state, timestep = self._stepped(self._state, action, self._next_keys())
        last, seen = timestep.step_type == LAST, self._named(timestep)
        reward, discount = timestep.reward, timestep.discount
        stepped = tensordict.get("_step", None)
        if stepped is not None:  # TorchRL leaves alone what is done, until all are
            rows = stepped.reshape(-1)
            state, seen = contiguous(where(rows, state, self._state)), where(rows, seen, self._seen)
            discount, last = where(rows, (discount, last), (self._discount, self._was_last))
            reward = pytree.tree_map(lambda x: where(rows, x, torch.zeros_like(x)), reward)
        self._state, self._seen, self._was_last, self._discount = state, seen, last, discount
        return self._written(reward)

    def _named(self, timestep: TimeStep) -> dict[str, Any]:
        """What is seen, by key."""
        if self._groups is None:
            return {"observation": timestep.observation}
        alive = timestep.extras.get("alive")
        mask = {} if alive is None else {group: {"mask": alive[group]} for group in self._groups}
        return {group: {"observation": timestep.observation[group], **mask.get(group, {})} for group in self._groups}

    def _written(self, reward: Tree) -> TensorDict:
        """What is seen, and whether it is the end; with rewards, if any.

        Copies: who changes what is seen in place must not change the state, which it may be a view of.
        """
        last, own = self._was_last, pytree.tree_map(torch.clone, self._seen)
        ended = torch.stack([(x == 0).reshape(x.shape[0], -1).all(-1) for x in pytree.tree_leaves(self._discount)])
        own |= _flags(last, ended.all(0))
        for group, size in (self._groups or {}).items():
            gone = self._discount[group] == 0
            own[group] |= _flags(last[:, None] | gone, gone)
            if reward is not None:
                own[group]["reward"] = reward[group][..., None].clone()
            own[group] = TensorDict(own[group], batch_size=[*self.batch_size, size], device=self.device)
        if self._groups is None and reward is not None:
            own["reward"] = reward[:, None].clone()
        return TensorDict(own, batch_size=self.batch_size, device=self.device)

    def _actions(self, tensordict: TensorDictBase) -> Tree:
        """Those of the environment, of the dtype of the spec."""
        spec = self._env.spec.action
        if self._groups is None:
            return self._checked(tensordict, "action", spec, self.action_spec.shape)
        sizes = {group: torch.Size([*self.batch_size, n, *spec[group].shape]) for group, n in self._groups.items()}
        return {group: self._checked(tensordict, (group, "action"), spec[group], sizes[group]) for group in sizes}

    def _checked(self, tensordict: TensorDictBase, key: Any, spec: SpecTree, expected: torch.Size) -> Tensor:
        """The action at a key."""
        name, action, known = self._env.spec.name, tensordict.get(key, None), sorted(map(str, tensordict.keys()))
        assert not isinstance(spec, dict)  # which to_torchrl refuses
        if action is None:
            raise ValueError(
                f"{name} takes {key!r} of shape {list(expected)}, and step() got {known}; let the policy write {key!r}."
            )
        if action.shape != expected:
            raise ValueError(
                f"{name} takes {key!r} of shape {list(expected)}, and this is {list(action.shape)}; write one for each "
                f"of the {expected[0]} environments{'' if self._groups is None else ' and every agent'}."
            )
        if not torch.can_cast(action.dtype, spec.dtype):
            raise ValueError(
                f"{name} takes {key!r} of {spec.dtype}, and this is {action.dtype}; let the policy write {spec.dtype}."
            )
        action = action.detach().to(spec.dtype)
        if action.device.type != "cpu":
            return action
        if isinstance(spec, Discrete | MultiDiscrete):
            num = torch.tensor(spec.num_values if isinstance(spec, Discrete) else spec.nvec)
            if ((action < 0) | (action >= num)).any():
                raise ValueError(
                    f"{name} takes integers from 0 to {(num - 1).tolist()} as {key!r}, and these are from "
                    f"{action.min()} to {action.max()}; let the policy choose among so many."
                )
        else:
            require_finite(action, f"{name} takes finite numbers as {key!r}")
        return action


def _flags(done: Tensor, ended: Tensor) -> dict[str, Tensor]:
    """`[..., 1]` each."""
    flags = {"done": done.clone(), "terminated": done & ended, "truncated": done & ~ended}
    return {name: x[..., None] for name, x in flags.items()}


def _flag_specs(lead: torch.Size, device: torch.device | None) -> dict[str, TensorSpec]:
    flag = Categorical(2, shape=torch.Size([*lead, 1]), dtype=torch.bool, device=device)
    return {name: flag.clone() for name in ("done", "terminated", "truncated")}


def torchrl_spec(spec: SpecTree, lead: torch.Size, device: torch.device | None = None) -> TensorSpec:
    """The spec of TorchRL for one of ours, with the axes `lead` before it."""
    if isinstance(spec, dict):
        inner = {name: torchrl_spec(value, lead, device) for name, value in spec.items()}
        return Composite(inner, shape=lead, device=device)
    shape = torch.Size([*lead, *spec.shape])
    if isinstance(spec, Discrete):
        return Categorical(spec.num_values, shape=shape, dtype=spec.dtype, device=device)
    if isinstance(spec, MultiDiscrete):
        return MultiCategorical(spec.nvec, shape=shape, dtype=spec.dtype, device=device)
    if isinstance(spec, Box) and abs(spec.low) < float("inf") and abs(spec.high) < float("inf"):
        return Bounded(low=spec.low, high=spec.high, shape=shape, dtype=spec.dtype, device=device)
    if spec.dtype == torch.bool:
        return Categorical(2, shape=shape, dtype=torch.bool, device=device)
    return Unbounded(shape, dtype=spec.dtype, device=device)

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
from torchpod.specs import Box, Discrete, MultiDiscrete, SpecTree
from torchpod.trees import contiguous
from torchpod.types import LAST, Tree


def to_torchrl(
    env: TensorEnv, num_envs: int, seed: int = 0, device: torch.device | str = "cpu", *, compile: bool = False
) -> "TorchRLEnv":
    """A batch of a tensor environment as a TorchRL environment of batch size `[num_envs]`.

    Keys are those of `torchpod.interop.to_tensordict`: `observation` `[B, ...]`, nested if it is a dict; `action` `[B]`
    int64 or `[B, A]` float32; `reward` `[B, 1]`; `done`, `terminated` and `truncated` `[B, 1]` bool. TorchRL resets at
    once where an episode is done, so that there is no row between two episodes: the last observation of an episode is
    in `("next", "observation")` and the first of the next one in `observation` of the row after it.

    A step refuses actions of another shape or kind; on the CPU also integers out of range, NaN and infinity: on a GPU
    the host would have to wait for the values. Floats outside the bounds go to the environment; torchpod's own clip.

    Args:
      env: such as `torchpod.envs.CartPole()`.
      num_envs: B.
      seed: the same as `set_seed` later; the same seed and actions give the same episodes.
      device: of everything.
      compile: compile the step, which takes seconds at the first one.

    Raises:
      ValueError: for an environment on the host, one with groups of agents or a dict of actions; if there
        is no environment.
    """
    if num_envs < 1:
        raise ValueError(f"num_envs={num_envs} must be at least 1.")
    if not env.traits.pure:
        raise ValueError(
            f"{env.spec.name} is stepped on the host; to_torchrl takes environments that are tensor programs."
        )
    if env.spec.groups is not None:
        raise ValueError(f"{env.spec.name} has groups of agents, which to_torchrl cannot name; use one agent.")
    if isinstance(env.spec.action, dict):
        raise ValueError(
            f"{env.spec.name} has a dict of actions, {sorted(env.spec.action)}, and to_torchrl takes one Box, Discrete "
            "or MultiDiscrete; make it one."
        )
    return TorchRLEnv(env, num_envs, seed, torch.device(device), compile)


class TorchRLEnv(EnvBase):
    """What `to_torchrl` returns. It keeps the state of the environments, as all of TorchRL's do."""

    def __init__(self, env: TensorEnv, num_envs: int, seed: int, device: torch.device, compile: bool) -> None:
        super().__init__(device=device, batch_size=torch.Size([num_envs]))
        self._env = env
        self._stepped = Compiler(compile)(lambda state, action, keys: contiguous(env.step(state, action, keys)))
        lead = torch.Size([num_envs])
        self.observation_spec = Composite(
            {"observation": torchrl_spec(env.spec.observation, lead, device)}, shape=lead, device=device
        )
        self.action_spec = torchrl_spec(env.spec.action, lead, device)
        self.reward_spec = Unbounded(torch.Size([num_envs, 1]), device=device)
        flags = ("done", "terminated", "truncated")
        flag = Categorical(2, shape=torch.Size([num_envs, 1]), dtype=torch.bool, device=device)
        self.done_spec = Composite({name: flag.clone() for name in flags}, shape=lead, device=device)
        self._state: Tree = None
        self._was_last = torch.zeros(num_envs, dtype=torch.bool, device=device)
        self._ended = torch.zeros_like(self._was_last)
        self._first_action = pytree.tree_map(torch.zeros_like, self.action_spec.zero())
        self._observation: Tree = None
        self._set_seed(seed)

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
                self._state, observation = contiguous(state), timestep.observation
                chosen = torch.ones_like(self._was_last)
            else:
                chosen = mask.reshape(-1)
                # The step after the last begins the next episode, and keeps what outlives one (`TensorEnv.restart`).
                state, timestep = self._stepped(self._state, self._first_action, keys)
                observation = timestep.observation
                if bool((chosen & ~self._was_last).any()):  # cut by whoever collects, in the middle of an episode
                    fresh, first = self._env.init(keys)
                    state = where(self._was_last, state, fresh)
                    observation = where(self._was_last, observation, first.observation)
                self._state = contiguous(where(chosen, state, self._state))
                observation = where(chosen, observation, self._observation)
        self._was_last = self._was_last & ~chosen
        self._observation = observation
        flags = self.full_done_spec.zero()
        flags["done"] = self._was_last[:, None].clone()
        return TensorDict(
            {"observation": pytree.tree_map(torch.clone, observation), **flags.to_dict()},
            batch_size=self.batch_size,
            device=self.device,
        )

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        action = self._checked(tensordict)
        if self._state is None:
            raise RuntimeError(f"{self._env.spec.name}: call reset() before step().")
        with torch.no_grad():
            state, timestep = self._stepped(self._state, action, self._next_keys())
        last, ended = timestep.step_type == LAST, timestep.discount == 0
        observation, reward = timestep.observation, timestep.reward
        stepped = tensordict.get("_step", None)
        if stepped is not None:  # TorchRL leaves alone what is done, until all are
            rows = stepped.reshape(-1)
            state = contiguous(where(rows, state, self._state))
            observation = where(rows, observation, self._observation)
            reward, last, ended = where(rows, (reward, last, ended), (0.0 * reward, self._was_last, self._ended))
        self._state, self._observation, self._was_last, self._ended = state, observation, last, ended
        return TensorDict(
            {
                # A copy: who changes it in place must not change the state, which it may be a view of.
                "observation": pytree.tree_map(torch.clone, observation),
                "reward": reward[:, None].clone(),
                "done": last[:, None],
                "terminated": (last & ended)[:, None],
                "truncated": (last & ~ended)[:, None],
            },
            batch_size=self.batch_size,
            device=self.device,
        )

    def _checked(self, tensordict: TensorDictBase) -> Tensor:
        """The action, of the dtype of the spec."""
        name, spec, expected = self._env.spec.name, self._env.spec.action, self.action_spec.shape
        action = tensordict.get("action", None)
        if action is None:
            raise ValueError(
                f"{name} takes 'action' of shape {list(expected)}, and step() got {sorted(tensordict.keys())}; let the "
                "policy write 'action'."
            )
        if action.shape != expected:
            raise ValueError(
                f"{name} takes actions of shape {list(expected)}, and these are {list(action.shape)}; write one "
                f"'action' for each of the {expected[0]} environments."
            )
        if not torch.can_cast(action.dtype, spec.dtype):
            raise ValueError(
                f"{name} takes 'action' of {spec.dtype}, and this is {action.dtype}; let the policy write {spec.dtype}."
            )
        action = action.detach().to(spec.dtype)
        if action.device.type != "cpu":
            return action
        if isinstance(spec, Discrete | MultiDiscrete):
            num = torch.tensor(spec.num_values if isinstance(spec, Discrete) else spec.nvec)
            if ((action < 0) | (action >= num)).any():
                raise ValueError(
                    f"{name} takes integers from 0 to {(num - 1).tolist()} as 'action', and these are from "
                    f"{action.min()} to {action.max()}; let the policy choose among so many."
                )
        else:
            require_finite(action, f"{name} takes finite numbers as 'action'")
        return action


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

"""A trained policy in a loop of one's own over Gymnasium environments: their observations in, their actions out."""

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from torchpod.agent import Agent, Variables
from torchpod.algos.multi_agent import Policies
from torchpod.envs.host.gymnasium import space_of
from torchpod.envs.host.spaces import action_of, masked, misfit, opened, spec_of, to_tensors
from torchpod.interop.policy import Greedy, acted, require_variables
from torchpod.types import ACTION_MASK


class GymnasiumPolicy:
    """The greedy actions of an agent, for the observations of a Gymnasium environment.

    `policy(observation)` takes what `reset` and `step` return and returns what `step` takes; of a vector environment
    those of all. Observations and actions are turned as torchpod.envs.Gymnasium turns them in training: choices that
    do not begin at 0, bounds that differ from entry to entry, images of bytes `[C, H, W]`, an `action_mask`.

    A policy with a memory is told whether an observation is the first of an episode, `policy(observation, first)`:
    True or False, of a vector environment `[B]` bool. With `AutoresetMode.NEXT_STEP` these are the rows that ended at
    the step before the last one, with `SAME_STEP` at the last one, with `DISABLED` those that you have reset.

    Args:
      agent: the agent; its own parameters are not used.
      variables: its parameters and buffers: `run.variables`. It acts on the CPU.
      env: the environment, or a vector environment, for its spaces; it is not stepped.

    Raises:
      ValueError: if the variables are not the agent's, it is one of many agents, or the spaces are none that agents
        can use. When it acts, if an observation is not of its space or not one that the agent was trained with, an
        action is not of its space, it is not told where episodes begin, or the agent acts on more than observations.
    """

    def __init__(self, agent: Agent, variables: Variables, env: gymnasium.Env | gymnasium.vector.VectorEnv) -> None:
        if isinstance(agent, Policies):
            who = f"{type(agent).__name__} is of many agents"
            raise ValueError(f"{who}, and a Gymnasium environment has one; use `torchpod export RUN`.")
        require_variables(agent, variables)
        name = type(env.unwrapped).__name__
        self._spaces = single = space_of(env, "observation_space", name), space_of(env, "action_space", name)
        self._num_envs = None
        if isinstance(env, gymnasium.vector.VectorEnv):
            single, self._num_envs = (env.single_observation_space, env.single_action_space), env.num_envs
        self._action, self._to_native = action_of(single[1], "action_space")
        self._observation = masked(spec_of(single[0], "observation_space"), self._action, "observation_space")
        self._greedy = Greedy(agent, {name: x.cpu() for name, x in variables.items()}, action=self._action)
        self._state = self._greedy.initial_state(self._num_envs or 1)

    @torch.no_grad()
    def __call__(self, observation: Any, first: Any = None) -> Any:
        """The actions; see the class."""
        if (wrong := misfit(observation, self._spaces[0])) is not None:
            raise ValueError(f"the policy was given an observation {wrong}; give it what the environment returned.")
        rows = _row(observation, self._spaces[0]) if self._num_envs is None else observation
        tensors = to_tensors(rows, self._observation)
        if isinstance(tensors, dict) and ACTION_MASK in tensors:  # which may be closed where an episode has ended
            tensors[ACTION_MASK], _ = opened(tensors[ACTION_MASK], self._action, np.zeros(self._num_envs or 1, bool))
        if self._greedy.has_state:
            action, self._state = acted(self._greedy, tensors, self._begins(first), self._state)
        else:
            action = acted(self._greedy, tensors)
        self._greedy.check(tensors)
        native = self._to_native(action.numpy())
        if self._num_envs is None:
            native = tuple(x[0] for x in native) if isinstance(native, tuple) else native[0]
        if not self._spaces[1].contains(native):
            raise ValueError(
                f"the policy takes the action {native}, which is not in {self._spaces[1]}; give it an environment with "
                "the actions of the one that it was trained in."
            )
        return native

    def _begins(self, first: Any) -> Tensor:
        """`[B]` bool."""
        shape, found = () if self._num_envs is None else (self._num_envs,), np.asarray(first)
        if found.shape != shape or found.dtype != bool:
            wanted = "True or False" if self._num_envs is None else f"bools of shape {[*shape]}"
            came = repr(first) if found.ndim == 0 else f"{found.dtype} of shape {[*found.shape]}"
            raise ValueError(
                f"{type(self._greedy.agent).__name__} has a memory, and policy(observation, first) wants to know where "
                f"episodes begin: give first {wanted}, not {came}."
            )
        return torch.from_numpy(found.reshape(-1))


def _row(observation: Any, space: Any) -> Any:
    """With an axis of one row."""
    if isinstance(space, spaces.Dict):
        return {name: _row(observation[name], inner) for name, inner in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(map(_row, observation, space))
    return np.array(observation)[None]

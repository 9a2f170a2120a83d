"""The agent-environment loop of Anakin, and what it shares with Sebulba's actors."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchpod import random
from torchpod.agent import Agent, Variables, bind
from torchpod.compile import span
from torchpod.env import Env
from torchpod.kernels.inductor import Compiled
from torchpod.trees import contiguous, reader, writer
from torchpod.types import ActorOutput, Carry, Trajectory, Tree

Step = Callable[[Variables, Carry, Tensor, Tensor], tuple[Carry, ActorOutput]]
"""(variables, carry, env_keys `[B, 3]`, actor_keys `[B, 3]`) -> (carry, output)."""


def start(agent: Agent, env: Env, env_keys: Tensor) -> Carry:
    """Resets every environment.

    Args:
      agent: gives the initial recurrent state.
      env: the environment.
      env_keys: `[B, 3]`, the key that each environment owns for its whole life.
    """
    step = torch.zeros((), dtype=torch.int64, device=env_keys.device)
    env_state, timestep = env.init(random.at(env_keys, step))
    actor_state = pytree.tree_map(lambda x: x.to(env_keys.device), agent.initial_state(env_keys.shape[0]))
    return contiguous(Carry(env_state, timestep, actor_state, step))


def make_step(agent: Agent, env: Env, explore: bool = True) -> Step:
    """One act and one environment step, as a function to compile (tensor environments) or to call (any)."""

    def step(variables: Variables, carry: Carry, env_keys: Tensor, actor_keys: Tensor) -> tuple[Carry, ActorOutput]:
        count = carry.step + 1
        with span("act"):
            output, actor_state = bind(agent, variables).act(
                carry.timestep, carry.actor_state, random.at(actor_keys, count), explore
            )
        with span("env_step"):
            action = output.action
            if not env.traits.differentiable:
                action = pytree.tree_map(torch.detach, action)
            env_state, timestep = env.step(carry.env_state, action, random.at(env_keys, count))
        return contiguous(Carry(env_state, timestep, actor_state, count)), contiguous(output)

    return step


class Recorder:
    """Collects the steps of an unroll.

    Args:
      carry: before the first step.
    """

    def __init__(self, carry: Carry) -> None:
        self._first, self._last = carry, carry
        self._timesteps, self._outputs = [carry.timestep], []

    def add(self, carry: Carry, output: ActorOutput) -> None:
        """What was decided in a step, and where it led."""
        self._last = carry
        self._timesteps.append(carry.timestep)
        self._outputs.append(output)

    def trajectory(self, time_axis: int = 0) -> Trajectory:
        """All steps, stacked."""
        stacked = _stack(self._timesteps, time_axis), _stack(self._outputs, time_axis)
        return Trajectory(*stacked, self._first.actor_state, self._last.actor_state)


def unroll(
    step: Step,
    variables: Variables,
    carry: Carry,
    env_keys: Tensor,
    actor_keys: Tensor,
    *,
    length: int,
    grad: bool = False,
    time_axis: int = 0,
) -> tuple[Carry, Trajectory]:
    """Lets an agent act for `length` steps.

    Args:
      step: from `make_step`, compiled or not.
      variables: parameters and buffers of the agent.
      carry: where the environments stand.
      env_keys: `[B, 3]`.
      actor_keys: `[B, 3]`.
      length: T, number of steps.
      grad: keep the graph, for gradients through the environment, which needs the trait `differentiable`.
      time_axis: where the T axis goes; 1 behind the P axis of a population.

    Returns:
      The carry after the last step, and the trajectory: `timestep [T + 1, B, ...]`, `output [T, B, ...]`.
    """
    looped = step.loop((variables, carry, env_keys, actor_keys)) if isinstance(step, Compiled) and not grad else None
    if looped:
        loop, inputs = looped
        last, timesteps, outputs = loop.run(inputs, length, time_axis)
        return last, Trajectory(timesteps, outputs, carry.actor_state, last.actor_state)
    recorder = Recorder(carry)
    with torch.set_grad_enabled(grad):
        for _ in range(length):
            carry, output = step(variables, carry, env_keys, actor_keys)
            recorder.add(carry, output)
        return carry, recorder.trajectory(time_axis)


def _stack(trees: list[Tree], axis: int) -> Tree:
    columns = zip(*map(reader(trees[0]), trees), strict=True)
    return writer(trees[0])([torch.stack(column, axis) for column in columns])

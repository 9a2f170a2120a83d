"""Gradients through the environment: backpropagation through an unroll, one compiled step at a time.

Read learner.py and rollout.py first. A graph of T steps would take inductor minutes. So the unroll runs without a graph
and keeps its carries; then the loss is differentiated with respect to the trajectory, and each step, from the last to
the first, is computed again and pulled back. Memory is that of T carries, the work one more forward pass, and compile
time that of one step for any T. Nothing is pulled back beyond the first carry, so that no gradient goes from one unroll
to the one before.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchpod import random
from torchpod.agent import Agent, Variables, bind
from torchpod.compile import Compiler, span
from torchpod.env import Env
from torchpod.learner import Learner, LearnerState
from torchpod.rollout import Step, make_step
from torchpod.types import Carry, Trajectory, Tree

Floats = list[Tensor]
"""The floating-point leaves of a tree, in order: what has a gradient."""
CarryGradient = tuple[Floats, Floats, Floats]
"""With respect to the state of the environment, the timestep, and the actor state."""


class Tape:
    """Records the carries of an unroll: `unroll(tape, ...)` instead of `unroll(step, ...)`."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self.carries: list[Carry] = []
        """Before each step."""

    def __call__(self, variables: Variables, carry: Carry, env_keys: Tensor, actor_keys: Tensor) -> Any:
        self.carries.append(carry)
        return self._step(variables, carry, env_keys, actor_keys)


class ThroughEnv:
    """The update of an agent with `through_env`: one optimizer step per unroll.

    Args:
      agent: what to train.
      env: a differentiable environment.
      learner: applies the gradient.
      compiler: how to compile (and vmap) the parts.

    Raises:
      ValueError: if the environment is not differentiable, the learner is to reuse or cut the unroll, or the agent is
        not `recurrent`.
    """

    def __init__(self, agent: Agent, env: Env, *, learner: Learner, compiler: Compiler) -> None:
        name, c = type(agent).__name__, learner.config
        if not env.traits.differentiable:
            raise ValueError(
                f"{name} learns through the environment, and {env.spec.name} is not differentiable; use algo=ppo, or "
                "an environment that is, e.g. env=pendulum."
            )
        if (c.num_epochs, c.num_minibatches) != (1, 1):
            raise ValueError(
                f"{name} takes one step per unroll, whose graph is then gone; use algo.learner.num_epochs=1 and "
                f"algo.learner.num_minibatches=1, not {c.num_epochs} and {c.num_minibatches}."
            )
        if not agent.recurrent or agent.standardise:
            raise ValueError(
                f"{name} has through_env, so it must be recurrent (its loss gets the steps in order) and standardise "
                "nothing."
            )
        self.agent, self.learner = agent, learner
        self._step = make_step(agent, env)
        self._axis = 0 if compiler.population == 1 else 1
        self._loss = compiler(self._loss_one)
        self._pull_back = compiler(self._pull_back_one)

    def update(
        self,
        state: LearnerState,
        carries: list[Carry],
        trajectory: Trajectory,
        env_keys: Tensor,
        actor_keys: Tensor,
        keys: Tensor,
    ) -> tuple[LearnerState, dict[str, Tensor]]:
        """One optimizer step.

        Args:
          state: the one that acted.
          carries: before each of the T steps, from `Tape`.
          trajectory: of the same T steps.
          env_keys: `[B, 3]`, those of the unroll.
          actor_keys: `[B, 3]`, those of the unroll.
          keys: `[B, 3]`, the learner's.

        Returns:
          The next state, and metrics: scalars, means over the rows of all ranks.
        """
        with span("gradient"):
            gradient, sums = self.gradient(state, carries, trajectory, env_keys, actor_keys, keys)
            weight = sums.pop("weight")
        total = torch.cat([gradient, torch.stack([*sums.values(), weight], -1)], -1)
        with span("apply"):
            state, metrics = self.learner.apply_sum(state, total, tuple(sums))
        return self.learner.observe(state, trajectory), metrics

    def gradient(
        self,
        state: LearnerState,
        carries: list[Carry],
        trajectory: Trajectory,
        env_keys: Tensor,
        actor_keys: Tensor,
        keys: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The gradient of this rank's loss with respect to all parameters, and its metrics; see `update`.

        Returns:
          One flat vector, and sums over rows, of which `weight` is the number of rows: nothing is divided by it yet.
        """
        buffers = self.learner.annealed(state)
        total, d_timestep, d_output, d_actor_state, sums = self._loss(
            state.params, buffers, state.targets, trajectory, keys
        )
        d_timesteps, d_outputs = (
            [x.movedim(self._axis, 0).contiguous().unbind(0) for x in xs] for xs in (d_timestep, d_output)
        )
        d_env_state = [torch.zeros_like(x) for x in _floats(carries[-1].env_state)]
        d_carry = d_env_state, [x[-1] for x in d_timesteps], d_actor_state
        for t in reversed(range(len(carries))):
            here = [x[t] for x in d_outputs], [x[t] for x in d_timesteps]
            # A program may lay its results out as it likes, and is compiled for arguments of one layout.
            d_carry = tuple([x.contiguous() for x in xs] for xs in d_carry)
            total, d_carry = self._pull_back(
                state.params, buffers, carries[t], env_keys, actor_keys, d_carry, *here, total
            )
        return total, sums

    # The functions below see one member of the population, and are compiled.

    def _loss_one(
        self, params: Variables, buffers: Variables, targets: Variables, trajectory: Trajectory, keys: Tensor
    ) -> tuple[Tensor, Floats, Floats, Floats, dict[str, Tensor]]:
        """The gradient of the loss, for a given trajectory, and with respect to the trajectory."""

        def loss_of(params: Variables, parts: tuple[Floats, Floats, Floats]) -> tuple[Tensor, dict[str, Tensor]]:
            batch = bind(self.agent, params | buffers).prepare(_with_floats(trajectory, parts), keys)
            losses, sums, _ = self.learner.losses(params, buffers, targets, batch, random.advance(keys[0], 1))
            return torch.stack([*losses.values()]).sum(), sums | {"weight": batch.steps["weight"].sum().detach()}

        parts = _floats(trajectory.timestep), _floats(trajectory.output), _floats(trajectory.last_actor_state)
        (d_params, d_parts), sums = torch.func.grad(loss_of, argnums=(0, 1), has_aux=True)(params, parts)
        return self.learner.groups.flat(d_params), *d_parts, sums

    def _pull_back_one(
        self,
        params: Variables,
        buffers: Variables,
        carry: Carry,
        env_keys: Tensor,
        actor_keys: Tensor,
        d_after: CarryGradient,
        d_output: Floats,
        d_timestep: Floats,
        total: Tensor,
    ) -> tuple[Tensor, CarryGradient]:
        """From the gradient with respect to the carry after a step to that with respect to the carry before it.

        Args:
          params: parameters.
          buffers: hyperparameters and statistics.
          carry: before the step.
          env_keys: `[B, 3]`.
          actor_keys: `[B, 3]`.
          d_after: of the loss, with respect to the carry after the step.
          d_output: with respect to the step's output, as the loss sees it.
          d_timestep: with respect to the timestep before the step, as the loss sees it.
          total: flat, the gradient with respect to the parameters; what the step adds is added.
        """

        def forward(params: Variables, parts: CarryGradient) -> tuple[CarryGradient, Floats]:
            after, output = self._step(params | buffers, _with_floats(carry, parts), env_keys, actor_keys)
            return _parts(after), _floats(output)

        _, pull_back, *_ = torch.func.vjp(forward, params, _parts(carry))
        d_params, (d_env_state, d_before, d_actor_state) = pull_back((d_after, d_output))
        d_before = [a + b for a, b in zip(d_before, d_timestep, strict=True)]
        return total + self.learner.groups.flat(d_params), (d_env_state, d_before, d_actor_state)


def _floats(tree: Tree) -> Floats:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor) and x.is_floating_point()]


def _parts(carry: Carry) -> CarryGradient:
    return _floats(carry.env_state), _floats(carry.timestep), _floats(carry.actor_state)


def _with_floats(tree: Any, parts: tuple[Floats, Floats, Floats]) -> Any:
    """A carry or trajectory with other floating-point leaves."""
    if isinstance(tree, Carry):
        names = ("env_state", "timestep", "actor_state")
    else:
        names = ("timestep", "output", "last_actor_state")
    changed = {}
    for name, floats in zip(names, parts, strict=True):
        fresh = iter(floats)
        changed[name] = pytree.tree_map(
            lambda x, fresh=fresh: next(fresh) if isinstance(x, Tensor) and x.is_floating_point() else x,
            getattr(tree, name),
        )
    return tree._replace(**changed)

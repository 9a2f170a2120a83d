"""The update of an agent that reuses the forward pass of its rollout.

Hessel et al. 2021 (https://arxiv.org/abs/2104.06272) name it as something that Anakin allows. A rollout has computed
the networks on every observation of the trajectory, and an update with the same parameters computes them again to
differentiate them. Here each step of the rollout keeps what its derivative needs (kernels/vjp.py); the update takes the
derivative of the loss with respect to what the networks said, and pulls that back, step by step from the last to the
first. It saves the forward pass of the update, and compiles in the same time for every T, also for recurrent agents; it
takes the memory of T steps' activations.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchpod import random
from torchpod.agent import Agent, Variables
from torchpod.compile import Compiler
from torchpod.env import Env
from torchpod.learner import Learner, LearnerState
from torchpod.rollout import make_step
from torchpod.trees import paths, reader, writer
from torchpod.types import ActorOutput, Batch, Carry, Tree


class ReuseForward:
    """Steps that are kept, and the gradient through them.

    Args:
      agent: what to train.
      env: where it acts; no gradient flows through it.
      learner: applies the gradient.
      compiler: how to compile (and vmap) the parts.

    Raises:
      ValueError: if the learner is to use the trajectory more than once, or the agent has several losses.
    """

    def __init__(self, agent: Agent, env: Env, *, learner: Learner, compiler: Compiler) -> None:
        c, name = learner.config, type(agent).__name__
        if (c.num_epochs, c.num_minibatches) != (1, 1):
            raise ValueError(
                "reuse_forward takes one step per unroll, after which the parameters are no longer those that acted; "
                f"use algo.learner.num_epochs=1 and algo.learner.num_minibatches=1, not {c.num_epochs} and "
                f"{c.num_minibatches}."
            )
        if len(agent.optimizer_groups()) > 1:
            raise ValueError(
                f"reuse_forward pulls one loss back, and {name} has {sorted(agent.optimizer_groups())}; use "
                "reuse_forward=false."
            )
        if not all(x.is_floating_point() for x in pytree.tree_leaves(agent.initial_state(1))):
            raise ValueError(f"reuse_forward differentiates the state of an agent, and {name} has one of integers.")
        self.names = learner.groups.names["loss"]
        self.learner, self._axis = learner, 0 if compiler.population == 1 else 1
        self._step, self._checked = make_step(agent, env), False
        self.step = compiler.vjp(self._step_one)
        self.loss = compiler(self._loss_one)

    def keep(self) -> "KeptSteps":
        """For one unroll."""
        return KeptSteps(self, self._axis)

    def check(self, forward: Tree, batch: Batch) -> None:
        """That `prepare` handed on what `act` said; looked at once."""
        handed = batch.steps.get("forward", ())
        if not self._checked and set(paths(handed)) != set(paths(forward)):
            raise ValueError(
                f"prepare() of {type(self.learner.agent).__name__} must hand extras['forward'] of act() on as "
                f"steps['forward'], with {paths(forward)}; it gave {paths(handed)}."
            )
        self._checked = True

    # The functions below see one member of the population, and are compiled.

    def _step_one(
        self, primals: tuple[Variables, Tree], buffers: Variables, carry: Carry, env_keys: Tensor, actor_keys: Tensor
    ) -> tuple[tuple[Tree, Tree], tuple[Carry, ActorOutput]]:
        """A step, as a function of the parameters and the actor state to what the networks say and the next one."""
        params, actor_state = primals
        after, output = self._step(params | buffers, carry._replace(actor_state=actor_state), env_keys, actor_keys)
        forward = output.extras.get("forward", ())
        leaves = pytree.tree_leaves(forward)
        if not leaves or not all(x.is_floating_point() for x in leaves):
            raise ValueError(
                f"reuse_forward needs what the networks say in ActorOutput.extras['forward'], floating-point tensors; "
                f"act() of {type(self.learner.agent).__name__} gave {[*map(str, (x.dtype for x in leaves))] or 'none'}."
            )
        return (forward, after.actor_state), (after, output)

    def _loss_one(
        self, params: Variables, buffers: Variables, targets: Variables, batch: Batch, keys: Tensor
    ) -> tuple[Tensor, Tree, dict[str, Tensor]]:
        """The gradient of the loss: by parameters (flat) that it uses itself, and by what the networks said."""

        def loss_of(params: Variables, forward: Tree) -> tuple[Tensor, dict[str, Tensor]]:
            rows = batch._replace(steps=batch.steps | {"forward": forward})
            losses, metrics, _ = self.learner.losses(params, buffers, targets, rows, random.fold_in(keys, 0))
            (loss,) = losses.values()
            return loss, metrics

        (own, d_forward), metrics = torch.func.grad(loss_of, argnums=(0, 1), has_aux=True)(
            params, batch.steps["forward"]
        )
        return self.learner.groups.flat(own), d_forward, metrics


class KeptSteps:
    """A `Step` that keeps its forward passes: `unroll(kept, ...)`, then `Learner.update(..., kept.sum_gradient)`."""

    def __init__(self, reuse: ReuseForward, axis: int) -> None:
        self._reuse, self._axis = reuse, axis
        self._pull_backs: list[Callable[[Any], Any]] = []
        self._last_state: Tree = ()
        self._forward: Tree = ()

    def __call__(
        self, variables: Variables, carry: Carry, env_keys: Tensor, actor_keys: Tensor
    ) -> tuple[Carry, ActorOutput]:
        params = {name: variables[name] for name in self._reuse.names}
        buffers = {name: x for name, x in variables.items() if name not in params}
        before = carry._replace(actor_state=())
        _, (after, output), pull_back = self._reuse.step(
            (params, carry.actor_state), buffers, before, env_keys, actor_keys
        )
        self._pull_backs.append(pull_back)
        self._last_state, self._forward = after.actor_state, output.extras["forward"]
        return after, output

    def sum_gradient(self, state: LearnerState, chunks: list[Batch], keys: Tensor) -> tuple[Tensor, tuple[str, ...]]:
        """See `learner.SumGradient`."""
        (batch,) = chunks
        self._reuse.check(self._forward, batch)
        own, d_forward, metrics = self._reuse.loss(state.params, state.buffers, state.targets, batch, keys)
        # By name, not in order: `prepare` may have put the dict together anew.
        d_leaves, write = reader(self._forward)(d_forward), writer(self._forward)
        d_steps = [write(leaves) for leaves in zip(*map(self._by_step, d_leaves), strict=True)]
        d_state = pytree.tree_map(torch.zeros_like, self._last_state)
        total: Variables = {}
        for pull_back, d_step in zip(reversed(self._pull_backs), reversed(d_steps), strict=True):
            d_params, d_state = pull_back((d_step, d_state))
            total = {name: total[name] + x for name, x in d_params.items()} if total else d_params
        pulled = self._reuse.learner.groups.flat(total, self._axis)
        return torch.cat([own + pulled, torch.stack([*metrics.values()], -1)], -1), tuple(metrics)

    def _by_step(self, rows: Tensor) -> tuple[Tensor, ...]:
        """`[T * B, ...]`, or `[T, B, ...]` of recurrent agents, as T tensors."""
        if not self._reuse.learner.agent.recurrent:
            rows = rows.unflatten(self._axis, (len(self._pull_backs), -1))
        return rows.unbind(self._axis)

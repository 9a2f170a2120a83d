"""Learning from replay: what an iteration does with its trajectory instead of `Learner.update`."""

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchpod import random
from torchpod.agent import Agent, Variables, bind
from torchpod.compile import Compiler, span
from torchpod.learner import Learner, LearnerState
from torchpod.replay.buffer import Priorities, ReplayBuffer, ReplayConfig, fill_iterations
from torchpod.trees import stack
from torchpod.types import Batch, Carry, Trajectory, Tree


def iterations_before(agent: Agent, config: ReplayConfig | None, *, num_envs: int, unroll_length: int) -> int:
    """Iterations of a run that only fill replay: 0 of an agent that learns without it.

    Args:
      agent: that of the run.
      config: see `ReplayConfig`.
      num_envs: B on all ranks.
      unroll_length: T.
    """
    if not agent.replayed:
        return 0
    sizes = {"num_envs": num_envs, "unroll_length": unroll_length, "length": agent.replayed}
    return fill_iterations(config or ReplayConfig(), **sizes, sequences=agent.recurrent)


class ReplayLearner:
    """Stores trajectories, and updates an agent from samples of what is stored.

    An iteration stores T steps of B environments and makes `num_minibatches` updates, whose rows are drawn together,
    before the first of them; priorities are written back together, after the last. The rows of a minibatch over all
    ranks are weighted to sum to 1: importance weights are relative to their mean.

    Args:
      agent: with `replayed` > 0.
      learner: of the agent, with its `iterations_before`.
      config: see `ReplayConfig`.
      num_envs: B on this rank.
      unroll_length: T.
      compiler: how to compile.

    Raises:
      ValueError: if the settings do not fit.
    """

    def __init__(
        self,
        agent: Agent,
        learner: Learner,
        config: ReplayConfig,
        *,
        num_envs: int,
        unroll_length: int,
        compiler: Compiler,
    ) -> None:
        if learner.config.num_epochs != 1:
            raise ValueError(
                f"algo.learner.num_epochs={learner.config.num_epochs}: {type(agent).__name__} draws new rows from "
                "replay for every update; use num_epochs=1, and num_minibatches for the updates per iteration."
            )
        if config.batch_size > config.capacity:
            raise ValueError(
                f"algo.replay.batch_size={config.batch_size} is more than algo.replay.capacity={config.capacity}; "
                "lower it, or raise that."
            )
        self.agent, self.learner, self.population = agent, learner, compiler.population
        self.batch_size = learner.ranks.share(config.batch_size, "algo.replay.batch_size")
        self.buffer = ReplayBuffer(
            config,
            num_envs=num_envs,
            unroll_length=unroll_length,
            length=agent.replayed,
            sequences=agent.recurrent,
            num_ranks=learner.ranks.world_size,
            population=compiler.population,
        )
        assert learner.iterations_before == self.buffer.fill_iterations
        if learner.num_iterations < 1:
            total, steps = learner.num_iterations + learner.iterations_before, num_envs * unroll_length
            raise ValueError(
                f"{total} iterations of {steps * learner.ranks.world_size} steps "
                f"end before anything is learned: replay samples from the iteration on that follows min_size="
                f"{config.min_size} steps, with windows of {agent.replayed} steps whole (longer with n_step); raise "
                "total_env_steps, or lower one of these."
            )
        self._draw = compiler(self._draw_one, fall_back=agent.may_fall_back)

    def check(self, iterations_per_call: int) -> None:
        """Before a run.

        Raises:
          ValueError: if a part of every unroll would never be learned from, or a call to the device may overwrite what
            its repetition would need.
        """
        most, length = self.agent.longest_unroll, self.buffer.unroll_length
        if most is not None and length > most:
            raise ValueError(
                f"algo.unroll_length={length}: {type(self.agent).__name__} learns from {most} steps for every unroll, "
                f"and never would from the rest; use algo.unroll_length={most}, or raise algo.agent.length."
            )
        if iterations_per_call > self.buffer.slack:
            raise ValueError(
                f"loop.iterations_per_call={iterations_per_call}: replay has room for {self.buffer.slack}; use at most "
                "that."
            )

    def begin(self, agent: Agent, carry: Carry, actor_keys: Tensor) -> Priorities | tuple[()]:
        """The priorities of an empty ring, of one member.

        Args:
          agent: makes one decision, by which the memory that is needed is known before anything is compiled.
          carry: of one member, before the first step.
          actor_keys: `[B, 3]`.

        Raises:
          ValueError: if there is not enough memory.
        """
        with torch.no_grad():
            output, _ = agent.act(carry.timestep, carry.actor_state, random.at(actor_keys, carry.step + 1))
        timestep, output = pytree.tree_map(lambda x: x[None], (carry.timestep, output))
        trajectory = Trajectory(timestep, output, carry.actor_state, ())
        self.buffer.check_memory(trajectory if self.population == 1 else stack([trajectory] * self.population))
        return self.buffer.priorities(actor_keys.device)

    def store(
        self, state: LearnerState, trajectory: Trajectory, priorities: Priorities | tuple[()], iteration: Tensor
    ) -> LearnerState:
        """Keeps the trajectory of an iteration, without learning from it."""
        with span("insert"):
            self.buffer.insert(trajectory, iteration, priorities)
        return self.learner.observe(state, trajectory)

    def update(
        self,
        state: LearnerState,
        trajectory: Trajectory,
        priorities: Priorities | tuple[()],
        iteration: Tensor,
        keys: Tensor,
    ) -> tuple[LearnerState, dict[str, Tensor]]:
        """Keeps the trajectory of an iteration, and learns from what is kept.

        Args:
          state: of the learner.
          trajectory: T steps of this rank's B environments.
          priorities: of the buffer, written in place.
          iteration: int64 scalar, or `[P]`.
          keys: `[B, 3]`, with `Learner.counters_per_update` fresh counters.

        Returns:
          The next state, and metrics: means over the updates and ranks.
        """
        state = self.store(state, trajectory, priorities, iteration)
        with span("sample"):
            minibatches, moments, leaf, own = self._draw(
                state.params, state.buffers, self.buffer.storage, priorities, iteration, state.num_steps, keys
            )
        state, metrics, new = self.learner.learn(state, minibatches, moments, own)
        if isinstance(priorities, Priorities):
            if not new:
                raise ValueError(
                    f"algo.replay.prioritised=true needs priorities, and the loss of {type(self.agent).__name__} gives "
                    "none; return LossOutput(..., priority=...), or set it to false."
                )
            priority = torch.cat(new, -1)
            if priority.shape != leaf.shape:
                raise ValueError(
                    f"the loss of {type(self.agent).__name__} gives {priority.shape[-1]} priorities for "
                    f"{leaf.shape[-1]} windows of replay; LossOutput.priority must have one per window."
                )
            with span("priorities"):
                self.buffer.write_back(priorities, leaf, priority)
        return state, metrics

    def _draw_one(
        self,
        params: Variables,
        buffers: Variables,
        storage: Tree,
        priorities: Priorities | tuple[()],
        iteration: Tensor,
        num_steps: Tensor,
        keys: Tensor,
    ) -> tuple[Batch, Tensor, Tensor, Tensor]:
        """Minibatches `[M, ...]`, their moments, where they come from: leaves `[M * R]` in the same order; a key."""
        m, rows, key = self.learner.config.num_minibatches, self.batch_size, keys[0]
        buffers = self.learner.annealed_at(buffers, num_steps)
        beta = 1.0 - (1.0 - self.buffer.config.beta) * self.learner.remaining(num_steps)
        drawn = self.buffer.sample(storage, priorities, iteration, beta, m * rows, random.advance(key, 1))
        batch = bind(self.agent, params | buffers).prepare(drawn.trajectory, random.split(key, m * rows))
        steps = batch.steps | {"weight": batch.steps["weight"] * drawn.weight}

        def deal(x: Tensor) -> Tensor:  # [T', M * R, ...] -> [M, T', R, ...]: each gets every m-th of the strata
            x = x.reshape(x.shape[0], rows, m, *x.shape[2:]).movedim(2, 0)
            return (x if self.agent.recurrent else x.flatten(1, 2)).contiguous()

        def deal_state(x: Tensor) -> Tensor:
            return x.reshape(rows, m, *x.shape[1:]).movedim(1, 0).contiguous()

        steps = pytree.tree_map(deal, steps)
        state = pytree.tree_map(deal_state, batch.actor_state) if self.agent.recurrent else ()
        moments, leaf = self.learner.dealer.moments_of(steps), deal_state(drawn.leaf).flatten()
        return Batch(steps, state), moments, leaf, random.advance(key, 2)

"""The learner: epochs of minibatches over one trajectory, for any agent. Read agent.py and dealer.py first.

`update(state, trajectory, keys)` is pure: it returns a new state. It is built of functions that are compiled apart
(`_prepare`, `_gradient`, `_apply`, and the dealer's), with plain Python between them, so that a large batch costs no
compile time and a captured graph holds them all. Between them go the two sums over ranks: the moments of an epoch's
minibatches, and one flat gradient per optimizer step.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchpod import random
from torchpod.agent import Agent, Variables, bind
from torchpod.bounds import bounded
from torchpod.compile import Compiler, span
from torchpod.dealer import Dealer, weight_of_buffer
from torchpod.distributed import ALONE, Ranks
from torchpod.groups import Groups, padded
from torchpod.hints import nearest
from torchpod.measures import measure, metrics_of, of_all, prefixes
from torchpod.nets import RunningMoments
from torchpod.ops.moments import Moments, merge, sums_about
from torchpod.ops.schedules import piecewise_linear
from torchpod.trees import member
from torchpod.types import Batch, Trajectory


@dataclass(frozen=True)
class LearnerConfig:
    """How an agent is optimised. Defaults are those of PPO on classic control in purejaxrl and CleanRL."""

    num_epochs: int = 4
    """Passes over each trajectory."""
    num_minibatches: int = 4
    """Updates per pass: parts of equal size that the trajectory is cut into. With replay: updates per iteration."""
    learning_rate: float | dict[str, float] = bounded(2.5e-4, least=0)
    """Of Adam (Kingma and Ba 2015); or one per optimizer group."""
    anneal_learning_rate: bool = True
    """Let the learning rate fall linearly to 0 over the iterations of the run."""
    anneal: tuple[str, ...] = ()
    """Hyperparameters of the agent that fall linearly to 0 over the run, e.g. entropy_coefficient."""
    schedules: dict[str, tuple[tuple[float, ...], ...]] | None = None
    """`{entropy_coefficient: [[0, 0.5], [5e7, 0.05]]}`: a hyperparameter of the agent, `learning_rate` or
    `learning_rate.GROUP` by points (environment steps, value): straight lines between them, constant before and after.
    Steps count as those of total_env_steps do. It takes the place of the setting, and of its annealing."""
    max_grad_norm: float | dict[str, float] = bounded(0.5, least=1e-9)
    """Global-norm clip of each optimizer group, or one per group; inf, in a file .inf, clips nothing."""
    beta1: float = bounded(0.9, least=0, most=0.999999)  # of 1 nothing would be learned, or divided by 0
    """Decay of Adam's mean of gradients."""
    beta2: float = bounded(0.999, least=0, most=0.999999)
    """Decay of Adam's mean of squared gradients."""
    epsilon: float = bounded(1e-5, least=0, most=1)
    """Adam adds it to the root of that mean of squares, by which it divides."""
    chunk_rows: int | None = None
    """Rows per gradient call, about: a minibatch is summed up in equal chunks so that activations stay in cache. null:
    2048 on CPU, 4,194,304 on CUDA."""


class LearnerState(NamedTuple):
    """Everything that learning changes. Leaves have a leading P axis in a population."""

    params: Variables
    buffers: Variables
    """Hyperparameters (float32 scalars) and statistics of the agent."""
    targets: Variables
    """Target parameters; empty if the agent has none."""
    mu: Variables
    nu: Variables
    """First and second moments of Adam: one flat vector per optimizer group (groups.py)."""
    learning_rate: dict[str, Tensor]
    """Per optimizer group, before annealing."""
    num_steps: Tensor
    """int64 scalar, optimizer steps of the run."""
    taken: dict[str, Tensor]
    """int64 scalars, of the agent's `policy_groups`: the steps that each took, for Adam's bias correction."""
    healthy: Tensor
    """bool scalar. A gradient that is not finite latches it to False and turns later updates into no-ops."""


_BUFFER, _SHARE = "buffer/", "buffer share/"
"""Among the metrics, before the names of buffers: their values, and how much the rows count that these come from."""
_PLAYED = "policy share/"
"""Likewise, before the names of policies: 1, or 0 if a minibatch has nobody who follows it."""

SumGradient = Callable[[LearnerState, list[Batch], Tensor], tuple[Tensor, tuple[str, ...]]]
"""(state, chunks of a minibatch, keys) -> gradients of all parameters and metrics, one flat vector; names of the
metrics."""


class Learner:
    """Updates an agent from trajectories.

    Args:
      agent: what to train; only its methods are used, its parameters live in `LearnerState`.
      config: see `LearnerConfig`.
      num_iterations: iterations of the whole run, for annealing.
      iterations_before: the first of these, which only fill replay: what falls over the run falls after them.
      steps_per_iteration: steps of all environments on all ranks in an iteration, which schedules count.
      compiler: how to compile (and vmap) the parts.
      ranks: over whom to sum.
    """

    def __init__(
        self,
        agent: Agent,
        config: LearnerConfig,
        *,
        num_iterations: int,
        iterations_before: int = 0,
        steps_per_iteration: int = 1,
        compiler: Compiler | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.agent, self.config, self.ranks = agent, config, ranks
        self.num_iterations, self.iterations_before = num_iterations - iterations_before, iterations_before
        self.steps_per_iteration = steps_per_iteration
        self._schedules = config.schedules or {}
        self.groups = Groups(agent)
        for group in set(agent.policy_groups) - self.groups.names.keys():
            raise ValueError(
                f"policy_groups has {group!r}, the agent has optimizer groups {sorted(self.groups.names)}."
            )
        for group in set(agent.optimizer_intervals) - self.groups.names.keys():
            raise ValueError(
                f"optimizer_intervals has {group!r}, the agent has optimizer groups {sorted(self.groups.names)}."
            )
        alone = [group for group in self.groups.names if group not in agent.policy_groups]
        self._passes = [*((group,) for group in alone), *([agent.policy_groups] if agent.policy_groups else [])]
        """The groups whose gradients are those of one sum: a policy's loss has no other's parameters."""
        self._max_grad_norm = self._by_group("max_grad_norm", config.max_grad_norm)
        self._annealed = tuple(dict.fromkeys((*config.anneal, *agent.annealed)))
        compiler = compiler or Compiler(enabled=False)
        self.dealer = Dealer(agent, config.num_minibatches, config.chunk_rows, compiler=compiler, ranks=ranks)
        self._prepare = compiler(self._prepare_one, fall_back=agent.may_fall_back)
        self._gradient = compiler(self._gradient_one, fall_back=agent.may_fall_back)
        self._apply = compiler(self._apply_one)
        self._sum_chunks = compiler.recorded(self._sum_chunks_of)
        # With others, sums over ranks lie between the steps.
        recorded = compiler.recorded if ranks.world_size == 1 else lambda fn: fn
        self._epochs, self._learn = recorded(self._epochs_of), recorded(self._learn_of)
        self._steps = recorded(self._steps_of)  # a part of these two, and by itself where they cannot be
        self._ready = compiler(self._ready_one)
        self._has_statistics = any(isinstance(module, RunningMoments) for module in agent.modules())
        self._observe = compiler(self._observe_one)
        self._absorb = compiler(self._absorb_one)
        self.counters_per_update = 1 + config.num_epochs * (config.num_minibatches + 1)
        self._flat_like: tuple[torch.Size, torch.dtype] | None = None
        self._metric_names: tuple[str, ...] = ()
        self._told: tuple[str, ...] = ()

    def _by_group(self, setting: str, value: float | dict[str, float]) -> dict[str, float]:
        """A setting of the learner, of each optimizer group."""
        groups = self.groups.names
        numbers: dict[str, float] = value if isinstance(value, dict) else dict.fromkeys(groups, value)
        if set(numbers) != set(groups):
            raise ValueError(
                f"{setting} has entries {sorted(numbers)}, the agent has optimizer groups {sorted(groups)}; give one "
                "for each, or one number for all."
            )
        return numbers

    def init(self, params: Variables, buffers: Variables) -> LearnerState:
        """The state before the first update, of one member."""
        device, groups = next(iter(params.values())).device, self.groups.names
        rates = self._by_group("learning_rate", self.config.learning_rate)
        known = [name for name, x in buffers.items() if x.ndim == 0 and x.dtype == torch.float32]
        for name in self._annealed:
            is_own, kind = name not in self.config.anneal, type(self.agent).__name__
            if name not in (buffers if is_own else known):  # an agent in float64 may anneal its own
                where = f"{kind}.annealed={self.agent.annealed}" if is_own else f"anneal={list(self.config.anneal)}"
                raise ValueError(f"{where}: {name} is not known; {nearest(name, known)}")
        known += ["learning_rate", *(f"learning_rate.{group}" for group in groups)]
        for name in self._schedules:
            if name not in known:
                raise ValueError(f"schedules.{name} is not known; {nearest(name, known)}")
            if name in self.config.anneal:
                raise ValueError(f"schedules and anneal both have {name}; leave it out of one of them.")
        moments = {group: params[names[0]].new_zeros(sum(self.groups.sizes(group))) for group, names in groups.items()}
        return LearnerState(
            params=params,
            buffers=buffers,
            targets={k: v.clone() for k, v in params.items()} if self.agent.target_rate is not None else {},
            mu=moments,
            nu={group: x.clone() for group, x in moments.items()},
            learning_rate={k: torch.tensor(float(v), device=device) for k, v in rates.items()},
            num_steps=torch.zeros((), dtype=torch.int64, device=device),
            taken={
                group: torch.zeros((), dtype=torch.int64, device=device)
                for group in groups
                if group in self.agent.policy_groups
            },
            healthy=torch.ones((), dtype=torch.bool, device=device),
        )

    def update(
        self,
        state: LearnerState,
        trajectory: Trajectory,
        keys: Tensor,
        sum_gradient: SumGradient | None = None,
    ) -> tuple[LearnerState, dict[str, Tensor]]:
        """All epochs and minibatches over one trajectory.

        Args:
          state: from `init` or the last `update`.
          trajectory: T steps of this rank's B environments.
          keys: `[B, 3]`, one key per environment, with `counters_per_update` fresh counters.
          sum_gradient: where the gradients of a minibatch's chunks come from, if not from the agent's loss alone
            (reuse_forward.py).

        Returns:
          The next state, and metrics: scalars, means over the minibatches and ranks, and those of measures.py.
        """
        buffers = self.annealed(state)
        loss_keys = random.advance_each(keys[..., 0, :], self.counters_per_update).unbind(-2)
        batch, measured = self._prepare(state.params, buffers, trajectory, keys)
        told = measured if isinstance(measured, dict) else metrics_of(self._told, *of_all(self.ranks, *measured))
        deals = self._numbers(state, range(1, self.counters_per_update, self.config.num_minibatches + 1))
        learning = state._replace(buffers=buffers)
        if sum_gradient is None:
            num_chunks = self.dealer.num_chunks(batch.steps, dealt=False)
            # An example with the keys of the first step, which draws nothing anew.
            begin = self._begin(state, num_chunks, loss_keys[2], lambda: self.dealer.deal(batch, keys, deals[0]))
            stepped, totals = self._epochs(learning, batch, keys, deals, loss_keys, *begin)
        else:
            stepped, totals = self._epochs_of(learning, batch, keys, deals, loss_keys, sum_gradient=sum_gradient)
        state = self.observe(stepped._replace(buffers=state.buffers | stepped.buffers), trajectory)
        return state, self._means(totals) | told

    def learn(
        self, state: LearnerState, minibatches: Batch, moments: Tensor, keys: Tensor
    ) -> tuple[LearnerState, dict[str, Tensor], list[Tensor]]:
        """One optimizer step per minibatch, of rows that were chosen elsewhere (torchpod.replay).

        Args:
          state: to be updated.
          minibatches: `[M, ...]`.
          moments: of this rank's minibatches, from `Dealer.moments_of`.
          keys: `[3]`, with M fresh counters.

        Returns:
          The next state, metrics, and the priorities of the rows of each minibatch, `[R]`, if the loss gives any.
        """
        numbers, zeros = self._begin(
            state, self.dealer.num_chunks(minibatches.steps, dealt=True), keys, lambda: minibatches
        )
        stepped, metrics, priorities = self._learn(state, minibatches, self.ranks.sum(moments), keys, numbers, zeros)
        new = stepped._replace(buffers=state.buffers | stepped.buffers)
        return new, self._means(metrics), priorities

    def _learn_of(
        self,
        state: LearnerState,
        minibatches: Batch,
        moments: Tensor,
        keys: Tensor,
        numbers: Sequence[Tensor],
        zeros: tuple[Tensor, ...],
    ) -> tuple[LearnerState, list[Tensor], list[Tensor]]:
        """As `_steps_of`, of minibatches with moments over all ranks."""
        buffers, minibatches, keys = self._ready(state.buffers, state.num_steps, minibatches, moments, keys)
        chunks = self.dealer.cut(minibatches, len(numbers))
        return self._steps(state._replace(buffers=buffers), chunks, keys.unbind(-2), numbers, zeros)

    def observe(self, state: LearnerState, trajectory: Trajectory) -> LearnerState:
        """Adds a new trajectory to the agent's running statistics, over all ranks."""
        if not self._has_statistics:
            return state
        sums = self._observe(state.params, self.annealed(state), trajectory)
        return self._absorb(state, {name: self.ranks.sum(x) for name, x in sums.items()})

    def _epochs_of(
        self,
        state: LearnerState,
        batch: Batch,
        keys: Tensor,
        deals: Sequence[Tensor],
        loss_keys: Sequence[Tensor],
        numbers: Sequence[Tensor] = (),
        zeros: tuple[Tensor, ...] = (),
        sum_gradient: SumGradient | None = None,
    ) -> tuple[LearnerState, list[Tensor]]:
        """All steps, and their metrics; the buffers of the state are those that the loss changed."""
        m, changed, totals = self.config.num_minibatches, {}, []
        for epoch, deal in enumerate(deals):
            first = 2 + epoch * (m + 1)
            chunks = self.dealer.cut(self.dealer.deal(batch, keys, deal), len(numbers) or 1)
            given = chunks, loss_keys[first : first + m]
            if sum_gradient is None:
                stepped, metrics, _ = self._steps(state, *given, numbers, zeros)
            else:
                stepped, metrics, _ = self._steps_of(state, *given, sum_gradient=sum_gradient)
            changed |= stepped.buffers
            state = stepped._replace(buffers=state.buffers | changed)
            totals += metrics
        return state._replace(buffers=changed), totals

    def _steps_of(
        self,
        state: LearnerState,
        chunks: list[Batch],
        keys: Sequence[Tensor],
        numbers: Sequence[Tensor] = (),
        zeros: tuple[Tensor, ...] = (),
        sum_gradient: SumGradient | None = None,
    ) -> tuple[LearnerState, list[Tensor], list[Tensor]]:
        """A step along the gradient of each minibatch; their metrics, and the priorities of their chunks."""
        num_chunks, metrics, priorities = len(chunks) // len(keys), [], []
        changed: Variables = {}
        for i, step_keys in enumerate(keys):
            own = chunks[i * num_chunks : (i + 1) * num_chunks]
            with span("gradient"):
                if sum_gradient is None:
                    fixed = state.params, state.buffers, state.targets
                    total, of_rows = self._sum_chunks(*fixed, own, step_keys, numbers, zeros)
                    priorities += of_rows
                else:
                    total, self._metric_names = sum_gradient(state, own, step_keys)
            self.ranks.sum(total)
            state, of_step = self._applied(state, total)
            metrics.append(of_step)
            changed |= self._changed(of_step, state.buffers)
            if changed:
                state = state._replace(buffers=state.buffers | changed)
        return state._replace(buffers=changed), metrics, priorities

    def _sum_chunks_of(
        self,
        params: Variables,
        buffers: Variables,
        targets: Variables,
        chunks: list[Batch],
        keys: Tensor,
        numbers: Sequence[Tensor],
        total: tuple[Tensor, ...],
    ) -> tuple[Tensor, list[Tensor]]:
        """Gradient and metrics of a minibatch, chunk by chunk, and the priorities of its rows."""
        priorities = []
        for chunk, number in zip(chunks, numbers, strict=True):
            flat, of_rows = self._gradient(params, buffers, targets, chunk, keys, number, total)
            total, priorities = (flat,), [*priorities, *of_rows]
        return total[0], priorities

    def _begin(
        self, state: LearnerState, num_chunks: int, keys: Tensor, minibatches: Callable[[], Batch]
    ) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        """What `_sum_chunks_of` begins with: the numbers of a minibatch's chunks, and zeros if there are several.

        How many zeros is learned once, from the gradient of some rows of `minibatches()`, which are asked for only
        then: it is not compiled, and of a whole chunk would take several times the memory of what is.
        """
        numbers, lead = self._numbers(state, range(num_chunks)), state.healthy.shape
        if num_chunks == 1:
            return numbers, ()
        if self._flat_like is None:
            chunk = self.dealer.cut(minibatches(), num_chunks)[0]
            first: Any = state.params, state.buffers, state.targets, chunk, keys, numbers[0]
            params, buffers, targets, chunk, key, number = member(first, 0) if lead else first
            flat, _ = self._gradient_one(params, buffers, targets, self.dealer.some_of(chunk), key, number, ())
            self._flat_like = torch.Size([*lead, *flat.shape]), flat.dtype
        shape, dtype = self._flat_like
        return numbers, (torch.zeros(shape, dtype=dtype, device=state.healthy.device),)

    def _numbers(self, state: LearnerState, numbers: range) -> list[Tensor]:
        """Int64 scalars, of all members."""
        each = torch.arange(numbers.start, numbers.stop, numbers.step, device=state.healthy.device)
        return list(each.expand(*state.healthy.shape, -1).unbind(-1))

    def _changed(self, metrics: Tensor, buffers: Variables) -> Variables:
        """The buffers that the loss gave new values; as they were if no row counted, or what is new is not finite."""
        if not any(name.startswith(_SHARE) for name in self._metric_names):
            return {}
        columns = dict(zip((*self._metric_names, "healthy"), metrics.unbind(-1), strict=False))
        found: Variables = {}
        for name in buffers:
            if _SHARE + name in columns:
                share = columns[_SHARE + name]
                new = (columns[_BUFFER + name] / share).to(buffers[name].dtype)
                is_new = (share > 0) & (columns["healthy"] > 0) & new.isfinite()
                found[name] = torch.where(is_new, new, buffers[name])
        return found

    def _means(self, metrics: list[Tensor]) -> dict[str, Tensor]:
        """Over minibatches, by name; of a policy over those in which somebody follows it."""
        of_all = torch.stack(metrics, -1)
        return self._named(of_all.nanmean(-1) if self.agent.policy_groups else of_all.mean(-1))

    def _named(self, metrics: Tensor) -> dict[str, Tensor]:
        """The metrics of `_apply_one` by name."""
        norms = ["grad_norm" if group == "loss" else f"grad_norm/{group}" for group in self.groups.names]
        named = dict(zip((*self._metric_names, "healthy", *norms), metrics.unbind(-1), strict=True))
        return {name: x for name, x in named.items() if not name.startswith((_SHARE, _PLAYED))}

    def apply_sum(
        self, state: LearnerState, total: Tensor, metric_names: tuple[str, ...]
    ) -> tuple[LearnerState, dict[str, Tensor]]:
        """One optimizer step along a gradient that was taken elsewhere (through_env.py).

        Args:
          state: to be updated.
          total: flat: gradient, metrics and, at the end, the weight of this rank's rows, by which all else is divided.
          metric_names: of the metrics.
        """
        self._metric_names = metric_names
        self.ranks.sum(total)
        rows = total[..., -1:]  # none, if all of them were resets
        new, metrics = self._applied(state, total[..., :-1] / torch.where(rows > 0, rows, 1.0))
        return new._replace(buffers=new.buffers | self._changed(metrics, new.buffers)), self._named(metrics)

    def _applied(self, state: LearnerState, flat: Tensor) -> tuple[LearnerState, Tensor]:
        with span("apply"):
            new, metrics = self._apply(state._replace(buffers={}), flat)  # fewer tensors to hand over
        return new._replace(buffers=state.buffers), metrics

    def losses(
        self, params: Variables, buffers: Variables, targets: Variables, batch: Batch, keys: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], tuple[Tensor, ...]]:
        """The agent's loss per optimizer group, its metrics with these among them, all scalars; priorities, if any."""
        target = bind(self.agent, targets | buffers) if targets else None
        out = bind(self.agent, params | buffers).loss(batch, keys, target)
        losses = out.loss if isinstance(out.loss, dict) else {"loss": out.loss}
        if set(losses) != set(self.groups.names):
            kind, names = type(self.agent).__name__, sorted(self.groups.names)
            raise ValueError(
                f"{kind}.loss must give one loss for each of optimizer_groups(), {names}, and gives {sorted(losses)}; "
                "let it return a dict with these names, or a scalar if the only one is `loss`."
            )
        changed: dict[str, Tensor] = {}
        for name, x in out.buffers.items():
            if name not in buffers or not buffers[name].is_floating_point():
                known = [k for k, v in buffers.items() if v.is_floating_point() and v.ndim == 0]
                raise ValueError(f"LossOutput.buffers has {name!r}, no scalar buffer of floats; {nearest(name, known)}")
            share = batch.steps[weight_of_buffer(name, batch.steps)].sum()  # of this chunk
            changed |= {_SHARE + name: share, _BUFFER + name: torch.where(share > 0, x * share, 0.0)}
        priorities = () if out.priority is None else (out.priority.detach(),)
        told = {"loss" if name == "loss" else f"loss/{name}": x for name, x in losses.items()}
        changed |= {_PLAYED + name: batch.steps[f"{name}/weight"].sum() for name in self.agent.policy_groups}
        dtype = next(iter(params.values())).dtype  # of the gradients that they go with
        all_told = {**out.metrics, **told, **changed}
        return losses, {name: x.detach().to(dtype) for name, x in all_told.items()}, priorities

    def remaining(self, num_steps: Tensor) -> Tensor:
        """From 1 in the first iteration to 0 after the last."""
        per_iteration = self.config.num_epochs * self.config.num_minibatches
        done = torch.div(num_steps, per_iteration, rounding_mode="floor") / self.num_iterations
        return (1.0 - done).clamp(min=0.0)

    def env_steps(self, num_steps: Tensor, iteration: Tensor | None = None) -> Tensor:
        """Steps of all environments before this iteration, int64; `iteration` is needed where it may only collect."""
        per_iteration = self.config.num_epochs * self.config.num_minibatches
        collected = self.iterations_before if iteration is None else iteration.clamp(max=self.iterations_before)
        return (torch.div(num_steps, per_iteration, rounding_mode="floor") + collected) * self.steps_per_iteration

    def acting(self, state: LearnerState, iteration: Tensor) -> Variables:
        """What an agent acts with in an iteration of the run: parameters, and buffers as they are by then."""
        return state.params | self.annealed(state, iteration)

    def annealed(self, state: LearnerState, iteration: Tensor | None = None) -> Variables:
        """The buffers that this iteration acts and learns with; None: one that learns."""
        return self.annealed_at(state.buffers, state.num_steps, iteration)

    def annealed_at(self, buffers: Variables, num_steps: Tensor, iteration: Tensor | None = None) -> Variables:
        """The same, of what is given."""
        changed: Variables = {}
        if self._annealed:
            remaining = self.remaining(num_steps)
            changed |= {name: buffers[name] * remaining for name in self._annealed}
        schedules = {name: points for name, points in self._schedules.items() if name in buffers}
        if schedules:
            env_steps = self.env_steps(num_steps, iteration)
            changed |= {name: piecewise_linear(points, env_steps) for name, points in schedules.items()}
        return buffers | changed if changed else buffers

    # The functions below see one member of the population, and are compiled.

    def _prepare_one(
        self, params: Variables, buffers: Variables, trajectory: Trajectory, keys: Tensor
    ) -> tuple[Batch, dict[str, Tensor] | tuple[Tensor, Tensor]]:
        """The batch, and metrics, or with several ranks what they follow from."""
        batch = bind(self.agent, params | buffers).prepare(trajectory, keys)
        self._told, measured = prefixes(batch), {}
        if self._told:
            sums = measure(batch)
            measured = metrics_of(self._told, *sums) if self.ranks.world_size == 1 else sums
        batch = batch._replace(report={})
        if self.agent.recurrent or self.config.num_minibatches == 1:
            return batch, measured
        # In memory [B, T]: rows are picked from one environment after the other, and then lie in cache (5 ms instead
        # of 7 to deal [128, 1024] on one core, most of it for sorting).
        by_env = pytree.tree_map(lambda x: x.transpose(0, 1).contiguous().transpose(0, 1), batch.steps)
        return batch._replace(steps=by_env), measured

    def _ready_one(
        self, buffers: Variables, num_steps: Tensor, minibatches: Batch, moments: Tensor, keys: Tensor
    ) -> tuple[Variables, Batch, Tensor]:
        """What an iteration learns with: buffers, minibatches that are standardised, and the keys `[M, 3]` of steps."""
        keys = random.advance_each(keys, self.config.num_minibatches)
        return self.annealed_at(buffers, num_steps), self.dealer.standardised(minibatches, moments), keys

    def _gradient_one(
        self,
        params: Variables,
        buffers: Variables,
        targets: Variables,
        batch: Batch,
        keys: Tensor,
        index: Tensor,
        total: tuple[Tensor, ...],
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Gradients and metrics of chunk `index`, one flat vector, plus those of the chunks before; and priorities."""
        keys = random.fold_in(keys, index)  # compiles to nothing where a loss draws nothing
        gradients: Variables = {}
        metrics: dict[str, Tensor] = {}
        priorities: tuple[Tensor, ...] = ()
        for groups in self._passes:

            def loss_of(own: Variables, groups: tuple[str, ...] = groups) -> tuple[Tensor, Any]:
                losses, *told = self.losses(params | own, buffers, targets, batch, keys)
                return functools.reduce(torch.add, [losses[group] for group in groups]), told

            names = [name for group in groups for name in self.groups.names[group]]
            own, told = torch.func.grad(loss_of, has_aux=True)({name: params[name] for name in names})
            metrics, priorities = told
            gradients |= own
        self._metric_names = tuple(metrics)
        flat = torch.cat([self.groups.flat(gradients), padded(torch.stack([x.reshape(()) for x in metrics.values()]))])
        return (total[0] + flat if total else flat), priorities

    def _apply_one(self, state: LearnerState, flat: Tensor) -> tuple[LearnerState, Tensor]:
        """Clips and applies a summed gradient: Adam, schedules, targets, and the latch of the NaN guard."""
        c, sizes = self.config, [state.mu[group].numel() for group in self.groups.names]
        *gradients, of_loss = flat.split([*sizes, flat.numel() - sum(sizes)])
        healthy = state.healthy & flat[: sum(sizes)].isfinite().all()
        step = state.num_steps + 1
        remaining = self.remaining(state.num_steps) if c.anneal_learning_rate else 1.0
        columns = dict(zip(self._metric_names, of_loss[: len(self._metric_names)].unbind(), strict=True))
        mu, nu, steps, norms, of_policies = {}, {}, {}, {}, {}
        for group, gradient in zip(self.groups.names, gradients, strict=True):
            interval = self.agent.optimizer_intervals.get(group, 1)
            if group in state.taken:
                taken = state.taken[group] + 1
            else:
                taken = step if interval == 1 else torch.div(step, interval, rounding_mode="floor").clamp(min=1)
            # 1 - beta^taken, which in float32 would lose four digits of beta2 at the first step
            correct1, correct2 = (-torch.expm1(taken * math.log(max(beta, 1e-30))) for beta in (c.beta1, c.beta2))
            # 1e-30 keeps square roots differentiable at 0, for gradients through updates
            norm = (gradient.square().sum() + 1e-30).sqrt()
            scale = (self._max_grad_norm[group] / norm).clamp(max=1.0)
            rate = state.learning_rate[group] * remaining
            if points := self._schedules.get(f"learning_rate.{group}", self._schedules.get("learning_rate")):
                rate = piecewise_linear(points, self.env_steps(state.num_steps))
            norms[group] = norm
            # As one tensor, so that they are computed before the loops below and not in each round of these.
            scale, per_mu, per_nu = torch.stack([scale, rate / correct1, 1.0 / correct2]).unbind()
            gradient = gradient * scale
            # Results of the program, so that they are read below and not computed again.
            mu[group] = torch.where(healthy, torch.lerp(gradient, state.mu[group], c.beta1), state.mu[group])
            nu[group] = torch.where(healthy, torch.lerp(gradient * gradient, state.nu[group], c.beta2), state.nu[group])
            steps[group] = per_mu * mu[group] / ((nu[group] * per_nu + 1e-30).sqrt() + c.epsilon)
            due = step % interval == 0 if interval > 1 else None
            if group in state.taken:
                played = columns[_PLAYED + group] > 0
                norms[group] = torch.where(played, norm, torch.nan)
                own = [x for x in columns if x.startswith(f"{group}/") or x == f"loss/{group}"]
                columns |= {x: torch.where(played, columns[x], torch.nan) for x in own}
                due = played if due is None else due & played
            if due is not None:
                mu[group] = torch.where(due, mu[group], state.mu[group])
                nu[group] = torch.where(due, nu[group], state.nu[group])
                steps[group] = torch.where(due, steps[group], 0.0)
                if group in state.taken:
                    of_policies[group] = torch.where(due, taken, state.taken[group])
        params = {name: state.params[name] - step for name, step in self.groups.by_parameter(steps).items()}
        rate = self.agent.target_rate or 0.0
        if self.agent.target_interval > 1:
            rate = torch.where(step % self.agent.target_interval == 0, rate, 0.0)
        targets = {k: torch.lerp(v, params[k], rate) for k, v in state.targets.items()}
        changed = {"params": params, "targets": targets, "num_steps": step, "taken": of_policies}
        kept = {
            name: pytree.tree_map(lambda a, b: torch.where(healthy, a, b), new, getattr(state, name))
            for name, new in changed.items()
        }
        metrics = [*columns.values(), healthy, *norms.values()]
        return state._replace(mu=mu, nu=nu, healthy=healthy, **kept), torch.stack([x.to(flat.dtype) for x in metrics])

    def _observe_one(self, params: Variables, buffers: Variables, trajectory: Trajectory) -> dict[str, Tensor]:
        """Sums for the running statistics, of this rank's trajectory."""
        seen = bind(self.agent, params | buffers)("statistics", trajectory)
        pairs = {name: x if isinstance(x, tuple) else (x,) for name, x in seen.items()}
        return {name: sums_about(buffers[f"{name}.mean"], *x) for name, x in pairs.items()}

    def _absorb_one(self, state: LearnerState, sums: dict[str, Tensor]) -> LearnerState:
        """Adds them to the statistics, unless a gradient was not finite: then what was seen may not be either."""
        buffers = dict(state.buffers)
        for name, x in sums.items():
            new = merge(Moments(*(buffers[f"{name}.{field}"] for field in Moments._fields)), x)
            for field, value in new._asdict().items():
                buffers[f"{name}.{field}"] = torch.where(state.healthy, value, buffers[f"{name}.{field}"])
        return state._replace(buffers=buffers)

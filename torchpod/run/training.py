"""The training of a run between two calls to the device: rows, checkpoints, evaluations, signals, and failures."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from torchpod.actions import closed_masks
from torchpod.anakin import Anakin, NonFiniteError, Report, RunState
from torchpod.config import TrainConfig
from torchpod.metrics import Logger
from torchpod.run.judge import Judge
from torchpod.run.keeper import Keeper
from torchpod.run.loops import reports
from torchpod.run.progress import UnreadError
from torchpod.run.stop import Interrupted, OverdueError, StopFlag
from torchpod.run.summary import Timing
from torchpod.sebulba import Sebulba
from torchpod.types import Tree
from torchpod.watched import sentence


class LearnerError(RuntimeError):
    """Learning failed in the middle of a run; the cause is the exception."""


class NonFiniteErrorInRun(FloatingPointError):
    """A gradient was not finite; the message names the folder with the trajectory."""


class Training:
    """Trains from a state on, to the end or until it is told to stop.

    Args:
      config: of the run.
      loop: its program.
      state: to begin with.
      wall_s: seconds trained so far.
      keeper: writes its checkpoints.
      judge: evaluates it.
      logger: writes its rows; None on all ranks but the first.
    """

    def __init__(
        self,
        config: TrainConfig,
        loop: Anakin | Sebulba,
        state: RunState,
        wall_s: float,
        *,
        keeper: Keeper,
        judge: Judge,
        logger: Logger | None,
    ) -> None:
        self.state, self.timing = state, Timing(wall_s)
        self._config, self._loop = config, loop
        self._keeper, self._judge, self._logger = keeper, judge, logger
        self._env_steps = int(state.env_steps.sum())
        self._evaluating = False

    def run(self, until: int | None) -> None:
        """Trains up to an iteration, None for the last; `state` and `timing` are then those of the end.

        Raises:
          NonFiniteErrorInRun, LearnerError, Interrupted, ...: see `execute`.
        """
        with (
            StopFlag(self._loop.ranks, self._loop.device, self._given_up) as stop,
            contextlib.closing(reports(self._config, self._loop, self.state, until=until)) as calls,
        ):
            try:
                self._learn(calls, stop)
            except OverdueError:
                lost = self._rescue()
                raise Interrupted(self._given_up() + (lost and f"; {lost}")) from None
            except NonFiniteError as error:
                raise self._non_finite(error) from error
            except Exception as error:
                failure = self._failure(error, stop)
                if failure is error:
                    raise
                raise failure from error
        self.state = pytree.tree_map(torch.clone, self.state)

    def _learn(self, calls: Iterator[Any], stop: StopFlag) -> None:
        loop, keeper, stopping = self._loop, self._keeper, False
        if isinstance(loop, Sebulba):
            self._judge.prepare(loop.learner.acting(self.state.learner, self.state.iteration))  # no thread acts yet
        self._evaluate()  # of a resumed run, that was stopped before it was
        for report, program in self._reported(calls):
            stop.pause()
            self.state = program.state
            if report.failure is not None:
                keeper.dump(report.failure)
            self._log(report)
            stopping, saving = stop.agree(report.iteration >= loop.num_iterations or keeper.due())
            if stopping or saving:
                keeper.save(self.state, self.timing.wall_s)
            if stopping:
                break
            stop.watch()
            self._evaluate(program.failure) if isinstance(loop, Sebulba) else self._evaluate()
        # Asked again: a signal may have come while the last checkpoint was written.
        if stopping or stop.agree(False)[0]:
            raise Interrupted(f"stopped at iteration {keeper.saved_at}; go on with resume={keeper.run_dir}")

    def _reported(self, calls: Iterator[Any]) -> Iterator[Any]:
        """What the loop yields. An OSError of learning is none of the run's files, for which there may be no room."""
        try:
            yield from calls
        except OSError as error:
            if not self.timing.steps:  # of a setting, or of a compiler
                raise
            raise self._learner_error(error) from error

    def _log(self, report: Report) -> None:
        """Counts what a call has done, and writes its row."""
        timing, now = self.timing, int(np.sum(report.env_steps))
        steps, self._env_steps = now - self._env_steps, now
        timing.compile_s += report.compile_s
        timing.wall_s += report.wall_s
        timing.steps += steps
        timing.seconds += report.wall_s
        if self._logger is not None:
            metrics = {name: value.tolist() for name, value in report.metrics.items()}
            times = {"env_steps_per_s": steps / report.wall_s, "wall_s": timing.wall_s, "compile_s": timing.compile_s}
            row = {"iteration": report.iteration, "env_steps": report.env_steps, **metrics, **times}
            self._logger.write(row)

    def _evaluate(self, failure: Callable[[], Exception | None] = lambda: None) -> None:
        """Evaluates, and writes a row, if it is time; raises what `failure` finds in the loop meanwhile."""
        state, iteration = self.state, self._iteration
        if self._logger is not None and self._judge.is_due(iteration):
            self._evaluating = True
            found = self._judge.row(self._loop.learner.acting(state.learner, state.iteration), iteration, failure)
            self._logger.write({"iteration": iteration, "env_steps": state.env_steps.tolist(), **found})
            self._evaluating = False

    @property
    def _iteration(self) -> int:
        return int(self.state.iteration.flatten()[0])

    def _rescue(self) -> str:
        """See `Keeper.rescue`; there is nothing to save before the first iteration."""
        return self._keeper.rescue(self.state, self.timing.wall_s) if self.timing.steps else ""

    def _given_up(self) -> str:
        saved_at, run_dir, alone = self._keeper.saved_at, self._keeper.run_dir, self._loop.ranks.world_size == 1
        if saved_at is None:
            return "stopped without a checkpoint"
        which = "in the middle of the next" if alone else "the last that all ranks have saved"
        return f"stopped at iteration {saved_at}, {which}; go on with resume={run_dir}"

    def _learner_error(self, error: Exception) -> LearnerError:
        number = self._iteration
        what = f"the evaluation after iteration {number}" if self._evaluating else f"iteration {number + 1}"
        return LearnerError(f"{what} failed: {sentence(error)}")

    def _failure(self, error: Exception, stop: StopFlag) -> Exception:
        """What to raise for an error: itself, or one that says when it came; with notes on what is saved."""
        failure = error
        if self.timing.steps and isinstance(error, ValueError | ImportError):  # the agent's, not that of a setting
            failure = self._learner_error(error)
        unread = isinstance(error, UnreadError)  # `torchpod train ... | tee FILE`, where tee has ended
        if unread or self._evaluating or (isinstance(self._loop, Sebulba) and not isinstance(error, OSError)):
            stop.pause()
            if lost := self._rescue():
                failure.add_note(lost)
        if self._keeper.saved_at is not None:
            failure.add_note(f"Iteration {self._keeper.saved_at} is saved; go on with resume={self._keeper.run_dir}")
        return failure

    def _non_finite(self, error: NonFiniteError) -> NonFiniteErrorInRun:
        """What to raise for a gradient that is not finite: where its trajectory is, and what is wrong with that."""
        loop, keeper = self._loop, self._keeper
        lost, wrong = self._rescue(), _not_finite(error.trajectory.timestep)
        what = f"a gradient of iteration {error.iteration} is not finite"
        try:
            path = keeper.dump(error)
        except OSError as full:
            path, lost = "no file", lost or str(full)
        came_from = f"the trajectory it came from is in {path}."
        advice = "Lower algo.learner.learning_rate or algo.learner.max_grad_norm, or check what is learned from."
        env = loop.envs[0] if isinstance(loop, Sebulba) else loop.env
        if closed := closed_masks(env.spec, error.trajectory.timestep.observation):
            what = f"nothing can be learned from iteration {error.iteration}"
            advice = f"The cause is the environment's: {' '.join(closed)}"
        elif loop.replay:
            came_from = f"its rows came from replay; the newest trajectory is in {path}."
            wrong = wrong or _not_finite(loop.replay.buffer.storage)
        if wrong:
            advice = f"The environment gave numbers that are not finite: {', '.join(wrong)}."
        if keeper.saved_at is not None:
            advice += f" Iteration {keeper.saved_at}, before it, is saved in {keeper.run_dir}."
        return NonFiniteErrorInRun(f"{what}; {came_from} {advice} {lost}".rstrip())


def _not_finite(tree: Tree) -> list[str]:
    """Names of the leaves that hold NaN or infinity."""
    floats = [(path, x) for path, x in pytree.tree_flatten_with_path(tree)[0] if x.is_floating_point()]
    # In pieces, for `isfinite` takes as much memory as it looks at, and a replay buffer may have left less than that.
    return [
        pytree.keystr(path).lstrip(".")
        for path, x in floats
        if not all(piece.isfinite().all() for piece in x.flatten().split(1 << 24))
    ]

"""Evaluations of a run, in training and at its end: when one is due, what plays, and what metrics.jsonl has of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchpod import random
from torchpod.agent import Agent
from torchpod.anakin import EVAL_STREAM
from torchpod.compile import Compiler
from torchpod.config import TrainConfig
from torchpod.env import Env
from torchpod.evaluate import Evaluation, Evaluator
from torchpod.metrics import METRICS_FILE, read_metrics
from torchpod.watched import watched


class Judge:
    """Evaluates what a run has learned: now and then, if it is asked to, and at the end.

    Args:
      config: of the run.
      run_dir: its folder, whose metrics.jsonl says after which iteration it was evaluated last.
      agent: its agent.
      env: to play with.
      num_envs: how many environments on the host there may be at once.
      device: of the run.
      compiler: for tensor environments.
    """

    def __init__(
        self,
        config: TrainConfig,
        run_dir: Path,
        agent: Agent,
        env: Env,
        *,
        num_envs: int,
        device: torch.device,
        compiler: Compiler,
    ) -> None:
        self._config, self._agent, self._env = config, agent, env
        self._num_envs, self._compiler = num_envs, compiler
        self._device = device if env.traits.pure else torch.device("cpu")
        self._evaluator: Evaluator | None = None
        self._last = _evaluated_last(run_dir)

    def is_due(self, iteration: int) -> bool:
        """Whether there is to be one after this iteration."""
        every, steps = self._config.evaluation.every, self._config.num_envs * self._config.algo.unroll_length
        return every is not None and self._last * steps // every < iteration * steps // every

    def prepare(self, variables: dict[str, Tensor]) -> None:
        """Compiles, where there is something to compile, before it is to be done."""
        if self._config.evaluation.every is not None and self._env.traits.pure:
            self._made("an evaluation in training").prepare(self._moved(variables))

    def evaluate(
        self, variables: dict[str, Tensor], when: str, failure: Callable[[], Exception | None] = lambda: None
    ) -> Evaluation:
        """Plays the episodes of the run's seed, always the same; raises what `failure` returns meanwhile."""
        return self._made(when)(self._moved(variables), failure)

    def _moved(self, variables: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: x.to(self._device) for name, x in variables.items()}

    def _made(self, when: str) -> Evaluator:
        env = watched(self._env, when, self._config.loop.timeout_s)
        if self._evaluator is None or env is not self._env:  # of a tensor environment it compiles once
            self._evaluator = Evaluator(
                self._agent,
                env,
                random.fold_in(random.key(self._config.evaluation_seed, self._device), EVAL_STREAM),
                num_episodes=self._config.evaluation.episodes,
                compiler=self._compiler,
                num_envs=self._num_envs,
            )
        return self._evaluator

    def row(
        self, variables: dict[str, Tensor], iteration: int, failure: Callable[[], Exception | None]
    ) -> dict[str, Any]:
        """What metrics.jsonl has of it: means over episodes, in a population one for each member."""
        found = self.evaluate(variables, "an evaluation in training", failure)
        self._last = iteration
        parts = {"eval_return": found.returns, "eval_length": found.lengths}
        parts |= {f"eval_return/{name}": x for name, x in found.groups.items()}
        parts |= {f"{name}/eval_return": x for name, x in found.teams.items()}
        row = {name: x.double().mean(-1) for name, x in parts.items()}
        ends = found.finished.sum(-1)
        row |= {f"eval_{name}": (x * found.finished).sum(-1) / ends for name, x in found.episode.items()}
        return {name: x.tolist() for name, x in row.items()}


def _evaluated_last(run_dir: Path) -> int:
    """The iteration of the last evaluation that metrics.jsonl has."""
    rows = read_metrics(run_dir) if (run_dir / METRICS_FILE).is_file() else []
    return max((row["iteration"] for row in rows if "eval_return" in row), default=0)

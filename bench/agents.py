"""Suite `agents`: environment steps per second of agents with replay in whole runs; there is no peer.

    torchpod bench agents [--json FILE] [--quick] [--only NAME]

A row is `torchpod train` with an experiment or other settings, for fewer steps than it has, on one core, or on a GPU if
there is one: acting, storing, drawing and updating, as its summary counts them, without compilation. The rounds have
seeds of their own. On a GPU no case begins after `GPU_BUDGET_S`, and the suite tells which had no time.
"""

import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from torchpod.bench import harness, processes
from torchpod.bench.anakin import describe
from torchpod.bench.compare import RowMaker
from torchpod.bench.harness import Record
from torchpod.compose import load


class Case(NamedTuple):
    """Some steps of a run."""

    name: str
    """Of the row, and of an experiment if there are no settings."""
    steps: int
    settings: tuple[str, ...] = ()

    @property
    def overrides(self) -> list[str]:
        """What `torchpod train` is told."""
        return [*(self.settings or [f"experiment={self.name}"]), f"total_env_steps={self.steps}"]


CASES = (
    Case("dqn_cartpole", 300_000),
    Case("dqn_minatar_breakout", 200_000),
    Case("c51_minatar_breakout", 100_000),
    Case("sac_pendulum", 12_000),
    Case("td3_pendulum", 12_000),
    Case("r2d2_memory_chain", 100_000),
    Case("r2d2_minatar_asterix", 100_000),
    Case("ddpg_pendulum", 12_000, ("experiment=td3_pendulum", "algo=ddpg")),
    Case("sebulba_dqn_cartpole", 300_000, ("experiment=dqn_cartpole", "loop=sebulba")),
    Case("sebulba_r2d2_memory_chain", 100_000, ("experiment=r2d2_memory_chain", "loop=sebulba")),
)

GPU_BUDGET_S = 440.0
"""When the last case begins on a GPU."""
AFTER_BUDGET_S = 110.0
"""How long it may go on: all is over before ten minutes are."""


def main(
    json_path: str | None = None,
    *,
    quick: bool = False,
    only: str | None = None,
    cases: Sequence[Case] = CASES,
    rounds: int = 3,
    overrides: Sequence[str] = (),
    budget_s: float | None = None,
) -> int:
    """Measures, writes the result file, prints the rows; the arguments are those of anakin.py, and of `train`.

    What is not begun within `budget_s` is not measured; by default there is no limit on a CPU.

    Returns:
      0, or 1 if a run failed or there was no time for it.
    """
    if quick:
        cases, rounds = cases[:1], 1
    device = "cuda" if torch.cuda.is_available() else "cpu"
    core = processes.last_core() if device == "cpu" else None
    make = RowMaker()
    if budget_s is None and device == "cuda":
        budget_s = GPU_BUDGET_S
    deadline = math.inf if budget_s is None else time.monotonic() + budget_s
    extra = {"core": core, "rounds": rounds, "quick": quick, "only": only, "budget_s": budget_s}
    with Record("agents", json_path, **extra) as record:
        record.calibrate(core)
        for case in harness.chosen(cases, only, "agents"):
            name = f"{case.name}/{load([*case.overrides, *overrides]).num_envs}"
            if time.monotonic() > deadline:
                record.failures.append((name, f"not measured, the time is over; use --only {case.name}."))
                continue
            try:
                rates = [
                    rate(case, seed, core, [f"device={device}", *overrides], deadline + AFTER_BUDGET_S)
                    for seed in range(rounds)
                ]
            except processes.WorkerError as error:
                record.failures.append((name, str(error)))
                continue
            record.rows.append(make.alone(name, statistics.median(rates), "env_steps/s", rates))
            print(describe(record.rows[-1]), flush=True)
            record.calibrate(core)
    return record.status


def rate(case: Case, seed: int, core: int | None, overrides: Sequence[str], deadline: float = math.inf) -> float:
    """Environment steps per second of one run.

    Raises:
      WorkerError: if it failed, or was not over by the `deadline` of `time.monotonic`.
    """
    with tempfile.TemporaryDirectory(prefix="torchpod-bench-") as folder:
        run = Path(folder) / "run"
        line = [*case.overrides, f"seed={seed}", f"run_dir={run}"]
        line += ["evaluation.episodes=1", "logger.console=false"]
        command = [sys.executable, "-m", "torchpod", "train", *line, *overrides]
        timeout_s = min(1800.0, max(1.0, deadline - time.monotonic()))
        processes.output_of(command, processes.ONE_THREAD, "the run", core=core, timeout_s=timeout_s)
        return json.loads((run / "summary.json").read_text())["env_steps_per_s"]

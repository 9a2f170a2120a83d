"""Suite `agents`: environment steps per second of agents with replay in whole runs, DQN, SAC and TD3 beside JAX.

    torchpod bench agents [--json FILE] [--quick] [--only NAME]

A row is a run of an experiment or of other settings, on one core, or on a GPU if there is one: acting, storing, drawing
and updating, without compilation. The rounds have seeds of their own; the first compiles cold. The peer, of the cases
that have one, is jax_replay.py; what differs is said there. On a GPU no case begins after `GPU_BUDGET_S`, and the suite
tells which had no time. Read harness.py first.
"""

import dataclasses
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from torchpod.bench import anakin, compare, harness, processes
from torchpod.bench.anakin import compile_rows, describe
from torchpod.bench.compare import RowMaker
from torchpod.bench.harness import Record
from torchpod.bench.processes import Measured, Worker, WorkerError
from torchpod.compose import load


class Case(NamedTuple):
    """A run."""

    name: str
    """Of its row, and of the experiment if there are no settings."""
    steps: int
    """Of all environments, as many as the experiment has, or fewer, or more."""
    settings: tuple[str, ...] = ()
    peer: bool = False
    """Whether jax_replay.py has it; then both sides must learn."""

    @property
    def overrides(self) -> list[str]:
        """What `torchpod train` would be told."""
        return [*(self.settings or [f"experiment={self.name}"]), f"total_env_steps={self.steps}"]


CASES = (
    Case("dqn_cartpole", 500_000, peer=True),
    Case("sac_pendulum", 40_000, peer=True),
    Case("td3_pendulum", 40_000, peer=True),
    Case("ddpg_pendulum", 12_000),
    Case("dqn_minatar_breakout", 200_000),
    Case("c51_minatar_breakout", 100_000),
    Case("r2d2_memory_chain", 100_000),
    Case("r2d2_minatar_asterix", 100_000),
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
    workers: tuple[Worker, Worker] | None = None,
) -> int:
    """Measures, writes the result file, prints the rows.

    Args:
      json_path: where the rows go; None for bench/results/.
      quick: the first case, once: whether everything works.
      only: measure the rows whose names begin with this; the page then shows this run in their place.
      cases: what to measure.
      rounds: times that each side runs, in turn; the first compiles cold.
      overrides: of torchpod's runs.
      budget_s: what is not begun by then is not measured; by default there is no limit on a CPU.
      workers: torchpod's and the peer's; None for the real ones.

    Returns:
      0, or 1 if a run failed or there was no time for it, if the work was unequal, a target missed, or one side of two
      learned nothing or much less than the other.
    """
    if quick:
        cases, rounds = cases[:1], 1
    device = "cuda" if torch.cuda.is_available() else "cpu"
    core = processes.last_core() if device == "cpu" else None
    ours, peer = workers or default_workers(device)
    make = RowMaker()
    if budget_s is None and device == "cuda":
        budget_s = GPU_BUDGET_S
    deadline = math.inf if budget_s is None else time.monotonic() + budget_s
    extra = {"core": core, "device": device, "rounds": rounds, "quick": quick, "only": only, "budget_s": budget_s}
    with Record("agents", json_path, **extra) as record:
        record.calibrate(core)
        if device == "cpu" and not workers and not quick:
            anakin.make_libraries(anakin.default_workers()[0])
        for case in harness.chosen(cases, only, "agents"):
            name = f"{case.name}/{load([*case.overrides, *overrides]).num_envs}"
            if time.monotonic() > deadline:
                record.failures.append((name, f"not measured, the time is over; use --only {case.name}."))
                continue
            sides = (ours, peer) if case.peer else (ours,)
            results = measured(case, sides, rounds, device, core, overrides, deadline + AFTER_BUDGET_S)
            a, b = results[ours.name], results.get(peer.name)
            if b is not None:
                row = make.rate(name, a, b, peer_name=peer.name)
                new = [dataclasses.replace(row, note="; ".join(filter(None, [row.note, compare.returned((a, b))])))]
                if device == "cpu" and rounds > 1:
                    new += compile_rows(make, name, (ours, peer), [results])
                record.failures += compare.problems(name, a, b)
                record.failures += [] if overrides else compare.untrained(name, case.name, (a, b))
            elif isinstance(a, WorkerError):
                record.failures.append((name, str(a)))
                continue
            else:
                rates = [rate for m in a for rate in processes.rates(m)]
                new = [make.alone(name, statistics.median(rates), "env_steps/s", rates)]
            for row in new:
                record.rows.append(row)
                print(describe(row), flush=True)
            record.calibrate(core)
    return record.status


def default_workers(device: str) -> tuple[Worker, Worker]:
    """Torchpod in this Python, JAX in that of `.venv-peers`."""
    python, missing = processes.peers_python(device)
    driver = str(processes.ROOT / "bench" / "peers" / "jax_replay.py")
    return (
        Worker("torchpod", (sys.executable, "-m", "torchpod.bench.agents_worker")),
        Worker("jax", (python, driver), missing=missing),
    )


def measured(
    case: Case,
    sides: Sequence[Worker],
    rounds: int,
    device: str,
    core: int | None,
    overrides: Sequence[str],
    deadline: float,
) -> dict[str, Measured]:
    """The rounds of each side; none goes on after the `deadline` of `time.monotonic`."""
    results: dict[str, Measured] = {side.name: [] for side in sides}
    with tempfile.TemporaryDirectory(prefix="torchpod-bench-") as cache:
        for seed in range(rounds):
            for side in sides:
                done = results[side.name]
                if isinstance(done, WorkerError):
                    continue
                # The first, torchpod's, takes settings of any kind; a peer knows the experiment by its name.
                own = [*case.overrides, *overrides] if side is sides[0] else ["--case", case.name]
                arguments = [*own, "--seed", str(seed), "--steps", str(case.steps), "--device", device]
                timeout_s = min(1800.0, max(1.0, deadline - time.monotonic()))
                try:
                    run = processes.run_worker(side, arguments, core=core, cache_dir=Path(cache), timeout_s=timeout_s)
                except WorkerError as error:
                    results[side.name] = error
                else:
                    done.append(run)
    return results

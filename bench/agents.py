"""Suite `agents`: environment steps per second of agents with replay in whole runs, DQN, SAC and TD3 beside JAX.

    torchpod bench agents [--json FILE] [--quick] [--only NAME]

A row is a run of an experiment or of other settings, on one core, or on a GPU if there is one: acting, storing, drawing
and updating, without compilation. The rounds have seeds of their own; the first compiles cold. The peer, of the cases
that have one, is jax_replay.py; what differs is said there. On a GPU no case begins after `GPU_BUDGET_S`, and the suite
tells which had no time. Read harness.py first.
"""

import math
import statistics
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from torchpod.bench import anakin, compare, harness, processes
from torchpod.bench.compare import RowMaker
from torchpod.bench.harness import Record
from torchpod.bench.processes import Worker, WorkerError
from torchpod.compose import load


class Case(NamedTuple):
    """A run."""

    experiment: str
    steps: int
    """Of all environments, as many as the experiment has, or fewer, or more."""
    peer: bool = False
    """Whether jax_replay.py has it; then both sides must learn."""
    settings: tuple[str, ...] = ()
    """Besides those of the experiment."""

    @property
    def name(self) -> str:
        """Of its row."""
        return f"sebulba_{self.experiment}" if "loop=sebulba" in self.settings else self.experiment

    @property
    def overrides(self) -> list[str]:
        """What `torchpod train` would be told."""
        return [f"experiment={self.experiment}", f"total_env_steps={self.steps}", *self.settings]

    def arguments(self, seed: int, device: str) -> list[str]:
        """Of one run of a worker; the same for both sides."""
        given = ["--case", self.experiment, "--steps", self.steps, "--seed", seed, "--device", device, *self.settings]
        return [str(x) for x in given]


CASES = (
    Case("dqn_cartpole", 500_000, peer=True),
    Case("sac_pendulum", 40_000, peer=True),
    Case("td3_pendulum", 40_000, peer=True),
    Case("ddpg_pendulum", 12_000),
    Case("dqn_minatar_breakout", 200_000),
    Case("c51_minatar_breakout", 100_000),
    Case("r2d2_memory_chain", 100_000),
    Case("r2d2_minatar_asterix", 100_000),
    Case("dqn_cartpole", 300_000, settings=("loop=sebulba",)),
    Case("r2d2_memory_chain", 100_000, settings=("loop=sebulba",)),
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
            name = f"{case.name}/{load(case.overrides).num_envs}"
            if time.monotonic() > deadline:
                record.failures.append((name, f"not measured, the time is over; use --only {case.name}."))
                continue
            sides = (ours, peer) if case.peer else (ours,)
            arguments = [case.arguments(seed, device) for seed in range(rounds)]
            results = processes.interleave(sides, arguments, core=core, deadline=deadline + AFTER_BUDGET_S)
            a, b = results[ours.name], results.get(peer.name)
            if b is not None:
                new = [anakin.noted(make.rate(name, a, b, peer_name=peer.name), compare.returned((a, b)))]
                if device == "cpu" and rounds > 1:
                    new += anakin.compile_rows(make, name, (ours, peer), [results])
                record.failures += compare.problems(name, a, b) + compare.untrained(name, case.name, (a, b))
            elif isinstance(a, WorkerError):
                record.failures.append((name, str(a)))
                continue
            else:
                rates = [rate for m in a for rate in processes.rates(m)]
                new = [make.alone(name, statistics.median(rates), "env_steps/s", rates)]
            for row in new:
                record.rows.append(row)
                print(anakin.describe(row), flush=True)
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

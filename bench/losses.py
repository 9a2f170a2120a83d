"""Suite `losses`: an update with a TorchRL loss, compiled by torchpod beside TorchRL's own, uncompiled, on one core.

    torchpod bench losses [--json FILE] [--quick] [--only NAME]

An update is the loss of one minibatch, its gradients, clipping, Adam, and the targets; the same networks, rows and
settings on both sides; ours begins anew every 500 updates, of which TorchRL does fewer. Small: 256 rows, 2 x 64
networks, where TorchRL's time is that of Python between operators; large: 8192 rows, 2 x 256, where it is that of
matrix products. Read harness.py first.
"""

import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

from torchpod.algos.torchrl import LOSSES, MULTI_AGENT
from torchpod.bench import harness
from torchpod.bench.anakin import describe
from torchpod.bench.harness import RowMaker, Worker

WORKER = (sys.executable, "-m", "torchpod.bench.losses_worker", "--side")
WORKERS = Worker("torchpod", (*WORKER, "torchpod")), Worker("torchrl", (*WORKER, "torchrl"))
SIZES = {"small": (256, 64), "large": (8192, 256)}
"""Rows, and units of each layer."""


class Case(NamedTuple):
    """A loss and a size."""

    loss: str
    size: str

    @property
    def name(self) -> str:
        """Of its row."""
        return f"{self.loss}/{self.size}"


CASES = tuple(Case(loss, size) for size in SIZES for loss in sorted(LOSSES.keys() - MULTI_AGENT))
SMALL_GOAL, LARGE_GOAL = 4.0, 1.0
"""Times TorchRL, at least; the first for `GOALS` alone."""
GOALS = ("A2CLoss", "ClipPPOLoss", "DDPGLoss", "DQNLoss", "IQLLoss", "SACLoss", "TD3Loss", "TQCLoss")


def main(
    json_path: str | None = None,
    *,
    quick: bool = False,
    only: str | None = None,
    cases: Sequence[Case] = CASES,
    rounds: int = 3,
    repeats: int = 3,
    core: int | None = None,
    workers: tuple[Worker, Worker] = WORKERS,
) -> int:
    """Measures, writes the result file, prints the rows; the arguments are those of anakin.py.

    Returns:
      0, or 1 if one side failed, the two did unequal work, or a goal was missed.
    """
    if quick:
        cases, rounds, repeats = cases[:1], 2, 1
    if core is None:
        core = harness.last_core()
    load_average, calibrations = os.getloadavg(), [harness.calibrate(core)]
    make, rows, failures = RowMaker(), [], []
    for case in harness.chosen(cases, only, "losses"):
        num_rows, hidden = SIZES[case.size]
        same = ["--loss", case.loss, "--rows", str(num_rows), "--hidden", str(hidden), "--repeats", str(repeats)]
        arguments = [[*same, "--seed", str(i)] for i in range(rounds)]
        results = harness.interleave(workers, arguments, core=core)
        a, b = (results[worker.name] for worker in workers)
        row = make.rate(case.name, a, b, peer_name=workers[1].name, unit="updates/s")
        rows.append(row)
        print(describe(row), flush=True)
        cold = a[:1] if isinstance(a, list) else a
        rows.append(make.compile_time(f"{case.name} cold compile", cold, [], peer_name=workers[1].name))
        failures += harness.problems(case.name, a, b, returns=False)
        failures += [f"{case.name}: {b}"] if isinstance(b, harness.WorkerError) else []
        goal = LARGE_GOAL if case.size == "large" else SMALL_GOAL if case.loss in GOALS else 0.0
        if row.ratio is not None and row.ratio < goal and not quick:
            failures.append(f"{case.name}: {row.ratio:.2f} x TorchRL, the goal is {goal:.1f} x.")
        calibrations.append(harness.calibrate(core))
    return harness.finish(
        "losses",
        rows,
        failures=failures,
        calibrations=calibrations,
        load_average=load_average,
        json_path=json_path,
        extra={"core": core, "rounds": rounds, "repeats_per_round": repeats, "quick": quick, "only": only},
    )

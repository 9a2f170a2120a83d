"""Suite `losses`: an update with a TorchRL loss, compiled by torchpod beside TorchRL's own, uncompiled, on one core.

    torchpod bench losses [--json FILE] [--quick] [--only NAME]

An update is the loss of one minibatch, its gradients, clipping, Adam, and the targets; the same networks, rows and
settings on both sides; ours begins anew every 500 updates, of which TorchRL does fewer. Small: 256 rows, 2 x 64
networks, where TorchRL's time is that of Python between operators; large: 8192 rows, 2 x 256, where it is that of
matrix products. Read harness.py first.
"""

import sys
from collections.abc import Sequence
from typing import NamedTuple

from torchpod.algos.torchrl import LOSSES, MULTI_AGENT
from torchpod.bench import compare, harness, processes
from torchpod.bench.anakin import describe
from torchpod.bench.compare import RowMaker
from torchpod.bench.harness import Record
from torchpod.bench.processes import Worker

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
      0, or 1 if one side failed, the two did unequal work, or a target was missed.
    """
    if quick:
        cases, rounds, repeats = cases[:1], 2, 1
    if core is None:
        core = processes.last_core()
    make = RowMaker()
    extra = {"core": core, "rounds": rounds, "repeats_per_round": repeats, "quick": quick, "only": only}
    with Record("losses", json_path, **extra) as record:
        record.calibrate(core)
        for case in harness.chosen(cases, only, "losses"):
            num_rows, hidden = SIZES[case.size]
            same = ["--loss", case.loss, "--rows", str(num_rows), "--hidden", str(hidden), "--repeats", str(repeats)]
            arguments = [[*same, "--seed", str(i)] for i in range(rounds)]
            results = processes.interleave(workers, arguments, core=core)
            a, b = (results[worker.name] for worker in workers)
            row = make.rate(case.name, a, b, peer_name=workers[1].name, unit="updates/s")
            record.rows.append(row)
            print(describe(row), flush=True)
            cold = a[:1] if isinstance(a, list) else a
            record.rows.append(make.compile_time(f"{case.name} cold compile", cold, [], peer_name=workers[1].name))
            record.failures += compare.problems(case.name, a, b, returns=False)
            record.calibrate(core)
    return record.status

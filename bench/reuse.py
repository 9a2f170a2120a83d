"""Suite `reuse`: what it saves to differentiate the rollout's own forward pass (torchpod/reuse_forward.py).

    torchpod bench reuse [--json FILE] [--quick]

The peer is torchpod without it, which computes the pass again in the update. Per environment step a network with a
forward pass of F operations costs F in the rollout, and in the update 3 F or, reused, 2 F: at most 4/3 for A2C. IMPALA
needs another pass for its V-trace targets: at most 5/3.
"""

import os
import sys
from collections.abc import Sequence

from torchpod.bench import harness
from torchpod.bench.harness import RowMaker, Worker, WorkerError
from torchpod.bench.reuse_worker import CASES

WORKER = (sys.executable, "-m", "torchpod.bench.reuse_worker")
WORKERS = Worker("torchpod", (*WORKER, "--reuse")), Worker("recomputed", WORKER)


def main(
    json_path: str | None = None,
    *,
    quick: bool = False,
    cases: Sequence[str] = tuple(CASES),
    rounds: int = 3,
    repeats: int = 5,
    core: int | None = None,
    workers: tuple[Worker, Worker] = WORKERS,
) -> int:
    """Measures, writes the result file, prints the rows; the arguments are those of anakin.py.

    Returns:
      0, or 1 if one side failed or the two did unequal work.
    """
    if quick:
        cases, rounds, repeats = cases[:1], 2, 1
    if core is None:
        core = harness.last_core()
    load_average, calibrations = os.getloadavg(), [harness.calibrate(core)]
    make, rows, failures = RowMaker(), [], []
    for case in cases:
        arguments = [["--case", case, "--repeats", str(repeats), "--seed", str(i)] for i in range(rounds)]
        results = harness.interleave(workers, arguments, core=core)
        a, b = (results[worker.name] for worker in workers)
        rows.append(make.rate(case, a, b, peer_name=workers[1].name))
        cold = (x[:1] if isinstance(x, list) else x for x in (a, b))
        rows.append(make.compile_time(f"{case} cold compile", *cold, peer_name=workers[1].name))
        if isinstance(a, list) and isinstance(b, list):
            failures += [problem for x, y in zip(a, b, strict=True) for problem in harness.unequal_work(x, y)]
        failures += [f"{case}: {result}" for result in (a, b) if isinstance(result, WorkerError)]
        for row in rows[-2:]:
            print(f"{row.name}: {row.value} {row.unit}, ratio {row.ratio}", flush=True)
    calibrations.append(harness.calibrate(core))
    return harness.finish(
        "reuse",
        rows,
        failures=failures,
        calibrations=calibrations,
        load_average=load_average,
        json_path=json_path,
        extra={"core": core, "rounds": rounds, "repeats_per_round": repeats, "quick": quick},
    )

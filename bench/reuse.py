"""Suite `reuse`: what it saves to differentiate the rollout's own forward pass (torchpod/reuse_forward.py).

    torchpod bench reuse [--json FILE] [--quick]

The peer is torchpod without it, which computes the pass again in the update. Per environment step a network with a
forward pass of F operations costs F in the rollout, and in the update 3 F or, reused, 2 F: at most 4/3 for A2C. IMPALA
needs another pass for its V-trace targets: at most 5/3.
"""

import sys
from collections.abc import Sequence

from torchpod.bench import compare, processes
from torchpod.bench.compare import RowMaker
from torchpod.bench.harness import Record
from torchpod.bench.processes import Worker
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
        core = processes.last_core()
    make = RowMaker()
    extra = {"core": core, "rounds": rounds, "repeats_per_round": repeats, "quick": quick}
    with Record("reuse", json_path, **extra) as record:
        record.calibrate(core)
        for case in cases:
            arguments = [["--case", case, "--repeats", str(repeats), "--seed", str(i)] for i in range(rounds)]
            results = processes.interleave(workers, arguments, core=core)
            a, b = (results[worker.name] for worker in workers)
            cold = (x[:1] if isinstance(x, list) else x for x in (a, b))
            new = [make.rate(case, a, b, peer_name=workers[1].name)]
            new.append(make.compile_time(f"{case} cold compile", *cold, peer_name=workers[1].name))
            record.rows += new
            record.failures += compare.problems(case, a, b, returns=False)
            for row in new:
                print(f"{row.name}: {row.value} {row.unit}, ratio {row.ratio}", flush=True)
        record.calibrate(core)
    return record.status

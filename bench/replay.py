"""Suite `replay`: what a buffer stores, samples and re-weighs per second, beside TorchRL's and NumPy's, on one core.

    torchpod bench replay [--json FILE] [--quick] [--only NAME]

A million steps of four numbers, of a frame of 84 x 84 bytes, or of stacks of four such frames, of which torchpod keeps
the newest (the others would need 28 and 56 GB); and 20,000 steps of stacks that are kept whole. Stored are unrolls of
16 steps of 64 (16) environments; samples are 256 transitions. torchpod and NumPy hold an observation once, TorchRL
twice, as its collectors write it; torchpod's samples are compiled and never begin at a reset. Beside samples by
priority stands Gumbel top-k over a flat vector, compiled too. Counted are rows. A million frames, or stacks, must fit
into what is stated of them (targets.py), the most that the process ever takes. Read harness.py first.
"""

import sys
from collections.abc import Sequence

from torchpod.bench import compare, harness, processes
from torchpod.bench.anakin import describe
from torchpod.bench.compare import RowMaker
from torchpod.bench.harness import Record
from torchpod.bench.processes import MissingError, Worker, WorkerError
from torchpod.bench.replay_worker import CASES, SIDES, Case

WORKERS = tuple(Worker(side, (sys.executable, "-m", "torchpod.bench.replay_worker", "--side", side)) for side in SIDES)


def main(
    json_path: str | None = None,
    *,
    quick: bool = False,
    only: str | None = None,
    cases: Sequence[Case] = CASES,
    rounds: int = 3,
    repeats: int = 3,
    core: int | None = None,
    workers: tuple[Worker, ...] = WORKERS,
) -> int:
    """Measures, writes the result file, prints the rows; the arguments are those of anakin.py.

    Returns:
      0, or 1 if our side failed, took more memory than is stated, or the sides did unequal work. A peer that cannot run
      is named in its row.
    """
    if quick:
        cases, rounds, repeats = cases[:1], 2, 1
    if core is None:
        core = processes.last_core()
    make = RowMaker()
    extra = {"core": core, "rounds": rounds, "repeats_per_round": repeats, "quick": quick, "only": only}
    with Record("replay", json_path, **extra) as record:
        record.calibrate(core)
        for case in harness.chosen(cases, only, "replay"):
            arguments = [["--case", case.name, "--repeats", str(repeats), "--seed", str(i)] for i in range(rounds)]
            draws_by_priority = case.prioritised and case.what == "sample"
            sides = [worker for worker in workers if worker.name != "gumbel" or draws_by_priority]
            results = processes.interleave(sides, arguments, core=core)
            ours, *peers = (results[worker.name] for worker in sides)
            for peer, theirs in zip(sides[1:], peers, strict=True):
                if isinstance(theirs, WorkerError):  # TorchRL's prioritised sampler does not load with every torch
                    theirs = MissingError(str(theirs))
                row = make.rate(f"{case.name}/{peer.name}", ours, theirs, peer_name=peer.name, unit="rows/s")
                record.rows.append(row)
                print(describe(row), flush=True)
                record.failures += compare.problems(row.name, ours, theirs, returns=False)
            if case.memory and isinstance(ours, list):
                taken = [m.get("memory_bytes", 0) / 1e6 for m in ours]
                record.rows.append(make.alone(f"{case.name} memory", max(taken), "MB", taken))
                print(describe(record.rows[-1]), flush=True)
            record.calibrate(core)
    return record.status

"""Suite `learning`: whether torchpod and JAX learn the same, over many seeds of each: the PPO of suite `anakin`.

    torchpod bench learning [--json FILE] [--quick] [--only NAME]

Rates say something only if both sides learn to the same return in the same number of iterations, and one seed says
little of that: PPO on Breakout with 64 environments ends between 7 and 30 on either side. (Iterations are those that
warm up there and one timed call, over which the learning rate falls to 0.) A row has the mean return of all seeds; its
ratio is that of what both sides gained over a random policy, with its 95 % interval. No time is measured, and other
work beside it does no harm. Read harness.py first.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from torchpod.bench import anakin, compare, harness, processes
from torchpod.bench.anakin import Case
from torchpod.bench.compare import RANDOM, Row, RowMaker
from torchpod.bench.harness import Record
from torchpod.bench.processes import Measured, Worker, WorkerError
from torchpod.bench.targets import Failure

SEEDS = {
    Case(64): 16,
    Case(1024): 8,
    Case(1024, env="pendulum"): 8,
    Case(64, env="minatar_breakout"): 64,
    Case(1024, env="minatar_breakout"): 12,
}
SAME = 0.2
"""By which the gains may differ: the whole interval has to lie within that of 1. Equal ones of Breakout, whose seeds
differ by a quarter of their mean, are found to in 99 of 100 runs."""
DRAWS = 100_000


def main(
    json_path: str | None = None,
    *,
    quick: bool = False,
    only: str | None = None,
    seeds: Mapping[Case, int] = SEEDS,
    core: int | None = None,
    workers: tuple[Worker, Worker] | None = None,
) -> int:
    """Trains, writes the result file, prints the rows; the arguments are those of anakin.py.

    Args:
      json_path: where the rows go; None for bench/results/.
      quick: one size and two seeds of a few iterations: whether everything works, not what is learned.
      only: the rows whose names begin with this.
      seeds: how many of each case.
      core: the core that both sides are pinned to; None for the last one.
      workers: torchpod's and the peer's; None for the real ones.

    Returns:
      0, or 1 if a side failed or did not learn, the work was unequal, or one learned less than the other or too few
      seeds were had to tell.
    """
    if quick:
        seeds = {Case(1024): 2}
    if core is None:
        core = processes.last_core()
    sides, make = workers or anakin.default_workers(), RowMaker()
    with Record("learning", json_path, core=core, quick=quick, only=only) as record:
        for case in harness.chosen([*seeds], only, "learning"):
            arguments = [anakin.case_arguments(case, 1, learn=not quick, seed=seed) for seed in range(seeds[case])]
            results = processes.interleave(sides, arguments, core=core)
            a, b = (ended(results[worker.name]) for worker in sides)
            row = make.number(case.name, "episode_return", "return", a, b, peer_name=sides[1].name)
            record.failures += compare.problems(case.name, a, b, returns=False)
            if isinstance(a, list) and isinstance(b, list):
                row = compared(row, RANDOM[case.env])
                record.failures += [] if quick else [*compare.untrained(case.name, case.env, (a, b)), *unequal(row)]
            record.rows.append(row)
            print(anakin.describe(row), flush=True)
    return record.status


def ended(measured: Measured) -> Measured:
    """The measurements, unless no episode ended in one of them."""
    if isinstance(measured, WorkerError) or all(m["episode_return"] is not None for m in measured):
        return measured
    return WorkerError(f"{measured[0]['framework']} ended no episode with one of the seeds.")


def compared(row: Row, of_random: float) -> Row:
    """The row with means in place of medians, and with the ratio of gains and its interval.

    What is known of a mean of n seeds is their mean plus t(n - 1) standard errors; of the ratio, the quantiles of the
    ratio of two such numbers, which hold the true one 95 times of 100 or more.

    Args:
      row: with a return of each seed.
      of_random: what a random policy gets.
    """
    assert row.peer is not None
    ours, peer = (np.array(x) for x in (row.repeats, row.peer["repeats"]))
    rng = np.random.default_rng(0)
    errors = [x.std(ddof=1) / len(x) ** 0.5 * rng.standard_t(len(x) - 1, DRAWS) for x in (ours, peer)]
    low, high = np.percentile(
        (ours.mean() - of_random + errors[0]) / (peer.mean() - of_random + errors[1]), [2.5, 97.5]
    )
    ratio = (ours.mean() - of_random) / (peer.mean() - of_random)
    spread = " and ".join(f"{x.std(ddof=1):.2g}" for x in (ours, peer))
    note = f"{len(ours)} seeds each, standard deviations {spread}; a random policy gets {of_random:g}"
    return dataclasses.replace(
        row,
        value=float(ours.mean()),
        peer={**row.peer, "value": float(peer.mean())},
        ratio=float(ratio),
        interval=(float(low), float(high)),
        note=note,
    )


def unequal(row: Row) -> list[Failure]:
    """Whether the gains differ by more than `SAME`, or might, by so few seeds."""
    assert row.ratio is not None and row.interval is not None
    low, high = row.interval
    if 1 - SAME <= low and high <= 1 + SAME:
        return []
    sentence = (
        f"torchpod gains {row.ratio:.2f} [{low:.2f}, {high:.2f}] of what its peer gains over a random policy, and all"
        f" of that must lie between {1 - SAME:g} and {1 + SAME:g}: find what differs, or take more seeds."
    )
    return [(row.name, sentence)]

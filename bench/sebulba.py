"""Suite `sebulba`: EnvPool raw, with inference, and with PPO, on all cores of this machine.

    torchpod bench sebulba [--json FILE] [--quick] [--only NAME]

The budget is the one of suite `anakin`: environments, + inference (`act_...`), + learning (`ppo_...`), with one and two
actor threads and with one that has two pools, whose threads are their own or in common, beside (a) the same work in
turn in one thread, and (b) a plain PyTorch loop (bench/peers/plain_ppo.py). Every side runs at its better number of
OpenMP threads and, with one pool, of EnvPool's: all are tried in the first round, the better half again in each that
follows, and the rounds of the best are reported. The best layout must reach the targets: it is a
setting, and which is best depends on the environment.

Rows `paced_...` are for machines with a GPU: EnvPool's steps where actors sleep before each, as long as a GPU needs
them to, beside EnvPool alone: what share of its steps is left. Read harness.py first.
"""

import itertools
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from torchpod.bench import harness, processes
from torchpod.bench.anakin import noted
from torchpod.bench.compare import EQUAL_WORK, TOO_EARLY, Row, RowMaker
from torchpod.bench.harness import Record
from torchpod.bench.processes import Measured, Worker, WorkerError
from torchpod.bench.targets import Failure


class Case(NamedTuple):
    """One environment."""

    task: str
    num_envs: int
    iterations: int
    """Within a timed call: a second or more."""


CASES = {
    "cartpole": Case("CartPole-v1", 64, 8),
    "pong": Case("Pong-v5", 8, 1),
    "ant": Case("Ant-v4", 8, 4),
}
PACED = {"pong": Case("Pong-v5", 64, 6)}
"""Of rows `paced_...`, with unrolls of 20 steps and a thread per core."""
THREADS = (1, 2)
LAYOUTS = {
    "1_actors": ("--actors", "1"),
    "2_actors": ("--actors", "2"),
    "2_pools": ("--actors", "1", "--pools", "2"),
    "2_sharing_pools": ("--actors", "1", "--pools", "2", "--share"),
}
"""Of actor threads and their pools."""
WORK = {"policy": "act", "update": "ppo"}
"""Mode of the worker -> beginning of a row's name."""


def main(
    json_path: str | None = None,
    *,
    quick: bool = False,
    cases: Mapping[str, Case] = CASES,
    paced: Mapping[str, Case] = PACED,
    only: str | None = None,
    rounds: int = 3,
    repeats: int = 3,
    ours: tuple[str, ...] = (sys.executable, "-m", "torchpod.bench.sebulba_worker"),
    plain: tuple[str, ...] = (sys.executable, str(processes.ROOT / "bench" / "peers" / "plain_ppo.py")),
) -> int:
    """Measures, writes the result file, prints the rows; returns 1 if a side failed, work was unequal, a target missed.

    Args:
      json_path: where the rows go; None for bench/results/.
      quick: CartPole, one round of one call: whether everything works, not how fast it is.
      cases: environments.
      paced: environments of rows `paced_...`.
      only: of these, those whose names begin with this (cartpole, pong, ant, paced_pong); the page then shows this run
        in the place of their rows.
      rounds: times that each side runs, in turn.
      repeats: timed calls in a round.
      ours: command of torchpod's worker.
      plain: command of the plain loop.
    """
    if quick:
        cases, paced, rounds, repeats = {"cartpole": CASES["cartpole"]}, {}, 1, 1
    kept = harness.named([*cases, *(f"paced_{name}" for name in paced)], only, "sebulba")
    cases = {name: case for name, case in cases.items() if name in kept}
    paced = {name: case for name, case in paced.items() if f"paced_{name}" in kept}
    make = RowMaker()
    extra = {"rounds": rounds, "repeats_per_round": repeats, "quick": quick, "only": only}
    with Record("sebulba", json_path, **extra) as record:
        record.calibrate(None)
        for name, case in cases.items():
            with tempfile.TemporaryDirectory(prefix="torchpod-bench-") as cache:
                results = {
                    (mode, side): sides
                    for mode in ("env_only", "policy", "update")
                    for side, sides in run_mode(case, mode, ours, plain, rounds, repeats, Path(cache)).items()
                }
            new = rows_of(make, name, case, results)
            record.rows += new
            show(new)
            record.failures += [
                (row_of(name, case, *key), str(result))
                for key, result in results.items()
                if isinstance(result, WorkerError)
            ]
            record.failures += unequal(name, case, results)
        for name, case in paced.items():
            new, wrong = paced_rows(make, name, case, ours, rounds, repeats)
            show(new)
            record.rows += new
            record.failures += wrong
    return record.status


Results = Mapping[tuple[str, str], Measured]


def run_mode(
    case: Case, mode: str, ours: tuple[str, ...], plain: tuple[str, ...], rounds: int, repeats: int, cache: Path
) -> dict[str, Measured]:
    """Every side, at its better numbers of threads."""
    sides = [Worker("sync", (*ours, "--actors", "0"))]
    if mode != "env_only":
        sides += [Worker(name, (*ours, *layout)) for name, layout in LAYOUTS.items()]
        sides.append(Worker("plain", plain))
    work = ["--task", case.task, "--num-envs", case.num_envs, "--mode", mode]
    work += ["--iterations", case.iterations, "--repeats", repeats]
    arguments = [str(x) for x in work]

    def run(side: Worker, threads: Threads, seed: int) -> Measured:
        more = ["--threads", threads[0], "--pool-threads", threads[1], "--seed", seed]
        return processes.interleave((side,), [[*arguments, *map(str, more)]], core=None, cache_dir=cache)[side.name]

    found = {side.name: dict[Threads, Measured]() for side in sides}
    left = {side.name: threads_of(side.name, mode) for side in sides}
    for seed in range(rounds):
        turns = itertools.zip_longest(*([(side, at) for at in left[side.name]] for side in sides))
        for worker, at in (pair for turn in turns for pair in turn if pair):
            before = found[worker.name].get(at, [])
            if isinstance(before, list):
                new = run(worker, at, seed)
                found[worker.name][at] = new if isinstance(new, WorkerError) else [*before, *new]
        for name, own in left.items():
            own.sort(key=lambda at, name=name: -rate(found[name][at]))
            left[name] = own[: max(1, len(own) // 2)]
    failed = {name: x for name, own in found.items() for x in own.values() if isinstance(x, WorkerError)}
    return {name: failed.get(name, found[name][own[0]]) for name, own in left.items()}


Threads = tuple[int, int]
"""Of OpenMP, and of EnvPool per pool."""


def threads_of(side: str, mode: str) -> list[Threads]:
    """What a side may choose from: two actors or pools share out the cores, one each."""
    openmp = THREADS if mode != "env_only" else THREADS[:1]
    pool = THREADS if side not in LAYOUTS or side == "1_actors" else THREADS[:1]
    return [*itertools.product(openmp, pool)]


def rate(result: Measured) -> float:
    """Median steps per second; 0 for a side that failed."""
    if isinstance(result, WorkerError):
        return 0.0
    return statistics.median(x for measurement in result for x in processes.rates(measurement))


def row_of(name: str, case: Case, mode: str, side: str) -> str:
    """The name of a row that a side of an environment is part of."""
    if mode == "env_only":
        return f"raw_{name}/{case.num_envs}"
    layout, peer = (side, "sync") if side in LAYOUTS else ("1_actors", side)
    return f"{WORK[mode]}_{name}_{layout}_vs_{peer}/{case.num_envs}"


def rows_of(make: RowMaker, name: str, case: Case, results: Results) -> list[Row]:
    """The budget of one environment."""
    raw, rows = results["env_only", "sync"], []
    if isinstance(raw, list):
        used = [x for measurement in raw for x in processes.rates(measurement)]
        rows.append(make.alone(f"raw_{name}/{case.num_envs}", statistics.median(used), "env_steps/s", used))
    for mode, work in WORK.items():
        for layout in LAYOUTS:
            for peer in ("sync", "plain"):
                row = f"{work}_{name}_{layout}_vs_{peer}/{case.num_envs}"
                told = TOO_EARLY if (mode, peer) == ("update", "plain") else ""
                rows.append(noted(make.rate(row, results[mode, layout], results[mode, peer], peer_name=peer), told))
    for side in (*LAYOUTS, "sync", "plain"):
        if isinstance(found := results["update", side], list):
            used = [sum(m["cpu_s"]) / sum(m["wall_s"]) / make.hardware["cores"] for m in found]
            row = f"cpu_{name}_{side}/{case.num_envs}"
            rows.append(make.alone(row, statistics.median(used), "share of all cores", used))
    return rows


def paced_rows(
    make: RowMaker, name: str, case: Case, ours: tuple[str, ...], rounds: int, repeats: int
) -> tuple[list[Row], list[Failure]]:
    """Of one environment, rows, and each side that failed."""
    layouts = {layout: words for layout, words in LAYOUTS.items() if layout != "1_actors"}
    sides = [Worker("raw", (*ours, "--actors", "0", "--mode", "env_only"))]
    sides += [Worker(layout, (*ours, *words, "--mode", "paced")) for layout, words in layouts.items()]
    work = ["--task", case.task, "--num-envs", case.num_envs, "--unroll-length", 20]
    work += ["--iterations", case.iterations, "--repeats", repeats]
    arguments = [[str(x) for x in (*work, "--seed", seed)] for seed in range(rounds)]
    results = processes.interleave(sides, arguments, core=None)
    rows, failures = [], []
    for layout in layouts:
        row, sides = f"paced_{name}_{layout}/{case.num_envs}", (results[layout], results["raw"])
        rows.append(make.rate(row, *sides, peer_name="EnvPool alone", waits=True))
        failures += [(row, str(side)) for side in sides if isinstance(side, WorkerError)]
    return rows, failures


def show(rows: list[Row]) -> None:
    """Prints rows."""
    for row in rows:
        print(f"{row.name:36s} {row.value or 0:12,.0f} {row.unit}  {row.ratio or 0:.2f} {row.note}", flush=True)


def unequal(name: str, case: Case, results: Results) -> list[Failure]:
    """Whether the plain loop did the same work."""
    a, b = results["update", "1_actors"], results["update", "plain"]
    if isinstance(a, WorkerError) or isinstance(b, WorkerError):
        return []
    pairs = ((key, a[0][key], b[0][key]) for key in EQUAL_WORK)
    row = row_of(name, case, "update", "plain")
    return [(row, f"unequal work: {key} is {x!r} and {y!r} in the plain loop.") for key, x, y in pairs if x != y]

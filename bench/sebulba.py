"""Suite `sebulba`: EnvPool raw, with inference, and with PPO, on all cores of this machine.

    torchpod bench sebulba [--json FILE] [--quick]

The budget is the one of suite `anakin`: environments, + inference (`act_...`), + learning (`ppo_...`), with one and two
actor threads, beside (a) the same work in turn in one thread, and (b) a plain PyTorch loop (bench/peers/plain_ppo.py).
Every side runs at its better number of OpenMP threads, found in the first round. Read harness.py first.
"""

import statistics
import sys
import tempfile
from collections.abc import Mapping
from os import getloadavg
from pathlib import Path
from typing import NamedTuple

from torchpod.bench import harness
from torchpod.bench.harness import EQUAL_WORK, Measured, Row, RowMaker, Worker, WorkerError


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
THREADS = (1, 2)


def main(
    json_path: str | None = None,
    *,
    quick: bool = False,
    cases: Mapping[str, Case] = CASES,
    rounds: int = 3,
    repeats: int = 3,
    ours: tuple[str, ...] = (sys.executable, "-m", "torchpod.bench.sebulba_worker"),
    plain: tuple[str, ...] = (sys.executable, str(harness.ROOT / "bench" / "peers" / "plain_ppo.py")),
) -> int:
    """Measures, writes the result file, prints the rows; returns 1 if a side failed or the work was unequal.

    Args:
      json_path: where the rows go; None for bench/results/.
      quick: CartPole, one round of one call: whether everything works, not how fast it is.
      cases: environments.
      rounds: times that each side runs, in turn.
      repeats: timed calls in a round.
      ours: command of torchpod's worker.
      plain: command of the plain loop.
    """
    if quick:
        cases, rounds, repeats = {"cartpole": CASES["cartpole"]}, 1, 1
    load_average = getloadavg()
    make, rows, failures = RowMaker(), [], []
    for name, case in cases.items():
        with tempfile.TemporaryDirectory(prefix="torchpod-bench-") as cache:
            results = {
                (mode, side): sides
                for mode in ("env_only", "policy", "update")
                for side, sides in run_mode(case, mode, ours, plain, rounds, repeats, Path(cache)).items()
            }
        new = rows_of(make, name, case, results)
        rows += new
        for row in new:
            print(f"{row.name:36s} {row.value or 0:12,.0f} {row.unit}  {row.ratio or 0:.2f} {row.note}", flush=True)
        failures += [f"{name}: {result}" for result in results.values() if isinstance(result, WorkerError)]
        failures += unequal(name, results)
    return harness.finish(
        "sebulba",
        rows,
        failures=failures,
        calibrations=[harness.calibrate(None)],
        load_average=load_average,
        json_path=json_path,
        extra={"rounds": rounds, "repeats_per_round": repeats, "quick": quick},
    )


Results = Mapping[tuple[str, str], Measured]


def run_mode(
    case: Case, mode: str, ours: tuple[str, ...], plain: tuple[str, ...], rounds: int, repeats: int, cache: Path
) -> dict[str, Measured]:
    """Every side, at its better number of threads."""
    sides = [Worker("sync", (*ours, "--actors", "0"))]
    if mode != "env_only":
        sides += [Worker(f"actors{k}", (*ours, "--actors", str(k))) for k in (1, 2)]
        sides.append(Worker("plain", plain))
    work = ["--task", case.task, "--num-envs", case.num_envs, "--mode", mode]
    work += ["--iterations", case.iterations, "--repeats", repeats]
    arguments = [str(x) for x in work]

    def run(workers: list[Worker], threads: int, seeds: range) -> dict[str, Measured]:
        rounds = [[*arguments, "--threads", str(threads), "--seed", str(seed)] for seed in seeds]
        return harness.interleave(workers, rounds, core=None, cache_dir=cache)

    first = {threads: run(sides, threads, range(1)) for threads in (THREADS if mode == "update" else THREADS[:1])}
    best = {side.name: max(first, key=lambda threads, side=side: rate(first[threads][side.name])) for side in sides}
    results: dict[str, Measured] = {s.name: first[best[s.name]][s.name] for s in sides}
    for seed in range(1, rounds):
        for side in sides:
            done, more = results[side.name], run([side], best[side.name], range(seed, seed + 1))[side.name]
            if isinstance(done, list):
                results[side.name] = [*done, *more] if isinstance(more, list) else more
    return results


def rate(result: Measured) -> float:
    """Median steps per second; 0 for a side that failed."""
    if isinstance(result, WorkerError):
        return 0.0
    return statistics.median(harness.rates(result[0]))


def rows_of(make: RowMaker, name: str, case: Case, results: Results) -> list[Row]:
    """The budget of one environment."""
    raw = results["env_only", "sync"]
    rows = [] if isinstance(raw, WorkerError) else [make.alone(f"raw_{name}/{case.num_envs}", rate(raw), "env_steps/s")]
    for mode, work in (("policy", "act"), ("update", "ppo")):
        for k in (1, 2):
            ours = results[mode, f"actors{k}"]
            for peer in ("sync", "plain"):
                row = f"{work}_{name}_{k}_actors_vs_{peer}/{case.num_envs}"
                rows.append(make.rate(row, ours, results[mode, peer], peer_name=peer))
            if mode == "update" and isinstance(ours, list):
                used = [sum(m["cpu_s"]) / sum(m["wall_s"]) / make.hardware["cores"] for m in ours]
                share = statistics.median(used)
                rows.append(make.alone(f"cpu_{name}_{k}_actors/{case.num_envs}", share, "share of all cores", used))
    return rows


def unequal(name: str, results: Results) -> list[str]:
    """Whether the plain loop did the same work."""
    a, b = results["update", "actors1"], results["update", "plain"]
    if isinstance(a, WorkerError) or isinstance(b, WorkerError):
        return []
    pairs = ((key, a[0][key], b[0][key]) for key in EQUAL_WORK)
    return [f"{name}: unequal work: {key} is {x!r} and {y!r} in the plain loop." for key, x, y in pairs if x != y]

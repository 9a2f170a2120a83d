"""Suite `anakin`: PPO on CartPole, Pendulum and MinAtar's Breakout, torchpod beside JAX on the same cores, in one run.

    torchpod bench anakin [--json FILE] [--quick] [--only NAME]

Time is a budget: environment only, + policy, + update, with the share that the networks' matrix products need at the
rate of calibrate.py (floor.py has the formula); compile time cold and warm beside it, and that of the first start on a
machine, which makes our own libraries and the precompiled header as well. The JAX driver is our own; rows
`rejax_...` have PPO of a third party beside torchpod's, and the suite fails where that is faster than our driver.
Read harness.py first.
"""

import dataclasses
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from torchpod.bench import compare, harness, processes
from torchpod.bench.compare import Row, RowMaker
from torchpod.bench.harness import Record
from torchpod.bench.processes import Measured, Worker, WorkerError
from torchpod.bench.targets import PRODUCT, Failure


class Case(NamedTuple):
    """What is measured: PPO, or a part of it, on both sides."""

    num_envs: int
    mode: str = "update"
    """Any of `MODES`."""
    env: str = "cartpole"
    cores: int = 1
    peer: str = "jax"
    """Or "rejax", PPO that others wrote: it must not be faster than jax_ppo.py."""
    dense: bool = False
    """Without leaving out the zeros of observations, which XLA multiplies: the same operations on both sides."""

    @property
    def name(self) -> str:
        """Of its row."""
        work = MODES[self.mode] if self.peer == "jax" else self.peer
        env = f"{self.env}_dense" if self.dense else self.env
        return f"{work}_{env}/{self.num_envs}" + (f" on {self.cores} cores" if self.cores > 1 else "")


MODES = {"env_only": "env_only", "policy": "env_policy", "update": "ppo"}
CASES = (
    *(Case(num_envs, mode) for num_envs in (4, 64, 1024, 4096, 16384, 65536) for mode in MODES),
    *(Case(num_envs, env="minatar_breakout") for num_envs in (64, 1024)),
    *(Case(num_envs, env="minatar_breakout", dense=True) for num_envs in (64, 1024)),
    Case(1024, env="pendulum"),
    *(Case(num_envs, cores=2) for num_envs in (4, 64, 1024, 4096)),
    *(Case(num_envs, env="minatar_breakout", cores=2) for num_envs in (64, 1024)),
    *(Case(num_envs, peer="rejax") for num_envs in (64, 1024)),
)
UNROLL_LENGTH = 128
# Environment steps of one timed call, half a second or more of it for the faster side; fewer, by the square root, below
# 1024 environments, where calls are slower.
STEPS_PER_CALL = {"env_only": 8_000_000, "policy": 2_000_000, "update": 500_000}
FIRST = Case(1024)
"""The case whose first start on a machine is measured."""
# Iterations before timing in `update`, so that the returns of both sides say whether they learn; in every round, for
# they are compiled in (annealing), and a program of another length would not be found in the cache.
LEARN_ITERATIONS = {
    "cartpole": {4: 1000, 64: 240, 1024: 60, 4096: 24},
    "minatar_breakout": {64: 60, 1024: 20},
    "pendulum": {1024: 100},
}


def main(
    json_path: str | None = None,
    *,
    quick: bool = False,
    cases: Sequence[Case] = CASES,
    rounds: int = 3,
    repeats: int = 3,
    core: int | None = None,
    workers: tuple[Worker, Worker] | None = None,
    rejax: Worker | None = None,
    only: str | None = None,
) -> int:
    """Measures, writes the result file, prints the rows.

    Args:
      json_path: where the rows go; None for bench/results/.
      quick: one size (1024) and two rounds of one call: whether everything works, not how fast it is.
      cases: what to measure.
      rounds: times that each side runs, in turn, compiles cold and, of `FIRST`, starts first.
      repeats: timed calls in a round.
      core: the core that both sides are pinned to; None for the last one.
      workers: torchpod's and the peer's; None for the real ones.
      rejax: that of rejax; None for the real one.
      only: measure the rows whose names begin with this; the page then shows this run in their place.

    Returns:
      0, or 1 if the peer was below its figure or slower than rejax, the work was unequal, a target missed, a side
      failed or there are too few cores for a row.
    """
    if quick:
        cases, rounds, repeats = (Case(1024), Case(1024, peer="rejax")), 2, 1
    if core is None:
        core = processes.last_core()
    ours, jax = workers or default_workers()
    make = RowMaker()
    chosen = harness.chosen(cases, only, "anakin")
    beside = [Case(case.num_envs) for case in chosen if case.peer == "rejax"]  # what it is held against
    chosen = list(dict.fromkeys([*chosen, *(case for case in beside if case in cases)]))
    extra = {"core": core, "rounds": rounds, "repeats_per_round": repeats, "quick": quick, "only": only}
    with Record("anakin", json_path, **extra) as record:
        record.calibrate(core)
        if not workers:
            make_libraries(ours)
        for case in chosen:
            peer = jax if case.peer == "jax" else rejax or rejax_worker()
            if case.cores > len(os.sched_getaffinity(0)):
                record.failures.append((case.name, "not measured, there are too few cores."))
                continue
            arguments = [case_arguments(case, repeats, learn=not quick, seed=i) for i in range(rounds)]
            pinned = core if case.cores == 1 else sorted(os.sched_getaffinity(0))[-case.cores :]
            results = processes.interleave((ours, peer), arguments, core=pinned)
            a, b = results[ours.name], results[peer.name]
            row = make.rate(case.name, a, b, peer_name=peer.name)
            learns = not quick and case.num_envs in LEARN_ITERATIONS[case.env]
            if case.mode == "update" and learns:
                record.failures += compare.untrained(case.name, case.env, (a, b))
            elif case.mode == "update":
                row = noted(row, compare.TOO_EARLY)
            row = with_floor(row, case, a, max(c[PRODUCT] for c in record.calibrations))
            record.rows.append(row)
            print(describe(row), flush=True)
            compiles = case.mode == "update" and case.peer == "jax" and not case.dense
            if compiles and case.cores == 1 and case.num_envs <= 4096:
                colds, firsts = ([], []) if quick else starts_again((ours, peer), case, rounds, pinned)
                new = compile_rows(make, case.name, (ours, peer), [results, *colds], firsts)
                failed = [first for first in firsts if isinstance(first, WorkerError)]
                record.failures += [(f"compile_first_{case.name}", str(first)) for first in failed]
                if case == FIRST and not quick and not workers:
                    try:
                        new.append(warm_run(make, case.num_envs, pinned, repeats))
                    except WorkerError as error:
                        record.failures.append((f"train_warm_cartpole/{case.num_envs}", str(error)))
                record.rows += new
                for row in new:
                    print(describe(row), flush=True)
            # rejax's networks begin otherwise: in so few steps it is ahead.
            record.failures += compare.problems(case.name, a, b, returns=learns or (quick and case.peer == "jax"))
            record.calibrate(core)
        record.failures += [] if quick else slower_than_rejax(record.rows)
    return record.status


def with_floor(row: Row, case: Case, measured: Measured, gflops: float) -> Row:
    """Says which share of the time the products of the networks need, at the rate of one that stays in cache.

    Args:
      row: with the rate.
      case: of the row.
      measured: torchpod's side.
      gflops: of one core.
    """
    if isinstance(measured, WorkerError) or row.value is None or not (flops := measured[0].get("flops")):
        return row
    share = flops * row.value / (1e9 * gflops * case.cores)
    rate = f"{gflops:.0f} GFLOP/s{' a core' if case.cores > 1 else ''}"
    return noted(row, f"matrix products need {share:.0%} of the time, at {rate}")


def noted(row: Row, note: str) -> Row:
    """The row, with one note more."""
    return dataclasses.replace(row, note="; ".join(filter(None, [row.note, note])))


def default_workers() -> tuple[Worker, Worker]:
    """Torchpod in this Python, JAX in that of `.venv-peers`."""
    python, missing = processes.peers_python()
    driver = str(processes.ROOT / "bench" / "peers" / "jax_ppo.py")
    return (
        Worker("torchpod", (sys.executable, "-m", "torchpod.bench.anakin_worker")),
        Worker("jax", (python, driver), missing=missing),
    )


def rejax_worker() -> Worker:
    """PPO of rejax, in the Python of `.venv-peers`."""
    python, missing = processes.peers_python()
    return Worker("rejax", (python, str(processes.ROOT / "bench" / "peers" / "rejax_ppo.py")), missing=missing)


def slower_than_rejax(rows: Sequence[Row]) -> list[Failure]:
    """Each case in which jax_ppo.py, measured in this run too, was slower than rejax."""
    peers, found = {row.name: row.peer for row in rows}, []
    for name, rejax in peers.items():
        ours = peers.get(name.replace("rejax_", "ppo_", 1))
        if name.startswith("rejax_") and rejax and ours and ours["value"] < rejax["value"]:
            sentence = (
                f"rejax did {rejax['value']:,.0f} env steps/s and our own JAX driver {ours['value']:,.0f}, so that"
                " ratios to it flatter us: repair jax_ppo.py, or use a quiet machine."
            )
            found.append((name, sentence))
    return found


def case_arguments(case: Case, repeats: int, *, learn: bool, seed: int) -> list[str]:
    """The arguments of one run of a worker; the same for both sides."""
    steps = STEPS_PER_CALL[case.mode] * min(1.0, math.sqrt(case.num_envs / 1024))
    iterations = max(1, round(steps / (UNROLL_LENGTH * case.num_envs)))
    arguments = ["--env", case.env, "--num-envs", case.num_envs, "--mode", case.mode]
    arguments += ["--threads", case.cores, "--iterations", iterations, "--repeats", repeats]
    if learn and case.mode == "update":
        arguments += ["--warmup", LEARN_ITERATIONS[case.env].get(case.num_envs, 0)]
    return [str(x) for x in (*arguments, "--seed", seed, *(["--dense"] if case.dense else []))]


def starts_again(
    workers: tuple[Worker, Worker], case: Case, rounds: int, core: int | Sequence[int] | None
) -> tuple[list[dict[str, Measured]], list[Measured]]:
    """A cold start for every round but the first, which has one; of `FIRST` a first start for each, in turn with them.

    Args:
      workers: torchpod's and the peer's.
      case: what starts.
      rounds: of the case.
      core: the core that all are pinned to.
    """
    colds, firsts = [], []
    for seed in range(rounds):
        arguments = case_arguments(case, 1, learn=False, seed=seed)
        if seed > 0:
            colds.append(processes.interleave(workers, [arguments], core=core))
        if case == FIRST:
            firsts.append(first_start(workers[0], arguments, core))
    return colds, firsts


def compile_rows(
    make: RowMaker,
    case: str,
    workers: tuple[Worker, Worker],
    starts: Sequence[Mapping[str, Measured]],
    firsts: Sequence[Measured] = (),
) -> list[Row]:
    """Seconds to compile all programs of a run: cold, warm, and in torchpod's first starts beside the peer's cold ones.

    Args:
      make: of rows.
      case: its name.
      workers: torchpod's and the peer's.
      starts: runs by worker, each with caches that were empty in its first round, and full in the later ones.
      firsts: one for each of these.
    """
    cold, warm = (
        [joined([start[worker.name] for start in starts], rounds) for worker in workers]
        for rounds in (slice(0, 1), slice(1, None))
    )
    kinds = [("cold", cold), ("warm", warm), *([("first", [joined(firsts), cold[1]])] if firsts else [])]
    return [make.compile_time(f"compile_{kind}_{case}", a, b, peer_name=workers[1].name) for kind, (a, b) in kinds]


def joined(runs: Sequence[Measured], rounds: slice = slice(None)) -> Measured:
    """Those rounds of every run; the first error, if one failed."""
    failed = next((run for run in runs if isinstance(run, WorkerError)), None)
    return failed or [m for run in runs if not isinstance(run, WorkerError) for m in run[rounds]]


def make_libraries(ours: Worker) -> None:
    """Runs once, for our own libraries and the header, which are made once per machine: no cold start is to make them.

    On all cores: on one the header is not made for the first programs.
    If it fails so do the cases, which say why.
    """
    processes.interleave((ours,), [case_arguments(Case(64), 1, learn=False, seed=0)], core=None)


def first_start(ours: Worker, arguments: Sequence[str], core: int | Sequence[int] | None) -> Measured:
    """One run as on a machine that has seen none: our own libraries are made too, and the header on several cores."""
    with tempfile.TemporaryDirectory(prefix="torchpod-bench-") as folder:
        homes = {name: str(Path(folder) / name) for name in ("XDG_CACHE_HOME", "TMPDIR")}  # libraries; the header
        for home in homes.values():
            Path(home).mkdir()
        worker = dataclasses.replace(ours, env={**ours.env, **homes})
        return processes.interleave((worker,), [arguments], core=core)[ours.name]


def warm_run(make: RowMaker, num_envs: int, core: int | Sequence[int] | None, repeats: int) -> Row:
    """`torchpod train` as a user waits for it: Python, imports, settings, programs from the cache, one iteration.

    Raises:
      WorkerError: if one of the commands failed.
    """
    seconds = []
    with tempfile.TemporaryDirectory(prefix="torchpod-bench-") as folder:
        env = {**processes.ONE_THREAD, "TORCHINDUCTOR_CACHE_DIR": str(Path(folder) / "cache")}
        settings = ("experiment=cartpole", f"num_envs={num_envs}", "total_env_steps=1", "evaluation.episodes=1")
        for i, command in enumerate(["warmup"] + ["train"] * repeats):
            arguments = [sys.executable, "-m", "torchpod", command, *settings, f"run_dir={folder}/run{i}"]
            began = time.perf_counter()
            processes.output_of(arguments, env, f"torchpod {command}", core=core)
            seconds.append(time.perf_counter() - began)
    row = make.alone(f"train_warm_cartpole/{num_envs}", statistics.median(seconds[1:]), "s", seconds[1:])
    note = "`torchpod train` after `torchpod warmup`: one iteration and an episode, from its first to its last moment"
    return dataclasses.replace(row, note=note)


def describe(row: Row) -> str:
    """One line for the terminal."""
    number = lambda x: "-" if x is None else f"{x:,.0f}" if row.unit != "s" else f"{x:.1f}"  # noqa: E731
    peer = "" if row.peer is None else f"  {row.peer['name']} {number(row.peer['value'])}"
    ratio = "" if row.ratio is None else f"  ratio {row.ratio:.2f}"
    if row.interval is not None:
        ratio += f" [{row.interval[0]:.2f}, {row.interval[1]:.2f}]"
    return f"{row.name:32s} {number(row.value):>12s} {row.unit}{peer}{ratio}{'  ' + row.note if row.note else ''}"

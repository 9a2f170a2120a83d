"""Suite `population`: populations of PPO on CartPole-v1 as one program, torchpod beside JAX (`jax.vmap`) on one core.

    torchpod bench population [--json FILE] [--quick] [--only NAME]

Rates are those of all members together. On two cores XLA may hang: it has `TWO_CORES_S` there.
Read anakin.py first.
"""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from torchpod.bench import compare, harness, processes
from torchpod.bench.anakin import compile_rows, default_workers, describe, make_libraries
from torchpod.bench.compare import RowMaker
from torchpod.bench.harness import Record
from torchpod.bench.processes import MissingError, Worker, WorkerError

CASES = ((16, 4), (64, 4))
"""Members, and environments of each."""
WORK = "population_ppo_cartpole"
STEPS_PER_CALL = 500_000
LEARN_ITERATIONS = 300
"""Before timing, so that the returns of both sides say whether they learn."""
TWO_CORES_S = 300.0
"""Of one run there: on a Xeon XLA hangs with 64 members, and with 16 it does not."""


def main(
    json_path: str | None = None,
    *,
    quick: bool = False,
    only: str | None = None,
    cases: Sequence[tuple[int, int]] = CASES,
    rounds: int = 3,
    repeats: int = 3,
    core: int | None = None,
    workers: tuple[Worker, Worker] | None = None,
) -> int:
    """Measures, writes the result file, prints the rows; the arguments are those of anakin.py.

    Returns:
      0, or 1 if the peer was below its figure, the work was unequal, a target missed or a side failed.
    """
    kept = harness.named([name_of(case) for case in cases], only, "population")
    if quick:
        cases, rounds, repeats = cases[:1], 2, 1
    if core is None:
        core = processes.last_core()
    ours, peer = workers or default_workers()
    make = RowMaker()
    extra = {"core": core, "rounds": rounds, "repeats_per_round": repeats, "quick": quick, "only": only}
    with Record("population", json_path, **extra) as record:
        record.calibrate(core)
        if not workers:
            make_libraries(ours)
        for members, num_envs in (case for case in cases if name_of(case) in kept):
            name = name_of((members, num_envs))
            with tempfile.TemporaryDirectory(prefix="torchpod-bench-") as cache:
                arguments = [case_arguments(members, num_envs, repeats, learn=not quick, seed=i) for i in range(rounds)]
                results = processes.interleave((ours, peer), arguments, core=core, cache_dir=Path(cache))
                a, b = results[ours.name], results[peer.name]
                both = [[*one, "--threads", "2"] for one in arguments]
                cores = None if core is None else sorted(os.sched_getaffinity(0))[-2:]
                two = processes.interleave((ours, peer), both, core=cores, cache_dir=Path(cache), timeout_s=TWO_CORES_S)
            new = [make.rate(name, a, b, peer_name=peer.name)]
            again = [case_arguments(members, num_envs, 1, learn=False, seed=i) for i in range(1, rounds)]
            colds = [processes.interleave((ours, peer), [one], core=core) for one in again if not quick]
            new += compile_rows(make, name, (ours, peer), [results, *colds])
            of_ours, of_peer = two[ours.name], two[peer.name]
            if isinstance(of_peer, WorkerError):  # no fault of ours
                of_peer = MissingError(str(of_peer))
            new.append(make.rate(f"{name} on 2 cores", of_ours, of_peer, peer_name=peer.name))
            for row in new:
                print(describe(row), flush=True)
            record.rows += new
            record.failures += [] if quick else compare.untrained(name, "cartpole", (a, b))
            record.failures += compare.problems(name, a, b)
            record.failures += compare.problems(f"{name} on 2 cores", of_ours, of_peer)
            record.calibrate(core)
    return record.status


def name_of(case: tuple[int, int]) -> str:
    """Of its row."""
    members, num_envs = case
    return f"{WORK}/{members}x{num_envs}"


def case_arguments(members: int, num_envs: int, repeats: int, *, learn: bool, seed: int) -> list[str]:
    """The arguments of one run of a worker; the same for both sides."""
    iterations = max(1, STEPS_PER_CALL // (128 * members * num_envs))
    arguments = ["--num-envs", num_envs, "--population", members, "--mode", "update", "--iterations", iterations]
    arguments += ["--repeats", repeats, *(["--warmup", LEARN_ITERATIONS] if learn else [])]
    return [str(x) for x in (*arguments, "--seed", 100 * seed)]

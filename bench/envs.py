"""Suite `envs`: environments under random actions, torchpod beside gymnax on one core, in the same run.

    torchpod bench envs [--json FILE] [--quick] [--only NAME]

2048 environments, auto-reset, every observation made. torchpod counts transitions alone: the steps that reset, which
gymnax does not have, are work that is not counted. Read harness.py first.
"""

import json
import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from torchpod.bench import compare, harness, processes
from torchpod.bench.anakin import describe
from torchpod.bench.compare import RowMaker
from torchpod.bench.harness import Record
from torchpod.bench.processes import MissingError, Worker

NUM_ENVS = 2048
STEPS_PER_CALL = 4_000_000
"""Transitions of one timed call where both sides are fast; fewer where they are slow."""


class Case(NamedTuple):
    """An environment of both sides."""

    name: str
    peer: str
    rate: float
    """Millions of steps per second, about: how long to measure."""
    arguments: dict[str, Any] = {}
    peer_arguments: dict[str, Any] = {}


CASES = (
    Case("cartpole", "CartPole-v1", 10),
    Case("pendulum", "Pendulum-v1", 10),
    Case("acrobot", "Acrobot-v1", 3),
    Case("mountain_car", "MountainCar-v0", 10),
    Case("mountain_car_continuous", "MountainCarContinuous-v0", 10),
    Case("catch", "Catch-bsuite", 8),
    Case("deep_sea", "DeepSea-bsuite", 2, {"size": 8}, {"size": 8}),
    Case("memory_chain", "MemoryChain-bsuite", 10, {"memory_length": 5}),
    Case("four_rooms", "FourRooms-misc", 5),
    Case("bernoulli_bandit", "BernoulliBandit-misc", 5),
    Case("minatar_asterix", "Asterix-MinAtar", 0.3),
    Case("minatar_breakout", "Breakout-MinAtar", 1.5),
    Case("minatar_freeway", "Freeway-MinAtar", 0.5),
    Case("minatar_seaquest", "Seaquest-MinAtar", 0.2),
    Case("minatar_space_invaders", "SpaceInvaders-MinAtar", 0.6),
)
ALONE = (
    Case("covid_economy", "", 0.1),
    Case("delayed_chain", "", 5),
    Case("grid_world", "", 2),
    Case("point_mass", "", 2),
    Case("tag_continuous", "", 0.03),
    Case("tag_gridworld", "", 2),
)
"""Without a peer in gymnax."""


def main(
    json_path: str | None = None,
    *,
    quick: bool = False,
    cases: Sequence[Case] = CASES,
    alone: Sequence[Case] = ALONE,
    rounds: int = 3,
    repeats: int = 3,
    core: int | None = None,
    workers: tuple[Worker, Worker] | None = None,
    only: str | None = None,
) -> int:
    """Measures, writes the result file, prints the rows; the arguments are those of anakin.py.

    With `only`, the rows whose names begin with it are measured, and the page shows this run in their place.

    Returns:
      0, or 1 if a peer was below its figure, a target missed, or a side failed.
    """
    if quick:
        cases, alone, rounds, repeats = cases[:1], (), 2, 1
    if core is None:
        core = processes.last_core()
    ours, peer = workers or default_workers()
    make = RowMaker()
    extra = {"core": core, "rounds": rounds, "repeats_per_round": repeats, "quick": quick, "only": only}
    with Record("envs", json_path, **extra) as record:
        record.calibrate(core)
        for case in harness.chosen([*cases, *alone], only, "envs"):
            sides = (ours, peer) if case.peer else (ours,)
            arguments = [case_arguments(case, repeats, quick=quick, seed=i) for i in range(rounds)]
            results = processes.interleave(sides, arguments, core=core)
            a = results[ours.name]
            b = results.get(peer.name, MissingError("gymnax has no such environment"))
            row = make.rate(f"{case.name}/{NUM_ENVS}", a, b, peer_name=peer.name)
            record.rows.append(row)
            print(describe(row), flush=True)
            record.failures += compare.problems(row.name, a, b)
            record.calibrate(core)
    return record.status


def default_workers() -> tuple[Worker, Worker]:
    """Torchpod in this Python, gymnax in that of `.venv-peers`."""
    python, missing = processes.peers_python()
    driver = str(processes.ROOT / "bench" / "peers" / "jax_envs.py")
    return (
        Worker("torchpod", (sys.executable, "-m", "torchpod.bench.envs_worker")),
        Worker("gymnax", (python, driver), missing=missing),
    )


def case_arguments(case: Case, repeats: int, *, quick: bool, seed: int) -> list[str]:
    """The arguments of one run of a worker; the same for both sides."""
    transitions = STEPS_PER_CALL * (0.05 if quick else min(1.0, math.sqrt(case.rate / 10)))
    steps = max(10, round(transitions / NUM_ENVS))
    arguments = ["--env", case.name, "--arguments", json.dumps(case.arguments), "--num-envs", NUM_ENVS]
    arguments += ["--steps", steps, "--repeats", repeats, "--seed", seed]
    return [str(x) for x in (*arguments, "--peer", case.peer, json.dumps(case.peer_arguments))]

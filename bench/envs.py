"""Suite `envs`: environments under random actions, torchpod beside gymnax on one core, in the same run.

    torchpod bench envs [--json FILE] [--quick] [--only NAME]

2048 environments, auto-reset, every observation made. torchpod counts transitions alone: the steps that reset, which
gymnax does not have, are work that is not counted. Read harness.py first.
"""

import json
import math
import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from torchpod.bench import harness
from torchpod.bench.anakin import describe
from torchpod.bench.harness import Figures, MissingError, RowMaker, Worker

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
    figure: float | None = None
    """What JAX is known to reach on a core of this kind, steps per second."""
    goal: float | None = None
    """Ratio to be reached."""


CASES = (
    Case("cartpole", "CartPole-v1", 10, figure=19.4e6, goal=1.0),
    Case("pendulum", "Pendulum-v1", 10, figure=12.5e6, goal=1.0),
    Case("acrobot", "Acrobot-v1", 3),
    Case("mountain_car", "MountainCar-v0", 10),
    Case("mountain_car_continuous", "MountainCarContinuous-v0", 10),
    Case("catch", "Catch-bsuite", 8, figure=9.1e6, goal=1.0),
    Case("deep_sea", "DeepSea-bsuite", 2, {"size": 8}, {"size": 8}),
    Case("memory_chain", "MemoryChain-bsuite", 10, {"memory_length": 5}),
    Case("four_rooms", "FourRooms-misc", 5),
    Case("bernoulli_bandit", "BernoulliBandit-misc", 5),
    Case("minatar_asterix", "Asterix-MinAtar", 0.3, figure=0.22e6, goal=2.0),
    Case("minatar_breakout", "Breakout-MinAtar", 1.5, figure=1.36e6, goal=2.0),
    Case("minatar_freeway", "Freeway-MinAtar", 0.5, goal=2.0),
    Case("minatar_seaquest", "Seaquest-MinAtar", 0.2, goal=2.0),
    Case("minatar_space_invaders", "SpaceInvaders-MinAtar", 0.6, figure=0.62e6, goal=2.0),
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
FIGURES = Figures(
    "2048x64x64", 95.1, {f"{case.name}/{NUM_ENVS}": case.figure for case in CASES if case.figure is not None}
)
"""Of the machine of anakin.py's."""


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
    figures: Figures = FIGURES,
    only: str | None = None,
) -> int:
    """Measures, writes the result file, prints the rows; the arguments are those of anakin.py.

    With `only`, the rows whose names begin with it are measured, and the page shows this run in their place.

    Returns:
      0, or 1 if a peer was below its figure, a goal was not reached, or a side failed.
    """
    if quick:
        cases, alone, rounds, repeats = cases[:1], (), 2, 1
    if core is None:
        core = harness.last_core()
    ours, peer = workers or default_workers()
    load_average = os.getloadavg()
    calibrations = [harness.calibrate(core)]
    make, rows, failures = RowMaker(), [], []
    cases = harness.chosen([*cases, *alone], only, "envs")
    for case in cases:
        sides = (ours, peer) if case.peer else (ours,)
        arguments = [case_arguments(case, repeats, quick=quick, seed=i) for i in range(rounds)]
        results = harness.interleave(sides, arguments, core=core)
        a = results[ours.name]
        b = results.get(peer.name, MissingError("gymnax has no such environment"))
        row = make.rate(f"{case.name}/{NUM_ENVS}", a, b, peer_name=peer.name)
        rows.append(row)
        print(describe(row), flush=True)
        failures += harness.problems(case.name, a, b)
        if case.goal is not None and row.ratio is not None and row.ratio < case.goal and not quick:
            failures.append(f"{case.name}: {row.ratio:.2f} x {peer.name}, and the goal is {case.goal:.1f} x.")
        calibrations.append(harness.calibrate(core))

    return harness.finish(
        "envs",
        rows,
        failures=failures,
        calibrations=calibrations,
        figures=None if quick else figures,
        load_average=load_average,
        json_path=json_path,
        extra={"core": core, "rounds": rounds, "repeats_per_round": repeats, "quick": quick, "only": only},
    )


def default_workers() -> tuple[Worker, Worker]:
    """Torchpod in this Python, gymnax in that of `.venv-peers`."""
    python, missing = harness.peers_python()
    driver = str(harness.ROOT / "bench" / "peers" / "jax_envs.py")
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

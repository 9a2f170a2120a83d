"""Suite `multiagent`: Tag and the COVID-19 economy by WarpDrive's measures, beside NumPy on one core.

    torchpod bench multiagent [--json FILE] [--quick] [--only NAME | --only headline]

Rows are `WORK_GAME_AGENTS/ENVIRONMENTS`. Work: `env_only`, random actions that lie on the device, observations made,
games begun again; `rollout`, with networks, sampling and storage; `a2c`, with the update; and `sampler` alone.
Rates are environment steps per second, without those that reset; of the sampler, calls times environments, for all that
an agent chooses: WarpDrive, Lan et al. 2021 (https://arxiv.org/abs/2108.13976), calls it for each choice. In the note:
agent steps per second, memory, the physical floor, and what WarpDrive reached on an A100, by that paper. The peer is
one game in NumPy (peers/numpy_games.py) on the same core, whatever the number of environments; `original` rows have the
same beside NumPy as the classes are written that WarpDrive compares itself with. Observations are full up to 45 agents,
beyond that partial. On CUDA, if there is any, what fits in memory side by side compiles at once and is
then measured in turn, the rows of `HEADLINE` first, and a command is over in ten minutes. Read harness.py and served.py
first.
"""

import dataclasses
import math
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, cast

import torch

from torchpod.bench import floor, harness, processes
from torchpod.bench.anakin import describe
from torchpod.bench.compare import Row, RowMaker
from torchpod.bench.floor import Gpu
from torchpod.bench.harness import Record
from torchpod.bench.multiagent_worker import CHUNK_ROWS, Details
from torchpod.bench.processes import Measured, Worker, WorkerError
from torchpod.bench.served import Job, Wave
from torchpod.bench.targets import WARPDRIVE, Failure

ORIGINALS = {"tag_gridworld": "--per-agent", "covid_economy": "--window"}
"""What has the peer do as the original's own class for the CPU does: agent by agent, or 600 days anew in each."""
WORK = {"env_only": "env_only", "rollout": "rollout", "update": "a2c", "sampler": "sampler"}
"""Mode of the worker -> beginning of a row's name."""
MOST_WITH_FULL = 45
"""Agents; with more, a full observation of everybody does not fit in memory."""
BUDGET_S = 520.0
MEMORY_SHARE = 0.7
"""Of a GPU's memory, by estimate, for the workers that are there at once."""
PEERS_SHARE = 0.15
"""Of the time on CUDA, kept for NumPy."""
MOST_AT_ONCE = 8
"""Workers that compile side by side, on the cores of a machine with one GPU."""


class Case(NamedTuple):
    """What is measured."""

    game: str
    num_agents: int
    num_envs: int
    mode: str = "env_only"

    @property
    def name(self) -> str:
        """Of its row."""
        return f"{WORK[self.mode]}_{self.game}_{self.num_agents}/{self.num_envs}"

    @property
    def has_peer(self) -> bool:
        """Whether there is one in NumPy."""
        return self.mode == "env_only"

    @property
    def original(self) -> str:
        """The option of the peer of its second row, on a CPU; "" if it has none."""
        return ORIGINALS.get(self.game, "") if self.has_peer else ""

    @property
    def memory_bytes(self) -> float:
        """About what it takes of a GPU: its context, the rows that it keeps, and the activations of a chunk."""
        agents, learns = self.num_envs * self.num_agents, self.mode == "update"
        few, many = (6, 4 * self.num_agents + 1) if self.game == GRID else (71, 7 * self.num_agents)
        seen = many if self.num_agents <= MOST_WITH_FULL else few
        kept = {"update": 2 * UNROLL, "rollout": UNROLL}.get(self.mode, 4)
        hidden = 32 if self.game == GRID else 256
        activations = 24 * hidden * min(UNROLL * agents, CHUNK_ROWS["cuda"]) if learns else 0
        return 0.8e9 + agents * kept * (4 * seen + 100) + activations


ENV_NUMBERS = 3
"""Of 4 bytes, that a step without networks reads or writes of an agent besides its state and observation: an action of
8 bytes and the reward."""
UNROLL = 100
"""Steps, of the worker's programs that learn."""
GRID, PLANE, COVID = "tag_gridworld", "tag_continuous", "covid_economy"
LEARNING = ("rollout", "update")
SHORTER = (50, 25, 10)
"""Steps of an unroll on a CPU where there are too many agents for `UNROLL` of them."""
MOST_ROWS = {GRID: 50_000_000, PLANE: 1_500_000}
"""Agents times steps of an iteration on a CPU: 7 GB of the one, 11 s of the other."""
CPU_CASES = (
    *(Case(GRID, agents, envs, mode) for agents in (5, 100, 1000) for envs in (60, 500, 2000) for mode in WORK),
    *(
        Case(PLANE, agents, envs, mode)
        for agents in (5, 100, 1000)
        for envs in (60, 500, 2000)
        for mode in WORK
        if mode not in LEARNING or agents * envs <= 60_000
    ),
    Case(PLANE, 45, 500),
    *(Case(PLANE, 45, 60, mode) for mode in LEARNING),
    *(Case(COVID, 52, envs) for envs in (60, 1000)),
    *(Case(COVID, 52, 60, mode) for mode in LEARNING),
)
"""What a core does in two hours. With networks, 60,000 agents of continuous Tag are the most: the next are 200,000, and
10 steps of them would take 15 s."""
HEADLINE = (
    Case(GRID, 5, 2000),
    Case(GRID, 5, 2000, "update"),
    Case(PLANE, 5, 2000),
    Case(PLANE, 5, 2000, "update"),
    Case(GRID, 1000, 2000, "update"),
    Case(PLANE, 45, 2000, "update"),
    Case(COVID, 52, 60),
    Case(GRID, 1000, 2000),
    Case(GRID, 5, 2000, "sampler"),
    Case(PLANE, 5, 2000, "sampler"),
    Case(COVID, 52, 60, "update"),
)
"""What to measure in ten minutes: every figure of WarpDrive's, the most important first."""
CUDA_CASES = (
    *(Case(GRID, agents, envs, mode) for agents in (5, 100, 1000) for envs in (60, 500, 2000) for mode in WORK),
    *(Case(PLANE, agents, envs, mode) for agents in (5, 45, 100) for envs in (60, 500, 2000) for mode in WORK),
    *(Case(PLANE, 1000, envs, mode) for envs in (60, 500, 2000) for mode in ("env_only", "sampler")),
    *(Case(PLANE, 1000, 60, mode) for mode in LEARNING),
    *(Case(COVID, 52, envs, mode) for envs in (60, 1000) for mode in ("env_only", *LEARNING)),
)

COVID_FIGURE = 24.0
"""Times a node of 16 CPU cores: its A100 with 60 environments of the economy."""


def main(
    json_path: str | None = None,
    *,
    quick: bool = False,
    only: str | None = None,
    device: str | None = None,
    cases: Sequence[Case] | None = None,
    rounds: int = 2,
    repeats: int = 3,
    seconds: float = 0.7,
    core: int | None = None,
    workers: tuple[Worker, Worker] | None = None,
    budget_s: float = BUDGET_S,
) -> int:
    """Measures, writes the result file, prints the rows; what is not said here is as in anakin.py.

    Args:
      json_path: where the rows go; None for bench/results/.
      quick: the first two cases, for a moment.
      only: measure the rows whose names begin with this; or `headline`, those of `HEADLINE`.
      device: cpu or cuda; None for cuda if there is one.
      cases: what to measure; None for all of that device.
      rounds: times that each side runs, in turn; the first compiles cold.
      repeats: timed calls in a round.
      seconds: of a timed call, about.
      core: the core that all are pinned to; None for the last one.
      workers: torchpod's and NumPy's; None for the real ones.
      budget_s: on CUDA, what is not measured by then is reported as not measured.

    Returns:
      0, or 1 if a target was missed or a side failed.
    """
    deadline = time.monotonic() + budget_s
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    cases = cases or (CUDA_CASES if device == "cuda" else CPU_CASES)
    cases = [*filter(cases.__contains__, HEADLINE), *(case for case in cases if case not in HEADLINE)]
    if only == "headline":
        cases = [case for case in cases if case in HEADLINE]
    else:
        cases = harness.chosen(cases, only, "multiagent")
    if quick:
        cases, rounds, repeats, seconds = cases[:2], 2, 1, 0.05
    if core is None:
        core = processes.last_core()
    ours, peer = workers or default_workers()
    make = RowMaker()
    extra = {"core": core, "rounds": rounds, "repeats_per_round": repeats, "quick": quick, "only": only}
    extra |= {"device": device, "budget_s": budget_s, "warpdrive_a100": WARPDRIVE}
    with Record("multiagent", json_path, **extra) as record:
        record.calibrate(core)
        if device == "cuda":
            served: dict[Case, dict[str, Measured]] = {}
            try:
                on_gpu(served, cases, ours, peer, seconds, repeats, rounds, core, deadline)
            finally:  # of what was measured, whatever stopped the rest
                for case in filter(served.__contains__, cases):
                    a, b = served[case][ours.name], served[case].get(peer.name, [])
                    add_row(record, make, case, a, b, peer.name)
        else:
            for case in cases:
                sides = [ours, *([peer] if case.has_peer else [])]
                original = dataclasses.replace(
                    peer, name=f"{peer.name} as there", command=(*peer.command, case.original)
                )
                if case.original:
                    sides.append(original)
                arguments = [case_arguments(case, device, seconds, repeats, seed) for seed in range(rounds)]
                results = processes.interleave(sides, arguments, core=core)
                record.calibrate(core)
                add_row(record, make, case, results[ours.name], results.get(peer.name, []), peer.name)
                if original in sides:
                    a, b = results[ours.name], results[original.name]
                    row = make.rate(case.name.replace("env_only", "original"), a, b, peer_name=original.name)
                    record.failures += [(row.name, str(b))] if isinstance(b, WorkerError) else []
                    record.rows.append(row)
                    print(describe(row), flush=True)
    return record.status


def add_row(record: Record, make: RowMaker, case: Case, ours: Measured, of_peer: Measured, peer_name: str) -> None:
    """Adds the row of a case with all that is to be said of it, and what is wrong with it."""
    unit = "env_steps/s" if case.mode != "sampler" else "1/s"
    row = make.rate(case.name, ours, of_peer, peer_name=peer_name, unit=unit)
    record.failures += [(case.name, str(side)) for side in (ours, of_peer) if isinstance(side, WorkerError)]
    if isinstance(ours, list):
        details = cast("list[Details]", ours)[-1]
        peak = peaks(make, details, record.calibrations)
        told = notes(case, row, details, peak)
        record.failures += impossible(case, row, details, peak)
        row = dataclasses.replace(row, note="; ".join(filter(None, [*told, row.note])))
    record.rows.append(row)
    print(describe(row), flush=True)


def on_gpu(
    found: dict[Case, dict[str, Measured]],
    cases: Sequence[Case],
    ours: Worker,
    peer: Worker,
    seconds: float,
    repeats: int,
    rounds: int,
    core: int | None,
    deadline: float,
) -> None:
    """Finds what each side measures: cases that fit in memory compile at once, NumPy runs when all are measured."""
    with_peer = [case for case in cases if case.has_peer]
    games = [*dict.fromkeys(case[:2] for case in with_peer)]
    of_waves = deadline - (PEERS_SHARE if games else 0.0) * (deadline - time.monotonic())
    for wave in waves(cases, MEMORY_SHARE * torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 1e11):
        jobs = [
            Job(case.name, ours, ["--rounds", str(rounds), *case_arguments(case, "cuda", seconds, repeats, 0)])
            for case in wave
        ]
        with Wave(jobs, of_waves) as running:
            results = running.measure(rounds)
        found |= {case: {ours.name: result.measurements} for case, result in zip(wave, results, strict=True)}
    with tempfile.TemporaryDirectory(prefix="torchpod-bench-") as cache:
        for i, game in enumerate(games):
            arguments = [case_arguments(Case(*game, 1), "cuda", seconds, repeats, seed) for seed in range(rounds)]
            left = max(1.0, (deadline - time.monotonic()) / (len(games) - i))
            measured = processes.interleave([peer], arguments, core=core, cache_dir=Path(cache), timeout_s=left)[
                peer.name
            ]
            for case in with_peer:
                if case[:2] == game:
                    found[case][peer.name] = measured


def waves(cases: Sequence[Case], limit: float) -> list[list[Case]]:
    """In their order, as many at a time as fit in memory and have cores to compile on."""
    found: list[list[Case]] = []
    for case in cases:
        if found and len(found[-1]) < MOST_AT_ONCE and sum(c.memory_bytes for c in (*found[-1], case)) <= limit:
            found[-1].append(case)
        else:
            found.append([case])
    return found


def default_workers() -> tuple[Worker, Worker]:
    """Torchpod, and NumPy without it, in this Python."""
    driver = str(processes.ROOT / "bench" / "peers" / "numpy_games.py")
    return (
        Worker("torchpod", (sys.executable, "-m", "torchpod.bench.multiagent_worker")),
        Worker("numpy", (sys.executable, driver)),
    )


def case_arguments(case: Case, device: str, seconds: float, repeats: int, seed: int) -> list[str]:
    """The arguments of one run of a worker; the same for both sides."""
    options = {"game": case.game, "num-agents": case.num_agents, "num-envs": case.num_envs, "mode": case.mode}
    options |= {"device": device, "seconds": seconds, "repeats": repeats, "seed": seed}
    rows = case.num_agents * case.num_envs
    if device == "cpu" and case.mode in LEARNING and rows * UNROLL > MOST_ROWS.get(case.game, math.inf):
        options["unroll"] = next(steps for steps in SHORTER if rows * steps <= MOST_ROWS[case.game])
    full = ["--full"] if case.num_agents <= MOST_WITH_FULL else []
    return [*(str(x) for name, value in options.items() for x in (f"--{name}", value)), *full]


def peaks(make: RowMaker, details: Details, calibrations: Sequence[Mapping[str, float]]) -> Gpu | None:
    """Of the GPU by its data sheet, or of the core as it was measured; None if they are not known."""
    if details.get("device") == "cuda":
        return floor.find(make.hardware["gpu"])
    flops = 1e9 * max(rate for c in calibrations for rate in c.values())  # of calibrate.py
    return Gpu(details["bytes_per_s"], flops, flops)


def least(case: Case, details: Details, peak: Gpu) -> tuple[floor.Floor, float, float]:
    """The floor of one iteration, and its bytes and flops: floor.py for each policy, and what the environments do.

    The sampler reads its logits and writes the actions.
    """
    steps = details["batch_rows"]
    if case.mode == "sampler":
        num_bytes, num_flops = 4.0 * steps * case.num_agents * (details["choices"] + 2), 0.0
    else:
        epochs, num_bytes = details["epochs"], 2 * steps * details["state_bytes"]
        num_flops = steps * details["env_flops"]
        for policy in details["policies"]:
            rows, size = steps * policy["agents"], policy["observation_size"]
            if case.mode == "env_only":
                num_bytes += 4 * rows * (size + ENV_NUMBERS)
            else:
                num_bytes += floor.moved_bytes(rows, epochs, size, 0.0)
                num_flops += floor.flops(rows, epochs, policy["layers"], size)
    tf32 = bool(details.get("tf32"))
    return floor.floor(details["kernels"], num_bytes, num_flops, gpu=peak, tf32=tf32), num_bytes, num_flops


def notes(case: Case, row: Row, details: Details, peak: Gpu | None) -> list[str]:
    """What else is to be said of a rate."""
    assert row.value is not None
    figure, per_step = WARPDRIVE.get(row.name), 1e6 * case.num_envs / row.value
    unit = "samples" if case.mode == "sampler" else "agent steps"
    told = [f"{row.value * case.num_agents:,.0f} {unit}/s", f"step {per_step:,.0f} us"]
    if peak is None:
        told[-1] += ", no floor is known for this device"
    else:
        found, num_bytes, num_flops = least(case, details, peak)
        length = details["unroll_length"]
        moving, computing = (f"{1e6 * s / length:,.0f}" for s in (found.bytes_s, found.flops_s))
        told[-1] += (
            f", floor {1e6 * found.seconds / length:,.0f}: bytes {moving} ({num_bytes / length / 1e6:,.2f} MB), flops"
            f" {computing} ({num_flops / length / 1e6:,.1f} M)"
        )
        if details["kernels"]:
            told[-1] += f", launches {1e6 * found.launches_s / length:,.0f} ({details['kernels'] / length:,.1f})"
        if row.ratio is not None:
            told[-1] += f", {row.ratio * per_step * length / 1e6 / found.seconds:,.0f} x NumPy if it were reached"
    told.append(f"memory {details.get('memory_bytes', 0) / 1e9:.2f} GB")
    if case.mode in LEARNING:
        if details["unroll_length"] in SHORTER:
            told.append(f"unrolls of {details['unroll_length']} steps")
        told.append(f"networks {'fused' if fused(details) else 'not fused'}, {number_type(details)}")
    if case.game == COVID and row.ratio is not None:
        told.append(
            f"{row.ratio / 16:.2f} of 16 NumPy cores, if they are 16 times as fast as one (WarpDrive on an A100, with"
            f" 60 environments: {COVID_FIGURE:g} of a 16-core node)"
        )
    if figure is not None:
        told.append(f"{row.value / figure:.2f} x WarpDrive's {figure:,.0f} on an A100")
    return told


def impossible(case: Case, row: Row, details: Details, peak: Gpu | None) -> list[Failure]:
    """Whether it was quicker than its floor, which is then none."""
    if peak is None or row.value is None:
        return []
    least_s, took_s = least(case, details, peak)[0].seconds, details["batch_rows"] / row.value
    wrong = f"an iteration took {1e3 * took_s:.1f} ms, and its floor is {1e3 * least_s:.1f}."
    return [(row.name, wrong)] if took_s < least_s else []


def fused(details: Details) -> bool:
    """Whether all networks run as one operator each."""
    return all(policy["fused"] for policy in details["policies"])


def number_type(details: Details) -> str:
    """Of the networks' numbers, and how they are multiplied."""
    return details["dtype"] + (" in TF32" if details.get("tf32") else "")

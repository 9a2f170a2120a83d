"""Suite `gpu`: is the captured iteration right, and how fast is it beside JAX on the same GPU. Under nine minutes.

    torchpod bench gpu [--json FILE] [--quick] [--only NAME]

Correctness first (gpu_checks.py). Then PPO on CartPole, Pendulum and MinAtar's Breakout with 1k to 64k environments,
torchpod beside JAX, and a grid world with a small network: environment steps per second with the physical floor beside
them (floor.py), compile time, capture time, memory, kernels per iteration, share of the time outside the environments'
steps. All workers of a wave compile at once and are then measured in turn, A B A B, each alone on the GPU (served.py).
Both sides multiply in TF32, as JAX does by default; correctness is looked at in float32.
Last, while the time lasts, Sebulba with IMPALA on EnvPool, beside EnvPool alone. What is not measured by then is told;
`--only` measures it. JAX runs in `.venv-peers`, or in this Python, the first that has JAX for CUDA
(`pip install "jax[cuda13]"`). With `device="cpu"` the same code runs uncaptured, which is how it is tested.
"""

import dataclasses
import importlib.util
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchpod.bench import compare, floor, harness, processes
from torchpod.bench.anakin import describe, noted
from torchpod.bench.compare import Row, RowMaker
from torchpod.bench.gpu_checks import correctness
from torchpod.bench.harness import Record
from torchpod.bench.processes import Measured, MissingError, Worker, WorkerError
from torchpod.bench.served import Job, Result, Wave
from torchpod.bench.targets import Failure
from torchpod.kernels import gpu_unroll

BUDGET_S = 520.0


class Case(NamedTuple):
    """What is measured: all of training on one environment, on both sides if JAX has a driver for it."""

    env: str
    num_envs: int

    @property
    def name(self) -> str:
        """Of its row."""
        return f"{'a2c' if self.env == 'grid_world' else 'ppo'}_{self.env}/{self.num_envs}"

    @property
    def rows(self) -> int:
        """Environment steps of an iteration."""
        return (32 if self.env == "grid_world" else 128) * self.num_envs

    @property
    def learns(self) -> bool:
        """Whether its returns tell that: those of few iterations do not."""
        return self.num_envs <= LEARN_UP_TO.get(self.env, 0)

    @property
    def one_kernel(self) -> bool:
        """Whether a GPU with room for it runs the unroll as one (kernels/gpu_unroll.py)."""
        return self.env in ("cartpole", "pendulum") and self.num_envs <= gpu_unroll.MOST_ROWS

    @property
    def memory_bytes(self) -> float:
        """About what one side takes of the GPU: its context, four copies of the rows, a minibatch's activations."""
        return 0.8e9 + self.rows * (4 * 4 * (OBSERVATION_SIZE[self.env] + floor.ROW_NUMBERS) + 640)


class HostCase(NamedTuple):
    """Sebulba on EnvPool."""

    task: str
    num_envs: int
    """Over two actors with two pools each: a quarter of it is an inference batch."""
    unroll_length: int

    @property
    def name(self) -> str:
        """Of its row."""
        return f"impala_{self.task}/{self.num_envs}x{self.unroll_length}"

    @property
    def iterations(self) -> int:
        """Of a timed call."""
        return max(2, round(HOST_CALL_STEPS / (self.num_envs * self.unroll_length)))


class Checks(NamedTuple):
    """The rows of gpu_checks.py, as something that `--only` can name."""

    name: str = "correctness"


OBSERVATION_SIZE = {"cartpole": 4, "pendulum": 3, "minatar_breakout": 400, "grid_world": 50}
NUM_ENVS = (1024, 4096, 16_384, 65_536)
CASES = (
    *(Case(env, num_envs) for num_envs in NUM_ENVS for env in ("cartpole", "pendulum", "minatar_breakout")),
    *(Case("grid_world", num_envs) for num_envs in (32_768, 131_072)),
)
HOST_CASES = tuple(
    HostCase(*x)
    for x in (
        ("Pong-v5", 256, 20),
        ("Pong-v5", 256, 60),
        ("Breakout-v5", 256, 60),
        ("Pong-v5", 1024, 20),
        ("Breakout-v5", 256, 20),
        ("Pong-v5", 128, 20),
    )
)
LAYOUT = ("--actors", 2, "--pools", 2)
"""Of Sebulba."""
HOST_CASE_S = 60.0
"""A case of Sebulba is begun if so much time is left."""
HOST_CALL_STEPS = 50_000
"""Its environment steps in a timed call: about two seconds of EnvPool on 16 cores."""
CALL_STEPS = {"cartpole": 16_000_000, "pendulum": 16_000_000, "minatar_breakout": 4_000_000, "grid_world": 64_000_000}
"""Environment steps of one timed call, some tenths of a second; fewer, by the square root, below 16k environments."""
WARMUP_STEPS = {"cartpole": 8_000_000, "pendulum": 56_000_000, "minatar_breakout": 2_700_000}
"""Before timing, at least 8 iterations."""
LEARN_UP_TO = {"cartpole": 4096, "pendulum": 4096, "minatar_breakout": 1024}
"""Environments with which that is enough for the returns of both sides to say whether they learn alike."""
MEMORY_SHARE = 0.7
"""Of a GPU's memory, by estimate, for the workers of a wave."""


def main(
    json_path: str | None = None,
    *,
    quick: bool = False,
    only: str | None = None,
    device: str = "cuda",
    cases: Sequence[Case] = CASES,
    host_cases: Sequence[HostCase] = HOST_CASES,
    rounds: int = 3,
    repeats: int = 2,
    workers: tuple[Worker, Worker] | None = None,
    budget_s: float = BUDGET_S,
) -> int:
    """Measures, writes the result file, prints the rows.

    Args:
      json_path: where the rows go; None for bench/results/.
      quick: the smallest sizes, two rounds of one short call and no targets: whether everything works.
      only: measure the rows whose names begin with this.
      device: cuda, or cpu for tests: uncaptured.
      cases: what to measure beside JAX.
      host_cases: what to measure of Sebulba.
      rounds: times that each side is measured, in turn.
      repeats: timed calls in a round.
      workers: torchpod's and the peer's; None for the real ones.
      budget_s: what is not measured by then is reported as not measured.

    Returns:
      0, 1 if something is wrong, a target missed or something was not measured, 2 if there is no such device.
    """
    deadline = time.monotonic() + budget_s
    if device == "cuda" and not torch.cuda.is_available():
        print("torchpod bench gpu: PyTorch sees no CUDA device here.", file=sys.stderr)
        return 2
    if quick:
        cases = [case for case in cases if case.num_envs == min(c.num_envs for c in cases if c.env == case.env)]
        host_cases, rounds, repeats = (HostCase("CartPole-v1", 8, 8),), 2, 1
    todo = harness.chosen([Checks(), *cases, *host_cases], only, "gpu")
    ours, peer = workers or default_workers(device)
    make = RowMaker()
    extra = {"rounds": rounds, "repeats_per_round": repeats, "quick": quick, "only": only, "budget_s": budget_s}
    with Record("gpu", json_path, **extra) as record:
        results: dict[tuple[str, str], Result] = {}
        waves = plan([case for case in todo if isinstance(case, Case)], ours, peer, memory_limit(device))
        try:
            for i, wave in enumerate(waves or [[]]):
                jobs = [
                    Job(case.name, worker, case_arguments(case, repeats, rounds, device, quick=quick))
                    for case, worker in wave
                ]
                with Wave(jobs, deadline) as running:
                    if i == 0 and Checks() in todo:  # while the workers compile
                        record.rows, record.failures = checked(device, num_envs=64 if quick else 1024)
                        print(f"correctness: {len(record.rows)} rows, {len(record.failures)} wrong", flush=True)
                    for job, result in zip(jobs, running.measure(rounds), strict=True):
                        results[job.case, job.worker.name] = result
        finally:  # of the waves that were measured, whatever stopped the next
            for case in (x for x in todo if isinstance(x, Case) and (x.name, ours.name) in results):
                why = "there is no JAX driver for it" if case.env == "grid_world" else f"{peer.name} was not measured"
                of_peer = results.get((case.name, peer.name), Result(MissingError(why), {}))
                of_ours = results[case.name, ours.name]
                of_case, wrong = case_rows(make, case, of_ours, of_peer, peer, device)
                record.rows += of_case
                record.failures += wrong
                if case.learns and not quick:
                    sides = of_ours.measurements, of_peer.measurements
                    record.failures += compare.untrained(case.name, case.env, sides)
                print(describe(of_case[0]), flush=True)
        host_rows(record, make, [x for x in todo if isinstance(x, HostCase)], device, deadline, quick=quick)
        if only is None and not quick:
            record.rows.append(make.alone("whole_suite", time.monotonic() - harness.BEGAN, "s"))
    return record.status


def checked(device: str, num_envs: int) -> tuple[list[Row], list[Failure]]:
    """See `correctness`; if it raises, the suite says so and goes on."""
    try:
        return correctness(device, num_envs)
    except Exception as error:
        traceback.print_exc()
        told = f"correctness: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        return [], [(f"difference_eager_compiled/{num_envs}", told)]


def default_workers(device: str) -> tuple[Worker, Worker]:
    """Torchpod in this Python; JAX in that of `.venv-peers`, or in this one, the first that has it for the device."""
    python, missing = processes.peers_python(device)
    if missing and not processes.lacks_jax(sys.executable, device):
        python, missing = sys.executable, None
    driver = str(processes.ROOT / "bench" / "peers" / "jax_ppo.py")
    return (
        Worker("torchpod", (sys.executable, "-m", "torchpod.bench.anakin_worker")),
        Worker("jax", (python, driver), missing=missing),
    )


def case_arguments(case: Case, repeats: int, rounds: int, device: str, *, quick: bool) -> list[str]:
    """The same for both sides."""
    steps = CALL_STEPS[case.env] * min(1.0, (case.num_envs / 16_384) ** 0.5)
    iterations = 2 if quick else max(2, round(steps / case.rows))  # in which an episode of Pendulum ends
    warmup = 1 if quick else max(8, WARMUP_STEPS.get(case.env, 0) // case.rows)
    options = {"env": case.env, "num-envs": case.num_envs, "mode": "update", "iterations": iterations}
    options |= {"warmup": warmup, "repeats": repeats, "rounds": rounds, "device": device}
    return [str(x) for name, value in options.items() for x in (f"--{name}", value)]


def memory_limit(device: str) -> float:
    """Bytes for the workers of a wave."""
    return MEMORY_SHARE * torch.cuda.mem_get_info()[0] if device == "cuda" else float("inf")


def plan(cases: Sequence[Case], ours: Worker, peer: Worker, limit: float) -> list[list[tuple[Case, Worker]]]:
    """Waves of what fits into memory at once: both sides of a case together, or apart where that is too much."""
    waves: list[list[tuple[Case, Worker]]] = []

    def place(group: list[tuple[Case, Worker]]) -> None:
        for wave in waves:
            if sum(case.memory_bytes for case, _ in (*wave, *group)) <= limit:
                wave.extend(group)
                return
        waves.append(group)

    for case in cases:
        sides = [(case, ours)] if case.env == "grid_world" else [(case, ours), (case, peer)]
        if len(sides) * case.memory_bytes <= limit:
            place(sides)
        else:
            for side in sides:
                place([side])
    return waves


def case_rows(
    make: RowMaker, case: Case, ours: Result, of_peer: Result, peer: Worker, device: str
) -> tuple[list[Row], list[Failure]]:
    """The rows of a case, its rate first, and what is wrong with it."""
    a, b, details = ours.measurements, of_peer.measurements, ours.details
    failures = compare.problems(case.name, a, b, returns=case.learns)
    rate = make.rate(case.name, a, b, peer_name=peer.name)
    if isinstance(a, list):
        notes = [
            f"TF32 {'on' if a[0].get('tf32') else 'off'}",
            floor_note(case, a[0], details, make.hardware["gpu"]),
            "" if case.learns else compare.TOO_EARLY,
            rate.note,
        ]
        rate = dataclasses.replace(rate, note="; ".join(filter(None, notes)))
    once = [last(a), last(b)]  # a worker compiles once, and knows the most memory of its life
    compiled = make.compile_time(f"compile_{case.name}", *once, peer_name=peer.name)
    rows = [rate, noted(compiled, "all cases compile side by side")]
    if device == "cuda":
        rows.append(make.number(f"memory_{case.name}", "memory_bytes", "bytes", *once, peer_name=peer.name))
    if details:
        rows += [
            make.alone(f"capture_{case.name}", details["capture_s"], "s"),
            make.alone(f"kernels_{case.name}", details["kernels"], "per iteration"),
            dataclasses.replace(
                make.alone(
                    f"outside_env_{case.name}", 1 - details["env_s"] / details["iteration_s"], "share of the time"
                ),
                note="environments alone, a launch after the other"
                + (", unlike in the iteration, whose unroll is one kernel: too low" if case.one_kernel else ""),
            ),
        ]
    if isinstance(a, list) and (not details or (device == "cuda" and not details["kernels"])):
        failures.append((case.name, "the profiler saw no kernel, or the worker ended before it could say so."))
    return rows, failures


def last(measured: Measured) -> Measured:
    """Its last round."""
    return measured[-1:] if isinstance(measured, list) else measured


def floor_note(case: Case, measurement: Mapping[str, Any], details: Mapping[str, Any], device_name: str | None) -> str:
    """What an iteration took, and the floor under that; without the floor where the GPU's is not known."""
    if not details:
        return ""
    took, gpu = f"iteration {1e3 * details['iteration_s']:.2f} ms", floor.find(device_name)
    if gpu is None:
        return f"{took}, no floor is known for this device"
    observation, epochs = details["observation_size"], measurement["epochs"]
    num_bytes = floor.moved_bytes(case.rows, epochs, observation, details["state_bytes"])
    num_flops = floor.flops(case.rows, epochs, details["layers"], observation)
    least = floor.floor(details["kernels"], num_bytes, num_flops, gpu=gpu, tf32=bool(measurement.get("tf32")))
    launches, moving, computing = (f"{1e3 * seconds:.2f}" for seconds in least)
    return (
        f"{took}, floor {1e3 * least.seconds:.2f}: launches {launches} ({details['kernels']}),"
        f" bytes {moving} ({num_bytes / 1e9:.2f} GB), flops {computing} ({num_flops / 1e12:.2f} T)"
    )


def host_rows(
    record: Record, make: RowMaker, cases: Sequence[HostCase], device: str, deadline: float, *, quick: bool
) -> None:
    """Sebulba with IMPALA on EnvPool: steps per second, their share of what EnvPool does alone, idle GPU."""
    there = importlib.util.find_spec("envpool") is not None
    with tempfile.TemporaryDirectory(prefix="torchpod-bench-") as cache:  # cases have programs in common
        for case in cases:
            left = deadline - time.monotonic()
            if not there:
                record.failures.append((case.name, "not measured, EnvPool is not installed; pip install envpool."))
            elif left < HOST_CASE_S:
                told = f"not measured, {max(0.0, left):.0f} s of the suite's time were left."
                record.failures.append((case.name, told))
            else:
                try:
                    record.rows += _host_case(make, case, device, deadline, Path(cache), quick=quick)
                except WorkerError as error:
                    record.failures.append((case.name, str(error)))


def _host_case(
    make: RowMaker, case: HostCase, device: str, deadline: float, cache_dir: Path, *, quick: bool
) -> list[Row]:
    worker = Worker("torchpod", (sys.executable, "-m", "torchpod.bench.sebulba_worker"))
    arguments = ["--task", case.task, "--num-envs", case.num_envs, "--unroll-length", case.unroll_length]
    arguments += ["--algo", "impala", "--device", device, "--iterations", 2 if quick else case.iterations]
    of_raw, of_ours = (
        processes.run_worker(
            worker,
            [str(x) for x in (*arguments, "--mode", mode, *layout)],
            core=None,
            cache_dir=cache_dir,
            timeout_s=max(1.0, deadline - time.monotonic()),
        )
        for mode, layout in (("env_only", ("--actors", 1)), ("update", LAYOUT))
    )
    raw, ours = (statistics.median(processes.rates(m)) for m in (of_raw, of_ours))
    where = case.name.removeprefix("impala_")
    rows = [
        make.alone(f"raw_envpool_{where}", raw, "env_steps/s", processes.rates(of_raw)),
        make.alone(case.name, ours, "env_steps/s", processes.rates(of_ours)),
        make.alone(f"impala_of_raw_{where}", ours / raw, "share"),
    ]
    print(describe(rows[1]), flush=True)
    if "gpu_busy" in of_ours:
        rows.append(make.alone(f"gpu_idle_{where}", 1 - of_ours["gpu_busy"], "share of the time"))
    return rows

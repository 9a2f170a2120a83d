"""The frame of every suite: workers measured in turn on the same core, rows with spread, checks, one JSON file.

A worker is a command that measures one case in a process of its own and prints one JSON line, a `Measurement`.
`interleave` runs the workers A B A B, pinned to one core, one at a time; the first round of each starts with empty
compile caches and the later ones with full ones, so that compile time comes cold and warm. Ratios are taken within a
round, so that load which comes and goes hits both sides. Read anakin.py next.
"""

import contextlib
import dataclasses
import datetime
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

import torch

from torchpod.bench.targets import Failure, below_figures, missed
from torchpod.config import ConfigError
from torchpod.hints import nearest
from torchpod.machine import commit, cpu, versions

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
FORMAT = 2
BEGAN = time.monotonic()
"""Of the suite: a process runs one, and imports this before it measures."""

RETURN_SHARE = 0.6
"""Means over a few seeds differ; those of two different algorithms differ more."""
JAX_RETURN_SHARE = {"cartpole": 0.85}
"""By environment, beside our own JAX driver, which is the same algorithm, where seeds differ little: 0.89 at least."""
TOO_EARLY = "returns say nothing in so few steps"
"""The note of a row whose sides had no time to learn."""
RANDOM = {"cartpole": 22.2, "minatar_breakout": 0.39, "pendulum": -1225.0}
"""Mean returns of a random policy."""
LEARNED = {"cartpole": 44.0, "minatar_breakout": 0.8, "pendulum": -300.0, "inverted_pendulum": 140.0}
"""What both sides must reach where they had time to learn: about twice those, of Pendulum a quarter of what is lost; of
Brax's inverted pendulum, where actions are greedy in the end, twice the 70 of a network that has learned nothing."""
# A worker that got less of its core than this was not alone on it, and one that uses several cores if it got less than
# this share of what it got in another round.
QUIET_CPU_SHARE = 0.95
QUIET_ROUND_SHARE = 0.9

PROBE_S = 60
"""How long JAX may take to find a device."""
NO_TASKSET = "there is no `taskset` on the PATH; install util-linux"
ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
EQUAL_WORK = (
    "mode",
    "num_envs",
    "unroll_length",
    "epochs",
    "minibatches",
    "batch_rows",
    "param_count",
    "dtype",
    "iterations",
    "total_iterations",
)


class Measurement(TypedDict):
    """What a worker prints. Rates count environment steps and leave out compilation and warm-up."""

    framework: str
    mode: str  # env_only | policy | update
    num_envs: int
    unroll_length: int
    epochs: int
    minibatches: int
    batch_rows: int  # unroll_length * num_envs
    param_count: int
    dtype: str
    device: NotRequired[str]  # cpu, if it is missing, or cuda
    tf32: NotRequired[bool]  # matrix products of float32 in TF32
    memory_bytes: NotRequired[int]  # the most that was in use, of a GPU or, in suite replay, by the process
    gpu_busy: NotRequired[float]  # share of the time in which it does anything
    iterations: int  # within one timed call
    total_iterations: int  # warm-up and timed together; the learning rate falls over these
    env: NotRequired[str]  # where a worker knows several
    population: NotRequired[int]  # members, whose steps are added up; num_envs and rows are those of one
    flops: NotRequired[float]  # of the networks in one environment step, with its share of the update (floor.py)
    compile_s: float
    env_steps: list[float]  # of each timed call: transitions, no resets
    wall_s: list[float]
    cpu_s: list[float]
    episode_return: float | None  # mean over the episodes that ended in the last timed call
    episodes: int
    threads: dict[str, Any]
    versions: dict[str, str]
    load_average: NotRequired[float]  # added by the harness, read just before the worker started


class WorkerError(ChildProcessError):
    """A worker is not installed or failed; the message says which and why."""


class MissingError(WorkerError):
    """There is no such side here, which is no fault: it is not installed, or nobody wrote it."""


Measured = list[Measurement] | WorkerError
"""What became of one side: a measurement per round, or the error that ended it."""


@dataclass(frozen=True)
class Worker:
    """One side of a comparison.

    Attributes:
      name: as it appears in rows, e.g. "jax".
      command: program and first arguments; `run_worker` appends those of the case.
      env: more environment variables.
      missing: why this worker cannot run here, None if it can.
    """

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    missing: str | None = None


@dataclass(frozen=True)
class Row:
    """One line of a result file; learning.py has means, and the ratio of gains with its 95 % interval.

    Attributes:
      name: `<work>/<num_envs>`.
      value: median over the rounds; None if it could not be measured, `note` says why.
      repeats: every single value behind it, in the order measured.
      peer: `{name, value, repeats}` of the other side, None if it could not be measured.
      ratio: ours over the peer's, the median over the rounds; for seconds, below 1 is better.
      interval: smallest and largest ratio of a round; None of a single one.
      cpu_share: CPU time over wall time of the worse side; below 0.95 somebody else had the core.
      threads: of each side.
      rounds: of each side, what `TOLD` names, round by round; seconds are those of all timed calls.
    """

    name: str
    value: float | None
    unit: str
    repeats: list[float]
    peer: dict[str, Any] | None
    ratio: float | None
    interval: tuple[float, float] | None
    cpu_share: float | None
    threads: dict[str, Any]
    hardware: str
    versions: dict[str, str]
    commit: str | None
    note: str = ""
    rounds: dict[str, list[dict[str, Any]]] = field(default_factory=dict)


TOLD = ("load_average", "compile_s", "episode_return", "episodes", "dtype", "device", "tf32")
"""Of a measurement, besides rates and seconds, as far as it has them."""


# --- The machine ------------------------------------------------------------------------------------------------------


def hardware() -> dict[str, Any]:
    """What ran the benchmark: `name` is short and fit for a file name."""
    found = cpu()
    brand, family, model = found["model name"], found["cpu family"], found["model"]
    cores = os.cpu_count() or 1
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    words = [brand, family, model, f"{cores} cores", *([gpu] if gpu else [])]
    name = re.sub(r"[^a-z0-9]+", "-", " ".join(words).lower()).strip("-")
    return {
        "name": name,
        "cpu": brand,
        "cpu_family": family,
        "cpu_model": model,
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "cores": cores,
        "gpu": gpu,
    }


def calibrate(core: int | None) -> dict[str, float]:
    """GFLOP/s of the stated matrix products on `core`: see calibrate.py."""
    script = str(ROOT / "bench" / "calibrate.py")
    return json.loads(output_of([sys.executable, script], {}, "calibration", core=core, timeout_s=120))


def peers_python(device: str = "cpu") -> tuple[str, str | None]:
    """The Python of `.venv-peers` (or TORCHPOD_PEERS_PYTHON), and why the JAX peers are missing, if they are."""
    python = os.environ.get("TORCHPOD_PEERS_PYTHON", str(ROOT / ".venv-peers" / "bin" / "python"))
    if shutil.which(python) is None:
        return python, f"{python} does not exist: `make bench` creates it"
    return python, lacks_jax(python, device)


def lacks_jax(python: str, device: str) -> str | None:
    """Why a Python cannot run JAX on a device, if so."""
    code = f"import jax; jax.config.update('jax_platforms', {device!r}); jax.devices(); print('has JAX')"
    try:
        probe = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False, timeout=PROBE_S)
    except subprocess.TimeoutExpired:
        return f"{python} -c 'import jax' on {device} was not over after {PROBE_S} s."
    if probe.returncode == 0 and _last_line(probe.stdout) == "has JAX":
        return None
    return f"{python} has no JAX for {device}: {_last_line(probe.stderr)}"


# --- Running workers --------------------------------------------------------------------------------------------------


def interleave(
    workers: Sequence[Worker],
    arguments: Sequence[Sequence[str]],
    *,
    core: int | Sequence[int] | None,
    cache_dir: Path | None = None,
    timeout_s: float = 1800.0,
) -> dict[str, Measured]:
    """Runs every worker once per round, in turn.

    Args:
      workers: the sides, in the order in which they run.
      arguments: command-line arguments of each round.
      core: the core, or cores, that all are pinned to, None for no pinning.
      cache_dir: compile caches go here, one folder per worker; None: an empty one, and the first round compiles cold.
      timeout_s: of one run.

    Returns:
      Each worker's measurements by round, or the error that ended its part.
    """
    if cache_dir is None:
        with tempfile.TemporaryDirectory(prefix="torchpod-bench-") as cache:
            return interleave(workers, arguments, core=core, cache_dir=Path(cache), timeout_s=timeout_s)
    results: dict[str, Measured] = {worker.name: [] for worker in workers}
    for round_arguments in arguments:
        for worker in workers:
            done = results[worker.name]
            if isinstance(done, WorkerError):
                continue
            try:
                done.append(run_worker(worker, round_arguments, core=core, cache_dir=cache_dir, timeout_s=timeout_s))
            except WorkerError as error:
                results[worker.name] = error
    return results


def run_worker(
    worker: Worker, arguments: Sequence[str], *, core: int | Sequence[int] | None, cache_dir: Path, timeout_s: float
) -> Measurement:
    """Runs one worker to its end and reads the last JSON line that it prints.

    Raises:
      WorkerError: if it is missing, failed, ran too long or printed no measurement.
    """
    if worker.missing:
        raise MissingError(f"{worker.name}: {worker.missing}")
    caches = {
        "TORCHINDUCTOR_CACHE_DIR": str(cache_dir / worker.name),
        "TRITON_CACHE_DIR": str(cache_dir / worker.name / "triton"),
        "JAX_COMPILATION_CACHE_DIR": str(cache_dir / worker.name),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    load = os.getloadavg()[0]
    env = {**ONE_THREAD, **caches, **worker.env}
    output = output_of([*worker.command, *arguments], env, worker.name, core=core, timeout_s=timeout_s)
    lines = [line for line in output.splitlines() if line.startswith("{")]
    if not lines:
        raise WorkerError(f"{worker.name} printed no measurement: {_last_line(output)}")
    measurement: Measurement = json.loads(lines[-1])
    missing = sorted((Measurement.__required_keys__) - measurement.keys())
    if missing:
        raise WorkerError(f"{worker.name} printed a measurement without {', '.join(missing)}")
    measurement["load_average"] = load
    return measurement


def output_of(
    command: Sequence[str],
    env: Mapping[str, str],
    name: str,
    *,
    core: int | Sequence[int] | None,
    timeout_s: float = 1800.0,
) -> str:
    """What a command writes to standard output.

    Args:
      command: program and arguments.
      env: more environment variables.
      name: of the command, for errors.
      core: the core, or cores, that it is pinned to; None for no pinning.
      timeout_s: how long it may take.

    Raises:
      WorkerError: if it cannot be pinned or started, fails or takes longer.
    """
    if core is not None:
        if shutil.which("taskset") is None:
            raise WorkerError(f"{name} cannot be pinned to core {core}: {NO_TASKSET}")
        command = ["taskset", "-c", str(core) if isinstance(core, int) else ",".join(map(str, core)), *command]
    try:
        process = subprocess.Popen(
            command,
            env={**os.environ, **env},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    except OSError as error:
        raise WorkerError(f"{name} could not be started: {error}") from None
    try:
        out, told = process.communicate(timeout=timeout_s)
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # ranks and compilers that it has started would go on
        process.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        raise WorkerError(f"{name} was still running after {timeout_s:.0f} s and was stopped") from None
    if process.returncode:
        raise WorkerError(f"{name} failed (exit status {process.returncode}): {_last_line(told)}")
    return out


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no message")


# --- Rows -------------------------------------------------------------------------------------------------------------


class RowMaker:
    """Makes rows that carry this machine, versions and commit."""

    def __init__(self) -> None:
        self.hardware = hardware()
        self.versions = versions()
        self.commit = commit()

    def rate(
        self,
        name: str,
        ours: Measured,
        peer: Measured,
        *,
        peer_name: str,
        unit: str = "env_steps/s",
        waits: bool = False,
    ) -> Row:
        """Environment steps (or what is counted) per second: the median of a round's calls, then over the rounds.

        Of processes that wait for each other, or for a time, CPU time does not say whether they had company: `waits`.
        """
        return self._row(name, unit, ours, peer, peer_name, rates, waits=waits)

    def compile_time(
        self,
        name: str,
        ours: Measured,
        peer: Measured,
        *,
        peer_name: str,
    ) -> Row:
        """Seconds of tracing and compiling."""
        return self._row(name, "s", ours, peer, peer_name, lambda m: [m["compile_s"]])

    def number(
        self,
        name: str,
        key: str,
        unit: str,
        ours: Measured,
        peer: Measured,
        *,
        peer_name: str,
    ) -> Row:
        """Any number of the measurements, by its name there."""
        return self._row(name, unit, ours, peer, peer_name, lambda m: [cast(float, m[key])])

    def alone(self, name: str, value: float, unit: str, repeats: Sequence[float] = ()) -> Row:
        """A measurement without a peer."""
        return Row(
            name=name,
            value=value,
            unit=unit,
            repeats=list(repeats) or [value],
            peer=None,
            ratio=None,
            interval=None,
            cpu_share=None,
            threads={"torchpod": {"torch": torch.get_num_threads(), "cores": os.cpu_count()}},
            hardware=self.hardware["name"],
            versions=self.versions,
            commit=self.commit,
        )

    def _row(
        self,
        name: str,
        unit: str,
        ours: Measured,
        peer: Measured,
        peer_name: str,
        values: Callable[[Measurement], list[float]],
        *,
        waits: bool = False,
    ) -> Row:
        sides = {"torchpod": ours, peer_name: peer}
        good = {side: ms for side, ms in sides.items() if isinstance(ms, list) and ms}
        medians = {side: [statistics.median(values(m)) for m in ms] for side, ms in good.items()}
        single = {side: [value for m in ms for value in values(m)] for side, ms in good.items()}
        ratios: list[float] = []
        if len(good) == 2:
            ratios = [a / b for a, b in zip(medians["torchpod"], medians[peer_name], strict=True) if b]
        notes, shares = [str(side) for side in sides.values() if isinstance(side, WorkerError)], []
        for ms in good.values():
            on_cpu = [m for m in ms if m.get("device", "cpu") == "cpu"]
            own = [sum(m["cpu_s"]) / sum(m["wall_s"]) for m in on_cpu]
            shares += own
            most = max(own, default=0.0)
            least = QUIET_CPU_SHARE if most < 1.05 else QUIET_ROUND_SHARE * most
            if own and min(own) < least and unit != "s" and not waits:
                notes.append(f"not alone on the core: {min(own):.0%} of it in the worst round")
        found = dict(self.versions)
        for ms in good.values():
            found.update(ms[0]["versions"])
        return Row(
            name=name,
            value=statistics.median(medians["torchpod"]) if "torchpod" in good else None,
            unit=unit,
            repeats=single.get("torchpod", []),
            peer=None
            if peer_name not in good
            else {
                "name": peer_name,
                "value": statistics.median(medians[peer_name]),
                "repeats": single[peer_name],
            },
            ratio=statistics.median(ratios) if ratios else None,
            interval=(min(ratios), max(ratios)) if len(ratios) > 1 else None,
            cpu_share=min(shares) if shares else None,
            threads={side: ms[0]["threads"] for side, ms in good.items()},
            hardware=self.hardware["name"],
            versions=found,
            commit=self.commit,
            note="; ".join(notes),
            rounds={side: [_told(m) for m in ms] for side, ms in good.items()},
        )


def _told(measurement: Measurement) -> dict[str, Any]:
    seconds = {"wall_s": sum(measurement["wall_s"]), "cpu_s": sum(measurement["cpu_s"])}
    return seconds | {name: x for name, x in measurement.items() if name in TOLD}


def dtype_of(module: torch.nn.Module) -> str:
    """Of its parameters: one, or several with commas."""
    return ",".join(sorted({str(x.dtype).removeprefix("torch.") for x in module.parameters()}))


def rates(measurement: Measurement) -> list[float]:
    """Environment steps per second of each timed call; resets are no steps."""
    return [steps / wall for steps, wall in zip(measurement["env_steps"], measurement["wall_s"], strict=True)]


# --- Checks: each returns what is wrong, nothing if all is well -------------------------------------------------------


def unequal_work(ours: Measurement, peer: Measurement) -> list[str]:
    """Where the two sides did not do the same work, sentences."""
    unsaid = {"population": 1, "env": "", "device": "cpu", "tf32": False}
    a, b = ({**unsaid, **side} for side in (ours, peer))
    return [
        f"unequal work: {key} is {a[key]!r} in {ours['framework']} and {b[key]!r} in {peer['framework']}."
        for key in (*EQUAL_WORK, *unsaid)
        if a[key] != b[key]
    ]


def unequal_returns(ours: Sequence[Measurement], peer: Sequence[Measurement]) -> list[str]:
    """Where both sides learned, and one to much less than the other in the mean of all rounds, a sentence.

    Rounds have seeds of their own, and one seed says little: PPO on Breakout with 64 environments ends between 16 and
    41 on either side (105 iterations).
    """
    first = peer[0]
    if first["mode"] != "update":
        return []
    same = JAX_RETURN_SHARE if first["framework"] == "jax" else {}
    share = same.get(first.get("env", ""), RETURN_SHARE)
    a, b = mean_return(ours), mean_return(peer)
    if a is None or b is None or abs(a - b) > (1 - share) * max(abs(a), abs(b)):
        return [
            f"{ours[0]['framework']} learned to a mean return of {a} and {first['framework']} to {b} in"
            f" the same number of steps; they may differ by {1 - share:.2g} of the one that is further from 0."
        ]
    return []


def untrained(name: str, env: str, sides: Sequence[Measured]) -> list[Failure]:
    """Each side that had time to learn and is not well above a random policy in the mean of all rounds.

    Returns that are equal say nothing if neither side has learned.
    """
    least, found = LEARNED[env], []
    for side in sides:
        if isinstance(side, WorkerError):
            continue
        mean = mean_return(side)
        if mean is None or mean < least:
            sentence = (
                f"{side[0]['framework']} learned to a mean return of {mean}, and must reach {least:g}, far from a"
                " random policy's, or equal returns say nothing: repair it, or let it learn longer."
            )
            found.append((name, sentence))
    return found


def mean_return(rounds: Sequence[Measurement]) -> float | None:
    """None if an episode never ended in one of them."""
    ended = [m["episode_return"] for m in rounds if m["episode_return"] is not None]
    return statistics.mean(ended) if len(ended) == len(rounds) else None


def problems(
    name: str,
    ours: Measured,
    peer: Measured,
    *,
    returns: bool = True,
) -> list[Failure]:
    """What is wrong with a row: a side failed, or the two differ in work or return; a missing peer is no fault.

    Without `returns` those are not compared: the two sides had no time to learn.
    """
    if isinstance(ours, WorkerError):
        return [(name, str(ours))]
    if isinstance(peer, WorkerError):
        return [] if isinstance(peer, MissingError) else [(name, str(peer))]
    told = [sentence for a, b in zip(ours, peer, strict=True) for sentence in unequal_work(a, b)]
    return [(name, sentence) for sentence in told + (unequal_returns(ours, peer) if returns else [])]


def chosen(cases: Sequence[Any], only: str | None, suite: str) -> list[Any]:
    """The cases whose names `named` finds."""
    kept = named([case.name for case in cases], only, suite)
    return [case for case in cases if case.name in kept]


def named(names: Sequence[str], only: str | None, suite: str) -> list[str]:
    """The names that begin with `only`, or one of several that commas part; all, if that is None.

    Raises:
      ValueError: if there is none.
    """
    if only is None:
        return [*names]
    starts = only.split(",")
    for start in starts:
        if not start or not any(name.startswith(start) for name in names):
            raise ValueError(f"--only {start!r} is nothing of {suite}; {nearest(start, [*names])}")
    return [name for name in names if name.startswith(tuple(starts))]


# --- Result files -----------------------------------------------------------------------------------------------------


def last_core() -> int | None:
    """The core that both sides are pinned to; None where there is no such thing.

    Raises:
      ConfigError: if there is, and nothing that pins.
    """
    if hasattr(os, "sched_getaffinity") and shutil.which("taskset") is None:
        raise ConfigError(f"the sides of a benchmark cannot be pinned to a core: {NO_TASKSET}.")
    return max(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


class Record:
    """What a suite has found so far. Leaving the context writes it, whatever ended the suite, and says what failed.

    A suite that is stopped (SIGTERM, Ctrl-C, a calibration that fails) ends there, with what it has as the run of a
    part; one that has no row yet raises what stopped it.

    Args:
      suite: its name.
      json_path: where the rows go; None for bench/results/.
      **extra: more of the result file: `quick`, `only`, `core`, ...

    Attributes:
      rows: in order.
      failures: what failed, of which row; peers below their figures and rows below their targets (targets.py) follow
        from the rows, are told as well, and not stored.
      calibrations: in the course of the suite; the best of each product counts, for what was slower had company.
      status: of the process, when it is written.
    """

    def __init__(self, suite: str, json_path: str | None, **extra: Any) -> None:
        self.rows: list[Row] = []
        self.failures: list[Failure] = []
        self.calibrations: list[Mapping[str, float]] = []
        self.status = 1
        self._suite, self._json_path, self._extra = suite, json_path, extra
        self._load_average = os.getloadavg()

    def calibrate(self, core: int | None) -> None:
        """Once more."""
        self.calibrations.append(calibrate(core))

    def __enter__(self) -> "Record":
        return self

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> bool:
        stopped = isinstance(error, WorkerError | KeyboardInterrupt | SystemExit)
        if error is not None:
            if not self.rows:
                return False
            why = "interrupted." if isinstance(error, KeyboardInterrupt | SystemExit) else str(error)
            self.failures.append((self.rows[-1].name, f"the suite was stopped after this row: {why}"))
            self._extra["only"] = ",".join(row.name for row in self.rows)
        self._write()
        return stopped

    def _write(self) -> None:
        calibration = {
            product: max(c[product] for c in self.calibrations) for product in (self.calibrations or [{}])[0]
        }
        told = [dataclasses.asdict(row) for row in self.rows]
        run = {"suite": self._suite, "rows": told, "calibration_gflops": calibration, **self._extra}
        self.failures = list(dict.fromkeys(self.failures))
        path = write_results(
            self._suite,
            self.rows,
            failures=self.failures,
            calibration=calibration,
            load_average=self._load_average,
            json_path=self._json_path,
            extra=self._extra,
        )
        print(f"{len(self.rows)} rows in {path}")
        implied = [] if self._extra.get("quick") else below_figures(run) + missed(run)
        for name, sentence in self.failures + implied:
            print(f"torchpod bench: {name}: {sentence}", file=sys.stderr)
        self.status = 1 if self.failures or implied else 0


def check_writable(json_path: str | None) -> None:
    """That `write_results` can write there, before an hour of measuring; the folder is made.

    Raises:
      ValueError: if it cannot.
    """
    path = RESULTS / "x.json" if json_path is None else Path(json_path)
    if path.is_dir():
        raise ValueError(f"--json wants a file for the rows, and {path} is a folder: name a file in it.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise ValueError(
            f"no rows can be written to {path.parent}: {error.strerror}; name a file elsewhere with --json."
        ) from None


def write_results(
    suite: str,
    rows: Sequence[Row],
    *,
    failures: Sequence[Failure],
    calibration: Mapping[str, float],
    load_average: Sequence[float],
    json_path: str | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Writes `bench/results/<suite>_<hardware>_<date>.json`, or `json_path`; returns where it lies."""
    machine = hardware()
    now = datetime.datetime.now(datetime.UTC)
    path = (
        Path(json_path) if json_path is not None else RESULTS / f"{suite}_{machine['name']}_{now:%Y-%m-%d-%H%M%S}.json"
    )
    document = {
        "format": FORMAT,
        "suite": suite,
        "date": now.isoformat(timespec="seconds"),
        "hardware": machine,
        "commit": commit(),
        "calibration_gflops": dict(calibration),
        "load_average": list(load_average),
        "wall_s": time.monotonic() - BEGAN,
        "failures": list(failures),
        **(extra or {}),
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}")  # a file is there whole or not at all
    partial.write_text(json.dumps(document, indent=1) + "\n")
    partial.replace(path)
    return path

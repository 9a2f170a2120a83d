"""One side of a comparison, measured in a process of its own.

A worker is a command that measures one case and prints one JSON line, a `Measurement`. `interleave` runs the workers
A B A B, pinned to one core, one at a time; the first round of each starts with empty compile caches and the later ones
with full ones, so that compile time comes cold and warm.
"""

import contextlib
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import torch

from torchpod.config import ConfigError

ROOT = Path(__file__).resolve().parent.parent
PROBE_S = 60
"""How long JAX may take to find a device."""
NO_TASKSET = "there is no `taskset` on the PATH; install util-linux"
ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}


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
    sampled_rows: NotRequired[int]  # of an update from replay
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
    load_average: NotRequired[float]  # added by `run_worker`, read just before the worker started


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


def interleave(
    workers: Sequence[Worker],
    arguments: Sequence[Sequence[str]],
    *,
    core: int | Sequence[int] | None,
    cache_dir: Path | None = None,
    timeout_s: float = 1800.0,
    deadline: float = math.inf,
) -> dict[str, Measured]:
    """Runs every worker once per round, in turn.

    Args:
      workers: the sides, in the order in which they run.
      arguments: command-line arguments of each round.
      core: the core, or cores, that all are pinned to, None for no pinning.
      cache_dir: compile caches go here, one folder per worker; None: an empty one, and the first round compiles cold.
      timeout_s: of one run.
      deadline: of `time.monotonic`, after which no run goes on.

    Returns:
      Each worker's measurements by round, or the error that ended its part.
    """
    if cache_dir is None:
        with tempfile.TemporaryDirectory(prefix="torchpod-bench-") as cache:
            options = {"core": core, "cache_dir": Path(cache), "timeout_s": timeout_s, "deadline": deadline}
            return interleave(workers, arguments, **options)
    results: dict[str, Measured] = {worker.name: [] for worker in workers}
    for round_arguments in arguments:
        for worker in workers:
            done = results[worker.name]
            if isinstance(done, WorkerError):
                continue
            left_s = min(timeout_s, max(1.0, deadline - time.monotonic()))
            try:
                done.append(run_worker(worker, round_arguments, core=core, cache_dir=cache_dir, timeout_s=left_s))
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


def dtype_of(module: torch.nn.Module) -> str:
    """Of its parameters: one, or several with commas."""
    return ",".join(sorted({str(x.dtype).removeprefix("torch.") for x in module.parameters()}))


def rates(measurement: Measurement) -> list[float]:
    """Environment steps per second of each timed call; resets are no steps."""
    return [steps / wall for steps, wall in zip(measurement["env_steps"], measurement["wall_s"], strict=True)]


def mean_return(rounds: Sequence[Measurement]) -> float | None:
    """None if an episode never ended in one of them."""
    ended = [m["episode_return"] for m in rounds if m["episode_return"] is not None]
    return statistics.mean(ended) if len(ended) == len(rounds) else None


def last_core() -> int | None:
    """The core that both sides are pinned to; None where there is no such thing.

    Raises:
      ConfigError: if there is, and nothing that pins.
    """
    if hasattr(os, "sched_getaffinity") and shutil.which("taskset") is None:
        raise ConfigError(f"the sides of a benchmark cannot be pinned to a core: {NO_TASKSET}.")
    return max(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None

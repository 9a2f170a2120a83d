"""Workers that wait: all compile and warm up at once, then one after the other is measured. Read harness.py first.

A worker started with `--rounds N` prints `{"ready": true}` when nothing is left to compile, then a `Measurement` for
each line that it reads, and `{"details": ...}` when its input ends. So a suite of many cases costs the compile time of
a few, and what is measured has the device for itself. Every wait ends at the deadline of the suite.
"""

import contextlib
import json
import os
import queue
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from torchpod.bench.processes import ONE_THREAD, ROOT, Measured, Measurement, MissingError, Worker, WorkerError

GONE = contextlib.suppress(OSError, ValueError)
"""Around pipes whose other end may be gone, or our own closed."""


class Job(NamedTuple):
    """One side of one case."""

    case: str
    worker: Worker
    arguments: Sequence[str]


class Result(NamedTuple):
    """What came of a job."""

    measurements: Measured
    details: dict[str, Any]


class Wave:
    """The workers of some jobs, which are started at once; leaving the context ends those that still run.

    Args:
      jobs: those of one case side by side, in the order in which they take turns.
      deadline: of `time.monotonic`, for everything.
      ready_s: how long the others wait for one that is not ready.
    """

    def __init__(self, jobs: Sequence[Job], deadline: float, ready_s: float = 300.0) -> None:
        self._jobs, self._deadline, self._ready_by = jobs, deadline, min(deadline, time.monotonic() + ready_s)
        self._folder = tempfile.TemporaryDirectory(prefix="torchpod-bench-", ignore_cleanup_errors=True)
        self._workers: list[Served | WorkerError] = []

    def __enter__(self) -> "Wave":
        num_threads = max(1, len(os.sched_getaffinity(0)) // max(1, len(self._jobs)))
        for i, job in enumerate(self._jobs):
            try:
                folder = Path(self._folder.name) / str(i)
                self._workers.append(Served(job, folder, self._deadline, threads=num_threads))
            except WorkerError as error:
                self._workers.append(error)
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            if isinstance(worker, Served):
                worker.kill()
        self._folder.cleanup()

    def measure(self, rounds: int) -> list[Result]:
        """When all are ready: each case in turn, its workers A B A B, `rounds` times each."""
        workers = self._workers
        for i, worker in enumerate(workers):
            if isinstance(worker, Served):
                workers[i] = _or_error(worker, lambda w=worker: w.ready(self._ready_by))
        found: list[list[Measurement]] = [[] for _ in workers]
        details: list[dict[str, Any]] = [{} for _ in workers]
        for case in dict.fromkeys(job.case for job in self._jobs):
            own = [i for i, job in enumerate(self._jobs) if job.case == case]
            for _ in range(rounds):
                for i in own:
                    worker = workers[i]
                    if isinstance(worker, Served):
                        workers[i] = _or_error(worker, lambda i=i, w=worker: found[i].append(w.measure()))
            for i in own:
                worker = workers[i]
                if isinstance(worker, Served):  # without details its measurements are there all the same
                    _or_error(worker, lambda i=i, w=worker: details[i].update(w.end()))
        return [
            Result(worker if isinstance(worker, WorkerError) else found[i], details[i])
            for i, worker in enumerate(workers)
        ]


class Served:
    """A worker that runs and waits for its turn.

    Args:
      job: what it does.
      folder: its own, made here: caches, and what it says on stderr.
      deadline: see `Wave`.
      threads: that may compile.

    Raises:
      WorkerError: from every method, if it is missing, failed, or was not done at the deadline.
    """

    def __init__(self, job: Job, folder: Path, deadline: float, *, threads: int) -> None:
        worker = job.worker
        if worker.missing:
            raise MissingError(f"{worker.name}: {worker.missing}")
        self._name, self._deadline = worker.name, deadline
        folder.mkdir()
        self._errors = folder / "stderr"
        env = {
            **os.environ,
            **ONE_THREAD,
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
            "TRITON_CACHE_DIR": str(folder / "triton"),
            "TORCHINDUCTOR_COMPILE_THREADS": str(threads),  # the other workers compile too
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            **worker.env,
        }
        try:
            with self._errors.open("w") as errors:
                self._process = subprocess.Popen(
                    [*worker.command, *job.arguments],
                    env=env,
                    cwd=ROOT,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                )
        except OSError as error:
            raise WorkerError(f"{worker.name} could not be started: {error}") from None
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def ready(self, by: float) -> None:
        """Waits until it is."""
        self._answer("ready", by)

    def measure(self) -> Measurement:
        """One round."""
        load = os.getloadavg()[0]
        self._tell("measure\n")
        answer = {**self._answer("wall_s"), "load_average": load}
        missing = sorted(Measurement.__required_keys__ - answer.keys())
        if missing:
            raise WorkerError(f"{self._name} printed a measurement without {', '.join(missing)}")
        return cast(Measurement, answer)

    def end(self) -> Mapping[str, Any]:
        """Its details; it is gone afterwards, and its memory free."""
        self._tell(None)
        details = self._answer("details")["details"]
        try:
            self._process.wait(max(0.0, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill()
        return details

    def kill(self) -> None:
        """Ends it, whatever it does."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with GONE:
                    pipe.close()

    def _read(self) -> None:
        with GONE:
            for line in self._process.stdout or ():
                self._lines.put(line)
        self._lines.put(None)

    def _tell(self, line: str | None) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        with GONE:  # if it is gone, the answer says why
            if line is None:
                pipe.close()
            else:
                pipe.write(line)
                pipe.flush()

    def _answer(self, key: str, by: float | None = None) -> dict[str, Any]:
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, (by or self._deadline) - time.monotonic()))
            except queue.Empty:
                what = "was not ready" if key == "ready" else "had not answered"
                raise WorkerError(f"{self._name} was not measured: it {what} when the time was over") from None
            if line is None:
                status = self._process.wait()
                lines = [x.strip() for x in self._errors.read_text(errors="replace").splitlines() if x.strip()]
                raise WorkerError(f"{self._name} failed (exit status {status}): {(lines or ['no message'])[-1]}")
            if line.startswith("{"):
                answer = json.loads(line)
                if key in answer:
                    return answer


def _or_error(worker: Served, do: Callable[[], Any]) -> "Served | WorkerError":
    try:
        do()
    except WorkerError as error:
        worker.kill()
        return error
    return worker

"""Runs `torchpod` commands in forks of one process that has imported everything: half a second instead of four.

Signals, exit statuses, standard error and the working folder are those of a process started by hand.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SERVER = """
import json, os, sys
import torch
torch.set_num_threads(1)
import torchpod.main
import torchpod.bench, torchpod.commands.eval_run
for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if child == 0:
        os.setsid()
        os.chdir(job["cwd"])
        os.environ.update(job["env"])
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(job[name], os.O_WRONLY | os.O_CREAT), number)
        sys.stdin.close()
        status = 1
        try:
            status = torchpod.main.main(job["argv"])
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(status)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Job:
    """A command that runs."""

    def __init__(self, server: subprocess.Popen[str], out: Path, err: Path) -> None:
        assert server.stdout is not None
        self._server, self._out, self._err = server, out, err
        self.pid = int(server.stdout.readline())
        self.status: int | None = None

    def kill(self, number: int) -> None:
        """Sends a signal; the process may be gone already."""
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            pass

    def wait(self) -> int:
        """The exit status; minus the signal that ended it. The session of its processes is `pid`."""
        if self.status is None:
            assert self._server.stdout is not None
            self.status = int(self._server.stdout.readline())
        return self.status

    @property
    def out(self) -> str:
        """Standard output so far."""
        return self._out.read_text()

    @property
    def err(self) -> str:
        """Standard error so far."""
        return self._err.read_text()


class Zygote:
    """The process that forks. One job at a time."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._folder = tempfile.TemporaryDirectory()
        self._count = 0
        self._job: Job | None = None

    def start(self, *argv: str, cwd: Path, env: dict[str, str] | None = None) -> Job:
        """Starts `torchpod *argv` in folder `cwd`."""
        self._count += 1
        out, err = (Path(self._folder.name, f"{self._count}.{name}") for name in ("out", "err"))
        out.touch()
        err.touch()
        job = {"argv": argv, "cwd": str(cwd), "env": env or {}, "out": str(out), "err": str(err)}
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(job) + "\n")
        self._server.stdin.flush()
        self._job = Job(self._server, out, err)
        return self._job

    def run(self, *argv: str, cwd: Path, env: dict[str, str] | None = None) -> tuple[int, str, str]:
        """Exit status, standard output, standard error."""
        job = self.start(*argv, cwd=cwd, env=env)
        status = job.wait()
        return status, job.out, job.err

    def settle(self) -> None:
        """Kills the job that a failed test has left."""
        if self._job is not None and self._job.status is None:
            self._job.kill(signal.SIGKILL)
            self._job.wait()

    def close(self) -> None:
        """Ends the process."""
        self.settle()
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait()
        self._server.stdout.close()
        self._folder.cleanup()


def wait_until(condition, timeout_s: float = 60.0) -> float:
    """Seconds until the condition holds."""
    began = time.perf_counter()
    while not condition():
        assert time.perf_counter() - began < timeout_s, "it never came true"
        time.sleep(0.002)
    return time.perf_counter() - began

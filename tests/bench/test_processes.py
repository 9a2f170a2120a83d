"""Workers as processes: pinned, timed, ended, and what they print."""

import shutil
import sys
import time
from pathlib import Path

import pytest

from torchpod.bench import (
    processes,
    targets,
)
from torchpod.bench.processes import Worker, WorkerError


def test_what_a_worker_has_started_ends_with_it(tmp_path):
    """As ranks and compilers are started."""
    told = tmp_path / "pid"
    code = f"""import subprocess, time
started = subprocess.Popen(["sleep", "60"])
open({str(told)!r}, "w").write(str(started.pid))
time.sleep(60)"""
    with pytest.raises(processes.WorkerError, match="still running after 2 s"):
        processes.output_of([sys.executable, "-c", code], {}, "it", core=None, timeout_s=2.0)
    pid = int(told.read_text())
    deadline = time.monotonic() + 5
    while (state := Path(f"/proc/{pid}/stat")).exists() and state.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("print('{}')", "without batch_rows"),
        ("print('hello')", "printed no measurement: hello"),
        ("import time; time.sleep(30)", "still running after 0 s"),
    ],
)
def test_a_worker_that_misbehaves_is_named_with_the_reason(tmp_path, code, message):
    worker = Worker("jax", (sys.executable, "-S", "-c", code))
    timeout_s = 0.3 if "sleep" in code else 60.0
    with pytest.raises(WorkerError, match=message):
        processes.run_worker(worker, [], core=None, cache_dir=tmp_path, timeout_s=timeout_s)


def test_missing_peers_are_explained(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHPOD_PEERS_PYTHON", str(tmp_path / "python"))
    assert "does not exist" in (processes.peers_python()[1] or "")
    monkeypatch.setenv("TORCHPOD_PEERS_PYTHON", sys.executable)
    reason = processes.peers_python()[1]
    assert reason is None or "has no JAX for cpu" in reason
    for program in ("true", "echo"):
        monkeypatch.setenv("TORCHPOD_PEERS_PYTHON", str(shutil.which(program)))
        assert "has no JAX for cpu" in (processes.peers_python()[1] or "")


def test_the_calibration_product_is_the_one_that_scales_the_figures():
    rates = processes.calibrate(None)
    assert targets.PRODUCT in rates and all(rate > 0 for rate in rates.values())


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ("exec sleep 30", "was not over after 1 s"),
        ("echo no devices >&2; exit 1", "has no JAX for cuda: no devices"),
        ("echo has JAX", None),
    ],
)
def test_why_there_is_no_jax_is_told_in_time(tmp_path, monkeypatch, lines, told):
    monkeypatch.setattr(processes, "PROBE_S", 1 if "sleep" in lines else 60)
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{lines}\n")
    python.chmod(0o755)
    reason = processes.lacks_jax(str(python), "cuda")
    assert reason is None if told is None else told in str(reason)

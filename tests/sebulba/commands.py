"""Runs from the command line, in a folder of their own, and what is seen of them from outside."""

import json
import os
import time
from pathlib import Path

from torchpod import checkpoint
from torchpod.main import main

SMALL = (
    "loop=sebulba",
    "compile=false",
    "logger.console=false",
    "num_envs=4",
    "algo.unroll_length=8",
    "algo.agent.hidden=[8]",
    "algo.learner.num_minibatches=2",
    "evaluation.episodes=2",
)
STEPS = 4 * 8


def train(*overrides):
    return main(["train", *SMALL, *overrides])


def goes_on_from(saved):
    """The run, with another iteration."""
    assert main(["train", "resume=run", f"total_env_steps={(saved + 1) * STEPS}"]) == 0
    assert int(checkpoint.latest(Path("run")).name) == saved + 1


def session_of(process):
    """All processes of a run, its workers and their servers too."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
    return [pid for pid in pids if session(pid) == process.pid]


def session(pid):
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def wait_for_rows(num, process):
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if Path("run/metrics.jsonl").is_file() and len(Path("run/metrics.jsonl").read_text().splitlines()) >= num:
            return
        time.sleep(0.05)
    process.kill()
    raise AssertionError(f"no {num} rows: {process.communicate()}")


def group_is_empty(process):
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def numbers_of_rows():
    return [json.loads(line)["iteration"] for line in Path("run/metrics.jsonl").read_text().splitlines()]


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False

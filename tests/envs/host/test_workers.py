"""Environments in processes of their own end with their run, and tell what went wrong there."""

import contextlib
import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from torchpod import random
from torchpod.envs.host import Gymnasium
from torchpod.envs.host.workers import preload
from torchpod.watched import close_all


class Plain(gymnasium.Env):
    observation_space, action_space = spaces.Box(0.0, 1.0, (1,)), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 0.0, False, False, {}


def keys(num, seed=0):
    return random.split(random.key(seed), num)


RUN = """
import ctypes, os, signal, sys
from pathlib import Path

import gymnasium
import torch

from torchpod.envs.host import Gymnasium


class Hanging(gymnasium.Env):
    observation_space, action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,)), gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return self.observation_space.low, {}

    def step(self, action):
        Path("worker").write_text(str(os.getpid()))
        ctypes.PyDLL(None).sleep(300)  # with Python's lock


env = Gymnasium(Hanging, processes=True)
env.init(torch.zeros(1, 3, dtype=torch.int64))
env.send(torch.zeros(1, dtype=torch.int64))
while not Path("worker").is_file() or not Path("worker").read_text():
    pass
os.kill(os.getpid(), signal.SIGKILL) if sys.argv[1] == "killed" else os._exit(130)
"""


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["killed", "exits"])
def test_a_worker_process_that_hangs_in_c_code_ends_with_its_run(tmp_path, ends):
    subprocess.run([sys.executable, "-c", RUN, ends], cwd=tmp_path, timeout=60)
    worker, deadline = int((tmp_path / "worker").read_text()), time.monotonic() + 10
    try:
        while alive(worker) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not alive(worker)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)


GROUPS = """
import os, signal

from torchpod.envs.host.workers import kill_at_end_of

for closed_before in (False, True):
    end, other_end = os.pipe()
    if (child := os.fork()) == 0:
        os.setpgrp()
        if closed_before:
            os.close(other_end)
            os.read(end, 1)  # until the parent has closed it, too
        kill_at_end_of(end)
        os.write(1, b"lives ")
        signal.alarm(10)
        os.close(other_end)
        while True:
            pass
    os.close(other_end)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_a_process_group_is_killed_when_nobody_holds_the_other_end_of_its_pipe():
    result = subprocess.run([sys.executable, "-c", GROUPS], capture_output=True, text=True, timeout=60)
    assert result.stdout == "lives -9\n-9\n", result.stderr


class TwoNumbersError(Exception):
    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")


def with_a_lock():
    error = ValueError("it was locked")
    error.lock = threading.Lock()  # pyright: ignore[reportAttributeAccessIssue]
    return error


FAULTS = {
    "two": (lambda: TwoNumbersError(1, 2), "TwoNumbersError: 1 and 2"),
    "lock": (with_a_lock, "ValueError: it was locked"),
    "exit": (lambda: SystemExit(3), "SystemExit: 3"),
    "unicode": (lambda: UnicodeDecodeError("utf-8", b"x", 0, 1, "no letter"), "UnicodeDecodeError: .*no letter"),
}


class Faulty(Plain):
    def __init__(self, what):
        self.what = what

    def step(self, action):
        raise FAULTS[self.what][0]()


@pytest.mark.filterwarnings("ignore:.*(Received the following error|Raising the last|Traceback)")  # Gymnasium's own
@pytest.mark.parametrize("what", FAULTS)
def test_errors_that_cannot_travel_come_from_their_process_as_what_they_say(what):
    env = Gymnasium(functools.partial(Faulty, what), processes=True)
    try:
        env.init(keys(1))
        with pytest.raises(RuntimeError, match=FAULTS[what][1]):
            env.step(None, torch.zeros(1, dtype=torch.int64), keys(1, 1))
    finally:
        env.close()


class Lost(Plain):
    def step(self, action):
        raise KeyError("no way")


@pytest.mark.filterwarnings("ignore:.*(Received the following error|Raising the last|Traceback)")  # Gymnasium's own
def test_an_error_that_can_travel_is_itself():
    env = Gymnasium(Lost, processes=True)
    try:
        env.init(keys(1))
        with pytest.raises(KeyError, match="no way"):
            env.step(None, torch.zeros(1, dtype=torch.int64), keys(1, 1))
    finally:
        env.close()


class AtHome(Plain):
    """Can be made in one process alone."""

    def __init__(self, process, error):
        if os.getpid() != process:
            raise error


@pytest.mark.filterwarnings("ignore:.*(Received the following error|Raising the last|Traceback)")  # Gymnasium's own
@pytest.mark.parametrize(
    ("error", "kind", "told"),
    [
        (LookupError("no licence here"), LookupError, "no licence here"),
        pytest.param(SystemExit(3), RuntimeError, "a worker process of AtHome is gone", marks=pytest.mark.slow),
    ],
)
def test_one_that_cannot_be_made_in_a_worker_process_is_told_as_what_it_says(error, kind, told):
    def make():
        return AtHome(run, error)

    run = os.getpid()
    make.__name__ = "AtHome"
    env = Gymnasium(make, processes=True)
    try:
        with pytest.raises(kind, match=told):
            env.init(keys(1))
    finally:
        env.close()


class Walk(gymnasium.Env):
    """Random, and tells the process it is in."""

    observation_space, action_space = Plain.observation_space, Plain.action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.random(1).astype(np.float32), {}

    def step(self, action):
        return self.np_random.random(1).astype(np.float32), float(os.getpid()), False, bool(action), {}


def test_worker_processes_stay_for_as_many_environments_again():
    env = Gymnasium(Walk, processes=True)
    try:
        seen = []
        for num, cut in ((2, 1), (2, 0), (1, 0)):  # the second time right after a last step
            _, first = env.init(keys(num))
            _, timestep = env.step(None, torch.full((num,), cut), keys(num, 1))
            seen.append((first.observation.tolist(), timestep.observation.tolist(), timestep.reward.tolist()))
        once, again, alone = seen
        assert once == again and once[0][0] != once[0][1]
        assert alone[0] == once[0][:1] and alone[1] == once[1][:1] and alone[2][0] not in once[2]
    finally:
        env.close()


class StaysOpen(Plain):
    """In other processes than one."""

    def __init__(self, process):
        self.process = process

    def close(self):
        if os.getpid() != self.process:
            time.sleep(1e6)


class Starter(Plain):
    """Starts a process, and is then killed."""

    def __init__(self, path):
        self.path = path

    def step(self, action):
        self.path.write_text(str(subprocess.Popen(["sleep", "1000"]).pid))
        os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


def test_what_a_worker_process_has_started_ends_with_it(tmp_path):
    env = Gymnasium(functools.partial(Starter, tmp_path / "pid"), processes=True)
    try:
        env.init(keys(1))
        told = "a worker process of Starter is gone, that of environment 0 with exit status -9"
        with pytest.raises(RuntimeError, match=told):
            env.step(None, torch.zeros(1, dtype=torch.int64), keys(1, 1))
    finally:
        env.close()
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 5
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(pid)


class Drawing(Plain):
    observation_space = spaces.Box(0.0, 1.0, (2,))

    def reset(self, *, seed=None, options=None):
        return np.array([np.random.random(), torch.rand(()).item()], np.float32), {}


def test_worker_processes_draw_apart_from_each_other_with_the_generators_of_numpy_and_torch():
    env = Gymnasium(Drawing, processes=True)
    try:
        assert [len(x.unique()) for x in env.init(keys(4))[1].observation.T] == [4, 4]
    finally:
        env.close()


def test_who_has_chosen_what_the_fork_server_imports_keeps_it(monkeypatch):
    server = multiprocessing.forkserver._forkserver
    monkeypatch.setattr(server, "_preload_modules", ["__main__", "mine"])
    preload()
    assert server._preload_modules == ["__main__", "mine"]
    monkeypatch.setattr(server, "_preload_modules", ["__main__"])
    preload()
    assert server._preload_modules == ["__main__", "torchpod.envs.host.workers", "gymnasium"]


class Importer(Plain):
    """Shows whether this process has imported torch by itself: then its source was not read by the fork server."""

    def reset(self, *, seed=None, options=None):
        with open(f"/proc/{os.getppid()}/maps") as file:
            return np.full(1, "libtorch" in file.read(), np.float32), {}


def test_the_fork_server_imports_torch_for_all_worker_processes():
    """In a process whose server does not run yet."""
    code = (
        "import sys, torch; from tests.envs.host.test_workers import Importer, keys\n"
        "from torchpod.envs.host import Gymnasium\n"
        "if __name__ == '__main__':\n"
        "    env = Gymnasium(Importer, processes=True)\n"
        "    print(env.init(keys(2))[1].observation.tolist()); env.close()\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert found.stdout == "[[1.0], [1.0]]\n", found.stderr


def test_worker_processes_that_do_not_close_are_ended(monkeypatch):
    monkeypatch.setattr("torchpod.watched.CLOSE_S", 0.5)
    env = Gymnasium(functools.partial(StaysOpen, os.getpid()), processes=True)
    env.init(keys(1))
    began = time.monotonic()
    close_all([env])
    assert time.monotonic() - began < 10 and multiprocessing.active_children() == []

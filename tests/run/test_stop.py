"""Signals beside the calls of a run; tests/run/test_execute.py and tests/distributed/test_ranks.py have whole runs."""

import contextlib
import multiprocessing
import os
import signal
import threading
import time
import warnings

import pytest
import torch

from torchpod.distributed import ALONE, Ranks
from torchpod.env import HostEnv
from torchpod.envs import CartPole
from torchpod.run import stop
from torchpod.run.stop import OverdueError, StopFlag
from torchpod.watched import watched


@pytest.mark.parametrize("ranks", [ALONE, Ranks(0, 2)], ids=["alone", "two ranks"])
def test_a_call_after_a_signal_that_came_while_a_checkpoint_was_written_may_be_given_up(monkeypatch, ranks):
    ended = []
    for name, seconds in {"GRACE_S": 0.2, "LEAVE_S": 0.8}.items():
        monkeypatch.setattr(StopFlag, name, seconds)
    monkeypatch.setattr(os, "_exit", ended.append)
    with StopFlag(ranks, torch.device("cpu"), lambda: "given up") as stop:
        stop.pause()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1.0)  # nothing is given up while it is written
        stop.watch()
        with pytest.raises(OverdueError):
            time.sleep(5.0)
        assert ended == []
        stop._calling = True  # as where C code hears nothing
        time.sleep(1.0)
    assert ended == ([] if ranks is ALONE else [130])


class Slow(HostEnv):
    """Goes on whatever is raised in it."""

    def step(self, state, action, keys):
        with contextlib.suppress(Exception):
            time.sleep(5.0)
        return super().step(state, action, keys)


def test_a_call_that_is_given_up_in_an_environment_is_not_its_failure(monkeypatch):
    monkeypatch.setattr(StopFlag, "GRACE_S", 0.2)
    env, keys = watched(Slow(CartPole()), "training", 60.0), torch.zeros(1, 3, dtype=torch.int64)
    env.init(keys)
    with StopFlag(ALONE, torch.device("cpu"), lambda: "given up") as stop:
        stop.pause()
        stop.watch()
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(OverdueError):
            env.step(None, torch.zeros(1, dtype=torch.int64), keys)


def test_a_signal_to_a_process_that_was_forked_within_is_none_to_the_run(monkeypatch):
    """As of a pool that an environment makes in its constructor."""
    ended, told = [], []
    monkeypatch.setattr(StopFlag, "LEAVE_S", 0.5)
    monkeypatch.setattr(os, "_exit", ended.append)
    before = signal.getsignal(signal.SIGTERM)
    with StopFlag(ALONE, torch.device("cpu"), lambda: told.append("over") or "", in_c=True):
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        with warnings.catch_warnings(action="ignore"):  # of threads
            child.start()
        child.terminate()
        child.join(20)
        time.sleep(1.5)
    assert child.exitcode == -signal.SIGTERM and (ended, told) == ([], [])
    assert signal.getsignal(signal.SIGTERM) is before and signal.set_wakeup_fd(-1) == -1


def test_a_call_that_ends_in_time_after_such_a_signal_is_left_alone(monkeypatch):
    monkeypatch.setattr(StopFlag, "GRACE_S", 0.2)
    with StopFlag(ALONE, torch.device("cpu"), lambda: "given up") as stop:
        stop.pause()
        os.kill(os.getpid(), signal.SIGINT)
        stop.watch()
        stop.pause()
        time.sleep(0.4)
        assert stop.agree(False) == (True, False)


def test_where_no_thread_can_be_started_signals_are_as_they_were(monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)}
    with pytest.raises(RuntimeError, match="start new thread"):
        StopFlag(Ranks(0, 2), torch.device("cpu"), lambda: "").__enter__()
    assert {number: signal.getsignal(number) for number in before} == before
    assert stop._ENTERED == [] and signal.set_wakeup_fd(-1) == -1

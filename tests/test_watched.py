"""What hangs in the main thread; tests/sebulba/test_ends.py has whole runs."""

import ctypes
import subprocess
import sys
import threading
import time

import pytest
import torch

from torchpod.env import HostEnv
from torchpod.envs.classic.cartpole import CartPole
from torchpod.watched import HostError, Watched, close_all, sentence, unless, watching

DEAF = """
import multiprocessing, time

multiprocessing.get_context("fork").Process(target=time.sleep, args=(300,), daemon=True).start()
from torchpod import watched

watched.GRACE_S = 0.5
with watched.watching("the valley has not answered", 0.1):
    while True:
        try:
            time.sleep(60)
        except Exception:
            pass
"""


ENDED = """
import multiprocessing, os, subprocess, time

def work(pipe):
    os.setpgrp()
    subprocess.Popen(["sleep", "300"])
    pipe.send("begun")
    time.sleep(300)

ours, theirs = multiprocessing.get_context("fork").Pipe()
multiprocessing.get_context("fork").Process(target=work, args=(theirs,), daemon=True).start()
print(ours.recv(), flush=True)
from torchpod.watched import end_process

end_process(3)
"""


def test_a_block_that_takes_too_long_is_ended_by_a_sentence():
    began = time.monotonic()
    with pytest.raises(HostError, match="the valley has not answered for 0.1 s; if it may take so long, raise"):
        with watching("the valley has not answered", 0.1):
            time.sleep(60)
    assert time.monotonic() - began < 2


def test_the_time_in_which_the_process_stands_still_is_not_counted():
    began = time.monotonic()
    with pytest.raises(HostError, match="the valley has not answered for 0.5 s"):
        with watching("the valley has not answered", 0.5):
            ctypes.PyDLL(None).sleep(2)  # with Python's lock: no thread runs, as in a process that is stopped
            time.sleep(60)
    assert 2.5 < time.monotonic() - began < 10


def test_blocks_that_end_in_time_are_left_alone_and_cost_little():
    began = time.perf_counter()
    for _ in range(1000):
        with watching("the valley has not answered", 0.1):
            pass
    assert time.perf_counter() - began < 0.2
    with watching("the valley has not answered", float("inf")):
        time.sleep(0.6)
    assert [thread.name for thread in threading.enumerate()].count("torchpod-watchdog") == 1


def test_what_fails_elsewhere_ends_a_block_that_goes_on(monkeypatch):
    monkeypatch.setattr("torchpod.watched.GRACE_S", 1.0)
    failure, began = [], time.monotonic()
    threading.Timer(0.5, failure.append, [LookupError("no way on")]).start()
    with pytest.raises(LookupError, match="no way on"):
        with unless(lambda: failure[0] if failure else None):
            time.sleep(60)
    assert 1.5 < time.monotonic() - began < 5
    with unless(lambda: failure[0]):  # what ends in time has its result
        time.sleep(0.5)


class Held:
    """Something like a run, whose tensors must not be freed by a daemon thread while the process ends."""

    def __init__(self, freed_by: list[str]) -> None:
        self._freed_by = freed_by

    def failure(self) -> None:
        """Nothing has failed."""

    def __del__(self) -> None:
        self._freed_by.append(threading.current_thread().name)


def test_the_main_thread_is_the_last_to_let_go_of_what_it_waits_for():
    freed_by = []
    for _ in range(2):
        held = Held(freed_by)
        with unless(held.failure):
            time.sleep(0.5)  # two looks
        del held
        time.sleep(0.5)
    assert freed_by == ["MainThread"] * 2


def test_another_thread_is_not_watched():
    def work():
        with watching("the valley has not answered", 0.05):
            time.sleep(0.5)
            done.append(True)

    done = []
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done


def test_a_block_that_hears_nothing_ends_the_process_with_the_sentence():
    # Its child has standard error as well: it is gone, too, when that is read to its end.
    result = subprocess.run([sys.executable, "-c", DEAF], capture_output=True, text=True, timeout=60)
    message = "the valley has not answered for 0.1 s; if it may take so long, raise loop.timeout_s=0.1."
    *stack, error = result.stderr.splitlines()
    assert (result.returncode, error) == (1, f"torchpod: error: {message}")
    assert stack[0] == "Stack of the thread that hangs (most recent call last):" and len(stack) < 4  # told once


def test_a_process_that_is_ended_takes_with_it_what_its_workers_have_started():
    # The last child has standard error as well: it is gone, too, when that is read to its end.
    result = subprocess.run([sys.executable, "-c", ENDED], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout, result.stderr) == (3, "begun\n", "")


class Stuck(HostEnv):
    """Raises in each step what it was made with, and does not close."""

    def __init__(self, error: BaseException | None = None):
        super().__init__(CartPole())
        self.error, self.closing = error or KeyError(), 0

    def step(self, state, action, keys):
        raise self.error

    def close(self):
        self.closing += 1
        time.sleep(60)


def test_an_environment_whose_close_hangs_is_given_up(monkeypatch):
    monkeypatch.setattr("torchpod.watched.CLOSE_S", 0.3)
    envs, began = [Stuck(), Stuck()], time.monotonic()
    message = r"cartpole could not be closed, .*: close\(\) of cartpole has not come back for 0.3 s; it is given up."
    with pytest.warns(UserWarning, match=message) as told:
        close_all(envs)
    assert time.monotonic() - began < 5 and [env.closing for env in envs] == [1, 1] and len(told) == 2


def test_after_one_that_hangs_the_others_have_less_time(monkeypatch):
    monkeypatch.setattr("torchpod.watched.CLOSE_S", 2.0)
    envs, began = [Stuck() for _ in range(5)], time.monotonic()
    with pytest.warns(UserWarning, match=r"has not come back for (2|0.5) s; it is given up.") as told:
        close_all(envs)
    assert 4.0 <= time.monotonic() - began < 8 and [env.closing for env in envs] == [1] * 5 and len(told) == 5


def test_a_block_within_another_leaves_that_one_its_time():
    with pytest.raises(HostError, match="the valley has not answered for 0.5 s"):
        with watching("the valley has not answered", 0.5):
            with watching("the hill has not answered", 60):
                pass
            time.sleep(60)


@pytest.mark.parametrize("error", [StopIteration("the file is read"), SystemExit(3), KeyError("x")], ids=type)
def test_whatever_an_environment_raises_is_told_as_its_own(error):
    env = Watched(Stuck(error), "training", 60)
    with pytest.raises(HostError, match=rf"cartpole failed in training: {type(error).__name__}: .*\.$") as caught:
        env.step(None, torch.zeros(1), torch.zeros(1, 3))
    assert caught.value.__cause__ is error


def test_it_ends_although_nothing_can_be_told():
    with open("/dev/full", "w") as full:
        assert subprocess.run([sys.executable, "-c", DEAF], stderr=full, timeout=60).returncode == 1


class MuteError(Exception):
    def __str__(self):
        return self.args[7]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (MuteError(), "MuteError."),
        (OSError("no way on"), "OSError: no way on."),
        (OSError("no way on."), "OSError: no way on."),
        (OSError("is it gone?"), "OSError: is it gone?"),
        (KeyError(), "KeyError."),
    ],
)
def test_a_sentence_has_one_mark_at_its_end(error, text):
    assert sentence(error) == text

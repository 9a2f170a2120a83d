"""What hangs in the main thread; tests/sebulba/test_run.py has whole runs."""

import ctypes
import subprocess
import sys
import threading
import time

import pytest

from torchpod.watched import HostError, sentence, watching

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


def test_it_ends_although_nothing_can_be_told():
    with open("/dev/full", "w") as full:
        assert subprocess.run([sys.executable, "-c", DEAF], stderr=full, timeout=60).returncode == 1


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError("no way on"), "OSError: no way on."),
        (OSError("no way on."), "OSError: no way on."),
        (OSError("is it gone?"), "OSError: is it gone?"),
        (KeyError(), "KeyError."),
    ],
)
def test_a_sentence_has_one_mark_at_its_end(error, text):
    assert sentence(error) == text

"""No test leaves an actor thread behind; and what runs from the command line have around them."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sebulba.commands import SMALL, session_of
from tests.sebulba.runs import threads


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert threads() == []


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current one, with environments and agents of a user's own."""
    monkeypatch.chdir(tmp_path)
    for name, given in (("corridor.py", "corridor.py"), ("agent.py", "forgetful.py")):
        shutil.copy(Path(__file__).with_name(given), tmp_path / name)
    return tmp_path


@pytest.fixture
def start():
    """Starts a run in a process group of its own; none outlives its test."""
    runs = []

    def begin(*overrides):
        command = [sys.executable, "-m", "torchpod", "train", *SMALL, *overrides]
        runs.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True))
        return runs[-1]

    yield begin
    for pid in [pid for run in runs for pid in session_of(run)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

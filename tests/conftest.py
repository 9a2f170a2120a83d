"""What every test gets: one torch thread, and a stated reason for each GPU test that does not run.

Inductor's cache stays where torch puts it, one folder per user, so that a second session compiles little.
"""

import os
import secrets
from collections.abc import Iterator
from typing import Any

# Before torch: two OpenMP threads that compete for a core are many times slower than one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from tests.zygote import Zygote


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    """Set the default; a test that wants more threads sets and restores them itself."""
    torch.set_num_threads(1)


@pytest.fixture
def seed() -> int:
    """A fresh one for each test; printed, so that a failure can be repeated."""
    value = secrets.randbits(32)
    print(f"seed={value}")
    return value


@pytest.fixture(scope="session")
def zygote_of_all() -> Iterator[Zygote]:
    """It takes seconds to start."""
    zygote = Zygote()
    yield zygote
    zygote.close()


@pytest.fixture
def zygote(zygote_of_all: Zygote) -> Iterator[Zygote]:
    """For `torchpod` commands in processes of their own."""
    yield zygote_of_all
    zygote_of_all.settle()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip gpu tests where there is no GPU, also when the -m option did not leave them out."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="gpu: torch.cuda.is_available() is False"))


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Count the gpu tests that the -m option leaves out."""
    global gpu_left_out
    gpu_left_out += sum(item.get_closest_marker("gpu") is not None for item in items)


gpu_left_out = 0


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand the number to the process that reports, if tests are shared out by pytest-xdist."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["gpu_left_out"] = gpu_left_out


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Every worker collects all tests, so one number is that of all."""
    global gpu_left_out
    gpu_left_out = getattr(node, "workeroutput", {}).get("gpu_left_out", gpu_left_out)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many gpu tests did not run, so that they cannot be forgotten unseen."""
    skipped = [r for r in terminalreporter.stats.get("skipped", []) if "gpu: torch.cuda" in str(r.longrepr)]
    if gpu_left_out or skipped:
        why = "there is no CUDA device" if not torch.cuda.is_available() else "the -m option leaves them out"
        terminalreporter.write_line(f"gpu tests not run: {gpu_left_out + len(skipped)} ({why})")

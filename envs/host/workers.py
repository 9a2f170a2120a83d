"""Gymnasium environments in processes of their own: what ends with a run, and tells what went wrong."""

import contextlib
import fcntl
import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable
from multiprocessing import connection, forkserver
from typing import Any

import numpy as np
import torch


def in_worker(make: Callable[[], Any], run: int, spaces: tuple[Any, Any]) -> Any:
    """Makes an environment in a process group of its own: a Ctrl-C is for the run, which ends its workers itself.

    Args:
      make: makes it.
      run: the process of the run. If that ends without a word, the group is killed.
      spaces: of its observations and actions.
    """
    parent = multiprocessing.parent_process()
    if os.getpid() != run and parent is not None:  # Gymnasium makes one in the run's own process too, to look at
        os.setpgrp()
        kill_at_end_of(parent.sentinel)
        np.random.seed()  # who forks copies the state of the fork server's
        torch.seed()  # which would otherwise be the same in every process
    try:
        return _portable(make())
    except Exception as error:
        if os.getpid() == run:
            raise
        return _portable(_unmade(error, *spaces))


def _unmade(error: Exception, observation_space: Any, action_space: Any) -> Any:
    """Raises at its reset what was raised as it was made: before that, a worker cannot tell what it was."""
    import gymnasium

    class Unmade(gymnasium.Env):
        def reset(self, **arguments: Any) -> Any:
            raise error

    env = Unmade()
    env.observation_space, env.action_space = observation_space, action_space
    return env


def _portable(env: Any) -> Any:
    """Raises what can be raised in another process, where Gymnasium makes it anew: `type(error)(error)`."""
    import gymnasium

    class Portable(gymnasium.Wrapper):
        def reset(self, **arguments: Any) -> Any:
            try:
                return self.env.reset(**arguments)
            except (Exception, SystemExit) as error:
                _require_portable(error)
                raise

        def step(self, action: Any) -> Any:
            try:
                return self.env.step(action)
            except (Exception, SystemExit) as error:
                _require_portable(error)
                raise

    return Portable(env)


def _require_portable(error: BaseException) -> None:
    """Raises a RuntimeError that says the same, if it cannot be pickled or made of one argument, or is an exit."""
    kind = type(error)
    try:
        if isinstance(error, SystemExit):  # of which Gymnasium tells nothing
            raise TypeError
        kind(pickle.loads(pickle.dumps(error)))
    except Exception:  # whatever a class of somebody else's does when it is made anew
        told = f"{kind.__module__}.{kind.__qualname__}: {error}".removeprefix("builtins.")
        raise RuntimeError(told) from error


def preload() -> None:
    """Has the fork server import what every worker needs, so that they share it: each took 3.5 s and 290 MB.

    Once the server runs, or where somebody has chosen what it imports, nothing is changed.
    """
    if getattr(forkserver._forkserver, "_preload_modules", None) == ["__main__"]:
        multiprocessing.get_context("forkserver").set_forkserver_preload(["__main__", __name__, "gymnasium"])


def kill_at_end_of(pipe: int) -> None:
    """The kernel kills this process group when nobody holds the other end of a pipe any more; on Linux alone.

    It needs no thread, which would wait for Python's lock where C code hangs with it. A signal at the death of the
    parent (prctl) would be at that of the fork server, which lives as long as its children.
    """
    if not hasattr(fcntl, "F_SETSIG"):
        return
    with contextlib.suppress(OSError):  # a kernel that does not
        fcntl.fcntl(pipe, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if connection.wait([pipe], 0):  # before the kernel was told
        os.killpg(0, signal.SIGKILL)

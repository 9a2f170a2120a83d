"""Environments on the host that the main thread steps: what hangs or fails in them ends the run with a sentence.

Actor threads have a watchdog of their own (sebulba/exchange.py); this is for everything before and after them.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from torchpod.env import Env
from torchpod.types import TimeStep, Tree

GRACE_S = 4.0
"""How long a time-out may take to reach the main thread, which in C code cannot hear of it, before the process ends."""


class HostError(RuntimeError):
    """An environment on the host failed or hangs in the main thread; the cause, if there is one, is its exception."""


class Watched:
    """An environment on the host behind the contract of `Env`; whatever goes wrong in it is a `HostError`.

    A tensor environment is left alone: its steps are parts of programs.

    Args:
      env: the environment.
      where: what is being done with it, e.g. "the final evaluation".
      timeout_s: a step or a reset may take so long.
    """

    def __init__(self, env: Env, where: str, timeout_s: float) -> None:
        self._env, self._where, self._timeout_s = env, where, timeout_s
        self.spec, self.traits = env.spec, env.traits

    def init(self, keys: Tensor) -> tuple[Tree, TimeStep]:
        """See `Env.init`."""
        with self._guarded():
            return self._env.init(keys)

    def step(self, state: Tree, action: Tree, keys: Tensor) -> tuple[Tree, TimeStep]:
        """See `Env.step`."""
        with self._guarded():
            return self._env.step(state, action, keys)

    def close(self) -> None:
        """Closes the environment, if it can be."""
        getattr(self._env, "close", lambda: None)()

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        name = self.spec.name
        try:
            with watching(f"{name} has not come back in {self._where}", self._timeout_s):
                yield
        except HostError:
            raise
        except Exception as error:
            raise HostError(f"{name} failed in {self._where}: {sentence(error)}") from error


def watched(env: Env, where: str, timeout_s: float) -> Env:
    """The environment, watched if it lives on the host."""
    return env if env.traits.pure else Watched(env, where, timeout_s)


def sentence(error: BaseException) -> str:
    """The kind of an exception and its message, with one mark at the end."""
    text = f"{type(error).__name__}: {error}".rstrip(": ")
    return text if text.endswith((".", "?", "!")) else text + "."


@contextlib.contextmanager
def watching(what: str, timeout_s: float) -> Iterator[None]:
    """Raises a `HostError` in the main thread if the block takes too long; elsewhere nothing is watched.

    A block that does not hear of it, in C code or because it catches everything, ends the process after `GRACE_S`.
    """
    main, lock, over = threading.main_thread(), threading.Lock(), threading.Event()
    if threading.current_thread() is not main:
        yield
        return
    message = f"{what} for {timeout_s:g} s; if it may take so long, raise loop.timeout_s={timeout_s:g}."

    def give_up(number: int, frame: Any) -> None:
        if not over.is_set():
            raise HostError(message)

    def expired() -> None:
        with lock:
            if over.is_set():
                return
            # A signal that nothing else uses. Unlike what threads can do, it ends a wait of the main thread.
            signal.pthread_kill(main.ident or 0, signal.SIGVTALRM)
        if not over.wait(GRACE_S):
            print(f"torchpod: error: {message}", file=sys.stderr, flush=True)
            os._exit(1)

    before = signal.signal(signal.SIGVTALRM, give_up)
    timer = threading.Timer(min(timeout_s, threading.TIMEOUT_MAX), expired)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        with lock:
            over.set()
        timer.cancel()
        signal.signal(signal.SIGVTALRM, before)

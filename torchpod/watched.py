"""Environments on the host that the main thread steps: what hangs or fails in them ends the run with a sentence.

Actor threads have a watchdog of their own (sebulba/exchange.py); this is for everything before and after them, and ends
an update of the learner if that one has found something meanwhile.
"""

import contextlib
import copy
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, NoReturn

from torch import Tensor

from torchpod.env import Env
from torchpod.types import TimeStep, Tree

GRACE_S = 4.0
"""How long a time-out may take to reach the main thread, which in C code cannot hear of it, before the process ends; or
an update may go on when an actor has failed."""
CLOSE_S = 5.0
"""How long an environment may take to be closed."""
CLOSE_GRACE_S = 10.0
"""`GRACE_S` of a `close`: what has failed before it is not told yet."""
NEXT_CLOSE_S = 0.5
"""And the others, once one of them has hung: a run that failed is to end within seconds, however many there are."""
_LOOK_S = 0.2
"""Between two looks of the watchdog."""


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
        return self._guarded(self._env.init, keys)

    def step(self, state: Tree, action: Tree, keys: Tensor) -> tuple[Tree, TimeStep]:
        """See `Env.step`."""
        return self._guarded(self._env.step, state, action, keys)

    def __copy__(self) -> "Watched":
        return Watched(copy.copy(self._env), self._where, self._timeout_s)

    def close(self) -> None:
        """Closes the environment, if it can be."""
        getattr(self._env, "close", lambda: None)()

    def _guarded(self, call: Callable[..., tuple[Tree, TimeStep]], *args: Tree) -> tuple[Tree, TimeStep]:
        name = self.spec.name
        try:
            with watching(f"{name} has not come back in {self._where}", self._timeout_s):
                return call(*args)
        except HostError:
            raise
        except (Exception, SystemExit) as error:  # who closes a window of an environment's may mean the process
            raise HostError(f"{name} failed in {self._where}: {sentence(error)}") from error


def watched(env: Env, where: str, timeout_s: float) -> Env:
    """The environment, watched if it lives on the host."""
    return env if env.traits.pure else Watched(env, where, timeout_s)


def sentence(error: BaseException) -> str:
    """The kind of an exception and its message, with one mark at the end."""
    text = f"{type(error).__name__}: {error}".rstrip(": ")
    return text if text.endswith((".", "?", "!")) else text + "."


def tell_stack(thread: int) -> None:
    """Writes to standard error where a thread stands, so that the author of an environment sees what hangs.

    If that fails, as on a full disk, what has to be done about the thread comes first.
    """
    with contextlib.suppress(Exception):
        stack = "".join(traceback.format_stack(sys._current_frames()[thread]))
        print(f"Stack of the thread that hangs (most recent call last):\n{stack}", end="", file=sys.stderr, flush=True)


def end_process(status: int) -> NoReturn:
    """Ends this process at once, and those that it has started by multiprocessing, which otherwise `atexit` ends."""
    with contextlib.suppress(Exception):
        for process in multiprocessing.active_children():
            with contextlib.suppress(Exception):
                process.kill()
    os._exit(status)


class StoodStill:
    """Tells a watchdog for how long its process was stopped (Ctrl-Z, a frozen container): nobody is blamed for that.

    Args:
      every_s: between two looks, as a rule.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s, self._last = every_s, (time.monotonic(), time.process_time())

    def look(self) -> float:
        """Seconds since the last look, if it comes five times too late and the process has hardly worked; or 0."""
        now = time.monotonic(), time.process_time()
        away, worked = (a - b for a, b in zip(now, self._last, strict=True))
        self._last = now
        return away if away > 5 * self._every_s and worked < away / 2 else 0.0


class _Block(NamedTuple):
    """Something that the main thread waits for."""

    message: str
    deadline: float
    """By `time.monotonic`."""
    grace_s: float
    failure: Callable[[], Exception | None] = lambda: None
    """What has failed elsewhere, since when the block has `GRACE_S` left."""


class _Watchdog:
    """A thread that looks at what the main thread waits for, from the first time that it does: one per step is slow."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.now: _Block | None = None

    def start(self) -> None:
        """To be called in the main thread; does something once."""
        if self._thread is None or not self._thread.is_alive():
            # A signal that nothing else uses. Unlike what threads can do, it ends a wait of the main thread.
            signal.signal(signal.SIGVTALRM, self._give_up)
            self._thread = threading.Thread(target=self._run, name="torchpod-watchdog", daemon=True)
            self._thread.start()

    def _give_up(self, number: int, frame: Any) -> None:
        if self.now is not None and time.monotonic() >= self.now.deadline:
            raise self.now.failure() or HostError(self.now.message)

    def _run(self) -> None:
        told, main, clock = None, threading.main_thread().ident or 0, StoodStill(_LOOK_S)
        while True:
            time.sleep(_LOOK_S)
            if (away := clock.look()) > 0:
                with self.lock:
                    if self.now is not None:
                        self.now = self.now._replace(deadline=self.now.deadline + away)
            block, now = self.now, time.monotonic()
            if block is not None and math.isinf(block.deadline) and block.failure() is not None:
                with self.lock:
                    if self.now is block:
                        self.now = block._replace(deadline=now + GRACE_S)
            if block is None or now < block.deadline:
                continue
            if block is not told:
                if block.message:
                    tell_stack(main)
                with self.lock:
                    if self.now is block:
                        signal.pthread_kill(main, signal.SIGVTALRM)
                told = block
            elif now > block.deadline + block.grace_s and self.now is block:
                with contextlib.suppress(Exception):
                    print(f"torchpod: error: {block.message}", file=sys.stderr, flush=True)
                end_process(1)


_WATCHDOG = _Watchdog()


def watching(
    what: str, timeout_s: float, advice: str = "", grace_s: float = GRACE_S
) -> contextlib.AbstractContextManager[None]:
    """Raises a `HostError` in the main thread if the block takes too long; elsewhere nothing is watched.

    A block that does not hear of it, in C code or because it catches everything, ends the process after `grace_s`.

    Args:
      what: has not happened, for the error.
      timeout_s: how long it may take.
      advice: to whom it happens; "" is to raise loop.timeout_s.
      grace_s: see above.
    """
    advice = advice or f"if it may take so long, raise loop.timeout_s={timeout_s:g}"
    message = f"{what} for {timeout_s:g} s; {advice}."
    return _waiting(_Block(message, time.monotonic() + timeout_s, grace_s))


def unless(failure: Callable[[], Exception | None]) -> contextlib.AbstractContextManager[None]:
    """Raises in the main thread what has failed elsewhere, if the block goes on for `GRACE_S` after it.

    What does not hear of it, in C code, has its time: no process is ended.

    Args:
      failure: returns it. Called from another thread.
    """
    return _waiting(_Block("", math.inf, math.inf, failure))


@contextlib.contextmanager
def _waiting(block: _Block) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _WATCHDOG.start()
    around, _WATCHDOG.now = _WATCHDOG.now, block
    try:
        yield
    finally:
        try:
            with _WATCHDOG.lock:
                _WATCHDOG.now = around
        finally:  # a time-out may come in between
            _WATCHDOG.now = around


def close_all(envs: Iterable[Env]) -> None:
    """Closes every environment that can be closed; what raises or hangs is a warning, for a run loses nothing by it."""
    patience = [CLOSE_S]
    with contextlib.ExitStack() as closing:
        for env in envs:
            closing.callback(_close, env, patience)


def _close(env: Env, patience: list[float]) -> None:
    close, name = getattr(env, "close", None), getattr(getattr(env, "spec", None), "name", type(env).__name__)
    if close is None:
        return
    began = time.monotonic()
    try:
        with watching(f"close() of {name} has not come back", patience[0], "it is given up", CLOSE_GRACE_S):
            close()
    except Exception as error:
        warnings.warn(f"{name} could not be closed, and may leave something behind: {sentence(error)}", stacklevel=2)
    if time.monotonic() - began >= patience[0]:
        patience[0] = min(patience[0], NEXT_CLOSE_S)

"""Environments on the host that the main thread steps: what hangs or fails in them ends the run with a sentence.

Actor threads have a watchdog of their own (sebulba/exchange.py); this is for everything before and after them, and ends
an update of the learner if that one has found something meanwhile.
"""

import contextlib
import copy
import dataclasses
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

from torch import Tensor

from torchpod.env import Env
from torchpod.processes import signal_group
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
"""Between two looks of the watchdog, and of the clock."""
_STOOD_STILL_S = 1.0
"""A look that comes so late shows that the process was stopped, unless it has worked meanwhile."""


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
        self.spec, self.traits, self.rows_each = env.spec, env.traits, getattr(env, "rows_each", 1)

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
    """The kind of an exception and its message, unless that cannot be had, with one mark at the end."""
    text = type(error).__name__
    with contextlib.suppress(Exception):  # of a class of somebody else's
        text = f"{text}: {error}".rstrip(": ")
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
                signal_group(process, signal.SIGKILL)
    os._exit(status)


class _Clock:
    """Knows when the process was stopped (Ctrl-Z, a frozen container): nobody is blamed for that.

    A thread looks at the time, so that no gap between two questions is taken for a stop.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a signal handler may ask while its thread does
        self._thread: threading.Thread | None = None
        self._last = 0.0, 0.0
        self._stops: deque[tuple[float, float]] = deque(maxlen=100)  # when each ended, and how long it was

    def start(self) -> None:
        """Does something once."""
        with self.lock:
            if self._thread is None or not self._thread.is_alive():
                self._last = time.perf_counter(), time.process_time()
                self._thread = threading.Thread(target=self._run, name="torchpod-clock", daemon=True)
                self._thread.start()

    def waited_s(self, since: float) -> float:
        """Seconds since a moment, by `time.perf_counter`, without those in which the process was stopped."""
        self.start()
        with self.lock:
            self._look()  # if the process has just gone on, the thread may not have looked yet
            return time.perf_counter() - since - sum(length for end, length in self._stops if end > since)

    def _look(self) -> None:
        now = time.perf_counter(), time.process_time()
        away, worked = (a - b for a, b in zip(now, self._last, strict=True))
        self._last = now
        if away > _STOOD_STILL_S and worked < away / 2:
            self._stops.append((now[0], away))

    def _run(self) -> None:
        while True:
            time.sleep(_LOOK_S)
            with self.lock:
                self._look()


CLOCK = _Clock()


@dataclasses.dataclass(eq=False)
class _Block:
    """Something that the main thread waits for."""

    message: str
    since: float
    """By `time.perf_counter`."""
    timeout_s: float
    grace_s: float
    failure: Callable[[], Exception | None] = lambda: None
    """What has failed elsewhere, since when the block has `GRACE_S` left."""
    told: bool = False
    """The main thread has been told that it is late."""

    def late_s(self) -> float:
        """How long it goes on after its time-out; negative before."""
        return CLOCK.waited_s(self.since) - self.timeout_s


class _Watchdog:
    """A thread that looks at what the main thread waits for, from the first time that it does: one per step is slow.

    The main thread waits for the end of a look before it lets go of a block. Else the last reference to all of a run
    could be this thread's, and a process aborts that ends while a daemon thread frees tensors.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.now: _Block | None = None

    def start(self) -> None:
        """To be called in the main thread; does something once."""
        if self._thread is None or not self._thread.is_alive():
            CLOCK.start()
            # A signal that nothing else uses. Unlike what threads can do, it ends a wait of the main thread.
            signal.signal(signal.SIGVTALRM, self._give_up)
            self._thread = threading.Thread(target=self._run, name="torchpod-watchdog", daemon=True)
            self._thread.start()

    def _give_up(self, number: int, frame: Any) -> None:
        if self.now is not None and self.now.late_s() >= 0:
            raise self.now.failure() or HostError(self.now.message)

    def _run(self) -> None:
        while True:
            time.sleep(_LOOK_S)
            with self.lock:
                self._look(threading.main_thread().ident or 0)

    def _look(self, main: int) -> None:
        if (block := self.now) is None:
            return
        if math.isinf(block.timeout_s) and block.failure() is not None:
            block.since, block.timeout_s = time.perf_counter(), GRACE_S
        if (late_s := block.late_s()) < 0:
            return
        if not block.told:
            if block.message:
                tell_stack(main)
            if self.now is block:  # a block within it may have begun
                signal.pthread_kill(main, signal.SIGVTALRM)
                block.told = True
        elif late_s > block.grace_s and self.now is block:
            with contextlib.suppress(Exception):
                print(f"torchpod: error: {block.message}", file=sys.stderr, flush=True)
            end_process(1)


_WATCHDOG = _Watchdog()


def _new_locks() -> None:
    CLOCK.lock, _WATCHDOG.lock = threading.RLock(), threading.Lock()


os.register_at_fork(after_in_child=_new_locks)  # a thread of the parent's may have held them


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
    return _waiting(_Block(message, time.perf_counter(), timeout_s, grace_s))


def unless(failure: Callable[[], Exception | None]) -> contextlib.AbstractContextManager[None]:
    """Raises in the main thread what has failed elsewhere, if the block goes on for `GRACE_S` after it.

    What does not hear of it, in C code, has its time: no process is ended.

    Args:
      failure: returns it. Called from another thread.
    """
    return _waiting(_Block("", time.perf_counter(), math.inf, math.inf, failure))


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

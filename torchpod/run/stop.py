"""How a run is told to stop: SIGTERM and SIGINT, between two calls to the device or in the middle of one."""

import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from torchpod.distributed import Ranks
from torchpod.watched import end_process


class Interrupted(KeyboardInterrupt):
    """The run was told to stop, and has saved itself if there was anything to save."""


class OverdueError(BaseException):
    """The call that was running when a signal came has not ended in time; no environment's, though it may be in one."""


class StopFlag:
    """SIGTERM and SIGINT ask for a stop after the running call; before the first report they stop at once.

    A call that goes on for longer than `GRACE_S` is given up, which loses what it has done. A rank that waits for
    others does so in C code, where it hears of no signal: a thread ends its process after `LEAVE_S`. A second SIGINT
    stops at once, but not under torchrun, which passes on the one that the ranks have got already.

    Args:
      ranks: of the run.
      device: of this one.
      given_up: what to say when a process is ended.
      in_c: end the process of a single rank too, if it is in C code that hears of no signal.
    """

    GRACE_S = 4.0
    LEAVE_S = 5.0

    def __init__(self, ranks: Ranks, device: torch.device, given_up: Callable[[], str], *, in_c: bool = False) -> None:
        self._ranks, self._device, self._given_up = ranks, device, given_up
        self._listens = in_c or ranks.world_size > 1
        self._deferred = self._asked = self._agreeing = False
        self._calling, self._watched_at = True, -math.inf
        self._old: dict[int, Any] = {}
        self._ear = self._heard_at = self._other_ear = -1

    def __enter__(self) -> "StopFlag":
        try:
            self._begin()
        except BaseException:  # no thread can be started, say: signals are as they were
            self.__exit__()
            raise
        return self

    def _begin(self) -> None:
        _ENTERED.append(self)
        with contextlib.suppress(ValueError):  # signals can only be handled in the main thread
            for number in (signal.SIGTERM, signal.SIGINT):
                self._old[number] = signal.signal(number, self._handle)
            self._old[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._overdue)
            if self._listens:
                ear, self._ear = os.pipe()
                self._heard_at = ear
                os.set_blocking(self._ear, False)
                # Each signal is written there, whatever the main thread does.
                self._other_ear = signal.set_wakeup_fd(self._ear)
                threading.Thread(target=self._listen, args=(ear,), name="torchpod-stop", daemon=True).start()

    def __exit__(self, *_: object) -> None:
        _ENTERED.remove(self)
        self.pause(self._deferred)
        if self._ear >= 0:
            signal.set_wakeup_fd(self._other_ear)
            os.close(self._ear)  # ends the thread
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: Any) -> None:
        insisting = self._asked and number == signal.SIGINT and self._ranks.world_size == 1
        if not self._deferred or insisting:
            self._calling = False
            raise Interrupted(f"stopped by {signal.Signals(number).name} without a new checkpoint")
        self._asked = True
        if self._calling:
            signal.setitimer(signal.ITIMER_REAL, self.GRACE_S)

    def _overdue(self, number: int, frame: Any) -> None:
        if self._calling:
            self._calling = False  # once: what follows is saved in peace
            raise OverdueError

    def _listen(self, ear: int) -> None:
        with open(ear, "rb", buffering=0) as signals:
            while heard := signals.read(1):
                if heard[0] in (signal.SIGTERM, signal.SIGINT):
                    time.sleep(self.LEAVE_S)
                    while (left := self._watched_at + self.LEAVE_S - time.monotonic()) > 0:  # a call began meanwhile
                        time.sleep(left)
                    if self._calling or self._agreeing:
                        with contextlib.suppress(Exception):
                            print(f"torchpod: {self._given_up()}", file=sys.stderr, flush=True)
                        end_process(130)

    def forget(self) -> None:
        """In a process that was forked within: signals to it are its own, and not the run's."""
        if self._ear >= 0:
            signal.set_wakeup_fd(self._other_ear)
            os.close(self._ear)
            os.close(self._heard_at)
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def pause(self, deferred: bool = True) -> None:
        """A call has ended, and there is something to save."""
        self._deferred, self._calling, self._agreeing = deferred, False, False
        if signal.SIGALRM in self._old:
            signal.setitimer(signal.ITIMER_REAL, 0.0)

    def watch(self) -> None:
        """The next call begins: it may be given up."""
        self._calling, self._watched_at = True, time.monotonic()
        if self._asked:  # while a checkpoint was written: once more, for the limits of this call
            signal.raise_signal(signal.SIGTERM)

    def agree(self, save_due: bool) -> tuple[bool, bool]:
        """Whether any rank was asked to stop, and whether a checkpoint is due on any."""
        if self._ranks.world_size == 1:
            return self._asked, save_due
        self._agreeing = True
        both = torch.tensor([self._asked, save_due], dtype=torch.int64, device=self._device)
        stop, save = map(bool, self._ranks.sum(both).tolist())
        self._agreeing = False
        return stop, save


_ENTERED: list[StopFlag] = []
"""Those in whose blocks this process is, the innermost last."""
_HELD = (signal.SIGTERM, signal.SIGINT)


def _hold() -> None:
    if _ENTERED:
        signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)  # one that comes now is the child's once it has forgotten


def _go_on() -> None:
    if _ENTERED:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD)


def _forget() -> None:
    if not _ENTERED:
        return
    with contextlib.suppress(Exception):
        while _ENTERED:
            _ENTERED.pop().forget()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD)


os.register_at_fork(before=_hold, after_in_parent=_go_on, after_in_child=_forget)

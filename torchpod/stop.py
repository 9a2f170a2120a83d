"""How a run is told to stop: SIGTERM and SIGINT, between two calls to the device or in the middle of one."""

import contextlib
import signal
from typing import Any

import torch

from torchpod.distributed import Ranks


class Interrupted(KeyboardInterrupt):
    """The run was told to stop, and has saved itself if there was anything to save."""


class OverdueError(Exception):
    """The call that was running when a signal came has not ended in time."""


class StopFlag:
    """SIGTERM and SIGINT ask for a stop after the running call; before the first report they stop at once.

    A call that goes on for longer than `GRACE_S` is given up, which loses what it has done; not with ranks, which wait
    for each other. A second SIGINT stops at once, but not under torchrun, which passes on the one that the ranks have
    got already.
    """

    GRACE_S = 4.0

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self._ranks, self._device = ranks, device
        self._deferred = self._asked = self._calling = False
        self._old: dict[int, Any] = {}

    def __enter__(self) -> "StopFlag":
        with contextlib.suppress(ValueError):  # signals can only be handled in the main thread
            for number in (signal.SIGTERM, signal.SIGINT):
                self._old[number] = signal.signal(number, self._handle)
            self._old[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._overdue)
        return self

    def __exit__(self, *_: object) -> None:
        self.pause(self._deferred)
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: Any) -> None:
        insisting = self._asked and number == signal.SIGINT and self._ranks.world_size == 1
        if not self._deferred or insisting:
            raise Interrupted(f"stopped by {signal.Signals(number).name} without a new checkpoint")
        self._asked = True
        if self._calling and self._ranks.world_size == 1:
            signal.setitimer(signal.ITIMER_REAL, self.GRACE_S)

    def _overdue(self, number: int, frame: Any) -> None:
        if self._calling:
            self._calling = False  # once: what follows is saved in peace
            raise OverdueError

    def pause(self, deferred: bool = True) -> None:
        """A call has ended, and there is something to save."""
        self._deferred, self._calling = deferred, False
        if signal.SIGALRM in self._old:
            signal.setitimer(signal.ITIMER_REAL, 0.0)

    def watch(self) -> None:
        """The next call begins: it may be given up."""
        self._calling = True

    def agree(self, save_due: bool) -> tuple[bool, bool]:
        """Whether any rank was asked to stop, and whether a checkpoint is due on any."""
        if self._ranks.world_size == 1:
            return self._asked, save_due
        stop, save = self._ranks.sum(torch.tensor([self._asked, save_due], dtype=torch.int64, device=self._device))
        return bool(stop), bool(save)

"""Where the time of an iteration of Anakin goes: `logger.phases=true`."""

import contextlib
import time
from collections.abc import Iterator

import torch
from torch import Tensor


class Phases:
    """Times parts of iterations, and never waits for the device.

    On a GPU each part lies between two events. In a captured graph these are recorded anew in every replay, so that the
    times are those of the last iteration of a call.

    Args:
      device: on which the iterations run.
      enabled: False times nothing.
    """

    def __init__(self, device: torch.device, enabled: bool = True) -> None:
        self._device, self._enabled = device, enabled
        self._seconds: dict[str, float] = {}
        self._events: dict[str, tuple[torch.cuda.Event, torch.cuda.Event]] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """What is done inside is of this part."""
        if not self._enabled:
            yield
            return
        if self._device.type != "cuda":
            began = time.perf_counter()
            yield
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - began
            return
        if name not in self._events:
            # External: nodes of a graph of their own, which the host may ask after a replay.
            first, last = (torch.cuda.Event(enable_timing=True, external=True) for _ in range(2))
            self._events[name] = first, last
        first, last = self._events[name]
        first.record()
        yield
        last.record()

    def begin(self) -> None:
        """A call begins: forgets what was before."""
        self._seconds.clear()

    def shares(self, num_iterations: int, wall_s: float) -> dict[str, Tensor]:
        """What part of a call's time went where: `phase_NAME`, and `phase_rest`. They sum to 1.

        Args:
          num_iterations: of the call, which is over: its metrics are on the host.
          wall_s: how long it took.
        """
        if not self._enabled:
            return {}
        seconds = dict(self._seconds)
        for name, (first, last) in self._events.items():
            seconds[name] = num_iterations * first.elapsed_time(last) / 1000
        found = {f"phase_{name}": x / wall_s for name, x in seconds.items()}
        found["phase_rest"] = 1.0 - sum(found.values())
        return {name: torch.tensor(x, dtype=torch.float64) for name, x in found.items()}

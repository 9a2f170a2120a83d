"""What actor threads and the learner hand to each other: trajectories one way, parameters the other.

One lock guards both. Every wait ends when the other side has failed or the run is over, and the learner's also when an
environment does not come back.
"""

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from torchpod.sebulba.transfer import Handed
from torchpod.watched import CLOCK, sentence, tell_stack

if TYPE_CHECKING:
    from tensordict import TensorDict

_WATCH_S = 0.5  # between two looks at the actors


class ActorError(RuntimeError):
    """An actor thread failed or hangs; the message names it, its cause is the exception of the thread."""


class ClosedError(Exception):
    """The run is over: actor threads end."""


class Phases:
    """Where the time of one actor thread goes, and what it is doing now.

    Args:
      environment: name of what it steps.
    """

    def __init__(self, environment: str) -> None:
        self.environment = environment
        self.now = "start", time.perf_counter()
        """What it does, and since when; one object, for the watchdog reads it from another thread."""
        self.thread = 0
        """Which thread it is, once it runs."""
        self._seconds: dict[str, float] = {}

    def in_environment_s(self) -> float:
        """How long it has been in its environments, while the process was not stopped; 0 if it does something else."""
        doing, since = self.now
        return CLOCK.waited_s(since) if doing == "environment" else 0.0

    def enter(self, name: str) -> None:
        """Ends the phase that was, begins another."""
        (before, since), now = self.now, time.perf_counter()
        self._seconds[before] = self._seconds.get(before, 0.0) + now - since
        self.now = name, now

    def take(self) -> dict[str, float]:
        """Seconds per phase since the last call."""
        self.enter(self.now[0])
        seconds, self._seconds = self._seconds, {}
        return seconds


class Item(NamedTuple):
    """One unroll of one pool of environments."""

    steps: "TensorDict"
    """`[b, T]`, with TorchRL's keys (interop/tensordicts.py), on the actor's device."""
    states: Handed
    """Of `(actor_state, carry)`, `[b, ...]`: the recurrent state before the first step, and where the environments
    stand after the last; everything is complete when they are."""
    version: int
    """Updates behind the parameters that it began with; with refresh=step, later steps may have newer ones."""
    seconds: dict[str, float]
    """Of the actor thread by phase, since its last unroll."""


class Exchange:
    """Queues of trajectories, one per actor, and the versions of the parameters.

    Args:
      phases: of each actor, for the watchdog.
      lag: unroll n waits for version `n - lag`, or takes the newest if None.
      capacity: unrolls that an actor may be ahead of the learner; then it waits.
      timeout_s: an environment step that takes longer is an error.
    """

    def __init__(self, phases: list[Phases], *, lag: int | None, capacity: int, timeout_s: float) -> None:
        self._phases, self._lag = phases, lag
        self._capacity, self._timeout_s = capacity, timeout_s
        self._changed = threading.Condition()
        self._queues: list[deque[list[Item]]] = [deque() for _ in phases]
        self._versions: dict[int, Handed] = {}
        self._failure: ActorError | None = None
        self._closed = False
        CLOCK.start()

    # The learner's side.

    def publish(self, version: int, variables: Handed) -> None:
        """Makes the parameters after `version` updates known; they must not be written to any more."""
        with self._changed:
            self._versions[version] = variables
            oldest = self._newest() if self._lag is None else version - self._lag
            for old in [v for v in self._versions if v < oldest]:
                del self._versions[old]
            self._changed.notify_all()

    def versions(self) -> list[Handed]:
        """What unrolls of a fixed lag may still ask for, oldest first; the last is the newest."""
        with self._changed:
            known = sorted(self._versions) if self._lag is not None else [max(self._versions)]
            return [self._versions[v] for v in known]

    def collect(self) -> list[Item]:
        """The next unroll of every pool of every actor, in their order.

        Raises:
          ActorError: if an actor failed, or has been in its environment for longer than the time-out; then standard
            error says where it stands.
        """
        with self._changed:
            while not all(self._queues):
                if (failure := self.failure()) is not None:
                    raise failure
                self._changed.wait(_WATCH_S)
            items = [item for queue in self._queues for item in queue.popleft()]
            self._changed.notify_all()
            return items

    def failure(self) -> ActorError | None:
        """What `collect` raises, if it does; then standard error says where an actor that hangs stands."""
        with self._changed:
            return self._failure or self._found_hanging()

    def occupancy(self) -> float:
        """How full the queues are, 0 to 1."""
        with self._changed:
            return sum(map(len, self._queues)) / (len(self._queues) * self._capacity)

    def close(self) -> None:
        """Ends all waits; actor threads see `ClosedError`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # The actors' side.

    def variables(self, unroll: int) -> tuple[int, Handed]:
        """The version for an unroll, and its number; waits for it."""
        with self._changed:
            while True:
                if self._closed:
                    raise ClosedError
                wanted = self._version_for(unroll)
                if wanted in self._versions:
                    return wanted, self._versions[wanted]
                self._changed.wait()

    def known(self, unroll: int) -> tuple[int, Handed] | None:
        """As `variables`, without waiting: None if its update is not over yet, or there may be newer ones later."""
        with self._changed:
            version = self._version_for(unroll)
            handed = self._versions.get(version) if self._lag is not None else None
            return (version, handed) if handed is not None and handed.complete() else None

    def newest(self) -> Handed:
        """The newest version, without waiting."""
        with self._changed:
            if self._closed:
                raise ClosedError
            return self._versions[self._newest()]

    def put(self, actor: int, items: list[Item]) -> None:
        """Hands an unroll over; waits while the queue is full."""
        with self._changed:
            while len(self._queues[actor]) >= self._capacity and not self._closed:
                self._changed.wait()
            if self._closed:
                raise ClosedError
            self._queues[actor].append(items)
            self._changed.notify_all()

    def fail(self, actor: int, error: BaseException) -> None:
        """Tells the learner that an actor is gone."""
        with self._changed:
            if self._failure is None:
                self._failure = ActorError(f"actor thread {actor} failed: {sentence(error)}")
                self._failure.__cause__ = error
            self._changed.notify_all()

    def _version_for(self, unroll: int) -> int:
        return self._newest() if self._lag is None else max(unroll - self._lag, 0)

    def _newest(self) -> int:
        """Of a free lag, whose update is over: who took one that a GPU still works on would wait for it."""
        over = [v for v, x in self._versions.items() if self._lag is not None or x.complete()]
        return max(over or self._versions)

    def _found_hanging(self) -> ActorError | None:
        for actor, phases in enumerate(self._phases):
            if (waited := phases.in_environment_s()) > self._timeout_s:
                tell_stack(phases.thread)
                self._failure = ActorError(
                    f"actor thread {actor} has waited {waited:.0f} s for a step of its {phases.environment} "
                    f"environments; if a step may take so long, raise loop.timeout_s={self._timeout_s:g}."
                )
        return self._failure

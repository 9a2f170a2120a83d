"""The search of `torchpod autoscale`: one knob after the other is turned for as long as that pays. Read probe.py first.

It is given a function that measures a setting, and knows nothing else of runs. Memory is predicted before it is tried,
by a line through the last two probes.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from torchpod.commands.probe import Answer, ProbeError

GAIN = 1.05
"""What is not so many times as fast is not faster: other work on a machine makes differences too."""
NAMES = {
    "num_minibatches": "algo.learner.num_minibatches",
    "chunk_rows": "algo.learner.chunk_rows",
    "num_actor_threads": "loop.num_actor_threads",
}
_LEAST_CHUNK = 256
"""Rows: no chunk is cut below."""


@dataclass(frozen=True)
class Setting:
    """What probes differ in. None: not to be changed, or of `chunk_rows` what null means."""

    num_envs: int
    num_minibatches: int | None = None
    chunk_rows: int | None = None
    num_actor_threads: int | None = None

    def overrides(self, start: "Setting") -> dict[str, int]:
        """By name: num_envs, and what differs from the start."""
        values = {
            key: getattr(self, name) for name, key in NAMES.items() if getattr(self, name) != getattr(start, name)
        }
        return {"num_envs": self.num_envs, **values}


@dataclass(frozen=True)
class Row:
    """A setting, what was predicted of it, and what came of it."""

    setting: Setting
    predicted_bytes: float | None
    answer: Answer | None
    """None: not started, because it was predicted not to fit."""

    @property
    def fits(self) -> bool:
        """Whether it ran."""
        return self.answer is not None and self.answer.verdict == "fits"

    @property
    def wants_memory(self) -> bool:
        """Whether memory is what it lacks."""
        return self.answer is None or self.answer.verdict == "out of memory"

    @property
    def rate(self) -> float:
        """Environment steps per second, of a core of its own; what is compared. 0 if it did not run."""
        return self.answer.env_steps_per_s / self.answer.cpu_share if self.answer else 0.0


Step = Callable[[Setting], Setting | None]
"""The next setting along a knob; None at its end."""


@dataclass
class Search:
    """A search under way.

    Args:
      measure: runs a setting.
      max_envs: no setting has more.
      largest: take more environments and rows even if they are not faster, up to the end of memory.
      fine: where memory ends between two powers of two, try what lies between.
      default_chunk: rows of a chunk if `chunk_rows` is None; None: a whole minibatch.
      max_actors: threads that act, at most.
      before, after: told of every setting, and of its row.

    Attributes:
      rows: in the order in which they were tried.
      most_envs: how many environments memory holds by the line through the largest two; None if they make none.
    """

    measure: Callable[[Setting], Answer]
    max_envs: int = 2**20
    largest: bool = False
    fine: bool = False
    default_chunk: int | None = None
    max_actors: int = 1
    before: Callable[[Setting], None] = lambda setting: None
    after: Callable[[Row], None] = lambda row: None
    rows: list[Row] = field(default_factory=list)
    most_envs: int | None = None

    def run(self, start: Setting) -> Row:
        """The fastest row, or the largest.

        Raises:
          ProbeError: if not even one environment can be run, or a probe failed, and not for want of memory.
        """
        best, end = self._follow(self._start(start), self._more_envs, patience=2, larger=self.largest)
        if self.fine and end is not None and end.wants_memory:
            best = self._between(best, end)
        self.most_envs = self._most_envs(best)
        best, _ = self._follow(best, _fewer_minibatches, larger=self.largest)
        if best.answer and best.answer.minibatch_rows:
            best = self._either(best, self._larger_chunks, self._smaller_chunks)
        return self._either(best, self._more_actors, _fewer_actors)

    def _start(self, setting: Setting) -> Row:
        """The first setting, with half as many environments for as long as it does not fit."""
        setting = dataclasses.replace(setting, num_envs=min(setting.num_envs, self.max_envs))
        while not (row := self._try(setting)).fits:
            why = row.answer.why if row.answer else ""
            if not row.wants_memory:
                least = self.rows[-2].setting.num_envs
                raise ProbeError(
                    f"not even num_envs={least} fits into memory, and half of that is refused; "
                    f"lower algo.unroll_length or the size of the networks, or begin with another num_envs: {why}"
                )
            if setting.num_envs == 1:
                raise ProbeError(f"not even num_envs=1 fits into memory: {why}")
            setting = dataclasses.replace(setting, num_envs=setting.num_envs // 2)
        return row

    def _follow(self, best: Row, step: Step, *, patience: int = 1, larger: bool = False) -> tuple[Row, Row | None]:
        """Turns a knob until `patience` probes in turn are not faster, or one does not fit.

        A minibatch that does not fit is tried again in chunks of the size that did.

        Args:
          best: where to begin.
          step: along the knob.
          patience: see above.
          larger: whether what is not faster counts as well.

        Returns:
          The best, and what did not fit, if that was the end.
        """
        at, misses = best, 0
        while misses < patience and (setting := step(at.setting)) is not None:
            row = self._try(setting)
            if row.wants_memory and self._in_one_piece(at):
                row = self._try(dataclasses.replace(setting, chunk_rows=self._minibatch_rows(at.setting)))
            if not row.fits:
                return best, row
            at, is_better = row, larger or row.rate > GAIN * best.rate
            best, misses = (row, 0) if is_better else (best, misses + 1)
        return best, None

    def _either(self, best: Row, up: Step, down: Step) -> Row:
        """Follows a knob one way, and the other way if that led nowhere."""
        found, _ = self._follow(best, up)
        return found if found is not best else self._follow(best, down)[0]

    def _between(self, best: Row, end: Row) -> Row:
        """Two more steps towards the end of memory, if there is anything between it and the best."""
        low, high = best.setting.num_envs, end.setting.num_envs
        for _ in range(2 if high == 2 * low else 0):
            middle = (low + high) // 2
            row = self._try(dataclasses.replace(end.setting, num_envs=middle))
            low, high = (middle, high) if row.fits else (low, middle)
            best = row if row.fits and (self.largest or row.rate > GAIN * best.rate) else best
        return best

    def _try(self, setting: Setting) -> Row:
        """Measures a setting, unless it is known, or predicted not to fit."""
        known = [row for row in self.rows if row.setting == setting]
        if known:
            return known[0]
        line = self._line(setting)
        predicted = line(setting.num_envs) if line else None
        limit = max((row.answer.limit_bytes for row in self.rows if row.answer), default=0) or math.inf
        self.before(setting)
        answer = None if predicted and predicted > limit else self.measure(setting)
        if answer and answer.verdict == "refused" and not self.rows:
            raise ProbeError(answer.why)  # what the settings begin with, and not how far they can be taken
        row = Row(setting, predicted, answer)
        self.rows.append(row)
        self.after(row)
        return row

    def _line(self, setting: Setting) -> Callable[[int], float] | None:
        """Bytes by num_envs, through the two largest settings that ran and differ in nothing else."""
        ran = [row for row in self.rows if row.fits]
        like = [row for row in ran if dataclasses.replace(row.setting, num_envs=setting.num_envs) == setting]
        points = sorted((row.setting.num_envs, row.answer.memory_bytes) for row in like if row.answer)[-2:]
        if len(points) < 2:
            return None
        (n0, m0), (n1, m1) = points
        return lambda n: m1 + (n - n1) * (m1 - m0) / (n1 - n0)

    def _most_envs(self, row: Row) -> int | None:
        line = self._line(row.setting)
        if line is None or row.answer is None or line(row.setting.num_envs) <= GAIN * line(0):
            return None  # too few of them to tell
        return int((row.answer.limit_bytes - line(0)) / (line(1) - line(0)))

    def _minibatch_rows(self, setting: Setting) -> int:
        """Of one that ran."""
        return next(row.answer.minibatch_rows for row in self.rows if row.setting == setting and row.answer)

    def _chunk(self, setting: Setting) -> int:
        rows = self._minibatch_rows(setting)
        return min(rows, setting.chunk_rows or self.default_chunk or rows)

    def _in_one_piece(self, row: Row) -> bool:
        """Whether minibatches could be cut into chunks, and are not."""
        return 0 < self._minibatch_rows(row.setting) == self._chunk(row.setting)

    def _more_envs(self, setting: Setting) -> Setting | None:
        more = dataclasses.replace(setting, num_envs=2 * setting.num_envs)
        return more if more.num_envs <= self.max_envs else None

    def _larger_chunks(self, setting: Setting) -> Setting | None:
        chunk = self._chunk(setting)
        return dataclasses.replace(setting, chunk_rows=2 * chunk) if chunk < self._minibatch_rows(setting) else None

    def _smaller_chunks(self, setting: Setting) -> Setting | None:
        chunk = self._chunk(setting) // 2
        return dataclasses.replace(setting, chunk_rows=chunk) if chunk >= _LEAST_CHUNK else None

    def _more_actors(self, setting: Setting) -> Setting | None:
        threads = 2 * (setting.num_actor_threads or 0)
        return dataclasses.replace(setting, num_actor_threads=threads) if 0 < threads <= self.max_actors else None


def _fewer_minibatches(setting: Setting) -> Setting | None:
    """Half as many, or a third if they are odd, and so on: divisors stay divisors."""
    num = setting.num_minibatches or 1
    smallest = next((n for n in range(2, num + 1) if num % n == 0), None)
    return dataclasses.replace(setting, num_minibatches=num // smallest) if smallest else None


def _fewer_actors(setting: Setting) -> Setting | None:
    threads = (setting.num_actor_threads or 0) // 2
    return dataclasses.replace(setting, num_actor_threads=threads) if threads else None

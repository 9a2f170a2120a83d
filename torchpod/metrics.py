"""Where the numbers of a run go: metrics.jsonl always, and whatever else wants rows (run/sinks.py, run/progress.py).

A row is a dict with at least `iteration` and `env_steps`; a value is a number, or in a population a list with one
number per member. NaN says that there is nothing to report, e.g. the return when no episode ended. Timings have names
that `is_timing` recognises; all other values of two runs with one seed on one machine are equal.
"""

import contextlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from torchpod.checkpoint import writing

Row = Mapping[str, float | int | list[float]]

METRICS_FILE = "metrics.jsonl"


class Sink(Protocol):
    """Something that takes rows."""

    def write(self, row: Row) -> None:
        """Takes one row."""
        ...

    def close(self) -> None:
        """Writes what is left. No row follows."""
        ...


class Logger:
    """Hands every row to metrics.jsonl of the run folder and to all other sinks.

    Args:
      run_dir: the run folder; made if it does not exist.
      sinks: where rows go beside metrics.jsonl. The logger closes them.
      resume_at: the iteration that the run goes on from: later rows are dropped. None for a new run.

    Raises:
      FileExistsError: if a new run would write into the metrics of an old one.
      ValueError: if the metrics to resume from are damaged.
      OSError: if the folder cannot be written.
    """

    def __init__(self, run_dir: Path, *, sinks: Sequence[Sink] = (), resume_at: int | None = None) -> None:
        self._sinks: tuple[Sink, ...] = (JsonlSink(run_dir, resume_at=resume_at), *sinks)

    def write(self, row: dict[str, float | int | list[float]]) -> None:
        """Writes one row."""
        assert "iteration" in row and "env_steps" in row, f"a row needs iteration and env_steps, not just {list(row)}"
        for sink in self._sinks:
            sink.write(row)

    def close(self) -> None:
        """Closes every sink, also when one of them fails."""
        with contextlib.ExitStack() as stack:
            for sink in reversed(self._sinks):
                stack.callback(sink.close)

    def __enter__(self) -> "Logger":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class JsonlSink:
    """One JSON object per line. What is not finite becomes null, for JSON has neither NaN nor infinity.

    Each row is one write to the operating system, so a killed process loses at most the line that it was writing.
    """

    def __init__(self, run_dir: Path, *, resume_at: int | None = None) -> None:
        self.path = Path(run_dir) / METRICS_FILE
        if self.path.exists() and resume_at is None:
            raise FileExistsError(
                f"{self.path} belongs to an earlier run; go on with it by resume={run_dir}, or choose another folder "
                "with run_dir=DIR."
            )
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists():
                self._truncate(resume_at or 0)
            self._file = open(self.path, "ab", buffering=0)

    def write(self, row: Row) -> None:
        line = json.dumps({key: finite(value) for key, value in row.items()}, allow_nan=False).encode() + b"\n"
        with writing(self.path):
            if self._file.write(line) != len(line):
                raise OSError("only a part of a row was written: is the disk full?")

    def close(self) -> None:
        self._file.close()

    def _truncate(self, iteration: int) -> None:
        """Drops the rows after an iteration, and a torn last line. The file is always the old or the new one."""
        kept = [line for line, row in _parse(self.path) if row.get("iteration", 0) <= iteration]
        temporary = self.path.with_name(METRICS_FILE + ".tmp")
        with open(temporary, "wb") as file:
            file.write(b"".join(kept))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.path)


def is_timing(key: str) -> bool:
    """Whether a metric is a time, a rate or a share of time, and so differs from run to run: `wall_s`, `actor_wait`."""
    return re.search(r"_s$|(^|_)per_s(_|$)|_wait$|^actor_in_|^queue_|^phase_", key) is not None


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """All rows of a run; null becomes NaN, and a torn last line is left out.

    Raises:
      FileNotFoundError: if the folder has no metrics.
      ValueError: if a line is damaged.
    """
    path = Path(run_dir) / METRICS_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"{run_dir} has no {METRICS_FILE}; expected a run folder, as torchpod train makes them: "
            "runs/<experiment>/<time>-seed<k>."
        )
    return [{key: _nan(value) for key, value in row.items()} for _, row in _parse(path)]


def rows_until(run_dir: Path, iteration: int | None) -> list[dict[str, Any]]:
    """The rows that a resumed run keeps; none of a new run."""
    if iteration is None or not (Path(run_dir) / METRICS_FILE).exists():
        return []
    return [row for row in read_metrics(run_dir) if row["iteration"] <= iteration]


def _parse(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """Lines, each with its newline, and what they say."""
    lines = path.read_bytes().splitlines(keepends=True)
    rows = []
    for i, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError
        except ValueError:
            if i == len(lines):
                break
            raise ValueError(
                f"line {i} of {path} is damaged: expected a JSON object, found {line[:40]!r}; remove that line, "
                "or move the file away to go on without the metrics so far."
            ) from None
        if line.endswith(b"\n"):  # A last line without its end may be half a number.
            rows.append((line, row))
    return rows


def finite(value: Any) -> Any:
    """Lists and mappings of numbers as JSON has them: null for what is NaN or infinite."""
    if isinstance(value, dict):
        return {name: finite(x) for name, x in value.items()}
    if isinstance(value, list):
        return [finite(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _nan(value: Any) -> Any:
    if isinstance(value, list):
        return [_nan(x) for x in value]
    return math.nan if value is None else value


def _mean(values: Sequence[float]) -> float:
    """The mean of what is not NaN."""
    known = [x for x in values if not math.isnan(x)]
    return sum(known) / len(known) if known else math.nan


def scalars(row: Row) -> Iterator[tuple[str, float]]:
    """Names and numbers of a row; of a population the mean under the name, and `members/NAME/INDEX`."""
    for key, value in row.items():
        yield key, number(value)
        if isinstance(value, list):
            yield from ((f"members/{key}/{member}", x) for member, x in enumerate(value))


def number(value: float | int | list[float]) -> float:
    """The value, of a population the mean of what its members have."""
    return _mean(value) if isinstance(value, list) else value


def short(value: float) -> str:
    """For a reader: four digits, or all before the point of thousands and millions; - if there is nothing to say."""
    whole = 9999.5 <= abs(value) < 1e9
    return "-" if math.isnan(value) else f"{value:,.0f}" if whole else f"{value:.4g}"

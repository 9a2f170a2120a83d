"""Where the numbers of a run go: metrics.jsonl always; the console, metrics.csv, TensorBoard and W&B if wanted.

A row is a dict with at least `iteration` and `env_steps`; a value is a number, or in a population a list with one
number per member. NaN says that there is nothing to report, e.g. the return when no episode ended. Timings have names
that `is_timing` recognises; all other values of two runs with one seed on one machine are equal.
"""

import collections
import contextlib
import csv
import json
import math
import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

Row = Mapping[str, float | int | list[float]]

METRICS_FILE = "metrics.jsonl"
CSV_FILE = "metrics.csv"
_RATE_WINDOW_S = 30.0
_BAR_WIDTH = 8


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
        with _writable(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists() and resume_at is None:
                raise FileExistsError(
                    f"{self.path} belongs to an earlier run; go on with it by resume={run_dir}, or choose another "
                    "folder with run_dir=DIR."
                )
            if self.path.exists():
                self._truncate(resume_at or 0)
            self._file = open(self.path, "ab", buffering=0)

    def write(self, row: Row) -> None:
        line = json.dumps({key: _finite(value) for key, value in row.items()}, allow_nan=False).encode() + b"\n"
        with _writable(self.path):
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


class CsvSink:
    """`run_dir/metrics.csv`: a line per row, a column per metric; what is not finite is an empty cell.

    Of a population: the mean, and every member in a column `members/NAME/INDEX`. A metric that appears later becomes
    the last column, for which the file is written again.

    Args:
      run_dir: the run folder; made if it does not exist.
      resume_at: as in `Logger`: the file is written again from metrics.jsonl, without the later rows.

    Raises:
      OSError: if the file cannot be written.
    """

    def __init__(self, run_dir: Path, *, resume_at: int | None = None) -> None:
        self.path = Path(run_dir) / CSV_FILE
        self._columns: list[str] = []
        self._file: Any = None
        with _writable(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._write_again([_cells(row) for row in _rows_until(run_dir, resume_at)])

    def write(self, row: Row) -> None:
        cells = _cells(row)
        with _writable(self.path):
            if cells.keys() <= set(self._columns):
                self._writer.writerow(cells)
                return
            self._file.close()
            with open(self.path, newline="") as file:
                rows = list(csv.DictReader(file))
            self._write_again([*rows, cells])

    def close(self) -> None:
        self._file.close()

    def _write_again(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """The file is always the old or the new one."""
        self._columns += [
            name for name in dict.fromkeys(name for row in rows for name in row) if name not in self._columns
        ]
        temporary = self.path.with_name(CSV_FILE + ".tmp")
        # A line per write to the operating system.
        self._file = open(temporary, "w", newline="", buffering=1)
        self._writer = csv.DictWriter(self._file, self._columns, restval="", lineterminator="\n")
        if self._columns:
            self._writer.writeheader()
        self._writer.writerows(rows)
        os.replace(temporary, self.path)


class TensorBoardSink:
    """Event files in `run_dir/tensorboard`, over `env_steps`. Of a population: the mean, and every member.

    Args:
      run_dir: the run folder.
      resume_at: as in `Logger`: what was logged later is hidden.

    Raises:
      ImportError: if the extra is not installed.
    """

    def __init__(self, run_dir: Path, *, resume_at: int | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "logger.tensorboard=true needs TensorBoard: pip install torchpod-rl[tensorboard], or leave it out."
            ) from error
        kept = [int(_number(row["env_steps"])) for row in _rows_until(run_dir, resume_at)]
        purge_step = None if resume_at is None else kept[-1] + 1 if kept else 0
        self._writer = SummaryWriter(str(Path(run_dir) / "tensorboard"), purge_step=purge_step)

    def write(self, row: Row) -> None:
        step: Any = int(_number(row["env_steps"]))
        for key, value in _scalars(row):
            if key != "env_steps" and not math.isnan(value):
                self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """A run of Weights & Biases over `env_steps`, its files in `run_dir/wandb`. Of a population as in TensorBoard.

    WANDB_MODE=offline keeps it on this machine, for `wandb sync` later. A resumed run goes on in the same run there;
    rows that W&B has already are not logged again.

    Args:
      run_dir: the run folder; its name becomes that of the run.
      project: of W&B.
      config: shown beside the run.

    Raises:
      ImportError: if the extra is not installed.
      ValueError: if W&B does not start, e.g. for want of a login.
    """

    def __init__(self, run_dir: Path, *, project: str, config: Mapping[str, Any]) -> None:
        try:
            from wandb import Error, Settings, init  # pyright: ignore[reportMissingImports]  # an extra
        except ImportError as error:
            raise ImportError(
                "logger.wandb=true needs W&B: pip install torchpod-rl[wandb], or leave it out."
            ) from error
        folder = Path(run_dir) / "wandb"
        with _writable(folder / "id"):
            folder.mkdir(parents=True, exist_ok=True)  # which W&B would take a temporary one for
            if not (folder / "id").exists():
                (folder / "id").write_text(secrets.token_hex(4))
            name = (folder / "id").read_text()
        try:
            self._run: Any = init(
                project=project,
                id=name,
                name=Path(run_dir).name,
                dir=str(run_dir),
                config=dict(config),
                resume=None if os.environ.get("WANDB_MODE") == "offline" else "allow",  # offline knows none
                settings=Settings(console="off"),  # the progress bar is none of its business
            )
        except Error as error:
            reason = " ".join(str(error).split()).rstrip(".")
            raise ValueError(
                f"logger.wandb=true cannot start W&B ({reason}); call wandb login, set WANDB_MODE=offline, or leave it "
                "out."
            ) from error
        self._run.define_metric("*", step_metric="env_steps")

    def write(self, row: Row) -> None:
        # W&B refuses a step that it has: so a resumed run repeats nothing.
        self._run.log({key: x for key, x in _scalars(row) if not math.isnan(x)}, step=row["iteration"])

    def close(self) -> None:
        self._run.finish()


class ConsoleSink:
    """A progress bar on a terminal, else a plain line every few seconds.

    It shows environment steps, their rate (`env_steps_per_s` of the row, or else measured here), the return (in a
    population the mean over members and the best one), the losses and the time left.

    Args:
      total_env_steps: of the whole run, as planned; resets take a part of them.
      num_iterations: of the whole run: what the bar, the percentage and the time left go by.
      advice: what makes the environments faster, for when the learner waits for them.
      every_s: seconds between two plain lines.
      console: where to write; standard output if None.
      clock: the time in seconds.
    """

    def __init__(
        self,
        total_env_steps: int,
        num_iterations: int,
        *,
        advice: str = "raise loop.num_actor_threads",
        every_s: float = 5.0,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._num_iterations = total_env_steps, num_iterations
        self._advice, self._every_s, self._clock = advice, every_s, clock
        self._console = console or Console(file=sys.stdout)
        self._history: collections.deque[tuple[float, int, int]] = collections.deque()
        self._shown_at, self._unshown = -math.inf, None
        self._progress: Progress | None = None
        if self._console.is_terminal:
            # Redrawn by `write`: a thread of its own would compete with training for the cores.
            columns = (
                BarColumn(bar_width=_BAR_WIDTH),
                TaskProgressColumn(),
                TextColumn("{task.fields[text]}", markup=False),
            )
            self._progress = Progress(*columns, console=self._console, auto_refresh=False)
            self._task = self._progress.add_task("train", total=num_iterations, text="compiling")
            self._progress.start()

    def write(self, row: Row) -> None:
        now = self._clock()
        self._history.append((now, int(_number(row["env_steps"])), int(_number(row["iteration"]))))
        while len(self._history) > 2 and now - self._history[1][0] >= _RATE_WINDOW_S:
            self._history.popleft()
        self._unshown = row
        if now - self._shown_at >= (0.1 if self._progress else self._every_s):
            self._show(row, now)

    def close(self) -> None:
        if self._unshown is not None:
            self._show(self._unshown, self._clock())
        if self._progress is not None:
            self._progress.stop()

    def _show(self, row: Row, now: float) -> None:
        self._shown_at, self._unshown = now, None
        text, iteration = self._text(row), self._history[-1][2]
        if self._progress is not None:
            self._progress.update(self._task, completed=iteration, text=text, refresh=True)
        else:
            percent = 100 * iteration // self._num_iterations
            self._console.print(f"{percent:3d}%  {text}", soft_wrap=True, markup=False, highlight=False)

    def _text(self, row: Row) -> str:
        # From the first row on: what came before it is compilation.
        (then, steps_then, iteration_then), (now, env_steps, iteration) = self._history[0], self._history[-1]
        shown_rate = _number(row.get("env_steps_per_s", math.nan))
        if math.isnan(shown_rate) and now > then:
            shown_rate = (env_steps - steps_then) / (now - then)
        iterations_left, done = self._num_iterations - iteration, iteration - iteration_then
        left_s = iterations_left * (now - then) / done if done > 0 and now > then else math.nan
        head = [
            f"{_compact(env_steps)}/{_compact(self._total)} env steps",
            f"{_compact(shown_rate)}/s",
            f"return {_show_return(row.get('episode_return', math.nan))}",
        ]
        losses = [f"{key.replace('_', ' ')} {_show_number(_number(row[key]))}" for key in row if _is_loss(key)]
        losses.sort(key=lambda text: not text.startswith("loss "))
        tail = [*_starving(row, self._advice), f"ETA {_show_duration(left_s)}"]
        # What does not fit beside the bar and the percentage is left out, but never the time left.
        while losses and self._progress and len("  ".join(head + losses + tail)) > self._console.width - _BAR_WIDTH - 6:
            losses.pop()
        return "  ".join(head + losses + tail)


def is_timing(key: str) -> bool:
    """Whether a metric is a time, a rate or a share of time, and so differs from run to run: `wall_s`, `actor_wait`."""
    return re.search(r"_s$|(^|_)per_s(_|$)|_wait$|^actor_in_|^queue_", key) is not None


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


def _rows_until(run_dir: Path, iteration: int | None) -> list[dict[str, Any]]:
    """The rows that a resumed run keeps; none of a new run."""
    if iteration is None or not (Path(run_dir) / METRICS_FILE).exists():
        return []
    return [row for row in read_metrics(run_dir) if row["iteration"] <= iteration]


@contextlib.contextmanager
def _writable(path: Path):
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        raise OSError(
            f"{path} cannot be written ({error.strerror or error}); free some space, or choose another folder "
            "with run_dir=DIR."
        ) from error


def _parse(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """Lines, each with its newline, and what they say."""
    lines = path.read_bytes().splitlines(keepends=True)
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError
        except ValueError:
            if number == len(lines):
                break
            raise ValueError(
                f"line {number} of {path} is damaged: expected a JSON object, found {line[:40]!r}; remove that line, "
                "or move the file away to go on without the metrics so far."
            ) from None
        if line.endswith(b"\n"):  # A last line without its end may be half a number.
            rows.append((line, row))
    return rows


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(x) for x in value]
    return value if math.isfinite(value) else None


def _nan(value: Any) -> Any:
    if isinstance(value, list):
        return [_nan(x) for x in value]
    return math.nan if value is None else value


def _mean(values: Sequence[float]) -> float:
    """The mean of what is not NaN."""
    known = [x for x in values if not math.isnan(x)]
    return sum(known) / len(known) if known else math.nan


def _scalars(row: Row) -> Iterator[tuple[str, float]]:
    """Names and numbers of a row; of a population the mean under the name, and `members/NAME/INDEX`."""
    for key, value in row.items():
        yield key, _number(value)
        if isinstance(value, list):
            yield from ((f"members/{key}/{member}", x) for member, x in enumerate(value))


def _cells(row: Row) -> dict[str, float | str]:
    return {key: x if math.isfinite(x) else "" for key, x in _scalars(row)}


def _number(value: float | int | list[float]) -> float:
    return _mean(value) if isinstance(value, list) else value


def _starving(row: Row, advice: str) -> list[str]:
    """Of Sebulba: which side the other waits for, and what to change (docs/loops.md)."""
    if "learner_wait" not in row:
        return []
    learner, actor, in_env, in_inference, in_transfer = (
        _number(row.get(name, 0.0))
        for name in ("learner_wait", "actor_wait", "actor_in_environment", "actor_in_inference", "actor_in_transfer")
    )
    if learner > 0.5 and actor > 0.5:
        return ["actors and learner take turns: raise loop.lag"]
    if learner > 0.5:
        sides = {
            f"environments: {advice}": in_env,
            "inference: raise num_envs": in_inference,
            "transfers: raise loop.pools_per_actor": in_transfer,
        }
        return [f"learner waits {learner:.0%} for {max(sides, key=lambda side: sides[side])}"]
    if actor > 0.5:
        return [f"actors wait {actor:.0%} for the update: lower algo.learner.num_epochs"]
    return ["actors and learner keep pace"]


def _is_loss(key: str) -> bool:
    return key == "loss" or key.endswith("_loss")


def _show_return(value: float | int | list[float]) -> str:
    best = max((x for x in value if not math.isnan(x)), default=math.nan) if isinstance(value, list) else math.nan
    return _show_number(_number(value)) + ("" if math.isnan(best) else f" (best {_show_number(best)})")


def _show_number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4g}"


def _compact(value: float) -> str:
    """12, 1.23k, 61.4k, 500k, 1.25M."""
    if math.isnan(value):
        return "-"
    for scale, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= scale:
            return f"{value / scale:.3g}{unit}" if value < 999.5 * scale else f"{value / scale:.0f}{unit}"
    return f"{value:.0f}"


def _show_duration(seconds: float) -> str:
    if math.isnan(seconds):
        return "-"
    minutes, whole = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{whole:02d}" if hours else f"{minutes}:{whole:02d}"

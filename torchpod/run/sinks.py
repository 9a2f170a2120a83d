"""Rows of metrics for other programs: metrics.csv, TensorBoard and W&B. Read metrics.py first."""

import csv
import math
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchpod.checkpoint import writing
from torchpod.metrics import Row, number, rows_until, scalars

CSV_FILE = "metrics.csv"


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
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._write_again([_cells(row) for row in rows_until(run_dir, resume_at)])

    def write(self, row: Row) -> None:
        cells = _cells(row)
        with writing(self.path):
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
                "logger.tensorboard=true needs TensorBoard: pip install 'torchpod-rl[tensorboard]', or leave it out."
            ) from error
        kept = [int(number(row["env_steps"])) for row in rows_until(run_dir, resume_at)]
        purge_step = None if resume_at is None else kept[-1] + 1 if kept else 0
        self._writer = SummaryWriter(str(Path(run_dir) / "tensorboard"), purge_step=purge_step)

    def write(self, row: Row) -> None:
        step: Any = int(number(row["env_steps"]))
        for key, value in scalars(row):
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
                "logger.wandb=true needs W&B: pip install 'torchpod-rl[wandb]', or leave it out."
            ) from error
        folder = Path(run_dir) / "wandb"
        with writing(folder / "id"):
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
        self._run.log({key: x for key, x in scalars(row) if not math.isnan(x)}, step=row["iteration"])

    def close(self) -> None:
        self._run.finish()


def _cells(row: Row) -> dict[str, float | str]:
    return {key: x if math.isfinite(x) else "" for key, x in scalars(row)}

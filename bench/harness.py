"""The frame of every suite: which cases it runs, and what it has found, in one JSON file.

processes.py runs the sides, compare.py makes rows of them. Read anakin.py next.
"""

import dataclasses
import datetime
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchpod.bench.compare import Row, hardware
from torchpod.bench.processes import ROOT, WorkerError, calibrate
from torchpod.bench.targets import Failure, below_figures, missed
from torchpod.hints import nearest
from torchpod.machine import commit

RESULTS = ROOT / "bench" / "results"
FORMAT = 2
BEGAN = time.monotonic()
"""Of the suite: a process runs one, and imports this before it measures."""


def chosen(cases: Sequence[Any], only: str | None, suite: str) -> list[Any]:
    """The cases whose names `named` finds."""
    kept = named([case.name for case in cases], only, suite)
    return [case for case in cases if case.name in kept]


def named(names: Sequence[str], only: str | None, suite: str) -> list[str]:
    """The names that begin with `only`, or one of several that commas part; all, if that is None.

    Raises:
      ValueError: if there is none.
    """
    if only is None:
        return [*names]
    starts = only.split(",")
    for start in starts:
        if not start or not any(name.startswith(start) for name in names):
            raise ValueError(f"--only {start!r} is nothing of {suite}; {nearest(start, [*names])}")
    return [name for name in names if name.startswith(tuple(starts))]


class Record:
    """What a suite has found so far. Leaving the context writes it, whatever ended the suite, and says what failed.

    A suite that is stopped (SIGTERM, Ctrl-C, a calibration that fails) ends there, with what it has as the run of a
    part; one that has no row yet raises what stopped it.

    Args:
      suite: its name.
      json_path: where the rows go; None for bench/results/.
      **extra: more of the result file: `quick`, `only`, `core`, ...

    Attributes:
      rows: in order.
      failures: what failed, of which row; peers below their figures and rows below their targets (targets.py) follow
        from the rows, are told as well, and not stored.
      calibrations: in the course of the suite; the best of each product counts, for what was slower had company.
      status: of the process, when it is written.
    """

    def __init__(self, suite: str, json_path: str | None, **extra: Any) -> None:
        self.rows: list[Row] = []
        self.failures: list[Failure] = []
        self.calibrations: list[Mapping[str, float]] = []
        self.status = 1
        self._suite, self._json_path, self._extra = suite, json_path, extra
        self._load_average = os.getloadavg()

    def calibrate(self, core: int | None) -> None:
        """Once more."""
        self.calibrations.append(calibrate(core))

    def __enter__(self) -> "Record":
        return self

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> bool:
        stopped = isinstance(error, WorkerError | KeyboardInterrupt | SystemExit)
        if error is not None:
            if not self.rows:
                return False
            why = "interrupted." if isinstance(error, KeyboardInterrupt | SystemExit) else str(error)
            self.failures.append((self.rows[-1].name, f"the suite was stopped after this row: {why}"))
            self._extra["only"] = ",".join(row.name for row in self.rows)
        self._write()
        return stopped

    def _write(self) -> None:
        calibration = {
            product: max(c[product] for c in self.calibrations) for product in (self.calibrations or [{}])[0]
        }
        told = [dataclasses.asdict(row) for row in self.rows]
        run = {"suite": self._suite, "rows": told, "calibration_gflops": calibration, **self._extra}
        self.failures = list(dict.fromkeys(self.failures))
        path = write_results(
            self._suite,
            self.rows,
            failures=self.failures,
            calibration=calibration,
            load_average=self._load_average,
            json_path=self._json_path,
            extra=self._extra,
        )
        print(f"{len(self.rows)} rows in {path}")
        implied = [] if self._extra.get("quick") else below_figures(run) + missed(run)
        for name, sentence in self.failures + implied:
            print(f"torchpod bench: {name}: {sentence}", file=sys.stderr)
        self.status = 1 if self.failures or implied else 0


def write_results(
    suite: str,
    rows: Sequence[Row],
    *,
    failures: Sequence[Failure],
    calibration: Mapping[str, float],
    load_average: Sequence[float],
    json_path: str | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Writes `bench/results/<suite>_<hardware>_<date>.json`, or `json_path`; returns where it lies."""
    machine = hardware()
    now = datetime.datetime.now(datetime.UTC)
    path = (
        Path(json_path) if json_path is not None else RESULTS / f"{suite}_{machine['name']}_{now:%Y-%m-%d-%H%M%S}.json"
    )
    document = {
        "format": FORMAT,
        "suite": suite,
        "date": now.isoformat(timespec="seconds"),
        "hardware": machine,
        "commit": commit(),
        "calibration_gflops": dict(calibration),
        "load_average": list(load_average),
        "wall_s": time.monotonic() - BEGAN,
        "failures": list(failures),
        **(extra or {}),
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}")  # a file is there whole or not at all
    partial.write_text(json.dumps(document, indent=1) + "\n")
    partial.replace(path)
    return path

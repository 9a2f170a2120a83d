"""`torchpod train --multirun KEY=a,b ...`: a run with each combination of values, one after the other."""

import itertools
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from torchpod.compose import GROUPS, load
from torchpod.config import ConfigError
from torchpod.run.stop import Interrupted


def combinations(overrides: Sequence[str]) -> list[list[str]]:
    """The overrides of each run: the product of what is several values, in Hydra's grammar, the last one fastest.

    Raises:
      ConfigError: for values that cannot be listed.
    """
    return [list(run) for run in itertools.product(*map(_each, overrides))]


def _each(override: str) -> list[str]:
    try:
        parsed = OverridesParser.create().parse_override(override)
    except HydraException:  # `load` says why
        return [override]
    if not parsed.is_sweep_override():
        return [override]
    key = parsed.get_key_element()
    try:
        values = list(parsed.sweep_string_iterator())
    except HydraException as error:
        raise ConfigError(f"{override} is no list of values; write them, or choice(a,b) or range(1,4).") from error
    if not values:
        raise ConfigError(f"{override} has no values; give some, e.g. {key}=1,2.")
    # What groups choose, a path too, `load` takes as it is.
    return [f"{key}={value.replace(chr(92), '') if key in GROUPS else value}" for value in values]


def multirun(overrides: Sequence[str]) -> int:
    """Trains all runs, each in a process of its own; returns 1 if one of them failed, after the others.

    Raises:
      ConfigError: before the first run, if the settings of one cannot be used.
      Interrupted: on SIGINT, SIGTERM and SIGHUP, when the run that it is passed on to has ended.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("--multirun starts a process for each run; start it without torchrun.")
    runs, failed = combinations(overrides), []
    configs = [load(run) for run in runs]
    for name in ("run_dir", "resume"):
        if any(getattr(config, name) is not None for config in configs):
            raise ConfigError(f"{name} is of one run, and --multirun has several; leave it out.")
    for i, run in enumerate(runs, 1):
        print(f"run {i} of {len(runs)}: {shlex.join(run)}", flush=True)
        status, stopped = _train(run)
        if stopped:
            raise Interrupted(f"stopped in run {i} of {len(runs)}")
        if status != 0:
            failed.append(shlex.join(run))
    if failed:
        print(f"torchpod: {len(failed)} of {len(runs)} runs failed: {'; '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _train(overrides: Sequence[str]) -> tuple[int, bool]:
    """The exit status of one run, and whether a signal came, which it was passed on."""
    heard: list[int] = []
    started: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, frame: Any) -> None:
        heard.append(number)
        for process in started:
            process.send_signal(number)

    listening = {
        number: signal.signal(number, pass_on)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN  # as under nohup
    }
    try:
        # In a process group of its own, so that Ctrl-C reaches it once, from here, as every signal does.
        process = subprocess.Popen(
            [sys.executable, "-m", "torchpod", "train", *overrides], stdin=subprocess.DEVNULL, process_group=0
        )
        started.append(process)
        for number in heard:
            process.send_signal(number)
        return process.wait(), bool(heard)
    finally:
        for number, handler in listening.items():
            signal.signal(number, handler)

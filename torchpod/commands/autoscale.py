"""`torchpod autoscale`: the num_envs, minibatches and chunks that fit memory, and the fastest. Read knobs.py first.

Prints a row per probe, and writes what it found as a file of overrides, for `torchpod train ... +autoscale=FILE`.
"""

import dataclasses
import json
import math
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from torchpod import algos
from torchpod.arguments import Parser, require_writable
from torchpod.commands.knobs import GAIN, NAMES, Row, Search, Setting
from torchpod.commands.probe import CPU_SHARE, Answer, measure
from torchpod.compose import load
from torchpod.config import ConfigError, TrainConfig
from torchpod.dealer import DEFAULT_CHUNK_ROWS
from torchpod.hints import human_bytes
from torchpod.host_memory import available_bytes
from torchpod.kernels.gxx import cores
from torchpod.machine import hardware
from torchpod.makers import make_agent, make_env
from torchpod.run.folder import write_text
from torchpod.watched import close_all

_PACE = "algo.env_steps_per_update"
_QUIET = 0.95
"""The least share of a core that a probe has on a machine with nothing else to do."""


def main(arguments: Sequence[str]) -> int:
    """The command; prints a row per probe and what it found, writes the override, and says how to train with it.

    Raises:
      ConfigError: if the settings cannot work, or a file cannot be written.
      ProbeError: if a probe failed, and not for want of memory.
    """
    options = _parser().parse_intermixed_args(arguments)
    for name, value in (("--seconds", options.seconds), ("--max-envs", options.max_envs), ("--memory", options.memory)):
        if value is not None and not 0 < value < math.inf:  # nor NaN
            raise ConfigError(f"torchpod autoscale: {name} {value:g} must be a finite number more than 0.")
    config = load(options.overrides)
    _check(config)
    limit, on_cpu = _limit(config, options.memory), config.device == "cpu"
    path = options.out or Path("runs", config.experiment, "autoscale.yaml")
    require_writable("torchpod autoscale: --out", path)
    if options.json is not None:
        require_writable("torchpod autoscale: --json", options.json)
    start, pace = _begin(config)

    def run(setting: Setting) -> Answer:
        changed = setting.overrides(start) | pace
        return measure(_with(options.overrides, changed), seconds=options.seconds, limit=limit, on_cpu=on_cpu)

    table = _Table()
    search = Search(
        run,
        max_envs=options.max_envs,
        largest=options.largest,
        fine=options.fine,
        default_chunk=DEFAULT_CHUNK_ROWS[torch.device(config.device).type],
        max_actors=cores(),
        before=table.before,
        after=table.after,
    )
    amount = human_bytes(limit) if limit else "nine tenths of the free memory"
    print(f"{config.experiment}: {options.seconds:g} s per probe after compilation, up to {amount} of {config.device}")
    try:
        best = search.run(start)
    finally:
        table.end()
    found = best.setting.overrides(start) | pace
    command = ["torchpod", "train", *_with(options.overrides, found)]
    for line in _told(search, best, config, start, largest=options.largest):
        print(line)
    print(shlex.join(command), flush=True)
    where = hardware(torch.device(config.device))
    header = f"# {shlex.join(['torchpod', 'autoscale', *arguments])}\n# {best.rate:,.0f} env steps/s, {where}"
    header += ", of CPU time\n" if best.answer and best.answer.cpu_share < _QUIET else "\n"
    write_text(path, header + yaml.safe_dump(_nested(found), sort_keys=False))
    if options.json is not None:
        document = {"command": command, "limit_bytes": limit, "most_envs": search.most_envs}
        rows = [_plain(row, best) for row in search.rows]
        write_text(options.json, json.dumps(document | {"rows": rows}, indent=1) + "\n")
    print(shlex.join(["torchpod", "train", *_with(options.overrides, found, write=False), f"+autoscale={path}"]))
    return 0


def _parser() -> Parser:
    parser = Parser("torchpod autoscale")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of the run, as for torchpod train")
    parser.add_argument("--seconds", type=float, default=5.0, help="to measure per probe, compilation left out")
    parser.add_argument("--memory", type=float, metavar="GB", help="limit; default: 0.8 of what is free, 0.9 on a GPU")
    parser.add_argument("--max-envs", type=int, default=2**20)
    parser.add_argument("--largest", action="store_true", help="fill the memory, even if that is not faster")
    parser.add_argument("--fine", action="store_true", help="also between the powers of two where memory ends")
    parser.add_argument("--out", type=Path, help="default: runs/<experiment>/autoscale.yaml")
    parser.add_argument("--json", type=Path, metavar="FILE", help="every row, for other programs")
    return parser


def _check(config: TrainConfig) -> None:
    if config.resume is not None:
        raise ConfigError(f"torchpod autoscale measures runs that begin; leave out resume={config.resume}.")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ConfigError(
            "torchpod autoscale measures one process; start it without torchrun, and train K ranks with K times the "
            "num_envs that it finds."
        )
    if config.loop.split is not None:
        raise ConfigError(
            f"torchpod autoscale measures one GPU, and loop.split={config.loop.split} uses several; leave it out."
        )


def _limit(config: TrainConfig, given_gb: float | None) -> int | None:
    """Bytes that a probe may take; None: the probe looks what its GPU has."""
    try:
        free = available_bytes() if config.device == "cpu" else None
    except OSError as error:
        raise ConfigError(
            "torchpod autoscale reads /proc to keep device=cpu within memory; run it on Linux."
        ) from error
    if given_gb is not None:
        if free is not None and given_gb * 1e9 > free:
            raise ConfigError(f"--memory {given_gb:g}: only {human_bytes(free)} are free; use less.")
        return int(given_gb * 1e9)
    return None if free is None else int(CPU_SHARE * free)


def _learns_from_replay(config: TrainConfig) -> bool:
    """Whether there are settings of replay, and the agent, which may be one of a user's, has a use for them."""
    if config.algo.replay is None or config.algo.name in algos.MAKERS:
        return config.algo.replay is not None
    env = make_env(config.env)
    try:
        return bool(make_agent(config.algo, env.spec)().replayed)
    finally:
        close_all([env])


def _begin(config: TrainConfig) -> tuple[Setting, dict[str, float]]:
    """Where the search begins, and what all probes have beside the settings of the run."""
    learner, sebulba, replayed = config.algo.learner, config.loop.name == "sebulba", _learns_from_replay(config)
    start = Setting(
        config.num_envs,
        num_minibatches=None if replayed else learner.num_minibatches,
        chunk_rows=learner.chunk_rows,
        num_actor_threads=config.loop.num_actor_threads if sebulba else None,
    )
    if not replayed or config.algo.env_steps_per_update is not None:
        return start, {}
    # More environments must not mean fewer updates per step: that would be faster, and another run.
    return start, {_PACE: config.num_envs * config.algo.unroll_length / learner.num_minibatches}


def _with(given: Sequence[str], found: dict[str, Any], *, write: bool = True) -> list[str]:
    """The overrides that were given, without those that `found` takes the place of, and `found` behind them."""
    replaced = {*found, *([NAMES["num_minibatches"]] if _PACE in found else [])}
    kept = [item for item in given if item.partition("=")[0].lstrip("+") not in replaced]
    return kept + [f"{key}={json.dumps(value)}" for key, value in found.items() if write]


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    """Dotted names as nested settings."""
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *folders, name = key.split(".")
        inner = tree
        for folder in folders:
            inner = inner.setdefault(folder, {})
        inner[name] = value
    return tree


def _plain(row: Row, best: Row) -> dict[str, Any]:
    """A row as JSON has it."""
    answer = row.answer or Answer("out of memory", why="not started")
    return {
        **dataclasses.asdict(row.setting),
        "predicted_bytes": row.predicted_bytes,
        **answer._asdict(),
        "chosen": row is best,
    }


def _told(search: Search, best: Row, config: TrainConfig, start: Setting, *, largest: bool) -> list[str]:
    """What the search comes to, in sentences."""
    first = next(row for row in search.rows if row.fits)
    found = ", ".join(f"{key}={value}" for key, value in best.setting.overrides(start).items())
    lines = [f"{'largest' if largest else 'fastest'}: {found}"]
    if best is not first:
        lines[0] += f", {best.rate / first.rate:.2f} times as fast as num_envs={first.setting.num_envs}"
    quickest = max((row for row in search.rows if row.fits), key=lambda row: row.rate)
    if quickest.rate > GAIN * best.rate:
        found = ", ".join(f"{key}={value}" for key, value in quickest.setting.overrides(start).items())
        lines.append(f"fastest of these: {found}, {quickest.rate / best.rate:.2f} times as fast as the largest")
    shared = sum(row.answer.cpu_share < _QUIET for row in search.rows if row.answer)
    if shared:
        lines.append(
            f"other work had the core too in {shared} of {len(search.rows)} probes; compared are env steps per second "
            "of CPU time, which that disturbs less"
        )
    if search.most_envs is not None:
        lines.append(f"memory holds about num_envs={search.most_envs:,}, by prediction")
    steps = best.setting.num_envs * config.algo.unroll_length
    iterations = -(-config.total_env_steps // steps)
    before = -(-config.total_env_steps // (start.num_envs * config.algo.unroll_length))
    if iterations < before:
        lines.append(
            f"total_env_steps={config.total_env_steps} are then {iterations} iterations of {steps:,} steps in place of "
            f"{before}: see that it still learns"
        )
    return lines


class _Table:
    """Rows on the screen: the setting before its probe, what came of it afterwards."""

    def __init__(self) -> None:
        self._begun, self._open = False, False

    def before(self, setting: Setting) -> None:
        """Prints the setting."""
        shown, found = {"num_envs": setting.num_envs}, ["memory", "predicted", "compile"]
        if setting.num_actor_threads is not None:
            shown["actors"] = setting.num_actor_threads
        if setting.num_minibatches is not None:
            shown |= {"chunk rows": setting.chunk_rows, "minibatches": setting.num_minibatches}
            found.insert(0, "of rows")
        if not self._begun:
            print(*(f"{name:>12}" for name in (*shown, *found)), f"{'env steps/s':>14}", sep="")
            self._begun = True
        print(*(f"{'' if x is None else format(x, ','):>12}" for x in shown.values()), sep="", end="", flush=True)
        self._open = True

    def after(self, row: Row) -> None:
        """Prints the rest of the line."""
        self._open = False
        if row.setting.num_minibatches is not None:
            rows = row.answer.minibatch_rows if row.answer else 0
            print(f"{format(rows, ',') if rows else '':>12}", end="")
        predicted = f"{'' if row.predicted_bytes is None else human_bytes(row.predicted_bytes):>12}"
        if row.answer is None:
            print(f"{'':>12}{predicted}  not started")
        elif row.fits:
            answer = row.answer
            compiled = f"{answer.compile_s:.1f} s"
            share = f"  with {answer.cpu_share:.0%} of a core" if answer.cpu_share < _QUIET else ""
            print(
                f"{human_bytes(answer.memory_bytes):>12}{predicted}{compiled:>12}{answer.env_steps_per_s:>14,.0f}{share}"
            )
        else:
            why = row.answer.why if row.answer.verdict == "refused" else f"out of memory: {row.answer.why}"
            memory = human_bytes(row.answer.memory_bytes) if row.answer.memory_bytes else ""
            print(f"{memory:>12}{predicted}  {why}")
        sys.stdout.flush()

    def end(self) -> None:
        """Ends a line that an error has cut off."""
        if self._open:
            print(flush=True)

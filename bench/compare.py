"""Two sides beside each other: rows with ratio and spread, and what makes them unfit to be compared.

Ratios are taken within a round, so that load which comes and goes hits both sides.
"""

import os
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from torchpod.bench.processes import Measured, Measurement, MissingError, WorkerError, mean_return, rates
from torchpod.bench.targets import Failure
from torchpod.machine import commit, cpu, versions

RETURN_SHARE = 0.6
"""Means over a few seeds differ; those of two different algorithms differ more."""
JAX_RETURN_SHARE = {"cartpole": 0.85}
"""By environment, beside our own JAX driver, which is the same algorithm, where seeds differ little: 0.89 at least."""
TOO_EARLY = "returns say nothing in so few steps"
"""The note of a row whose sides had no time to learn."""
RANDOM = {"cartpole": 22.2, "minatar_breakout": 0.39, "pendulum": -1225.0}
"""Mean returns of a random policy."""
LEARNED = {"cartpole": 44.0, "minatar_breakout": 0.8, "pendulum": -300.0, "inverted_pendulum": 140.0}
LEARNED |= {"dqn_cartpole": 400.0, "sac_pendulum": -300.0, "td3_pendulum": -300.0}
"""By environment or experiment, what both sides must reach where they had time to learn: about twice those, of Pendulum
a quarter of what is lost, of DQN on CartPole four fifths of the most; of Brax's inverted pendulum, where actions are
greedy in the end, twice the 70 of a network that has learned nothing."""
# A worker that got less of its core than this was not alone on it, and one that uses several cores if it got less than
# this share of what it got in another round.
QUIET_CPU_SHARE = 0.95
QUIET_ROUND_SHARE = 0.9

EQUAL_WORK = (
    "mode",
    "num_envs",
    "unroll_length",
    "epochs",
    "minibatches",
    "batch_rows",
    "param_count",
    "dtype",
    "iterations",
    "total_iterations",
)


@dataclass(frozen=True)
class Row:
    """One line of a result file; learning.py has means, and the ratio of gains with its 95 % interval.

    Attributes:
      name: `<work>/<num_envs>`.
      value: median over the rounds; None if it could not be measured, `note` says why.
      repeats: every single value behind it, in the order measured.
      peer: `{name, value, repeats}` of the other side, None if it could not be measured.
      ratio: ours over the peer's, the median over the rounds; for seconds, below 1 is better.
      interval: smallest and largest ratio of a round; None of a single one.
      cpu_share: CPU time over wall time of the worse side; below 0.95 somebody else had the core.
      threads: of each side.
      rounds: of each side, what `TOLD` names, round by round; seconds are those of all timed calls.
    """

    name: str
    value: float | None
    unit: str
    repeats: list[float]
    peer: dict[str, Any] | None
    ratio: float | None
    interval: tuple[float, float] | None
    cpu_share: float | None
    threads: dict[str, Any]
    hardware: str
    versions: dict[str, str]
    commit: str | None
    note: str = ""
    rounds: dict[str, list[dict[str, Any]]] = field(default_factory=dict)


TOLD = ("load_average", "compile_s", "episode_return", "episodes", "dtype", "device", "tf32")
"""Of a measurement, besides rates and seconds, as far as it has them."""


def hardware() -> dict[str, Any]:
    """What ran the benchmark: `name` is short and fit for a file name."""
    found = cpu()
    brand, family, model = found["model name"], found["cpu family"], found["model"]
    cores = os.cpu_count() or 1
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    words = [brand, family, model, f"{cores} cores", *([gpu] if gpu else [])]
    name = re.sub(r"[^a-z0-9]+", "-", " ".join(words).lower()).strip("-")
    return {
        "name": name,
        "cpu": brand,
        "cpu_family": family,
        "cpu_model": model,
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "cores": cores,
        "gpu": gpu,
    }


class RowMaker:
    """Makes rows that carry this machine, versions and commit."""

    def __init__(self) -> None:
        self.hardware = hardware()
        self.versions = versions()
        self.commit = commit()

    def rate(
        self,
        name: str,
        ours: Measured,
        peer: Measured,
        *,
        peer_name: str,
        unit: str = "env_steps/s",
        waits: bool = False,
    ) -> Row:
        """Environment steps (or what is counted) per second: the median of a round's calls, then over the rounds.

        Of processes that wait for each other, or for a time, CPU time does not say whether they had company: `waits`.
        """
        return self._row(name, unit, ours, peer, peer_name, rates, waits=waits)

    def compile_time(
        self,
        name: str,
        ours: Measured,
        peer: Measured,
        *,
        peer_name: str,
    ) -> Row:
        """Seconds of tracing and compiling."""
        return self._row(name, "s", ours, peer, peer_name, lambda m: [m["compile_s"]])

    def number(
        self,
        name: str,
        key: str,
        unit: str,
        ours: Measured,
        peer: Measured,
        *,
        peer_name: str,
    ) -> Row:
        """Any number of the measurements, by its name there."""
        return self._row(name, unit, ours, peer, peer_name, lambda m: [cast(float, m[key])])

    def alone(self, name: str, value: float, unit: str, repeats: Sequence[float] = ()) -> Row:
        """A measurement without a peer."""
        return Row(
            name=name,
            value=value,
            unit=unit,
            repeats=list(repeats) or [value],
            peer=None,
            ratio=None,
            interval=None,
            cpu_share=None,
            threads={"torchpod": {"torch": torch.get_num_threads(), "cores": os.cpu_count()}},
            hardware=self.hardware["name"],
            versions=self.versions,
            commit=self.commit,
        )

    def _row(
        self,
        name: str,
        unit: str,
        ours: Measured,
        peer: Measured,
        peer_name: str,
        values: Callable[[Measurement], list[float]],
        *,
        waits: bool = False,
    ) -> Row:
        sides = {"torchpod": ours, peer_name: peer}
        good = {side: ms for side, ms in sides.items() if isinstance(ms, list) and ms}
        medians = {side: [statistics.median(values(m)) for m in ms] for side, ms in good.items()}
        single = {side: [value for m in ms for value in values(m)] for side, ms in good.items()}
        ratios: list[float] = []
        if len(good) == 2:
            ratios = [a / b for a, b in zip(medians["torchpod"], medians[peer_name], strict=True) if b]
        notes, shares = [str(side) for side in sides.values() if isinstance(side, WorkerError)], []
        for ms in good.values():
            on_cpu = [m for m in ms if m.get("device", "cpu") == "cpu"]
            own = [sum(m["cpu_s"]) / sum(m["wall_s"]) for m in on_cpu]
            shares += own
            most = max(own, default=0.0)
            least = QUIET_CPU_SHARE if most < 1.05 else QUIET_ROUND_SHARE * most
            if own and min(own) < least and unit != "s" and not waits:
                notes.append(f"not alone on the core: {min(own):.0%} of it in the worst round")
        found = dict(self.versions)
        for ms in good.values():
            found.update(ms[0]["versions"])
        return Row(
            name=name,
            value=statistics.median(medians["torchpod"]) if "torchpod" in good else None,
            unit=unit,
            repeats=single.get("torchpod", []),
            peer=None
            if peer_name not in good
            else {
                "name": peer_name,
                "value": statistics.median(medians[peer_name]),
                "repeats": single[peer_name],
            },
            ratio=statistics.median(ratios) if ratios else None,
            interval=(min(ratios), max(ratios)) if len(ratios) > 1 else None,
            cpu_share=min(shares) if shares else None,
            threads={side: ms[0]["threads"] for side, ms in good.items()},
            hardware=self.hardware["name"],
            versions=found,
            commit=self.commit,
            note="; ".join(notes),
            rounds={side: [_told(m) for m in ms] for side, ms in good.items()},
        )


def _told(measurement: Measurement) -> dict[str, Any]:
    seconds = {"wall_s": sum(measurement["wall_s"]), "cpu_s": sum(measurement["cpu_s"])}
    return seconds | {name: x for name, x in measurement.items() if name in TOLD}


def unequal_work(ours: Measurement, peer: Measurement) -> list[str]:
    """Where the two sides did not do the same work, sentences."""
    unsaid = {"population": 1, "env": "", "device": "cpu", "tf32": False, "sampled_rows": 0}
    a, b = ({**unsaid, **side} for side in (ours, peer))
    return [
        f"unequal work: {key} is {a[key]!r} in {ours['framework']} and {b[key]!r} in {peer['framework']}."
        for key in (*EQUAL_WORK, *unsaid)
        if a[key] != b[key]
    ]


def unequal_returns(ours: Sequence[Measurement], peer: Sequence[Measurement]) -> list[str]:
    """Where both sides learned, and one to much less than the other in the mean of all rounds, a sentence.

    Rounds have seeds of their own, and one seed says little: PPO on Breakout with 64 environments ends between 16 and
    41 on either side (105 iterations).
    """
    first = peer[0]
    if first["mode"] != "update":
        return []
    same = JAX_RETURN_SHARE if first["framework"] == "jax" else {}
    share = same.get(first.get("env", ""), RETURN_SHARE)
    a, b = mean_return(ours), mean_return(peer)
    if a is None or b is None or abs(a - b) > (1 - share) * max(abs(a), abs(b)):
        return [
            f"{ours[0]['framework']} learned to a mean return of {a} and {first['framework']} to {b} in"
            f" the same number of steps; they may differ by {1 - share:.2g} of the one that is further from 0."
        ]
    return []


def untrained(name: str, env: str, sides: Sequence[Measured]) -> list[Failure]:
    """Each side that had time to learn and is not well above a random policy in the mean of all rounds.

    Returns that are equal say nothing if neither side has learned.
    """
    least, found = LEARNED[env], []
    for side in sides:
        if isinstance(side, WorkerError):
            continue
        mean = mean_return(side)
        if mean is None or mean < least:
            sentence = (
                f"{side[0]['framework']} learned to a mean return of {mean}, and must reach {least:g}, far from a"
                " random policy's, or equal returns say nothing: repair it, or let it learn longer."
            )
            found.append((name, sentence))
    return found


def returned(sides: Sequence[Measured]) -> str:
    """What each side learned, in the mean of its rounds."""
    found = [(side[0]["framework"], mean_return(side)) for side in sides if isinstance(side, list)]
    told = ", ".join(f"{name} {'none' if mean is None else format(mean, '.3g')}" for name, mean in found)
    return told and f"returns: {told}"


def problems(
    name: str,
    ours: Measured,
    peer: Measured,
    *,
    returns: bool = True,
) -> list[Failure]:
    """What is wrong with a row: a side failed, or the two differ in work or return; a missing peer is no fault.

    Without `returns` those are not compared: the two sides had no time to learn.
    """
    if isinstance(ours, WorkerError):
        return [(name, str(ours))]
    if isinstance(peer, WorkerError):
        return [] if isinstance(peer, MissingError) else [(name, str(peer))]
    told = [sentence for a, b in zip(ours, peer, strict=True) for sentence in unequal_work(a, b)]
    return [(name, sentence) for sentence in told + (unequal_returns(ours, peer) if returns else [])]

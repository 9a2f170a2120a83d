"""What rows are to reach beside their peer, set before they were measured, and what bounds them where that is known.

A suite whose row misses its target exits with 1, and docs/benchmarks.md shows both (report.py).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

LESS_IS_BETTER = frozenset({"s", "bytes", "MB", "kernels", "per iteration", "calls"})
"""Units. Those per iteration are launches."""
MORE_IS_BETTER = frozenset({"env_steps/s", "updates/s", "rows/s", "1/s"})


class Target(NamedTuple):
    """See the module. A ratio, seconds, or what the row itself must reach."""

    ratio: float | None = None
    """At least so many times the peer's rate; at most so many times its seconds."""
    seconds: float | None = None
    """At most."""
    least: float | None = None
    """At least, in the row's unit."""
    bound: str = ""
    """What bounds the row, and what was tried: where the numbers are."""
    stated: float | None = None
    """What the peer did, in the row's unit, when the target was set, on one core (or two) of an AMD EPYC (25-17)."""


_FOUR = (
    "128-row minibatches: on a core of an Intel Xeon (6-207) epochs take 48 % of the time, steps of 4 rows 37 % (12.5 "
    "us each), what lies between the calls 12 %; tried: the unroll and the epochs of an update as one C++ call each, "
    "one operator per network, dot products for up to 8 rows, an allocator of our own (docs/design.md, section 4)"
)
_DENSE = (
    "the product of 400 inputs: at the rate of NumPy's product on the same core all products take 84 % of the time "
    "with 64 environments and 89 % with 1024 (EPYC 25-17), so that 1.34 and 1.42 x JAX would be left if nothing else "
    "took any; tried: to leave out the zeros, nine in ten of these inputs, which is what torchpod does otherwise"
)
_POPULATION = (
    "the networks' operators, which at the speed of the core's matrix products take 1.3 of the 1.7 ms of a minibatch, "
    "Adam 0.3 (EPYC 25-17); tried: weights as they are for 4 rows each, moments in one vector with aligned rows "
    "(docs/design.md, section 4, also for what the peer was tried with)"
)
_HOST = (
    "the host: the GPU idles 0.9 of the time; an actor takes 1.7 ms per step of a pool, in which the pool's threads "
    "have nothing to do; tried: more threads and pools, waits that block, streams of high priority; pools that share "
    "threads, which gained nothing on an H200, where EnvPool alone did 16,500 to 28,200 steps/s by the minute "
    "(docs/design.md, section 5)"
)
_LAUNCHES = (
    "kernels of 1 to 3 us that wait for each other with few environments (launches at 1 us, assumed, are 0.3 of the "
    "time with 1024), networks with many; tried, after the run on an H100: networks that share launches, with which an "
    "iteration on it takes, by hand, {} of JAX in that run; unrolls of up to 4096 environments as one kernel, measured "
    "on an H200 alone (docs/design.md, section 4)"
)
_GPU = {
    "cartpole": _LAUNCHES.format("2.80 ms with 1024 environments, which is 2.8 x the rate"),
    "pendulum": _LAUNCHES.format("4.4 ms with 4096 environments, which is 3.1 x the rate"),
    "minatar_breakout": "networks, 7 of the 12 ms of an iteration with 4096 environments on an H200, and dealing its "
    "rows, 2.4 ms there; launches, at 1 us each (assumed), are 1.85 of 9.1 ms with 1024 on an H100; tried, after the "
    "run on that: networks that share launches; the unroll cannot be one kernel, for a row of 400 numbers has no room "
    "in registers (docs/design.md, section 4)",
}
_COMPILE = Target(ratio=3.0)
_FIRST = Target(
    ratio=3.0,
    bound="g++, once per machine: torch's header and our own libraries, 16 s on a core of an Intel Xeon, which for JAX "
    "are in its wheel; on one of an EPYC 25-17 the libraries take 8.6 s and the header, which saves every program 1.9, "
    "6.7; tried there: -O1 for the libraries, 7.0 s in place of 8.6, no debug information, nothing; the header beside "
    "tracing, which helps two cores (30 to 26 s) and not one; left: wheels that hold them, each for one processor",
)
_WARM = Target(
    seconds=5.0,
    bound="Python: on a core of an EPYC 25-17, where the same start takes 2.4 to 3 s, 63 % of the time from the agent "
    "on is tracing, 27 inductor's passes and look-ups (cProfile); on an Intel Xeon, with the imports before it, half "
    "is tracing, a quarter imports, a quarter the rest; of the EPYC 25-1, whose core has 0.64 to 0.78, by run, of the "
    "speed of one of 25-17, that makes 3.1 to 4.7 s; the rest was not profiled there: it had a load of 1.3 and 2.8, "
    "JAX took 1.1 s in place of 0.5, the code was of 2026-11-25, and it was not had since; tried: garbage collections "
    "and searches left out (kernels/quicker.py), no iteration that is thrown away (docs/design.md, section 4)",
)

_TRAIN_WARM = Target(
    seconds=5.0,
    bound="Python: of 7.9 s of CPU time on an Intel Xeon 3.4 were imports (torch 1.4, dynamo and inductor 1.3, Hydra "
    "0.3; `python -X importtime`), 2.6 tracing, inductor's passes and look-ups, the rest settings, an iteration, "
    "an episode and a checkpoint; on one of an EPYC 25-17 (6.2 to 7.2 s, by hand) a third imports, a third tracing, a "
    "seventh inductor's passes and look-ups (cProfile); tried: what compile_warm_... says, and no search for garbage "
    "among imports, 6.3 -> 4.9 s on an EPYC 26-2, by hand; inductor cannot be had without dynamo",
)


def _ppo(*targets: tuple[str, float, float, str]) -> dict[str, Target]:
    """A rate each, and compiling it."""
    found = {name: Target(ratio=ratio, bound=bound, stated=stated) for name, ratio, stated, bound in targets}
    for name, *_ in targets:
        if "2 cores" not in name:
            found |= {f"compile_cold_{name}": _COMPILE, f"compile_warm_{name}": _WARM}
    return found


TARGETS: Mapping[str, Mapping[str, Target]] = {
    "anakin": _ppo(
        ("ppo_cartpole/4", 0.5, 250_000, _FOUR),
        ("ppo_cartpole/64", 1.0, 289_000, ""),
        ("ppo_cartpole/1024", 1.2, 230_000, ""),
        ("ppo_cartpole/4096", 1.2, 211_000, ""),
        ("ppo_cartpole/1024 on 2 cores", 1.3, 275_000, ""),
        ("ppo_cartpole/4096 on 2 cores", 1.3, 255_000, ""),
        ("ppo_minatar_breakout/64", 1.3, 100_000, ""),
        ("ppo_minatar_breakout/1024", 1.3, 84_000, ""),
    )
    | {f"ppo_minatar_breakout_dense/{num_envs}": Target(ratio=1.3, bound=_DENSE) for num_envs in (64, 1024)}
    | {"compile_first_ppo_cartpole/1024": _FIRST, "train_warm_cartpole/1024": _TRAIN_WARM},
    "population": _ppo(
        ("population_ppo_cartpole/16x4", 1.0, 330_000, _POPULATION),
        ("population_ppo_cartpole/64x4", 1.0, 294_000, _POPULATION),
    ),
    "gpu": {
        f"ppo_{env}/{num_envs}": Target(ratio=ratio, bound=_GPU[env])
        for env in ("cartpole", "pendulum", "minatar_breakout")
        for num_envs, ratio in ((1024, 2.0), (4096, 2.0), (65_536, 1.2))
    }
    | {f"a2c_grid_world/{num_envs}": Target(least=50e6) for num_envs in (32_768, 131_072)}
    | {
        f"impala_of_raw_{work}": Target(least=0.9, bound=_HOST)
        for work in (
            *(f"Pong-v5/{size}" for size in ("128x20", "256x20", "256x60", "1024x20")),
            *(f"Breakout-v5/{size}" for size in ("256x20", "256x60")),
        )
    },
}


def outcome(target: Target, row: Mapping[str, Any]) -> tuple[str, str]:
    """The target in words; and "met", "met, not in every round" (of a ratio), "missed" or "not measured"."""
    got, limit, unit = _sides(target, row)
    less = row["unit"] in LESS_IS_BETTER
    wanted = f"{'<=' if less else '>='} {_number(limit)} {unit}"
    if got is None:
        return wanted, "not measured"
    reached = (lambda x: x <= limit) if less else (lambda x: x >= limit)
    if not reached(got):
        return wanted, "missed"
    rounds = row["interval"] if target.ratio is not None else ()
    return wanted, "met" if all(map(reached, rounds)) else "met, not in every round"


def beside_stated(target: Target, row: Mapping[str, Any]) -> str:
    """The row beside what its peer did when the target was set, on another machine perhaps; "" if nothing is stated."""
    if target.stated is None or row["value"] is None:
        return ""
    return f"{row['value'] / target.stated:.2f} x the {target.stated:,.0f} stated"


def missed(suite: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence for each row that misses its target, with what bounds it as far as that is known."""
    found = []
    for row in rows:
        target = TARGETS.get(suite, {}).get(row["name"])
        if target is None:
            continue
        wanted, verdict = outcome(target, row)
        if verdict == "missed":
            got, _, unit = _sides(target, row)
            told = f"{got:.1f}" if unit == "s" else f"{got:.2f}" if got < 1000 else _number(got)
            found.append(
                f"{row['name']}: {told} {unit}, the target is {wanted}{f'; {target.bound}' if target.bound else ''}."
            )
    return found


def _sides(target: Target, row: Mapping[str, Any]) -> tuple[Any, float, str]:
    """What was measured, None if nothing was; what it is held against; the unit of both."""
    if target.ratio is not None:
        return row["ratio"], target.ratio, "x"
    limit = target.seconds if target.seconds is not None else target.least
    assert limit is not None, "a target says one of the three"
    return row["value"], limit, row["unit"]


def _number(x: float) -> str:
    return f"{x:,.0f}" if x >= 1000 else f"{x:g}"

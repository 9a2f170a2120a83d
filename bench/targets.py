"""What rows are to reach beside their peer, set before they were measured, and what bounds them where that is known.

A suite whose row misses its target, or whose peer is below its figure, exits with 1. Neither is stored: both follow
from the rows, so that docs/benchmarks.md shows those of today for runs of any date (report.py).
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

Failure = tuple[str, str]
"""The row that it is of, and a sentence."""

LESS_IS_BETTER = frozenset({"s", "bytes", "MB", "kernels", "per iteration", "calls"})
"""Units. Those per iteration are launches."""
MORE_IS_BETTER = frozenset({"env_steps/s", "updates/s", "rows/s", "1/s"})


PRODUCT, GFLOPS = "2048x64x64", 95.1
"""The product of calibrate.py that scales figures, and its rate on a core of an AMD EPYC (25-17), where they are of."""
# A peer must reach this share of its scaled figure. 0.9 leaves room for noise, not for a bad driver.
FLOOR_SHARE = 0.9


class Target(NamedTuple):
    """See the module. A ratio, or what the row itself must reach; of some rows a peer's figure is all that is known."""

    ratio: float | None = None
    """At least so many times the peer's rate; at most so many times its seconds."""
    most: float | None = None
    """At most, in the row's unit."""
    least: float | None = None
    """At least, in the row's unit."""
    bound: str = ""
    """What bounds the row, and what was tried: where the numbers are."""
    stated: float | None = None
    """The peer's figure: what it did, in the row's unit, when the target was set, on a core (or two) of that EPYC."""
    slowest: float | None = None
    """The least that it did there, where that varied: its figure then."""
    best_of: str = ""
    """What the rows of a pattern differ by: the best of them is judged, because that is a setting."""


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
    "tracing, which helps two cores (30 to 26 s) and not one; since 2026-11-30 the first programs go without the "
    "header on one core, and a library has fewer kernels (34.6 to 27.9 s on a Xeon, by hand, three pairs); left: "
    "wheels that hold them, each for one processor",
)
_WARM = Target(
    most=5.0,
    bound="Python: on a core of an EPYC 25-17, where the same start takes 2.4 to 3 s, 63 % of the time from the agent "
    "on is tracing, 27 inductor's passes and look-ups (cProfile); on an Intel Xeon, with the imports before it, half "
    "is tracing, a quarter imports, a quarter the rest; of the EPYC 25-1, whose core has 0.64 to 0.78, by run, of the "
    "speed of one of 25-17, that makes 3.1 to 4.7 s; the rest was not profiled there: it had a load of 1.3 and 2.8, "
    "JAX took 1.1 s in place of 0.5, the code was of 2026-11-25, and has not been measured there since; tried: garbage "
    "collections and searches left out (kernels/quicker.py), no iteration that is thrown away (docs/design.md, section "
    "4)",
)

_TRAIN_WARM = Target(
    most=5.0,
    bound="Python: of 7.9 s of CPU time on an Intel Xeon 3.4 were imports (torch 1.4, dynamo and inductor 1.3, Hydra "
    "0.3; `python -X importtime`), 2.6 tracing, inductor's passes and look-ups, the rest settings, an iteration, "
    "an episode and a checkpoint; on one of an EPYC 25-17 (6.2 to 7.2 s, by hand) a third imports, a third tracing, a "
    "seventh inductor's passes and look-ups (cProfile); tried: what compile_warm_... says, and no search for garbage "
    "among imports, 6.3 -> 4.9 s on an EPYC 26-2, by hand; inductor cannot be had without dynamo",
)


_REPLAY = (
    "tensors that programs hand over, for an update of 128 rows is 0.1 to 0.2 ms of products: a quarter of the time of "
    "SAC and TD3, by perf, and what lies between the programs, another quarter; of TD3 also the policy's gradient, "
    "which the peer leaves out in every other update; tried: kept and loaded states, metrics and unrolls in one call "
    "each, the updates' beginnings in the recorded call, critics and policies as one operator each, which gave 1.2 to "
    "1.3 x, by hand in turn (docs/design.md, section 4)"
)
_REPLAY_COLD = Target(
    ratio=3.0,
    bound="g++: of 19 to 20 s on a core of an Intel Xeon 2.7 to 4.4 are tracing, passes and look-ups, as in a warm "
    "start; the rest is the C++ of an iteration's programs, which XLA, with its own code generator, compiles in 5",
)


def _ppo(*targets: tuple[str, float | None, float, str]) -> dict[str, Target]:
    """Rates, and what every program takes to compile."""
    found = {name: Target(ratio=ratio, bound=bound, stated=stated) for name, ratio, stated, bound in targets}
    return found | {"compile_cold_*": _COMPILE, "compile_warm_*": _WARM}


WARPDRIVE = {
    "env_only_tag_gridworld_5/2000": 9.8e6,
    "env_only_tag_gridworld_1000/2000": 2.9e6,
    "a2c_tag_gridworld_5/2000": 1.3e6,
    "a2c_tag_gridworld_1000/2000": 0.58e6,
    "sampler_tag_gridworld_5/2000": 18e6,
    "env_only_tag_continuous_5/2000": 8.3e6,
    "a2c_tag_continuous_5/2000": 0.57e6,
    "a2c_tag_continuous_45/2000": 0.15e6,
    "sampler_tag_continuous_5/2000": 16e6,
}
"""Its figures on one A100, by the paper (multiagent.py); it does not say how many of the agents of continuous Tag were
taggers."""

# What JAX is known to reach on an AMD EPYC with AVX-512 (family 25, model 17), and the product of a core of it. With
# 1024 and 4096 environments of CartPole jax_ppo.py reaches that pinned to one core. With 64, and on Breakout, XLA
# reaches the figures without `taskset` alone, where it uses 1.6 to 1.9 cores in spite of its flags for one thread;
# pinned to one it does 0.6 to 0.8 of them, and fails the suite. That of 4 environments it does not reach: 170,000 on
# one core, 130,000 on two, and no more with its scans unrolled by 4 or 16 (266,000 on an EPYC 26-2, 1.3 times as fast).
TARGETS: Mapping[str, Mapping[str, Target]] = {
    "anakin": _ppo(
        ("ppo_cartpole/4", 0.5, 250_000, _FOUR),
        ("ppo_cartpole/64", 1.0, 289_000, ""),
        ("ppo_cartpole/1024", 1.2, 230_000, ""),
        ("ppo_cartpole/4096", 1.2, 211_000, ""),
        ("ppo_cartpole/64 on 2 cores", None, 300_000, ""),
        ("ppo_cartpole/1024 on 2 cores", 1.3, 275_000, ""),
        ("ppo_cartpole/4096 on 2 cores", 1.3, 255_000, ""),
        ("ppo_minatar_breakout/64", 1.3, 100_000, ""),
        ("ppo_minatar_breakout/1024", 1.3, 84_000, ""),
    )
    | {f"ppo_minatar_breakout_dense/{num_envs}": Target(ratio=1.3, bound=_DENSE) for num_envs in (64, 1024)}
    | {"compile_first_ppo_cartpole/1024": _FIRST, "train_warm_cartpole/1024": _TRAIN_WARM},
    "agents": {
        name: Target(ratio=1.0, bound=_REPLAY) for name in ("dqn_cartpole/64", "sac_pendulum/8", "td3_pendulum/8")
    }
    | {"compile_cold_*": _REPLAY_COLD, "compile_warm_*": Target(most=5.0)},
    "envs": {
        "cartpole/2048": Target(ratio=1.0, stated=19.4e6),
        "pendulum/2048": Target(ratio=1.0, stated=12.5e6),
        "catch/2048": Target(ratio=1.0, stated=9.1e6),
        "minatar_asterix/2048": Target(ratio=2.0, stated=0.22e6),
        "minatar_breakout/2048": Target(ratio=2.0, stated=1.36e6),
        "minatar_freeway/2048": Target(ratio=2.0),
        "minatar_seaquest/2048": Target(ratio=2.0),
        "minatar_space_invaders/2048": Target(ratio=2.0, stated=0.62e6),
    },
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
    }
    | {"whole_suite": Target(most=540.0)},
    "losses": {"*/large": Target(ratio=1.0)}
    | {
        f"{loss}Loss/small": Target(ratio=4.0) for loss in ("A2C", "ClipPPO", "DDPG", "DQN", "IQL", "SAC", "TD3", "TQC")
    },
    "multiagent on cpu": {
        f"{work}/*": Target(ratio=ratio, best_of="number of environments")
        for work, ratio in (
            ("env_only_tag_gridworld_5", 20.0),
            ("env_only_tag_gridworld_1000", 100.0),
            ("original_tag_gridworld_1000", 100.0),
        )
    },
    "multiagent on cuda": {
        name: Target(least=5.0 * figure)
        for name, figure in WARPDRIVE.items()
        if name != "env_only_tag_gridworld_1000/2000"
    },
    "population": _ppo(("population_ppo_cartpole/16x4", 1.0, 330_000, _POPULATION))
    | {"population_ppo_cartpole/64x4": Target(ratio=1.0, bound=_POPULATION, stated=294_000, slowest=208_000)},
    # A million steps of 84 x 84 bytes and 20 beside them, and 750 MB for Python, PyTorch, the compiled program and its
    # samples.
    "replay": {"*_million_* memory": Target(most=84 * 84 + 20 + 750)},
    "sebulba": {
        f"{work}_{env}_*_vs_sync/{num_envs}": Target(ratio=1.0, best_of="layout")
        for env, num_envs in (("cartpole", 64), ("pong", 8), ("ant", 8))
        for work in ("act", "ppo")
    }
    | {
        "ppo_cartpole_*_vs_plain/64": Target(ratio=3.0, best_of="layout"),
        "ppo_pong_*_vs_plain/8": Target(ratio=1.2, best_of="layout"),
        "cpu_pong_[12]_*/8": Target(least=0.9, best_of="layout"),
    },
}


def targets_of(run: Mapping[str, Any]) -> dict[str, Target]:
    """By name, those of the rows of a run, a result file or what becomes one. Keys of `TARGETS` are patterns."""
    known = TARGETS.get(f"{run['suite']} on {run.get('device')}", TARGETS.get(run["suite"], {}))
    found: dict[str, Target] = {}
    for pattern, target in known.items():
        rows = [row for row in run["rows"] if fnmatchcase(row["name"], pattern)]
        if target.best_of:
            rows = sorted(rows, key=lambda row, target=target: _sides(target, row)[0] or 0.0)[-1:]
        found |= {row["name"]: target for row in rows}
    return found


def outcome(target: Target, row: Mapping[str, Any]) -> tuple[str, str]:
    """The target in words; and "met", "met, not in every round" (of a ratio), "missed" or "not measured".

    Both are "" if there is none but a peer's figure.
    """
    got, limit, unit = _sides(target, row)
    if limit is None:
        return "", ""
    less = row["unit"] in LESS_IS_BETTER
    best = f" with the best {target.best_of}" if target.best_of else ""
    wanted = f"{'<=' if less else '>='} {_number(limit)} {unit}{best}"
    if got is None:
        return wanted, "not measured"
    reached = (lambda x: x <= limit) if less else (lambda x: x >= limit)
    if not reached(got):
        return wanted, "missed"
    rounds = (row["interval"] or ()) if target.ratio is not None else ()
    return wanted, "met" if all(map(reached, rounds)) else "met, not in every round"


def beside_stated(target: Target, row: Mapping[str, Any]) -> str:
    """The row beside what its peer did when the target was set, on another machine perhaps; "" if nothing is stated."""
    if target.stated is None or row["value"] is None:
        return ""
    return f"{row['value'] / target.stated:.2f} x the {target.stated:,.0f} stated"


def missed(run: Mapping[str, Any]) -> list[Failure]:
    """Each row of a run that misses its target, with what bounds it as far as that is known."""
    found, targets = [], targets_of(run)
    for row in run["rows"]:
        target = targets.get(row["name"])
        if target is None:
            continue
        wanted, verdict = outcome(target, row)
        if verdict == "missed":
            got, limit, unit = _sides(target, row)
            digits = 1 if unit == "s" else 2
            digits += 2 if round(got, digits) == limit else 0  # 0.9997 does not reach 1
            told = f"{got:.{digits}f}" if got < 1000 else _number(got)
            bound = f"; {target.bound}" if target.bound else ""
            found.append((row["name"], f"{told} {unit}, the target is {wanted}{bound}."))
    return found


def below_figures(run: Mapping[str, Any]) -> list[Failure]:
    """Each row of a run whose peer was slower than `FLOOR_SHARE` of its figure on a machine of this speed."""
    found, targets = [], targets_of(run)
    scale = run["calibration_gflops"].get(PRODUCT, 0.0) / GFLOPS
    for row in run["rows"]:
        peer, target = row["peer"], targets.get(row["name"], Target())
        figure = target.slowest or target.stated
        if peer is None or figure is None or peer["value"] >= FLOOR_SHARE * scale * figure:
            continue
        sentence = (
            f"{peer['name']} did {peer['value']:,.0f} env steps/s, below {FLOOR_SHARE * scale * figure:,.0f}"
            f" ({FLOOR_SHARE} x its figure {figure:,.0f} x {scale:.2f} for this machine's {PRODUCT} product), so that"
            " the ratio flatters us: use a quiet machine or repair the driver."
        )
        found.append((row["name"], sentence))
    return found


def _sides(target: Target, row: Mapping[str, Any]) -> tuple[Any, float | None, str]:
    """What was measured, None if nothing was; what it is held against, None if nothing is; the unit of both."""
    if target.ratio is not None:
        return row["ratio"], target.ratio, "x"
    return row["value"], target.least if target.most is None else target.most, row["unit"]


def _number(x: float) -> str:
    return f"{x:,.0f}" if x >= 1000 else f"{x:g}"

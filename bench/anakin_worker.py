"""The torch side of the `anakin` suite: one case, one JSON line, as bench/peers/jax_ppo.py prints it.

taskset -c 0 python -m torchpod.bench.anakin_worker --num-envs 1024 --iterations 2 --repeats 3 --mode update
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchpod import random
from torchpod.algos.ppo import PPO, PPOConfig
from torchpod.anakin import Anakin, RunState
from torchpod.bench.harness import Measurement
from torchpod.compile import Compiler
from torchpod.cpu_calls import Unroll
from torchpod.env import TensorEnv
from torchpod.envs.classic.cartpole import CartPole
from torchpod.envs.minatar.breakout import Breakout
from torchpod.graph import Replay
from torchpod.inductor import Compiled
from torchpod.learner import LearnerConfig
from torchpod.types import FIRST, LAST

MODES = ("env_only", "policy", "update")
UNROLL_LENGTH = 128


class Work(NamedTuple):
    """An environment, and PPO's settings for it: those of jax_ppo.py."""

    env: TensorEnv
    agent: PPOConfig = PPOConfig()
    learner: LearnerConfig = LearnerConfig()


def minatar_breakout() -> Work:
    """As purejaxrl has it."""
    agent = PPOConfig(activation="relu", channels=())
    return Work(Breakout(), agent, LearnerConfig(num_minibatches=8, learning_rate=5e-3))


WORK = {"cartpole": lambda: Work(CartPole()), "minatar_breakout": minatar_breakout}


class Clock(Compiler):
    """A compiler whose functions keep the time of their calls: where an iteration goes."""

    def __init__(self, enabled: bool, population: int = 1) -> None:
        super().__init__(enabled, population)
        self.seconds: dict[str, list[float]] = {}

    def __call__(self, fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """See `Compiler`."""
        compiled = super().__call__(fn, **options)
        return _Timed(compiled, self.seconds.setdefault(fn.__qualname__, []))

    def recorded(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """See `Compiler`. What is one call keeps the time of that; else its parts keep theirs."""
        recorded, seconds = super().recorded(fn), self.seconds.setdefault(fn.__qualname__, [])

        def timed(*args: Any) -> Any:
            before, began = self._num_calls(), time.perf_counter()
            result = recorded(*args)
            elapsed = time.perf_counter() - began
            if self._num_calls() == before:
                seconds.append(elapsed)
            return result

        return timed

    def _num_calls(self) -> int:
        return sum(map(len, self.seconds.values()))

    def table(self, wall_s: float) -> str:
        """Share, calls and microseconds per call of each function within the last `wall_s` seconds of calls."""
        lines, rest = [], wall_s
        for name, all_calls in sorted(self.seconds.items(), key=lambda item: -sum(item[1])):
            total = sum(all_calls)
            rest -= total
            if all_calls:
                lines.append(
                    f"{total / wall_s:6.1%} {len(all_calls):7d} x {1e6 * total / len(all_calls):9.1f} us  {name}"
                )
        return "\n".join([*lines, f"{rest / wall_s:6.1%} between the calls"])


class _Timed(Compiled):
    """A compiled function that keeps the time of its calls, and of unrolls as if they were one."""

    def __init__(self, compiled: Callable[..., Any], seconds: list[float]) -> None:
        self._compiled, self._seconds = compiled, seconds

    def __call__(self, *args: Any) -> Any:
        began = time.perf_counter()
        result = self._compiled(*args)
        self._seconds.append(time.perf_counter() - began)
        return result

    def loop(self, args: tuple[Any, ...]) -> Any:
        looped = self._compiled.loop(args) if isinstance(self._compiled, Compiled) else None
        if looped is None:
            return None
        loop, inputs = looped
        return _TimedLoop(loop, self._seconds), inputs


class _TimedLoop(NamedTuple):
    loop: Unroll
    seconds: list[float]

    def run(self, *args: Any) -> Any:
        began = time.perf_counter()
        result = self.loop.run(*args)
        self.seconds.append(time.perf_counter() - began)
        return result


def measure(
    num_envs: int,
    iterations: int,
    repeats: int,
    mode: str,
    *,
    warmup: int = 0,
    seed: int = 0,
    compiler: Compiler | None = None,
    threads: int = 1,
    env: str = "cartpole",
) -> Measurement:
    """Compiles, warms up, then times `repeats` calls of `iterations` iterations each: the work of jax_ppo.py.

    Args:
      num_envs: environments, B.
      iterations: iterations within one timed call.
      repeats: timed calls.
      mode: "env_only" (random actions), "policy" (+ networks, sampling, stored trajectory) or "update" (all of PPO).
      warmup: iterations before the first timed one, rounded up to whole calls, at least one call; the learning rate
        falls to 0 over warm-up and timed iterations together (`total_iterations`).
      seed: of parameters and environments.
      compiler: instead of a plain one, e.g. for a population; a `Clock` begins anew with the timed calls.
      threads: of torch.
      env: one of `WORK`.
    """
    if mode == "env_only" and env != "cartpole":
        raise ValueError(f"env_only counts CartPole's rewards and draws its actions; {env} has a row in suite envs.")
    work = WORK[env]()
    warmup_calls = max(1, -(-warmup // iterations))
    anakin = Anakin(
        lambda: PPO(work.env.spec, work.agent),
        work.env,
        num_envs=num_envs,
        unroll_length=UNROLL_LENGTH,
        learner=work.learner,
        num_iterations=iterations * (warmup_calls + repeats),
        compiler=compiler or Compiler(True),
    )
    measured = timed(
        anakin, mode, iterations, repeats, warmup_calls=warmup_calls, seed=seed, compiler=compiler, threads=threads
    )
    return {**measured, "env": env}


def timed(
    anakin: Anakin,
    mode: str,
    iterations: int,
    repeats: int,
    *,
    warmup_calls: int = 1,
    seed: int = 0,
    compiler: Compiler | None = None,
    threads: int = 1,
) -> Measurement:
    """As `measure`, of any program.

    Returns:
      The measurement; `compile_s` is everything from the built agent to the end of the first call, less the time of
      a later call.
    """
    torch.set_num_threads(threads)
    config, state = anakin.learner.config, anakin.init(seed)
    call = CALLS[mode](anakin, state)
    wall_s, cpu_s, episodes = [], [], []
    began, first_s = time.perf_counter(), 0.0
    for i in range(warmup_calls + repeats):
        if i == warmup_calls and isinstance(compiler, Clock):
            for seconds in compiler.seconds.values():
                seconds.clear()
        wall, cpu = time.perf_counter(), time.process_time()
        sums = torch.stack([call() for _ in range(iterations)]).reshape(-1, 4).sum(0).tolist()
        wall_s.append(time.perf_counter() - wall)
        cpu_s.append(time.process_time() - cpu)
        episodes.append(sums)
        if i == 0:
            first_s = time.perf_counter() - began
    compile_s = first_s - min(wall_s[1:])
    wall_s, cpu_s = wall_s[warmup_calls:], cpu_s[warmup_calls:]
    env_steps = [sums[3] for sums in episodes[warmup_calls:]]
    rates = [steps / wall for steps, wall in zip(env_steps, wall_s, strict=True)]
    count, total_return = episodes[-1][:2]
    return {
        "framework": "torchpod",
        "mode": mode,
        "num_envs": anakin.num_envs,
        "unroll_length": anakin.unroll_length,
        "epochs": config.num_epochs,
        "minibatches": config.num_minibatches,
        "batch_rows": anakin.unroll_length * anakin.num_envs,
        "param_count": sum(p.numel() for p in anakin.agent.parameters()),
        "dtype": "float32",
        "iterations": iterations,
        "total_iterations": anakin.num_iterations,
        "population": anakin.population,
        "compile_s": compile_s,
        "env_steps": env_steps,
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "env_steps_per_s": {"median": statistics.median(rates), "min": min(rates), "max": max(rates)},
        "episode_return": total_return / count if count else None,
        "episodes": int(count),
        "threads": {"torch": torch.get_num_threads(), "affinity": len(os.sched_getaffinity(0))},
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }


def update_call(anakin: Anakin, state: RunState) -> Callable[[], Tensor]:
    """All of PPO; the call returns the episode sums of an iteration."""
    replay: list[Replay] = []

    def call() -> Tensor:
        if not replay:  # compiles, so it belongs into the first call
            replay.append(Replay(anakin.iterate, state, capture=False))
        return replay[0]()["episodes"].clone()

    return call


def policy_call(anakin: Anakin, state: RunState) -> Callable[[], Tensor]:
    """Environment and policy: the rollout with its stored trajectory."""
    carry = state.carry

    def call() -> Tensor:
        nonlocal carry
        carry, trajectory = anakin.rollout(state._replace(carry=carry))
        step_type = trajectory.timestep.step_type[1:]
        zero = torch.zeros((), dtype=torch.int64)
        return torch.stack([(step_type == LAST).sum(), zero, zero, (step_type != FIRST).sum()]).double()

    return call


def env_only_call(anakin: Anakin, state: RunState) -> Callable[[], Tensor]:
    """The environment with random actions, nothing stored."""

    def step(env_state: Any, count: Tensor, env_keys: Tensor, actor_keys: Tensor) -> tuple[Any, Tensor, Tensor]:
        count = count + 1
        action = random.bits(random.at(actor_keys, count), 1)[:, 0] & 1
        env_state, timestep = anakin.env.step(env_state, action, random.at(env_keys, count))
        return env_state, count, timestep.reward.sum()

    compiled = Compiler(True)(step)
    env_state, count = state.carry.env_state, state.carry.step

    def call() -> Tensor:
        nonlocal env_state, count
        total = torch.zeros(())
        for _ in range(UNROLL_LENGTH):
            env_state, count, reward = compiled(env_state, count, state.env_keys, state.actor_keys)
            total = total + reward
        zero = torch.zeros(())
        return torch.stack([zero, total, zero, total]).double()  # every step but a reset has reward 1

    return call


CALLS = {"env_only": env_only_call, "policy": policy_call, "update": update_call}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--env", choices=[*WORK], default="cartpole")
    parser.add_argument("--num-envs", type=int, default=1024)
    parser.add_argument("--iterations", type=int, default=2, help="iterations within one timed call")
    parser.add_argument("--repeats", type=int, default=3, help="timed calls")
    parser.add_argument("--mode", choices=MODES, default="update")
    parser.add_argument("--warmup", type=int, default=0, help="iterations before timing (at least one call)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--population", type=int, default=1, help="members, aggregate rates")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="kept for symmetry: the output is always JSON")
    parser.add_argument("--profile", action="store_true", help="a table of where the time goes, on stderr")
    args = parser.parse_args()
    compiler = (Clock if args.profile else Compiler)(True, args.population)
    m = measure(
        args.num_envs,
        args.iterations,
        args.repeats,
        args.mode,
        warmup=args.warmup,
        seed=args.seed,
        compiler=compiler,
        threads=args.threads,
        env=args.env,
    )
    if isinstance(compiler, Clock):
        print(compiler.table(sum(m["wall_s"])), file=sys.stderr)
    print(json.dumps(m))


if __name__ == "__main__":
    main()

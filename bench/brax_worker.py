"""The torch side of the `brax` suite: one case through the door of envs/host/brax.py, as bench/peers/jax_brax.py.

    python -m torchpod.bench.brax_worker --env ant --backend spring --num-envs 256 --mode update --iterations 2

`--mode env_only` steps with random actions, drawn by a compiled program; `--mode update` is PPO in Sebulba, one actor
thread beside the learner. One JSON line.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any, NamedTuple

import torch

from torchpod import random
from torchpod.algos.ppo import PPO, PPOConfig
from torchpod.bench.processes import Measurement, dtype_of
from torchpod.compile import Compiler
from torchpod.envs.host import Brax
from torchpod.evaluate import evaluate
from torchpod.learner import LearnerConfig
from torchpod.sebulba import Sebulba, SebulbaConfig
from torchpod.sebulba.program import Program
from torchpod.types import FIRST

UNROLL_LENGTH = 32
AGENT = PPOConfig(value_clip=False)
LEARNER = LearnerConfig(learning_rate=3e-4, anneal_learning_rate=False, epsilon=1e-8)
"""What brax.training has or can be told: no clipped values, a constant rate, Adam's own epsilon."""


class Sides(NamedTuple):
    """What is measured, and what it was made of."""

    call: Callable[[], float]
    """One timed call; environment steps, without resets."""
    unroll_length: int
    num_params: int
    dtype: str
    """Of the parameters; without any, of observations."""
    finish: Callable[[], float | None]
    """Ends it; the mean return of an episode, or None."""


def stepping(make_env: Callable[[], Brax], num_envs: int, steps: int, seed: int, compiled: bool) -> Sides:
    """Random actions, `steps` of them in a call."""
    env = make_env()
    size = env.spec.action.shape[0]
    keys, count = random.split(random.key(seed), num_envs), 0
    draw = Compiler(compiled)(lambda count: random.uniform(random.at(keys, count), size, -1.0, 1.0))
    _, first = env.init(keys)

    def call() -> float:
        nonlocal count
        moved = torch.zeros((), dtype=torch.int64)
        for _ in range(steps):
            count += 1
            _, timestep = env.step(None, draw(torch.tensor(count)), keys)
            moved += (timestep.step_type != FIRST).sum()
        return float(moved)

    return Sides(call, steps, 0, str(first.observation.dtype).removeprefix("torch."), lambda: None)


def ppo(
    make_env: Callable[[], Brax],
    num_envs: int,
    iterations: int,
    total_iterations: int,
    learn: bool,
    seed: int,
    compiled: bool,
) -> Sides:
    """All of PPO, `iterations` iterations in a call."""
    env = make_env()
    sebulba = Sebulba(
        lambda: PPO(env.spec, AGENT),
        make_env,
        num_envs=num_envs,
        unroll_length=UNROLL_LENGTH,
        learner=LEARNER,
        num_iterations=total_iterations,
        compiler=Compiler(compiled),
        config=SebulbaConfig(num_actor_threads=1, lag=1),
    )
    program = Program(sebulba, sebulba.init(seed))
    program.begin(sys.maxsize)  # actors are ahead to the end, as in the middle of a run

    def call() -> float:
        before = program.env_steps
        for _ in range(iterations):
            program()
        return program.env_steps - before

    def finish() -> float | None:
        learned = program.state.learner
        program.close()
        if not learn:
            return None
        key, variables = random.key(seed + 1), learned.params | learned.buffers
        return float(evaluate(sebulba.agent, env, variables, key, num_episodes=num_envs).returns.mean())

    agent = sebulba.agent
    return Sides(call, UNROLL_LENGTH, sum(p.numel() for p in agent.parameters()), dtype_of(agent), finish)


def measure(
    name: str,
    num_envs: int,
    mode: str,
    iterations: int,
    repeats: int,
    *,
    backend: str | None = None,
    warmup: int = 0,
    learn: bool = False,
    seed: int = 0,
    compiled: bool = True,
) -> Measurement:
    """Warms up, then times `repeats` calls.

    Args:
      name: of Brax.
      num_envs: B.
      mode: "env_only" or "update".
      iterations: within a timed call; of env_only, steps.
      repeats: timed calls.
      backend: of Brax; None for the environment's own.
      warmup: iterations before the first timed one, rounded up to whole calls, at least two calls: Brax's PPO compiles
        in both.
      learn: play an episode in each environment afterwards.
      seed: of everything.
      compiled: False to see whether it works at all.
    """
    torch.set_num_threads(1)  # XLA has the cores

    options: dict[str, Any] = {"backend": backend} if backend else {}

    def make_env() -> Brax:
        # Episodes begin as in Brax's own training; drawing new states is work that it does not do.
        return Brax(name, fresh_resets=False, **options)

    update = mode == "update"
    warmup_calls = max(2, -(-warmup // iterations)) if update else 1
    total_iterations = iterations * (warmup_calls + repeats)
    began = time.perf_counter()
    if update:
        side = ppo(make_env, num_envs, iterations, total_iterations, learn, seed, compiled)
    else:
        side = stepping(make_env, num_envs, iterations, seed, compiled)
    warm_s, env_steps, wall_s, cpu_s = 0.0, [], [], []
    for i in range(warmup_calls + repeats):
        if i == warmup_calls:
            warm_s = time.perf_counter() - began
        wall, cpu = time.perf_counter(), time.process_time()
        env_steps.append(side.call())
        wall_s.append(time.perf_counter() - wall)
        cpu_s.append(time.process_time() - cpu)
    env_steps, wall_s, cpu_s = env_steps[warmup_calls:], wall_s[warmup_calls:], cpu_s[warmup_calls:]
    compile_s = warm_s - warmup_calls * min(wall_s)
    return {
        "framework": "torchpod",
        "mode": mode,
        "env": name,
        "num_envs": num_envs,
        "unroll_length": side.unroll_length,
        "epochs": LEARNER.num_epochs if update else 0,
        "minibatches": LEARNER.num_minibatches if update else 0,
        "batch_rows": side.unroll_length * num_envs,
        "param_count": side.num_params,
        "dtype": side.dtype,
        "iterations": iterations if update else 1,
        "total_iterations": total_iterations if update else repeats + 1,
        "compile_s": compile_s,
        "env_steps": env_steps,
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "episode_return": side.finish(),
        "episodes": num_envs if learn else 0,
        "threads": {"torch": torch.get_num_threads(), "cores": len(os.sched_getaffinity(0))},
        "versions": {
            "torch": torch.__version__,
            "python": platform.python_version(),
            **{package: metadata.version(package) for package in ("jax", "jaxlib", "brax")},
        },
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--env", required=True)
    parser.add_argument("--backend")
    parser.add_argument("--num-envs", type=int, default=256)
    parser.add_argument("--mode", choices=["env_only", "update"], default="update")
    parser.add_argument("--iterations", type=int, default=4, help="within a timed call; of env_only, steps")
    parser.add_argument("--repeats", type=int, default=3, help="timed calls")
    parser.add_argument("--warmup", type=int, default=0, help="iterations before timing (at least two calls)")
    parser.add_argument("--learn", action="store_true", help="play episodes afterwards")
    parser.add_argument("--seed", type=int, default=0)
    options: dict[str, Any] = vars(parser.parse_args())
    positional = [options.pop(x) for x in ("env", "num_envs", "mode", "iterations", "repeats")]
    print(json.dumps(measure(*positional, **options)))


if __name__ == "__main__":
    main()

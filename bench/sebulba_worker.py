"""One measurement of suite `sebulba`, torchpod's side: EnvPool stepped raw, with inference, or with PPO.

    python -m torchpod.bench.sebulba_worker --task Pong-v5 --num-envs 8 --mode update --actors 2

Prints one line of JSON: a `Measurement` of processes.py. `--actors 0` does everything in one thread, in turn.
"""

import argparse
import json
import os
import platform
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchpod.agent import Agent
from torchpod.algos.impala import IMPALA, IMPALAConfig
from torchpod.algos.ppo import PPO, PPOConfig
from torchpod.anakin import RunState
from torchpod.bench.kernels import busy_share
from torchpod.bench.processes import Measurement, dtype_of
from torchpod.compile import Compiler
from torchpod.envs.host import EnvPool
from torchpod.learner import LearnerConfig
from torchpod.sebulba import Sebulba, SebulbaConfig
from torchpod.sebulba.program import Program
from torchpod.types import FIRST, Trajectory

ATARI = {"reward_clip": True, "episodic_life": True}
DECIDING_S = 1.5e-3
"""A little less than the 1.7 ms that an actor takes for one step of a pool on an H200: the pause with which EnvPool
alone did about as many steps there as beside our actors (docs/design.md, section 5)."""


class Acting(Sebulba):
    """The loop without an update: inference and environments alone."""

    def update(self, state: RunState, trajectory: Trajectory) -> tuple[RunState, dict[str, Tensor]]:
        """Counts."""
        steps = (trajectory.timestep.step_type[1:] != FIRST).sum()
        return state._replace(iteration=state.iteration + 1, env_steps=state.env_steps + steps), {}


def measure(
    task: str,
    num_envs: int,
    mode: str,
    *,
    actors: int,
    iterations: int,
    repeats: int,
    threads: int,
    seed: int,
    pools: int = 1,
    share: bool = False,
    pool_threads: int | None = None,
    compiled: bool = True,
    algo: str = "ppo",
    unroll_length: int = 128,
    device: str = "cpu",
) -> Measurement:
    """Warms up for one call, then times `repeats` calls of `iterations` iterations each; on a GPU profiles one more.

    Args:
      task: of EnvPool.
      num_envs: B, over all actors.
      mode: "env_only" (one pool, actions drawn beforehand), "paced" (the same in all pools, whose actors wait
        `DECIDING_S` before each step, as for a GPU), "policy" or "update".
      actors: actor threads; 0 for none.
      iterations: within one timed call.
      repeats: timed calls.
      threads: OpenMP threads of the learner.
      seed: of everything.
      pools: of environments, per actor.
      share: the pools of an actor have their threads in common.
      pool_threads: that step the environments of a pool; None shares out the cores.
      compiled: False to see whether it works at all.
      algo: "ppo", 4 epochs of 4 minibatches, or "impala", one update per batch.
      unroll_length: T.
      device: of actors and learner.
    """
    torch.set_num_threads(threads)
    options: dict[str, Any] = ATARI if task.startswith(("Pong", "Breakout")) else {}
    pool_threads = pool_threads or max(1, (os.cpu_count() or 1) // max(1, actors * pools))
    network: dict[str, Any] = {"torso": "nature", "shared": True} if options else {}
    config = LearnerConfig() if algo == "ppo" else LearnerConfig(num_epochs=1, num_minibatches=1)

    profiles = int(device == "cuda" and mode == "update")  # calls after the timed ones

    def make_agent() -> Agent:
        return PPO(env.spec, PPOConfig(**network)) if algo == "ppo" else IMPALA(env.spec, IMPALAConfig(**network))

    def make_env() -> EnvPool:
        return EnvPool(task, num_threads=pool_threads, **options)

    env = make_env()
    kind = Sebulba if mode == "update" else Acting
    sebulba = kind(
        make_agent,
        make_env,
        num_envs=num_envs,
        unroll_length=unroll_length,
        device=device,
        learner=config,
        num_iterations=iterations * (1 + repeats + profiles),
        compiler=Compiler(compiled and mode in ("policy", "update")),
        config=SebulbaConfig(
            num_actor_threads=actors, pools_per_actor=pools, pools_share_threads=share, lag=1 if actors else 0
        ),
    )
    began = time.perf_counter()
    if mode == "env_only":
        call, close = raw_call(task, num_envs, unroll_length, pool_threads, options), env.close
    elif mode == "paced":
        call, close = paced_call(sebulba, sebulba.init(seed)), sebulba.close
    else:
        program = Program(sebulba, sebulba.init(seed))
        program.begin(sys.maxsize)  # actors are ahead to the end, as in the middle of a run
        call, close = program_call(program), program.close
    compile_s = time.perf_counter() - began
    env_steps, wall_s, cpu_s = [], [], []
    for _ in range(1 + repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        env_steps.append(float(sum(call() for _ in range(iterations))))
        wall_s.append(time.perf_counter() - wall)
        cpu_s.append(time.process_time() - cpu)
    busy = [busy_share(lambda: [call() for _ in range(iterations)]) for _ in range(profiles)]
    close()
    env_steps, wall_s, cpu_s = env_steps[1:], wall_s[1:], cpu_s[1:]
    measurement: Measurement = {
        "framework": "torchpod",
        "mode": mode,
        "num_envs": num_envs,
        "unroll_length": unroll_length,
        "epochs": config.num_epochs,
        "minibatches": config.num_minibatches,
        "batch_rows": unroll_length * num_envs,
        "param_count": sum(p.numel() for p in sebulba.agent.parameters()),
        "dtype": dtype_of(sebulba.agent),
        "iterations": iterations,
        "total_iterations": iterations * (1 + repeats),
        "compile_s": compile_s,
        "env_steps": env_steps,
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "episode_return": None,
        "episodes": 0,
        "threads": {"torch": threads, "actors": actors, "pools": pools, "pool": pool_threads, "share": share},
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }
    if busy:
        measurement["gpu_busy"] = busy[0]
    return measurement


def program_call(program: Program) -> Callable[[], int]:
    """One iteration of the loop; the call returns its environment steps."""

    def call() -> int:
        before = program.env_steps
        program()
        return program.env_steps - before

    return call


def raw_call(task: str, num_envs: int, length: int, num_threads: int, options: dict[str, Any]) -> Callable[[], int]:
    """As many steps as an iteration has, of EnvPool itself with actions drawn beforehand: nothing of ours."""
    import envpool

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Gymnasium, about the precision of bounds
        pool = envpool.make_gymnasium(task, num_envs=num_envs, seed=0, num_threads=num_threads, **options)
        pool.reset()
        space = pool.action_space
    actions = [np.stack([space.sample() for _ in range(num_envs)]) for _ in range(length)]
    done = np.zeros(num_envs, bool)

    def call() -> int:
        nonlocal done
        steps = 0
        for action in actions:
            steps += num_envs - int(done.sum())  # the step after the last one resets
            _, _, terminated, truncated, _ = pool.step(action)
            done = terminated | truncated
        return steps

    return call


def paced_call(sebulba: Sebulba, state: RunState) -> Callable[[], int]:
    """As many steps as an iteration has, each with the action 0 and after `DECIDING_S` in which its actor sleeps."""
    actors = sebulba.actors(state)

    def unroll(actor: Any, counts: list[int]) -> None:
        action = torch.zeros(sebulba.num_envs // len(actors) // len(actor.pools), dtype=torch.int64)
        for t in range(sebulba.unroll_length + 1):
            for pool in actor.pools:
                if t > 0:
                    counts.append(int((pool.env.recv().step_type != FIRST).sum()))
                if t < sebulba.unroll_length:
                    time.sleep(DECIDING_S)
                    pool.env.send(action)

    def call() -> int:
        counts: list[int] = []
        threads = [threading.Thread(target=unroll, args=(actor, counts)) for actor in actors]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(counts)

    return call


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", default="CartPole-v1")
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--mode", choices=["env_only", "paced", "policy", "update"], default="update")
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--pools", type=int, default=1, help="pools of environments per actor")
    parser.add_argument("--share", action="store_true", help="the pools of an actor have their threads in common")
    parser.add_argument("--pool-threads", type=int, help="of EnvPool, per pool; default: the cores are shared out")
    parser.add_argument("--iterations", type=int, default=4, help="iterations within one timed call")
    parser.add_argument("--repeats", type=int, default=3, help="timed calls")
    parser.add_argument("--threads", type=int, default=1, help="OpenMP threads of the learner")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--algo", choices=["ppo", "impala"], default="ppo")
    parser.add_argument("--unroll-length", type=int, default=128)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="of actors and learner; cuda: in TF32")
    options = vars(parser.parse_args())
    torch.set_float32_matmul_precision("high" if options["device"] == "cuda" else "highest")
    print(json.dumps(measure(options.pop("task"), options.pop("num_envs"), options.pop("mode"), **options)))


if __name__ == "__main__":
    main()

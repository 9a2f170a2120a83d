"""The torch side of the suites `anakin` and `gpu`: one case, one JSON line, as bench/peers/jax_ppo.py prints it.

taskset -c 0 python -m torchpod.bench.anakin_worker --num-envs 1024 --iterations 2 --repeats 3 --mode update

With `--rounds N` it compiles, captures (`--device cuda`) and warms up, prints a line, and then measures once for each
line that it reads; at the end it prints `Details` (served.py).
"""

import argparse
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchpod import random
from torchpod.algos.a2c import A2C, A2CConfig
from torchpod.algos.actor_critic import ActorCritic, ActorCriticConfig
from torchpod.algos.ppo import PPO, PPOConfig
from torchpod.anakin import Anakin, RunState
from torchpod.bench import floor
from torchpod.bench.clock import Clock
from torchpod.bench.kernels import kernels, profiled, table
from torchpod.bench.processes import Measurement, dtype_of
from torchpod.compile import Compiler
from torchpod.env import TensorEnv
from torchpod.envs.classic.cartpole import CartPole
from torchpod.envs.classic.pendulum import Pendulum
from torchpod.envs.grids.grid_world import GridWorld
from torchpod.envs.minatar.breakout import Breakout
from torchpod.graph import Replay
from torchpod.kernels import mlp
from torchpod.learner import LearnerConfig
from torchpod.specs import Box, Discrete
from torchpod.types import FIRST, LAST, Carry, Tree

MODES = ("env_only", "policy", "update")
UNROLL_LENGTH = 128


class Work(NamedTuple):
    """An environment, and the settings for it: those of jax_ppo.py."""

    env: TensorEnv
    config: ActorCriticConfig = PPOConfig()
    learner: LearnerConfig = LearnerConfig()
    agent: Callable[..., ActorCritic] = PPO
    unroll_length: int = UNROLL_LENGTH


def minatar_breakout() -> Work:
    """As purejaxrl has it."""
    agent = PPOConfig(activation="relu", channels=())
    return Work(Breakout(), agent, LearnerConfig(num_minibatches=8, learning_rate=5e-3))


def pendulum() -> Work:
    """With the discount and the costs of experiment=pendulum: with those of CartPole neither side learns it."""
    agent = PPOConfig(discount=0.95, entropy_coefficient=0.0, reward_scale=0.1)
    return Work(Pendulum(), agent, LearnerConfig(learning_rate=1e-3))


def grid_world() -> Work:
    """A small room, a small network and one gradient step per unroll, as in the paper of the Podracers."""
    env = GridWorld(
        walls=["....."] * 5,
        objects=[{"reward": 1.0, "termination": 0.0, "respawn": 0.1}],
        max_episode_steps=100,
        lifetime_seed=0,
    )
    learner = LearnerConfig(num_epochs=1, num_minibatches=1, learning_rate=7e-4)
    return Work(env, A2CConfig(hidden=(32, 32)), learner, A2C, unroll_length=32)


WORK = {
    "cartpole": lambda: Work(CartPole()),
    "pendulum": pendulum,
    "minatar_breakout": minatar_breakout,
    "grid_world": grid_world,
}


Program = Callable[[RunState], tuple[RunState, Tensor]]
"""(state) -> (state, `[4]` sums over the iteration's episodes: their number, returns, lengths; and transitions)."""


class Sizes(TypedDict):
    """What a floor follows from (floor.py)."""

    layers: list[tuple[int, int]]
    """Inputs and outputs of each linear layer."""
    observation_size: int
    """Numbers in an observation."""
    state_bytes: float
    """What one environment carries from step to step."""


class Details(Sizes):
    """What is found out about one iteration when all measurements are over."""

    capture_s: float
    """Of the CUDA graph alone; 0 on a CPU."""
    kernels: int
    """Kernels, copies and fills of one replay, by the profiler; 0 on a CPU."""
    iteration_s: float
    """Median over the timed calls."""
    env_s: float
    """T steps of the environments alone, with random actions, observations made; captured on a GPU."""


class Prepared:
    """A compiled, captured and warm program: measured as often as one likes.

    Args:
      anakin: the program.
      mode: one of `MODES`.
      iterations: within one timed call.
      warmup_calls: before the first timed one.
      seed: of parameters and environments.
      compiler: of what the program does not compile itself; None for a plain one.
      threads: of torch.
      capture: as CUDA graphs.
    """

    def __init__(
        self,
        anakin: Anakin,
        mode: str,
        iterations: int,
        *,
        warmup_calls: int = 1,
        seed: int = 0,
        compiler: Compiler | None = None,
        threads: int = 1,
        capture: bool = False,
    ) -> None:
        torch.set_num_threads(threads)
        self._anakin, self._mode, self._iterations = anakin, mode, iterations
        self._compiler, self._capture = compiler or Compiler(True), capture
        self._state, self._env_replay, self._wall_s = anakin.init(seed), None, list[float]()  # of every call
        began = time.perf_counter()
        program = PROGRAMS[mode](anakin, self._compiler)
        if not capture:
            self._compiler.ahead(program, self._state)  # as `train` does
        self._replay = self._captured(program, self._state)
        self._call()
        self._first_s = time.perf_counter() - began
        for _ in range(warmup_calls - 1):
            self._call()
        self._num_warm = len(self._wall_s)

    def measure(self, repeats: int) -> Measurement:
        """Times `repeats` calls.

        Returns:
          The measurement; `compile_s` is everything from the built agent to the end of the first call, less the capture
          and the time of the second call.
        """
        anakin, config, on_gpu = self._anakin, self._anakin.learner.config, self._anakin.device.type == "cuda"
        cpu_s, sums = [], []
        for _ in range(repeats):
            cpu = time.process_time()
            sums.append(self._call())
            cpu_s.append(time.process_time() - cpu)
        wall_s = self._wall_s[-repeats:]
        env_steps = [x[3] for x in sums]
        count, total_return = sums[-1][:2]
        cuda = {"cuda": str(torch.version.cuda)} if on_gpu else {}
        own = sizes(anakin, self._state.carry)
        epochs = config.num_epochs if self._mode == "update" else 0
        num_flops = floor.flops(1, epochs, own["layers"], own["observation_size"])
        return {
            "framework": "torchpod",
            "mode": self._mode,
            "num_envs": anakin.num_envs,
            "unroll_length": anakin.unroll_length,
            "epochs": config.num_epochs,
            "minibatches": config.num_minibatches,
            "batch_rows": anakin.unroll_length * anakin.num_envs,
            "param_count": sum(p.numel() for p in anakin.agent.parameters()),
            "dtype": dtype_of(anakin.agent),
            "device": anakin.device.type,
            "tf32": on_gpu and torch.get_float32_matmul_precision() == "high",
            "memory_bytes": torch.cuda.max_memory_allocated() if on_gpu else 0,
            "iterations": self._iterations,
            "total_iterations": anakin.num_iterations,
            "population": anakin.population,
            "flops": num_flops if self._mode != "env_only" else 0.0,
            "compile_s": self._first_s - self._replay.capture_s - self._wall_s[1],
            "env_steps": env_steps,
            "wall_s": wall_s,
            "cpu_s": cpu_s,
            "episode_return": total_return / count if count else None,
            "episodes": int(count),
            "threads": {"torch": torch.get_num_threads(), "affinity": len(os.sched_getaffinity(0))},
            "versions": {"torch": torch.__version__, "python": platform.python_version()} | cuda,
        }

    def prepare_env(self) -> None:
        """Compiles and captures the steps of the environments alone, for `details`."""
        self._env_replay = self._captured(env_only(self._anakin, self._compiler, observe=True), self._state)
        self._env_replay().tolist()  # waits for it

    def details(self, repeats: int = 5) -> Details:
        """To be called after the last measurement, for a GPU that was profiled may be slower afterwards.

        Calls that warm up are left out: meanwhile others may compile on the same GPU.
        """
        assert self._env_replay is not None, "prepare_env comes first"
        env_s = []
        for _ in range(repeats):
            began = time.perf_counter()
            self._env_replay().tolist()
            env_s.append(time.perf_counter() - began)
        return {
            "capture_s": self._replay.capture_s,
            "kernels": len(kernels(profiled(self._replay))),
            "iteration_s": statistics.median(self._wall_s[self._num_warm :]) / self._iterations,
            "env_s": statistics.median(env_s),
            **sizes(self._anakin, self._state.carry),
        }

    def kernel_times(self) -> str:
        """A table of one iteration on a GPU."""
        return table(profiled(self._replay))

    def _captured(self, program: Program, state: RunState) -> Replay:
        return Replay(program, state, capture=self._capture)

    def _call(self) -> list[float]:
        """All iterations of one timed call; the sums over their episodes (their copy to the host waits for them)."""
        began = time.perf_counter()
        sums = [self._replay().clone() for _ in range(self._iterations)]
        total = torch.stack(sums).flatten(0, -2).sum(0)[:4].tolist()
        self._wall_s.append(time.perf_counter() - began)
        return total


def sizes(anakin: Anakin, carry: Carry) -> Sizes:
    """Of a program, with its environments somewhere."""
    linear = [module for module in anakin.agent.modules() if isinstance(module, nn.Linear)]
    return {
        "layers": [(module.in_features, module.out_features) for module in linear],
        "observation_size": sum(x.numel() for x in pytree.tree_leaves(carry.timestep.observation)) // anakin.num_envs,
        "state_bytes": sum(x.nbytes for x in pytree.tree_leaves(carry.env_state)) / anakin.num_envs,
    }


def build(env: str, num_envs: int, num_iterations: int, *, compiler: Compiler, device: str = "cpu") -> Anakin:
    """The program for one of `WORK`."""
    work = WORK[env]()
    return Anakin(
        lambda: work.agent(work.env.spec, work.config),
        work.env,
        num_envs=num_envs,
        unroll_length=work.unroll_length,
        learner=work.learner,
        num_iterations=num_iterations,
        compiler=compiler,
        device=device,
    )


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
    warmup_calls = max(1, -(-warmup // iterations))
    anakin = build(env, num_envs, iterations * (warmup_calls + repeats), compiler=compiler or Compiler(True))
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
    capture: bool = False,
) -> Measurement:
    """As `measure`, of any program; on a GPU as CUDA graphs, with `capture`."""
    options = {"warmup_calls": warmup_calls, "seed": seed, "compiler": compiler, "threads": threads}
    prepared = Prepared(anakin, mode, iterations, **options, capture=capture)
    if isinstance(compiler, Clock):
        for seconds in compiler.seconds.values():
            seconds.clear()
    return prepared.measure(repeats)


def update(anakin: Anakin, compiler: Compiler) -> Program:
    """All of PPO."""

    def iterate(state: RunState) -> tuple[RunState, Tensor]:
        state, metrics = anakin.iterate(state)
        return state, metrics["episodes"]

    return iterate


def policy(anakin: Anakin, compiler: Compiler) -> Program:
    """Environment and policy: the rollout with its stored trajectory."""

    def iterate(state: RunState) -> tuple[RunState, Tensor]:
        carry, trajectory = anakin.rollout(state)
        step_type = trajectory.timestep.step_type[1:]
        last = (step_type == LAST).sum()
        zero = torch.zeros_like(last)
        return state._replace(carry=carry), torch.stack([last, zero, zero, (step_type != FIRST).sum()]).double()

    return iterate


def env_only(anakin: Anakin, compiler: Compiler, *, observe: bool = False) -> Program:
    """The environment with random actions, nothing stored.

    With `observe` every step makes all of its TimeStep, and nothing is counted: sums cost a GPU more than a step.
    """
    spec = anakin.env.spec.action

    def draw(keys: Tensor) -> Tensor:
        if isinstance(spec, Discrete):
            return random.to_integer(random.bits(keys, 1)[:, 0], spec.num_values)
        assert isinstance(spec, Box)
        return random.uniform(keys, math.prod(spec.shape), spec.low, spec.high)

    def step(env_state: Tree, count: Tensor, sums: Tensor, env_keys: Tensor, actor_keys: Tensor) -> Tree:
        count = count + 1
        env_state, timestep = anakin.env.step(env_state, draw(random.at(actor_keys, count)), random.at(env_keys, count))
        if not observe:
            moved = (timestep.step_type != FIRST).sum()
            sums = sums + torch.stack([timestep.reward.sum(), moved.float()]).double()
        result = env_state, count, sums, timestep if observe else ()
        return pytree.tree_map(lambda x: x.contiguous(), result)

    compiled = compiler(step)

    def iterate(state: RunState) -> tuple[RunState, Tensor]:
        env_state, count = state.carry.env_state, state.carry.step
        sums = torch.zeros(2, dtype=torch.float64, device=count.device)
        for _ in range(anakin.unroll_length):
            env_state, count, sums, _ = compiled(env_state, count, sums, state.env_keys, state.actor_keys)
        total, moved = sums.unbind()
        zero = torch.zeros_like(total)
        carry = state.carry._replace(env_state=env_state, step=count)
        return state._replace(carry=carry), torch.stack([zero, total, zero, moved])

    return iterate


PROGRAMS = {"env_only": env_only, "policy": policy, "update": update}


def serve(prepared: Prepared, env: str, repeats: int) -> None:
    """Says that it is ready, measures once for each line on stdin, and ends with `Details`."""
    prepared.prepare_env()
    print(json.dumps({"ready": True}), flush=True)
    for _ in sys.stdin:
        print(json.dumps({**prepared.measure(repeats), "env": env}), flush=True)
    print(json.dumps({"details": prepared.details()}), flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--env", choices=[*WORK], default="cartpole")
    parser.add_argument("--num-envs", type=int, default=1024)
    parser.add_argument("--iterations", type=int, default=2, help="iterations within one timed call")
    parser.add_argument("--repeats", type=int, default=3, help="timed calls")
    parser.add_argument("--rounds", type=int, help="measure so often, whenever a line comes in")
    parser.add_argument("--mode", choices=MODES, default="update")
    parser.add_argument("--warmup", type=int, default=0, help="iterations before timing (at least one call)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--population", type=int, default=1, help="members, aggregate rates")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dense", action="store_true", help="multiply the zeros of observations too, on a CPU")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: captured, in TF32")
    parser.add_argument("--eager", action="store_true", help="compile nothing, for tests")
    parser.add_argument("--profile", action="store_true", help="a table of programs, on a GPU of kernels, on stderr")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high" if args.device == "cuda" else "highest")
    if args.dense:
        mlp.LOOKS_FROM = sys.maxsize
    on_gpu = args.device == "cuda"
    compiler = (Clock if args.profile and not on_gpu else Compiler)(not args.eager, args.population)
    warmup_calls = max(1, -(-args.warmup // args.iterations))
    num_iterations = args.iterations * (warmup_calls + args.repeats * (args.rounds or 1))
    anakin = build(args.env, args.num_envs, num_iterations, compiler=compiler, device=args.device)
    options = {"warmup_calls": warmup_calls, "seed": args.seed, "compiler": compiler, "threads": args.threads}
    options["capture"] = on_gpu
    if args.rounds:
        serve(Prepared(anakin, args.mode, args.iterations, **options), args.env, args.repeats)
        return
    if args.profile and on_gpu:
        prepared = Prepared(anakin, args.mode, args.iterations, **options)
        print(json.dumps({**prepared.measure(args.repeats), "env": args.env}))
        print(prepared.kernel_times(), file=sys.stderr)
        return
    m = timed(anakin, args.mode, args.iterations, args.repeats, **options)
    m["env"] = args.env
    if isinstance(compiler, Clock):
        print(compiler.table(sum(m["wall_s"])), file=sys.stderr)
    print(json.dumps(m))


if __name__ == "__main__":
    main()

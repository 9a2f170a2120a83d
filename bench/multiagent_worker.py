"""The torch side of the `multiagent` suite: one game with many agents, one JSON line.

taskset -c 0 python -m torchpod.bench.multiagent_worker --game tag_gridworld --num-agents 5 --full --mode update

With `--rounds` it waits for its turns: see served.py.
"""

import argparse
import dataclasses
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchpod import random
from torchpod.actions import random_action
from torchpod.algos.multi_agent import IA2C, IA2CConfig, Policies
from torchpod.anakin import Anakin, RunState
from torchpod.bench.kernels import kernels, profiled
from torchpod.bench.processes import Measurement, dtype_of
from torchpod.compile import Compiler
from torchpod.dealer import DEFAULT_CHUNK_ROWS
from torchpod.env import TensorEnv
from torchpod.envs import CovidEconomy, TagContinuous, TagGridWorld
from torchpod.graph import Replay
from torchpod.host_memory import status_bytes
from torchpod.kernels import mlp
from torchpod.learner import LearnerConfig
from torchpod.nets.heads import make_head
from torchpod.trees import contiguous
from torchpod.types import FIRST, Tree

ACTION_SETS = 8
"""Random actions of all environments, drawn beforehand and used in turn: what they cost is a row of its own."""
CHUNK_ROWS = DEFAULT_CHUNK_ROWS | {"cpu": 4096}
"""Rows of agents per gradient call, about."""
FEW_STEPS = 8
MOST_COPIED = 1 << 28


class Game(NamedTuple):
    """An environment, and the settings for it: those of configs/experiment/ia2c_*.yaml, WarpDrive's."""

    env: TensorEnv
    config: IA2CConfig
    learner: LearnerConfig
    unroll_length: int = 100


COMMON: dict[str, Any] = {
    "activation": "relu",
    "shared": True,
    "discount": 0.98,
    "value_coefficient": 2.0,
    "entropy_coefficient": 0.05,
}
LEARNER: dict[str, Any] = {"num_epochs": 1, "num_minibatches": 1, "anneal_learning_rate": False, "epsilon": 1e-8}


def tag_gridworld(num_agents: int, full: bool) -> Game:
    """One runner; a policy for all."""
    config = IA2CConfig(policies={"everybody": ["tagger", "runner"]}, hidden=(32, 32), **COMMON)
    env = TagGridWorld(num_agents - 1, use_full_observation=full)
    return Game(env, config, LearnerConfig(learning_rate=1e-3, max_grad_norm=3.0, **LEARNER))


def tag_continuous(num_agents: int, full: bool) -> Game:
    """A tenth are taggers, and at least one; a policy for each group."""
    num_taggers = max(1, num_agents // 10)
    env = TagContinuous(num_taggers, num_agents - num_taggers, use_full_observation=full)
    config = IA2CConfig(hidden=(256, 256), **COMMON)
    return Game(env, config, LearnerConfig(learning_rate={"runner": 5e-3, "tagger": 1e-3}, **LEARNER))


def covid_economy(num_agents: int, full: bool) -> Game:
    """51 governors and the planner; a policy for each group."""
    config = IA2CConfig(hidden=(256, 256), **COMMON)
    return Game(CovidEconomy(), config, LearnerConfig(learning_rate=1e-4, **LEARNER), unroll_length=90)


GAMES = {"tag_gridworld": tag_gridworld, "tag_continuous": tag_continuous, "covid_economy": covid_economy}


class PolicyWork(TypedDict):
    """What floor.py wants to know of a policy."""

    agents: int
    observation_size: int
    layers: list[tuple[int, int]]
    fused: bool
    """Whether its network runs as one operator (torchpod/kernels/mlp.py)."""


class Details(Measurement):
    """A measurement, and what the floor of an iteration follows from."""

    policies: list[PolicyWork]
    state_bytes: float
    """What one environment carries from step to step."""
    env_flops: float
    """Of a step of one environment, where they are more than a few per agent: the distances of continuous Tag."""
    choices: int
    """Numbers from which the sampler draws, per agent."""
    kernels: int
    """Of an iteration on a GPU; 0 on a CPU."""
    bytes_per_s: float
    """Read and written by a copy of what a step, or a stored unroll, handles, on a CPU; 0 on a GPU."""


Program = Callable[[RunState], tuple[RunState, Tensor]]
"""An iteration: state -> (state, transitions, a float64 scalar)."""


def env_only(anakin: Anakin, compiler: Compiler) -> Program:
    """Environments under random actions; every step makes its observation and resets what is over."""
    env = anakin.env
    keys = random.split(random.key(1, anakin.device), anakin.num_envs)
    observation = env.init(keys)[1].observation
    actions = [random_action(env.spec, observation, random.at(keys, i)) for i in range(ACTION_SETS)]

    def step(env_state: Tree, count: Tensor, moved: Tensor, env_keys: Tensor, action: Tree) -> Tree:
        count = count + 1
        env_state, timestep = env.step(env_state, action, random.at(env_keys, count))
        moved = moved + (timestep.step_type != FIRST).sum()
        return contiguous((env_state, count, moved, timestep.observation, timestep.reward, timestep.discount))

    compiled = compiler(step)

    def iterate(state: RunState) -> tuple[RunState, Tensor]:
        env_state, count = state.carry.env_state, state.carry.step
        moved = torch.zeros((), dtype=torch.float64, device=count.device)
        for t in range(anakin.unroll_length):
            env_state, count, moved, *_ = compiled(env_state, count, moved, state.env_keys, actions[t % ACTION_SETS])
        return state._replace(carry=state.carry._replace(env_state=env_state, step=count)), moved

    return iterate


def rollout(anakin: Anakin, compiler: Compiler) -> Program:
    """The same with the policies' networks and their sampling; everything is stored."""

    def iterate(state: RunState) -> tuple[RunState, Tensor]:
        carry, trajectory = anakin.rollout(state)
        return state._replace(carry=carry), (trajectory.timestep.step_type[1:] != FIRST).sum().double()

    return iterate


def update(anakin: Anakin, compiler: Compiler) -> Program:
    """All of A2C."""

    def iterate(state: RunState) -> tuple[RunState, Tensor]:
        state, metrics = anakin.iterate(state)
        return state, metrics["episodes"][3]

    return iterate


def sampler(anakin: Anakin, compiler: Compiler) -> Program:
    """Actions of all agents from logits, T times; what is counted is environments, as WarpDrive does."""
    groups = anakin.env.spec.groups or {}
    spec, num_agents = anakin.env.spec.action[next(iter(groups))], sum(groups.values())
    head = make_head(spec, 0.0)
    assert head is not None
    logits = random.normal(random.split(random.key(1, anakin.device), anakin.num_envs), num_agents * head.num_outputs)
    logits = logits.view(anakin.num_envs, num_agents, head.num_outputs)

    def draw(count: Tensor, keys: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        count = count + 1
        own = random.fold_in(random.at(keys, count)[:, None], torch.arange(num_agents, device=keys.device))
        return count, head.draw(logits, own, True)

    compiled = compiler(draw)

    def iterate(state: RunState) -> tuple[RunState, Tensor]:
        count, action = state.carry.step, logits
        for _ in range(anakin.unroll_length):
            count, action = compiled(count, state.actor_keys, logits)
        drawn = torch.full((), anakin.unroll_length * anakin.num_envs, dtype=torch.float64, device=action.device)
        return state._replace(carry=state.carry._replace(step=count)), drawn

    return iterate


PROGRAMS = {"env_only": env_only, "rollout": rollout, "update": update, "sampler": sampler}


def build(
    game: str,
    num_agents: int,
    num_envs: int,
    *,
    mode: str,
    full: bool,
    compiler: Compiler,
    device: str,
    unroll_length: int | None = None,
) -> Anakin:
    """The program for one of `GAMES`; what stores nothing takes `FEW_STEPS` for an iteration on a CPU.

    Raises:
      ValueError: if the game has another number of agents.
    """
    made = GAMES[game](num_agents, full)
    groups = made.env.spec.groups or {}
    if sum(groups.values()) != num_agents:
        raise ValueError(f"{game} has {sum(groups.values())} agents, and not {num_agents}.")
    learner = dataclasses.replace(made.learner, chunk_rows=CHUNK_ROWS[device])
    few = device == "cpu" and mode not in ("rollout", "update")
    return Anakin(
        lambda: IA2C(made.env.spec, made.config),
        made.env,
        num_envs=num_envs,
        unroll_length=FEW_STEPS if few else unroll_length or made.unroll_length,
        learner=learner,
        num_iterations=1,
        compiler=compiler,
        device=device,
    )


class Prepared:
    """A program that is compiled, captured on a GPU, and warm.

    Args:
      anakin: of `build`.
      mode: of `PROGRAMS`.
      compiler: that of `anakin`.
      seconds: of a timed call, about.
      seed: of everything.
    """

    def __init__(self, anakin: Anakin, mode: str, *, compiler: Compiler, seconds: float, seed: int) -> None:
        self._anakin, self._mode, self._seconds = anakin, mode, seconds
        self._on_gpu = anakin.device.type == "cuda"
        began = time.perf_counter()
        self._replay = Replay(PROGRAMS[mode](anakin, compiler), anakin.init(seed), capture=self._on_gpu)
        self._replay().item()
        first_s = time.perf_counter() - began
        self.time()
        self._compile_s = max(0.0, first_s - self._replay.capture_s - 2 * self._each_s)
        self._kernels = len(kernels(profiled(self._replay))) if self._on_gpu else 0

    def time(self) -> None:
        """Finds out how many iterations a timed call has."""
        began = time.perf_counter()
        self._replay().item()
        self._each_s = time.perf_counter() - began
        self._iterations = max(1, round(self._seconds / self._each_s))

    def measure(self, repeats: int) -> Details:
        """So many timed calls."""
        anakin, replay, mode, iterations = self._anakin, self._replay, self._mode, self._iterations
        config, on_gpu = anakin.learner.config, self._on_gpu
        wall_s, cpu_s, moved = [], [], []
        for _ in range(repeats):
            wall, cpu = time.perf_counter(), time.process_time()
            moved.append(torch.stack([replay().clone() for _ in range(iterations)]).sum().item())  # which waits
            wall_s.append(time.perf_counter() - wall)
            cpu_s.append(time.process_time() - cpu)
        peak = torch.cuda.max_memory_allocated() if on_gpu else status_bytes(os.getpid(), "VmHWM")
        learns, stores = mode == "update", mode in ("rollout", "update")
        carried = sum(x.nbytes for x in pytree.tree_leaves(replay.state.carry))
        measured = {
            "framework": "torchpod",
            "mode": mode,
            "num_envs": anakin.num_envs,
            "unroll_length": anakin.unroll_length,
            "epochs": config.num_epochs if learns else 0,
            "minibatches": config.num_minibatches if learns else 0,
            "batch_rows": anakin.unroll_length * anakin.num_envs,
            "param_count": sum(p.numel() for p in anakin.agent.parameters()),
            "dtype": dtype_of(anakin.agent),
            "device": anakin.device.type,
            "tf32": on_gpu and torch.get_float32_matmul_precision() == "high",
            "memory_bytes": peak,
            "iterations": iterations,
            "total_iterations": iterations * repeats,
            "compile_s": self._compile_s,
            "env_steps": moved,
            "wall_s": wall_s,
            "cpu_s": cpu_s,
            "episode_return": None,
            "episodes": 0,
            "threads": {"torch": torch.get_num_threads(), "affinity": len(os.sched_getaffinity(0))},
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
            **details(anakin, replay.state),
            "kernels": self._kernels,
            "bytes_per_s": 0.0 if on_gpu else copy_rate(carried * (anakin.unroll_length if stores else 1)),
        }
        return cast(Details, measured)


def details(anakin: Anakin, state: RunState) -> dict[str, Any]:
    """What the floor follows from, without what is measured."""
    env, agent = cast(TensorEnv, anakin.env), cast(Policies, anakin.agent)
    groups = env.spec.groups or {}
    seen = cast("dict[str, Tree]", state.carry.timestep.observation)
    numbers = {g: [x for x in pytree.tree_leaves(o) if x.dtype != torch.bool] for g, o in seen.items()}  # no masks
    observed = {g: sum(x[0, 0].numel() for x in leaves) for g, leaves in numbers.items()}
    owners = {"everybody": [*groups]} if "everybody" in agent.policies else {g: [g] for g in groups}
    policies = []
    for name, own in owners.items():
        size = observed[own[0]]
        layers = [(m.in_features, m.out_features) for m in agent.policies[name].modules() if isinstance(m, nn.Linear)]
        *hidden, policy, value = (outputs for _, outputs in layers)
        fused = (size, *hidden, policy + value) in mlp.FUSED
        agents = sum(groups[g] for g in own)
        policies.append(PolicyWork(agents=agents, observation_size=size, layers=layers, fused=fused))
    pairs = 0
    if isinstance(env, TagContinuous):
        n = env.num_agents
        pairs = env.num_taggers * (n - env.num_taggers) + (0 if env.num_seen is None else n * n)
    head = make_head(env.spec.action[next(iter(groups))], 0.0)
    assert head is not None
    return {
        "policies": policies,
        "state_bytes": sum(x.nbytes for x in pytree.tree_leaves(state.carry.env_state)) / anakin.num_envs,
        "env_flops": 6.0 * pairs,  # two differences, two squares, their sum, one comparison
        "choices": head.num_outputs,
    }


def copy_rate(num_bytes: int) -> float:
    """Bytes read and written per second by copies of so many: what fits into a cache is faster."""
    source = torch.zeros(min(num_bytes, MOST_COPIED), dtype=torch.uint8)
    target, times = torch.empty_like(source), []
    for _ in range(min(1000, 4 * MOST_COPIED // len(source))):
        began = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - began)
    return 2 * len(source) / min(times)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--game", choices=[*GAMES], required=True)
    parser.add_argument("--num-agents", type=int, default=5)
    parser.add_argument("--num-envs", type=int, default=2000)
    parser.add_argument("--mode", choices=[*PROGRAMS], default="env_only")
    parser.add_argument("--unroll", type=int, help="steps of an iteration that stores them; default: the game's")
    parser.add_argument("--full", action="store_true", help="the full observation")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: captured, in TF32")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a timed call, about")
    parser.add_argument("--repeats", type=int, default=3, help="timed calls")
    parser.add_argument("--rounds", type=int, help="measure whenever a line comes in")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high" if args.device == "cuda" else "highest")
    compiler = Compiler(True)
    anakin = build(
        args.game,
        args.num_agents,
        args.num_envs,
        mode=args.mode,
        full=args.full,
        compiler=compiler,
        device=args.device,
        unroll_length=args.unroll,
    )
    prepared = Prepared(anakin, args.mode, compiler=compiler, seconds=args.seconds, seed=args.seed)
    if not args.rounds:
        print(json.dumps(prepared.measure(args.repeats)))
        return
    print(json.dumps({"ready": True}), flush=True)
    for _ in sys.stdin:
        prepared.time()  # now it is alone on the device
        print(json.dumps(prepared.measure(args.repeats)), flush=True)
    print(json.dumps({"details": {}}), flush=True)


if __name__ == "__main__":
    main()

"""The torch side of the `envs` suite: one environment under random actions, one JSON line, as bench/peers/jax_envs.py.

taskset -c 0 python -m torchpod.bench.envs_worker --env catch --num-envs 2048 --steps 2000 --repeats 3
"""

import argparse
import json
import os
import platform
import time
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchpod import random
from torchpod.actions import random_action
from torchpod.bench.processes import Measurement
from torchpod.compile import Compiler
from torchpod.makers import make_env
from torchpod.specs import Box, Discrete
from torchpod.trees import contiguous
from torchpod.types import FIRST, Tree


def measure(
    name: str, arguments: dict[str, Any], num_envs: int, steps: int, repeats: int, seed: int = 0
) -> Measurement:
    """Compiles, then times `repeats` calls of `steps` steps of all environments; resets are no steps.

    Every step makes its observation, as one that an agent reads would.
    """
    torch.set_num_threads(1)
    env = make_env({"name": name, **arguments})
    action_spec = env.spec.action

    def draw(observation: Tree, keys: Tensor) -> Tree:
        if isinstance(action_spec, Discrete):  # and Box, as in the results on record
            return random.to_integer(random.bits(keys, 1)[:, 0], action_spec.num_values)
        if isinstance(action_spec, Box):
            return random.uniform(keys, action_spec.shape[0], action_spec.low, action_spec.high)
        return random_action(env.spec, observation, keys)

    def step(state: Tree, timestep: Tree, sums: Tensor, count: Tensor, env_keys: Tensor, action_keys: Tensor) -> Tree:
        count = count + 1
        action = draw(timestep.observation, random.at(action_keys, count))
        state, timestep = env.step(state, action, random.at(env_keys, count))
        moved = (timestep.step_type != FIRST).sum()
        reward = torch.stack([leaf.sum() for leaf in pytree.tree_leaves(timestep.reward)]).sum()
        sums = sums + torch.stack([reward, moved.float()]).double()
        return contiguous((state, timestep, sums, count))

    keys = [random.split(random.fold_in(random.key(seed), i), num_envs) for i in range(2)]
    compiled, zero = Compiler(True)(step), torch.zeros((), dtype=torch.int64)
    begin = (*env.init(random.at(keys[0], zero)), torch.zeros(2, dtype=torch.float64), zero)
    carry = pytree.tree_map(lambda x: x.contiguous().clone(), begin)
    wall_s, cpu_s, sums = [], [], []
    began = time.perf_counter()
    carry = compiled(*carry, *keys)
    first_s = time.perf_counter() - began
    for _ in range(repeats + 1):  # the first warms up
        wall, cpu, before = time.perf_counter(), time.process_time(), carry[2]
        for _ in range(steps):
            carry = compiled(*carry, *keys)
        wall_s.append(time.perf_counter() - wall)
        cpu_s.append(time.process_time() - cpu)
        sums.append((carry[2] - before).tolist())
    wall_s, cpu_s, sums = wall_s[1:], cpu_s[1:], sums[1:]
    return {
        "framework": "torchpod",
        "mode": "env_only",
        "num_envs": num_envs,
        "unroll_length": steps,
        "epochs": 0,
        "minibatches": 0,
        "batch_rows": steps * num_envs,
        "param_count": 0,
        "dtype": "float32",
        "iterations": 1,
        "total_iterations": repeats + 1,
        "compile_s": first_s,
        "env_steps": [moved for _, moved in sums],
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "episode_return": sum(total for total, _ in sums) / sum(moved for _, moved in sums),  # reward per step
        "episodes": 0,
        "threads": {"torch": torch.get_num_threads(), "affinity": len(os.sched_getaffinity(0))},
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--env", required=True)
    parser.add_argument("--arguments", type=json.loads, default={}, help="of the environment, as JSON")
    parser.add_argument("--num-envs", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=1000, help="steps within one timed call")
    parser.add_argument("--repeats", type=int, default=3, help="timed calls")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--peer", nargs=2, help="the peer's environment and its arguments; ignored here")
    args = parser.parse_args()
    print(json.dumps(measure(args.env, args.arguments, args.num_envs, args.steps, args.repeats, args.seed)))


if __name__ == "__main__":
    main()

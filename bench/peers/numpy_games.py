"""The NumPy peer of the `multiagent` suite: one game, arrays over its agents, one JSON line.

As a user of NumPy would write it: every step is a few operations on arrays of all agents, observations are made, and a
game that is over starts again. Actions are drawn before the clock starts.

    taskset -c 0 python bench/peers/numpy_games.py --game tag_gridworld --num-agents 5 --mode env_only --repeats 3

Two variants do what the originals' own classes for the CPU do, which are slower: `--per-agent` Tag as in WarpDrive,
`--window` the economy as in the AI Economist.
"""

import argparse
import json
import os
import platform
import time

import numpy as np
from numpy_covid import CovidEconomy, CovidEconomyWindow
from numpy_tag import TagContinuous, TagGridWorld, TagGridWorldPerAgent


def make(game, num_agents, full, seed=0, *, per_agent=False, window=False):
    """As torchpod.bench.multiagent_worker makes it."""
    if game == "tag_gridworld":
        return (TagGridWorldPerAgent if per_agent else TagGridWorld)(num_agents - 1, full=full)
    if game == "covid_economy":
        return CovidEconomyWindow() if window else CovidEconomy()
    num_taggers = max(1, num_agents // 10)
    return TagContinuous(num_taggers, num_agents - num_taggers, full=full, seed=seed)


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--game", choices=["tag_gridworld", "tag_continuous", "covid_economy"], required=True)
    parser.add_argument("--num-agents", type=int, default=5)
    parser.add_argument("--num-envs", help="of torchpod; here it is one")
    parser.add_argument("--mode", choices=["env_only"], default="env_only")
    parser.add_argument("--full", action="store_true", help="the full observation")
    parser.add_argument(
        "--per-agent", action="store_true", help="tag_gridworld: actions, rewards, observations one by one"
    )
    parser.add_argument("--window", action="store_true", help="covid_economy: 600 days are added up anew each day")
    parser.add_argument("--device", help="of torchpod; ignored here")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a timed call, about")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.per_agent and args.game != "tag_gridworld" or args.window and args.game != "covid_economy":
        parser.error("--per-agent is of tag_gridworld, --window of covid_economy.")
    env = make(args.game, args.num_agents, args.full, args.seed, per_agent=args.per_agent, window=args.window)
    actions = env.actions(np.random.default_rng(args.seed), 64)
    env.reset()

    def play(steps):
        for i in range(steps):
            _, _, terminated, truncated = env.step(actions[i % 64])
            if terminated or truncated:
                env.reset()

    play(20)
    began = time.perf_counter()
    play(50)
    steps = max(10, round(50 * args.seconds / (time.perf_counter() - began)))
    wall_s, cpu_s = [], []
    for _ in range(args.repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        play(steps)
        wall_s.append(time.perf_counter() - wall)
        cpu_s.append(time.process_time() - cpu)
    work = {"num_envs": 1, "unroll_length": steps, "epochs": 0, "minibatches": 0, "batch_rows": steps, "param_count": 0}
    result = {
        "framework": "numpy" + " per agent" * args.per_agent + " window" * args.window,
        "mode": args.mode,
        **work,
        "dtype": "float64" if args.game == "covid_economy" else "float32",
        "iterations": 1,
        "total_iterations": 1,
        "compile_s": 0.0,
        "env_steps": [steps] * args.repeats,
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "episode_return": None,
        "episodes": 0,
        "threads": {"affinity": len(os.sched_getaffinity(0))},
        "versions": {"numpy": np.__version__, "python": platform.python_version()},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()

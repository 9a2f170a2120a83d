"""The torch side of suite `agents`: one run, one JSON line, as bench/peers/jax_replay.py prints it.

taskset -c 0 python -m torchpod.bench.agents_worker --case dqn_cartpole

It is what `torchpod train` does between compilation and evaluation, without its logs and checkpoints.
"""

import argparse
import contextlib
import json
import os
import platform
import time
from collections.abc import Sequence

import torch

from torchpod.bench.processes import Measurement, dtype_of
from torchpod.compose import load
from torchpod.distributed import ALONE
from torchpod.makers import make_agent, make_env, with_defaults
from torchpod.run.loops import make_loop, reports
from torchpod.sebulba import Sebulba


def measure(overrides: Sequence[str], *, seed: int = 0) -> Measurement:
    """One run, without compilation; returns are those of the episodes that ended in its last tenth.

    Args:
      overrides: of the run, with replay.
      seed: of parameters and environments.
    """
    config = with_defaults(load(overrides))
    assert config.algo.replay is not None
    torch.set_num_threads(config.threads or 1)
    env, device = make_env(config.env), torch.device(config.device)
    loop = make_loop(config, env, make_agent(config.algo, env.spec), ALONE, device)
    state = loop.init(seed)
    wall_s, cpu_s, compile_s, env_steps, returns, episodes = 0.0, 0.0, 0.0, 0, 0.0, 0
    cpu = time.process_time()
    with contextlib.closing(loop) if isinstance(loop, Sebulba) else contextlib.nullcontext():
        for report, _ in reports(config, loop, state):
            now = time.process_time()
            # The first report's CPU time is that of compilation too.
            cpu_s += report.wall_s if report.compile_s else now - cpu
            wall_s, compile_s, cpu = wall_s + report.wall_s, compile_s + report.compile_s, now
            env_steps, count = report.env_steps, int(report.metrics["episodes"])
            if count and report.iteration > 0.9 * loop.num_iterations:
                returns, episodes = returns + count * float(report.metrics["episode_return"]), episodes + count
    on_gpu = device.type == "cuda"
    return {
        "framework": "torchpod",
        "mode": "update",
        "env": config.experiment_name or "",
        "num_envs": config.num_envs,
        "unroll_length": config.algo.unroll_length,
        "epochs": config.algo.learner.num_epochs,
        "minibatches": config.algo.learner.num_minibatches,
        "batch_rows": config.num_envs * config.algo.unroll_length,
        "sampled_rows": config.algo.replay.batch_size,
        "param_count": sum(x.numel() for x in loop.agent.parameters()),
        "dtype": dtype_of(loop.agent),
        "device": device.type,
        "tf32": on_gpu and torch.get_float32_matmul_precision() == "high",
        "memory_bytes": torch.cuda.max_memory_allocated() if on_gpu else 0,
        "iterations": loop.num_iterations,
        "total_iterations": loop.num_iterations,
        "compile_s": compile_s,
        "env_steps": [float(env_steps)],
        "wall_s": [wall_s],
        "cpu_s": [cpu_s],
        "episode_return": returns / episodes if episodes else None,
        "episodes": episodes,
        "threads": {"torch": torch.get_num_threads(), "affinity": len(os.sched_getaffinity(0))},
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }


def main() -> None:
    """Command line: that of jax_replay.py, and settings."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--case", default="dqn_cartpole", help="an experiment")
    parser.add_argument("settings", nargs="*", help="as of `torchpod train`")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="of all environments; by default those of the experiment")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    args = parser.parse_args()
    overrides = [f"experiment={args.case}", f"device={args.device}", *args.settings]
    overrides += [] if args.steps is None else [f"total_env_steps={args.steps}"]
    print(json.dumps(measure(overrides, seed=args.seed)))


if __name__ == "__main__":
    main()

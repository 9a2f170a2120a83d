"""Started by torchrun, or alone: saves what each rank drew and what it learned. `probe.py OUT OVERRIDE...`."""

import sys
from pathlib import Path

import torch

from torchpod.anakin import Anakin
from torchpod.compile import Compiler
from torchpod.config import load
from torchpod.distributed import init, shutdown
from torchpod.makers import make_agent, make_env


def main(out: Path, overrides: list[str]) -> None:
    """Trains, and writes `rank-<r>.pt`."""
    torch.set_num_threads(1)
    config = load(overrides)
    ranks, device = init("cpu")
    env = make_env(config.env)
    anakin = Anakin(
        make_agent(config.algo, env.spec),
        env,
        num_envs=ranks.share(config.num_envs, "num_envs"),
        unroll_length=config.algo.unroll_length,
        learner=config.algo.learner,
        num_iterations=config.num_iterations,
        compiler=Compiler(config.compile),
        ranks=ranks,
        device=device,
    )
    state = anakin.init(config.seed)
    _, trajectory = anakin.rollout(state)
    saved = {
        "env_keys": state.env_keys,
        "actor_keys": state.actor_keys,
        "learner_keys": state.learner_keys,
        "action": trajectory.output.action.movedim(1, 0),
        "observation": trajectory.timestep.observation.movedim(1, 0),
        "params": [state.learner.params],
        "metrics": [],
    }
    for _ in range(config.num_iterations):
        state, metrics = anakin.iterate(state)
        saved["params"].append(state.learner.params)
        saved["metrics"].append(metrics)
    torch.save(saved, out / f"rank-{ranks.rank}.pt")
    shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

"""Started by torchrun, or alone: saves what each rank drew and learned. `probe.py OUT '{"CASE": ["OVERRIDE"]}'`."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchpod.compose import load
from torchpod.distributed import Ranks, init, shutdown
from torchpod.makers import make_agent, make_env
from torchpod.run.loops import make_loop, reports
from torchpod.sebulba import Sebulba


def main(out: Path, cases: dict[str, list[str]]) -> None:
    """Trains each, and writes `CASE-<rank>.pt`."""
    torch.set_num_threads(1)
    ranks, device = init("cpu")
    for name, overrides in cases.items():
        torch.save(trained(overrides, ranks, device), out / f"{name}-{ranks.rank}.pt")
    shutdown()


def trained(overrides: list[str], ranks: Ranks, device: torch.device) -> dict[str, Any]:
    config = load(overrides)
    env = make_env(config.env)
    loop = make_loop(config, env, make_agent(config.algo, env.spec), ranks, device)
    state = loop.init(config.seed)
    trajectory = None if isinstance(loop, Sebulba) else loop.rollout(state)[1]
    params, metrics = [state.learner.params], []
    for report, program in reports(config, loop, state):
        trajectory = trajectory or program.trajectory
        params.append(pytree.tree_map(torch.clone, program.state.learner.params))
        metrics.append(report.metrics | {"env_steps": torch.tensor(report.env_steps)})
    assert trajectory is not None
    action, observation = (
        pytree.tree_map(lambda x: x.movedim(1, 0), tree)
        for tree in (trajectory.output.action, trajectory.timestep.observation)
    )
    return {
        "env_keys": state.env_keys,
        "actor_keys": state.actor_keys,
        "learner_keys": state.learner_keys,
        "action": action,
        "observation": observation,
        "params": params,
        "metrics": metrics,
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))

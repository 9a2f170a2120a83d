"""What a run leaves behind when it ends: summary.json, and a folder for each member of a population."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor
from torch.utils import _pytree as pytree

from torchpod import checkpoint, stats
from torchpod.agent import Agent
from torchpod.anakin import RunState
from torchpod.config import TrainConfig
from torchpod.distributed import Ranks
from torchpod.evaluate import Evaluation
from torchpod.metrics import Logger, read_metrics
from torchpod.run.folder import commit, hardware, save_state, versions, write_text
from torchpod.watched import HostError


@dataclass
class Timing:
    """How long the training took."""

    wall_s: float
    """Of training, without compilation, resumed parts included."""
    compile_s: float
    steps: int
    seconds: float
    """Transitions and seconds of this process's calls: their quotient is the throughput."""


def summarise(
    config: TrainConfig,
    evaluation: Evaluation,
    state: RunState,
    timing: Timing,
    device: torch.device,
    ranks: Ranks,
) -> dict[str, Any]:
    """The contents of summary.json."""
    summary: dict[str, Any] = {"eval_return": eval_returns(evaluation)}
    if config.population > 1:
        summary["members"] = [eval_returns(member) for member in each(evaluation)]
        means = [member["mean"] for member in summary["members"]]
        summary["best_member"] = means.index(max(means))
        summary["unhealthy_members"] = (~state.learner.healthy).nonzero().flatten().tolist()
    return summary | {
        **unfinished(evaluation),
        "env_steps": int(state.env_steps.double().mean()),
        "env_steps_per_s": timing.steps / timing.seconds if timing.seconds else None,
        "wall_s": timing.wall_s,
        "compile_s": timing.compile_s,
        "hardware": hardware(device),
        "threads": torch.get_num_threads(),
        "ranks": ranks.world_size,
        "versions": versions(),
        "commit": commit(),
        "config_hash": config.hash(),
    }


def each(evaluation: Evaluation) -> list[Evaluation]:
    """The evaluations of the members of a population, or the one there is."""
    episodes = evaluation.returns.shape[-1]
    rows = pytree.tree_map(lambda x: x.reshape(-1, episodes), evaluation)
    return [pytree.tree_map(lambda x, i=i: x[i], rows) for i in range(len(rows.returns))]


def eval_returns(evaluation: Evaluation) -> dict[str, Any]:
    """What `eval_return` says of all episodes, and of each of `groups` and of `policies` that are no group.

    Under `episode` the means of what the environment says of those that ended.
    """
    told: dict[str, Any] = eval_return(evaluation.returns.flatten())
    for kind, parts in ("groups", evaluation.groups), ("policies", evaluation.teams):
        told |= {kind: {name: eval_return(x.flatten()) for name, x in parts.items()}} if parts else {}
    over = evaluation.finished
    if evaluation.episode and bool(over.any()):
        told["episode"] = {name: float(x[over].double().mean()) for name, x in evaluation.episode.items()}
    return told


def eval_return(returns: Tensor) -> dict[str, Any]:
    """`{mean, iqm, ci95, episodes}` of episode returns `[E]`; `ci95` is the 95 % bootstrap interval of the IQM.

    Raises:
      HostError: if one is NaN or infinite.
    """
    values = returns.double().cpu().numpy()
    if wrong := int((~np.isfinite(values)).sum()):
        raise HostError(
            f"{wrong} of {values.size} evaluated episodes have a return that is not finite, for the environment gave "
            "such a reward; torchpod.testing.check_env looks for the step."
        )
    low, high = stats.bootstrap_ci(values, stats.iqm)
    return {
        "mean": float(values.mean()),
        "iqm": float(stats.iqm(values)),
        "ci95": [float(low), float(high)],
        "episodes": int(values.size),
    }


def unfinished(evaluation: Evaluation) -> dict[str, int]:
    """How many episodes were cut because they did not end, and at which step, the latest; 0 if none was."""
    steps = torch.where(evaluation.finished, 0, evaluation.lengths)
    return {"unfinished_episodes": int((~evaluation.finished).sum()), "unfinished_steps": int(steps.max())}


def write_members(
    run_dir: Path, config: TrainConfig, agent: Agent, state: RunState, summary: dict, timing: Timing
) -> None:
    """A run folder for each member, that `torchpod train resume=` and `torchpod eval` take like any other."""
    rows = read_metrics(run_dir)
    for p in range(config.population):
        folder = run_dir / "members" / str(p)
        if any(int(path.name) > int(state.iteration[p]) for path in checkpoint.all_of(folder)):
            continue  # it has gone on by itself
        with checkpoint.writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        member = replace(
            config,
            population=1,
            seed=config.seed + p,
            evaluation=replace(config.evaluation, seed=config.evaluation_seed),  # all have played the same episodes
            members={name: [values[p]] for name, values in config.members.items()},
            run_dir=str(folder),
            resume=None,
        )
        one = pytree.tree_map(lambda x, p=p: x[p].clone(), state)
        save_state(folder, agent, one, {"wall_s": timing.wall_s}, Ranks(), config.checkpoint.keep)
        write_text(folder / "config.yaml", yaml.safe_dump(member.to_dict(), sort_keys=False))
        own = {"eval_return": summary["members"][p], "env_steps": int(state.env_steps[p])}
        own["healthy"] = bool(state.learner.healthy[p])
        write_text(folder / "summary.json", json.dumps(summary | own, indent=1))
        with Logger(folder, resume_at=0) as logger:
            for row in rows:
                own = {name: value[p] if isinstance(value, list) else value for name, value in row.items()}
                rates = {name: own[name] / config.population for name in ("env_steps_per_s",) if name in own}
                logger.write(own | rates)

"""What summary.json says of a run: returns of its evaluation, speed, machine and versions."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchpod import stats
from torchpod.anakin import RunState
from torchpod.config import TrainConfig
from torchpod.distributed import Ranks
from torchpod.evaluate import Evaluation
from torchpod.machine import commit, hardware, versions
from torchpod.metrics import short
from torchpod.watched import HostError

_MOST_TOLD = 4
"""Of what an environment says of its episodes, on screen."""


@dataclass
class Timing:
    """How long the training took."""

    wall_s: float
    """Of training, without compilation, resumed parts included."""
    compile_s: float = 0.0
    steps: int = 0
    seconds: float = 0.0
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
    env_steps = int(state.env_steps.double().mean())
    return summary | {
        **unfinished(evaluation),
        "env_steps": env_steps,
        "resets": int(state.iteration.flatten()[0]) * config.num_envs * config.algo.unroll_length - env_steps,
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


def result_of(summary: dict[str, Any]) -> str:
    """The line with which a run ends."""
    score, cut, compiled, resets = summary["eval_return"], "", "", ""
    if summary.get("resets"):  # a finished run's may be of an older version
        resets = f" (and {summary['resets']:,} resets)"
    if summary["compile_s"] >= 0.05:
        compiled = f", {summary['compile_s']:.1f} s compilation"
    if summary["unfinished_episodes"]:
        cut = f", {summary['unfinished_episodes']} of them cut at {summary['unfinished_steps']:,} steps"
    means = [(name, own["mean"]) for name, own in score.get("groups", {}).items()]
    means += [(f"policy {name}", own["mean"]) for name, own in score.get("policies", {}).items()]
    told = [*score.get("episode", {}).items()]
    means += told[:_MOST_TOLD]
    parts = ": " * bool(means) + ", ".join(f"{name} {short(mean)}" for name, mean in means)
    parts += f" and {len(told) - _MOST_TOLD} more in summary.json" if len(told) > _MOST_TOLD else ""
    low, high = map(short, score["ci95"])
    return (
        f"eval return {short(score['mean'])} with greedy actions (IQM {short(score['iqm'])}, 95 % CI of the IQM "
        f"[{low}, {high}], {score['episodes']} episodes{cut}{parts}) after {summary['env_steps']:,} env steps{resets}; "
        f"{summary['env_steps_per_s'] or 0:,.0f} env steps/s{compiled}"
    )


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

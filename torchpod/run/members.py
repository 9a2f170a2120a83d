"""The members of a population: the settings in which they differ, and a run folder for each."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.utils import _pytree as pytree

from torchpod import checkpoint
from torchpod.agent import Agent
from torchpod.anakin import RunState
from torchpod.bounds import bounds_of
from torchpod.checkpoint import CheckpointError
from torchpod.config import ConfigError, TrainConfig, check_ranges
from torchpod.distributed import Ranks
from torchpod.hints import nearest
from torchpod.learner import LearnerConfig
from torchpod.metrics import Logger, finite, read_metrics
from torchpod.replay.segments import Segments, clean
from torchpod.run.folder import write_text
from torchpod.run.keeper import save_state

_OURS = "written_by_population"
"""In what a checkpoint says of itself: its member has not gone on by itself."""


def apply_members(state: RunState, config: TrainConfig) -> RunState:
    """Puts the per-member values of `members` into hyperparameters and learning rates."""
    learner = state.learner
    groups = learner.learning_rate
    rates = {f"learning_rate.{group}": group for group in groups}
    if len(groups) == 1:
        rates["learning_rate"] = next(iter(groups))
    lead = (config.population,) if config.population > 1 else ()
    known = [name for name, x in learner.buffers.items() if x.shape == lead and x.dtype == torch.float32]
    schedules, bounds = config.algo.learner.schedules or {}, bounds_of(LearnerConfig)["learning_rate"]
    for name, values in config.members.items():
        scheduled = {name, "learning_rate", f"learning_rate.{rates[name]}"} if name in rates else {name}
        if scheduled & schedules.keys():
            raise ConfigError(f"members.{name} has a schedule, which is that of all members; leave one of them out.")
        if name in known:
            table, key = learner.buffers, name
        elif name in rates:
            if name != "learning_rate" and len(groups) == 1 and "learning_rate" in config.members:
                raise ConfigError(f"members.learning_rate and members.{name} are one rate; leave one of them out.")
            check_ranges({name: values}, {rates[name]: bounds, "learning_rate": bounds}, "members.")
            table, key = learner.learning_rate, rates[name]
        elif name == "learning_rate":
            named = ", ".join(f"members.{rate}" for rate in rates)
            raise ConfigError(f"members.learning_rate is of agents with one optimizer group; here there are {named}.")
        elif name in config.algo.agent and (own := [f"members.{x}" for x in known if x.endswith(f".{name}")]):
            raise ConfigError(f"members.{name} is a setting of each policy; write {', '.join(own)}.")
        elif name in config.algo.agent:
            raise ConfigError(
                f"members.{name} is a setting of the agent, and cannot differ from member to member before its "
                f"constructor says self.hyperparameter({name!r}, config.{name})."
            )
        else:
            raise ConfigError(f"members.{name} is no setting; {nearest(name, [*known, *rates])}")
        table[key] = torch.as_tensor(values, dtype=torch.float32, device=table[key].device)
        if config.population == 1:
            table[key] = table[key][0]
    return state


def write_members(
    run_dir: Path,
    config: TrainConfig,
    agent: Agent,
    segments: Segments | None,
    state: RunState,
    summary: dict[str, Any],
    meta: dict[str, Any],
) -> None:
    """A run folder for each member, that `torchpod train resume=` and `torchpod eval` take like any other.

    What their checkpoints say of themselves is `meta`, from `Keeper.meta`.
    """
    rows = read_metrics(run_dir)
    folders = {p: run_dir / "members" / str(p) for p in range(config.population)}
    for p, folder in list(folders.items()):
        if _goes_its_own_way(folder):
            print(f"{folder} has gone on by itself, and is left as it is.")
            del folders[p]
    manifests = {} if segments is None else segments.split(folders)
    for p, folder in folders.items():
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
        save_state(folder, agent, one, meta | {_OURS: True}, Ranks(), config.checkpoint.keep, manifests.get(p))
        clean(folder, 0, json.loads(manifests.get(p, b"{}")))
        write_text(folder / "config.yaml", yaml.safe_dump(member.to_dict(), sort_keys=False))
        own = {"eval_return": summary["members"][p], "env_steps": int(state.env_steps[p])}
        own["healthy"] = bool(state.learner.healthy[p])
        own["resets"] = summary["env_steps"] + summary["resets"] - own["env_steps"]
        write_text(folder / "summary.json", json.dumps(finite(summary | own), indent=1))
        with Logger(folder, resume_at=0) as logger:
            for row in rows:
                own = {name: value[p] if isinstance(value, list) else value for name, value in row.items()}
                rates = {name: own[name] / config.population for name in ("env_steps_per_s",) if name in own}
                logger.write(own | rates)


def _goes_its_own_way(run_dir: Path) -> bool:
    """Whether a member has a checkpoint of its own, or one that cannot be read."""
    try:
        return any(_OURS not in checkpoint.read_meta(folder) for folder in checkpoint.all_of(run_dir))
    except CheckpointError:
        return True

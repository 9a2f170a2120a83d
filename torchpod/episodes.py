"""Returns and lengths of the episodes that end inside a trajectory, and what environments report of them."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchpod.actions import open_masks
from torchpod.specs import EnvSpec
from torchpod.types import LAST, TimeStep, Tree

Teams = Mapping[str, Callable[[dict[str, Tree], int], Tree]]
"""See `Agent.teams`."""
NO_TEAMS: Teams = {}


class Episodes(NamedTuple):
    """What `count_episodes` found in a trajectory."""

    sums: Tensor
    """`[4]` float64: episodes that ended, sum of their returns, sum of their lengths, transitions. Behind them, as
    `names_of` says, the sums of returns of each group and team, if there are any, of steps that their agents were in
    the game, if they can leave it, and of what the environment reports. Last, rows of action masks that allow nothing,
    from which nothing can be learned."""
    running_return: Tensor
    running_length: Tensor


def none_yet(timestep: TimeStep, teams: Teams = NO_TEAMS) -> tuple[Tensor, Tensor]:
    """Return and length of episodes of which nothing has been counted, as `count_episodes` takes them."""
    size, device = timestep.step_type.shape[0], timestep.step_type.device
    groups = [len(timestep.reward) + len(teams)] if isinstance(timestep.reward, dict) else []
    kinds = [1 + len(timestep.extras["alive"]) + len(teams)] if "alive" in timestep.extras else []
    return torch.zeros(size, *groups, device=device), torch.zeros(size, *kinds, dtype=torch.int64, device=device)


def count_episodes(
    timestep: TimeStep,
    running_return: Tensor,
    running_length: Tensor,
    teams: Teams = NO_TEAMS,
    spec: EnvSpec | None = None,
) -> Episodes:
    """Returns and lengths of the episodes that end in a trajectory, on raw rewards and true game over.

    Args:
      timestep: `[T + 1, B, ...]`.
      running_return: `[B]`, of the episodes under way at the first timestep; `[B, G]` of groups: of each, by name, the
        mean over its agents, whose sum is the return of an episode, and then of each team.
      running_length: `[B]`; `[B, 1 + G]` of groups whose agents can leave the game: behind the length of the episode,
        of each group and team the steps that its agents were in the game, their sum.
      teams: see `Agent.teams`.
      spec: of the environment, which may have action masks.
    """
    over = timestep.extras["game_over"][1:]  # [T, B]
    real = timestep.step_type[:-1] != LAST
    reward, alive, steps = timestep.extras["raw_reward"], timestep.extras.get("alive", {}), real
    num_groups = len(reward) if isinstance(reward, dict) else 0
    present = _of_each(alive, teams) if alive else []
    if present:
        steps = torch.stack([real, *((x[:-1] & real[..., None]).sum(-1) for x in present)], -1)
    if num_groups:
        reward = torch.stack([x.mean(-1) for x in _of_each(reward, teams)], -1)  # [T + 1, B, G]
    # What was gained after the last game over of an environment is still running; the rest belongs to episodes that
    # ended. Two sums over time, then, instead of a scan (12 ms for [128, 1024] on one core; this: 0.5 ms).
    time = torch.arange(over.shape[0], device=over.device)[:, None]
    last = torch.where(over, time, -1).amax(0)  # [B]

    def divide(gain: Tensor, running: Tensor) -> tuple[Tensor, Tensor]:
        """float64 sum of what ended, and per environment what is running."""
        more = [1] * (gain.ndim - over.ndim)
        since, place = last.reshape(*last.shape, *more), time.reshape(-1, 1, *more)
        before = torch.where(since < 0, running.double(), 0.0)
        after = torch.where(place > since, gain.double(), 0.0).sum(0) + before
        return (running.double() + gain.double().sum(0) - after).sum(0), after

    ended_return, return_ = divide(reward[1:], running_return)
    ended_length, length = divide(steps, running_length)
    of_episodes = ended_length[0] if alive else ended_length
    whole = ended_return[:num_groups].sum() if num_groups else ended_return
    sums = torch.stack([over.sum().double(), whole, of_episodes, real.sum().double()])
    sums = torch.cat([sums, ended_return]) if num_groups else sums
    if present:  # the mean over the agents of a group
        told = [x / own.shape[-1] for x, own in zip(ended_length[1:], present, strict=True)]
        sums = torch.cat([sums, torch.stack(told)])
    report = timestep.extras.get("episode", {})
    told = [torch.where(over, report[name][1:].double(), 0.0).sum() for name in sorted(report)]
    masks = open_masks(spec, timestep.observation).values() if spec else ()
    closed = sum(((~x).sum().double() for x in masks), torch.zeros_like(whole))
    sums = torch.cat([sums, torch.stack([*told, closed])])
    return Episodes(sums, return_.float(), length.long())


def counting(teams: Teams, spec: EnvSpec) -> Callable[[TimeStep, Tensor, Tensor], Episodes]:
    """`count_episodes`, of these teams in this environment."""
    return functools.wraps(count_episodes)(functools.partial(count_episodes, teams=teams, spec=spec))


def names_of(timestep: TimeStep, teams: Teams = NO_TEAMS) -> list[str]:
    """The metrics of the sums behind the first four, but for the last.

    `episode_return/GROUP`, `TEAM/episode_return`, `episode_length/GROUP`, `TEAM/episode_length`, `episode_NAME`.
    """
    groups = timestep.reward if isinstance(timestep.reward, dict) else ()
    found = []
    for kind, own in ("return", groups), ("length", timestep.extras.get("alive", ())):
        found += [f"episode_{kind}/{name}" for name in sorted(own)]
        found += [f"{name}/episode_{kind}" for name in teams if own]
    return found + [f"episode_{name}" for name in sorted(timestep.extras.get("episode", ()))]


def _of_each(tree: dict[str, Tensor], teams: Teams) -> list[Tensor]:
    """`[T, B, N]` of each group, by name, and of each team."""
    return [*(tree[group] for group in sorted(tree)), *(of(tree, 2) for of in teams.values())]


def average(history: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Means of metrics; of those whose names end in `_min` and `_max` the least and the largest.

    `loss/GROUP` and `grad_norm/GROUP` are means, whatever their group is called. What is NaN is left out: of an
    iteration that has nothing to say of a metric. NaN where all are.
    """
    if len(history) == 1:
        return history[0]
    alike: dict[Any, list[str]] = {}
    for name, x in history[-1].items():
        kind = "" if name.startswith(("loss/", "grad_norm/")) else name[-4:]
        kind = _EXTREMES.get(kind, _mean), x.device, x.dtype, x.shape, tuple(name in h for h in history)
        alike.setdefault(kind, []).append(name)
    reduced = {}
    for (reduce, *_, has), names in alike.items():  # together they take as long as one
        kept = [torch.stack([h[name] for name in names]) for h, own in zip(history, has, strict=True) if own]
        reduced |= zip(names, reduce(torch.stack(kept)).unbind(), strict=True)
    return {name: reduced[name] for name in history[-1]}


def _mean(x: Tensor) -> Tensor:
    """Of `[I, ...]` over I, without NaN if there is anything else."""
    return x.nanmean(0)


def _least(x: Tensor) -> Tensor:
    """As `_mean`."""
    return torch.where(x.isnan().all(0), torch.nan, torch.where(x.isnan(), torch.inf, x).amin(0))


def _largest(x: Tensor) -> Tensor:
    return -_least(-x)


_EXTREMES = {"_min": _least, "_max": _largest}


def mean_metrics(history: list[dict[str, Tensor]], names: Sequence[str] = ()) -> dict[str, Tensor]:
    """Metrics of several iterations, on the host: see `average`, and means over all their episodes (NaN if none ended).

    Args:
      history: per iteration, scalars (`[P]` in a population), and `episodes`, the sums of `count_episodes`.
      names: from `names_of`.
    """
    metrics = average([{name: x for name, x in h.items() if name != "episodes"} for h in history])
    count, returns, lengths, _, *others, _ = torch.stack([h["episodes"] for h in history]).sum(0).unbind(-1)
    metrics |= {"episodes": count, "episode_return": returns / count, "episode_length": lengths / count}
    metrics |= {name: x / count for name, x in zip(names, others, strict=True)}
    on_host = {}
    for device in {value.device for value in metrics.values()}:  # one copy from each
        names = [name for name, value in metrics.items() if value.device == device]
        # In float64, as `episodes` are: of several types a stack has the largest.
        on_host |= zip(names, torch.stack([metrics[name] for name in names]).double().cpu().unbind(), strict=True)
    return {name: on_host[name] for name in metrics}

"""Players that follow no policy, to compare what was trained with: `torchpod eval RUN --instead planner=random`.

`random` draws every action that is allowed with equal probability; where a Box has no bounds, from -1 to 1, or 2 from
the one that it has. An action is numbers with commas between, `3` or `0.5,-1`: one for all, or one for each that an
agent chooses, in units of the spec (integers from 0; a Box of a host environment whose bounds differ is scaled to -1 to
1); where the action mask forbids it, the first one that is allowed is taken. A name is a group of agents, or else a
policy of the run that is no group. Who is not named plays as trained. Behind an equals sign a number may be negative:
`--instead=-0.5,1`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchpod import random
from torchpod.actions import mask_by_choice, mask_of, random_action
from torchpod.agent import Agent
from torchpod.specs import Box, Discrete, EnvSpec, MultiDiscrete, SpecTree
from torchpod.types import ActorOutput, TimeStep, Tree

RANDOM = "random"
_STREAM = 0x5C21
"""Of the keys of random players."""


class Script(NamedTuple):
    """What some agents of a group play, or the one agent there is."""

    action: Tensor | None
    """Of the spec's shape; None: random."""
    who: Tensor | None
    """`[N]` bool, which of the group's; None: all."""


class Scripted(Agent):
    """An agent whose actions are replaced, those of all or of some.

    Args:
      agent: says the actions that are not.
      spec: of the environment.
      scripts: by group, or under None for an environment without.
    """

    def __init__(self, agent: Agent, spec: EnvSpec, scripts: dict[str | None, list[Script]]) -> None:
        super().__init__()
        self.agent, self.recurrent, self.may_fall_back = agent, agent.recurrent, agent.may_fall_back
        self.teams, self._spec, self._scripts = agent.teams, spec, scripts

    def initial_state(self, batch_size: int) -> Tree:
        """The agent's."""
        return self.agent.initial_state(batch_size)

    def act(self, timestep: TimeStep, state: Tree, keys: Tensor, explore: bool = True) -> tuple[ActorOutput, Tree]:
        """See `Agent.act`."""
        output, state = self.agent.act(timestep, state, keys, explore)
        drawn = random_action(self._spec, timestep.observation, random.fold_in(keys, _STREAM))
        if None in self._scripts:
            (script,) = self._scripts[None]
            return ActorOutput(self._said(None, script.action, drawn, timestep.observation), {}), state
        actions = dict(output.action)
        for group, scripts in self._scripts.items():
            for action, who in scripts:
                said = self._said(group, action, drawn[group], timestep.observation[group])
                actions[group] = said if who is None else _where(who, said, actions[group])
        return ActorOutput(actions, {}), state  # what the agent says besides is of its own actions

    def _said(self, group: str | None, action: Tensor | None, drawn: Tree, observation: Tree) -> Tree:
        if action is None:
            return drawn
        action = action.to(drawn.device).expand(drawn.shape)
        if (mask := mask_of(observation)) is None:
            return action
        spec = self._spec.action if group is None else self._spec.action[group]
        if isinstance(spec, Discrete):
            return _allowed(action, mask)
        if not isinstance(spec, MultiDiscrete):
            return action
        parts = zip(action.unbind(-1), mask_by_choice(mask, spec), strict=True)
        return torch.stack([_allowed(own, of) for own, of in parts], -1)


def scripted(agent: Agent, spec: EnvSpec, instead: Sequence[str]) -> Scripted:
    """An agent that plays as `instead` says, see the module; its weights are named `agent.NAME`.

    Raises:
      ValueError: if there is no such group or policy, or the action is none that one may choose.
    """
    scripts: dict[str | None, list[Script]] = {}
    sizes = spec.groups or {}
    for said in instead:
        name, _, action = said.rpartition("=")
        places: dict[str | None, Tensor | None] = dict.fromkeys(sizes or [None])
        if name in agent.teams:  # before a group of that name: a policy of other agents may be called like it
            places = {group: who for group, who in _places(agent, sizes, name).items() if bool(who.any())}
        elif name in sizes:
            places = {name: None}
        elif name:
            policies = f", the policies of the run {list(agent.teams)}" if agent.teams else ""
            raise ValueError(
                f"--instead {said}: the groups of {spec.name} are {list(sizes)}{policies}; name one of them, or none "
                "for all."
            )
        for group, who in places.items():
            for _, others in scripts.setdefault(group, []):
                if who is None or others is None or bool((who & others).any()):
                    told = group or "the agent"
                    raise ValueError(f"--instead {said}: {told} plays something else already; say it once.")
            own = spec.action if group is None else spec.action[group]
            scripts[group].append(Script(None if action == RANDOM else _action(said, own, action), who))
    return Scripted(agent, spec, scripts)


def _places(agent: Agent, sizes: Mapping[str, int], policy: str) -> dict[str | None, Tensor]:
    """Who follows a policy: by group `[N]` bool."""
    numbers = torch.arange(sum(sizes.values())).split(list(sizes.values()))
    chosen = agent.teams[policy](dict(zip(sizes, numbers, strict=True)), 0)
    return {group: torch.isin(own, chosen) for group, own in zip(sizes, numbers, strict=True)}


def _where(who: Tensor, said: Tree, own: Tree) -> Tree:
    """`said` `[B, N, ...]` for these agents, `[N]`, `own` for the others."""
    return pytree.tree_map(lambda a, b: torch.where(who.to(b.device).reshape(-1, *[1] * (b.ndim - 2)), a, b), said, own)


def _action(said: str, spec: SpecTree, text: str) -> Tensor:
    """The action, of the spec's shape and dtype."""
    if not isinstance(spec, Discrete | MultiDiscrete | Box):
        raise ValueError(f"--instead {said}: of actions {spec} only random is played.")
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--instead {said}: {text!r} is neither random nor numbers with commas between.") from None
    size = math.prod(spec.shape)
    if len(numbers) not in (1, size):
        raise ValueError(f"--instead {said}: an action has {size} numbers, not {len(numbers)}; give all, or one.")
    action = torch.tensor(numbers if len(numbers) == size else numbers * size).reshape(spec.shape)
    if not bool(_possible(spec, action).all()):
        raise ValueError(f"--instead {said}: {text} is not in {spec}.")
    return action.to(spec.dtype)


def _possible(spec: Discrete | MultiDiscrete | Box, action: Tensor) -> Tensor:
    if isinstance(spec, Box):
        return (action >= spec.low) & (action <= spec.high)
    limit = torch.tensor(spec.num_values if isinstance(spec, Discrete) else spec.nvec)
    return (action >= 0) & (action < limit) & (action == action.floor())


def _allowed(action: Tensor, mask: Tensor) -> Tensor:
    """`action` `[...]`, or the first that `mask` `[..., A]` allows."""
    allowed = mask.gather(-1, action.long()[..., None])[..., 0]
    return torch.where(allowed, action, mask.int().argmax(-1).to(action.dtype))

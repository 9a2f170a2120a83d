"""Players that follow no policy, to compare what was trained with: `torchpod eval RUN --instead planner=random`.

`random` draws every action that is allowed with equal probability; where a Box has no bounds, from -1 to 1, or 2 from
the one that it has. An action is numbers with commas between, `3` or `0.5,-1`: one for all, or one for each that an
agent chooses, in units of the spec (integers from 0; a Box of a host environment whose bounds differ is scaled to -1 to
1); where the action mask forbids it, the first one that is allowed is taken. Who is not named plays as trained. Behind
an equals sign a number may be negative: `--instead=-0.5,1`.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torchpod import random
from torchpod.actions import mask_by_choice, mask_of, random_action
from torchpod.agent import Agent
from torchpod.specs import Box, Discrete, EnvSpec, MultiDiscrete, SpecTree
from torchpod.types import ActorOutput, TimeStep, Tree

RANDOM = "random"
_STREAM = 0x5C21
"""Of the keys of random players."""


class Scripted(Agent):
    """An agent whose actions are replaced, those of all or of some groups.

    Args:
      agent: says the actions that are not.
      spec: of the environment.
      scripts: by group, or under None for an environment without: None for random, or the action, of the spec's shape.
    """

    def __init__(self, agent: Agent, spec: EnvSpec, scripts: dict[str | None, Tensor | None]) -> None:
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
            return output._replace(action=self._said(None, drawn, timestep.observation)), state
        said = {group: self._said(group, drawn[group], timestep.observation[group]) for group in self._scripts}
        return ActorOutput(output.action | said, output.extras), state

    def _said(self, group: str | None, drawn: Tree, observation: Tree) -> Tree:
        action = self._scripts[group]
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
      ValueError: if there is no such group, or the action is none that one may choose.
    """
    scripts: dict[str | None, Tensor | None] = {}
    known = list(spec.groups or ())
    for said in instead:
        group, _, action = said.rpartition("=")
        for name in [group] if group else known or [None]:
            if name is not None and name not in known:
                raise ValueError(
                    f"--instead {said}: the groups of {spec.name} are {known}; name one of them, or none for all."
                )
            if name in scripts:
                raise ValueError(f"--instead {said}: {name or 'the agent'} plays something else already; say it once.")
            own = spec.action if name is None else spec.action[name]
            scripts[name] = None if action == RANDOM else _action(said, own, action)
    return Scripted(agent, spec, scripts)


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

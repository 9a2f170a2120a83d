"""A PettingZoo ParallelEnv as a `gymnasium.Env` that is all of its agents, and what is put around a ParallelEnv.

Gymnasium's vector environments can then step many of them, in this process or in others. Imported by pettingzoo.py.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array
from pettingzoo.utils import BaseParallelWrapper
from pettingzoo.utils.conversions import turn_based_aec_to_parallel_wrapper

from torchpod.envs.host.gymnasium import require_number
from torchpod.envs.host.spaces import misfit

_ANSWERS = {
    "reset": ("observations", "infos"),
    "step": ("observations", "rewards", "terminations", "truncations", "infos"),
}
Groups = dict[str, list[Any]]
"""The agents of each group, in the order of their rows."""


class Joint(gymnasium.Env):
    """Observes `{group: {observation: [N, ...], reward: [N], alive: [N]}}`, and takes `{group: [N, ...]}`.

    An agent is alive while the environment lists it and does not end its part. Of who is not, the observation is 0, but
    for the final one. The episode is over when nobody is alive; if some of those who were left were truncated, and not
    terminated, it is truncated, and they count as alive at its end: their values go on.

    Args:
      make: makes a `pettingzoo.ParallelEnv`.
      groups: see `groups_of`.

    Raises:
      ValueError: if the groups are not right.
    """

    def __init__(self, make: Callable[[], Any], groups: Mapping[str, Sequence[Any]] | None = None) -> None:
        self.env = make()
        self.name = name_of(self.env)
        self.groups = groups_of(self.env, self.name, groups)
        self.in_turns = _in_turns(self.env)
        self._known = {agent for agents in self.groups.values() for agent in agents}
        self._alive: set[Any] = set()
        self.seen = {g: self.env.observation_space(agents[0]) for g, agents in self.groups.items()}
        self.acts = {g: self.env.action_space(agents[0]) for g, agents in self.groups.items()}
        self.observation_space = spaces.Dict({g: self._space(g, len(agents)) for g, agents in self.groups.items()})
        self.action_space = spaces.Dict({g: batch_space(self.acts[g], len(x)) for g, x in self.groups.items()})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begins an episode of everybody."""
        observation, _ = complete(self.env.reset(seed=seed, options=options), "reset", self.name)
        self._alive = self._listed()
        return self._said(observation, {}, self._alive), {}

    def step(self, action: dict[str, np.ndarray]) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Those whom the environment lists act."""
        listed, before = set(self.env.agents), self._alive
        rows = {g: list(zip(*x, strict=True)) if isinstance(x, tuple) else x for g, x in action.items()}
        chosen = {a: rows[g][i] for g, x in self.groups.items() for i, a in enumerate(x) if a in listed}
        observation, reward, terminated, truncated, _ = complete(self.env.step(chosen), "step", self.name)
        alive = {a for a in self._listed() if not (terminated.get(a) or truncated.get(a))}
        for agent in (alive & listed) - reward.keys():
            raise ValueError(f"{self.name} gave {agent} no reward; give everybody one who is in its agents.")
        over = not alive
        if over:
            alive = {a for a in before if truncated.get(a) and not terminated.get(a)}
        observation = {a: x for a, x in observation.items() if a in before or a in alive}
        reward = {a: x for a, x in reward.items() if a in before}
        self._alive = alive
        return self._said(observation, reward, alive), 0.0, over and not alive, over and bool(alive), {}

    def close(self) -> None:
        """Closes the environment."""
        self.env.close()

    def _listed(self) -> set[Any]:
        listed = set(self.env.agents)
        for agent in listed - self._known:
            raise ValueError(
                f"{self.name} has {agent} in its agents, and not in its possible_agents; list everybody there may ever "
                "be."
            )
        return listed

    def _space(self, group: str, num: int) -> spaces.Dict:
        reward = spaces.Box(-np.inf, np.inf, (num,), np.float64)
        return spaces.Dict(
            {"observation": batch_space(self.seen[group], num), "reward": reward, "alive": spaces.MultiBinary(num)}
        )

    def _said(self, observation: Mapping[Any, Any], reward: Mapping[Any, Any], alive: set[Any]) -> dict[str, Any]:
        for agent in alive - observation.keys():
            raise ValueError(f"{self.name} gave {agent} no observation; give everybody one who is in its agents.")
        for agent, x in reward.items():
            require_number(x, f"{self.name} gave {agent}")
        return {
            group: {
                "observation": self._rows(group, observation),
                "reward": np.array([reward.get(agent, 0.0) for agent in agents], np.float64),
                "alive": np.array([agent in alive for agent in agents], np.int8),
            }
            for group, agents in self.groups.items()
        }

    def _rows(self, group: str, observation: Mapping[Any, Any]) -> Any:
        agents, space = self.groups[group], self.seen[group]
        rows = [observation[agent] if agent in observation else zeros(space) for agent in agents]
        try:
            return concatenate(space, rows, create_empty_array(space, len(agents)))
        except ValueError as error:
            for agent, row in zip(agents, rows, strict=True):
                if (wrong := misfit(row, space)) is not None:
                    raise ValueError(f"{self.name} gave {agent} an observation {wrong}; make them agree.") from error
            raise


class Limited(BaseParallelWrapper):
    """Truncates everybody after so many steps."""

    def __init__(self, env: Any, max_episode_steps: int) -> None:
        super().__init__(env)
        self._most, self._count = max_episode_steps, 0

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """As the environment."""
        self._count = 0
        return self.env.reset(seed=seed, options=options)

    def step(self, actions: dict[Any, Any]) -> Any:
        """As the environment, until the limit."""
        self._count += 1
        observation, reward, terminated, truncated, infos = complete(self.env.step(actions), "step", name_of(self.env))
        if self._count >= self._most:
            truncated = dict.fromkeys([*actions, *self.env.agents], True)  # also who just came
        return observation, reward, terminated, truncated, infos


class Repeated(BaseParallelWrapper):
    """Takes actions `num` times, or until nobody is left to take them, or somebody comes; rewards add up."""

    def __init__(self, env: Any, num: int) -> None:
        super().__init__(env)
        self._num = num

    def step(self, actions: dict[Any, Any]) -> Any:
        """Up to `num` steps of the environment."""
        observation, reward, terminated, truncated, infos = {}, dict.fromkeys(actions, 0.0), {}, {}, {}
        for _ in range(self._num):
            listed = set(self.env.agents) - {a for a in actions if terminated.get(a) or truncated.get(a)}
            if not listed or not listed <= actions.keys():
                break
            answer = self.env.step({a: x for a, x in actions.items() if a in listed})
            found, gained, *rest = complete(answer, "step", name_of(self.env))
            told = listed | set(self.env.agents) - actions.keys()  # nothing changes for who has left
            reward |= {a: reward.get(a, 0.0) + float(r) for a, r in gained.items() if a in told}
            for whole, new in zip((observation, terminated, truncated, infos), (found, *rest), strict=True):
                whole |= {a: x for a, x in new.items() if a in told}
        return observation, reward, terminated, truncated, infos


def name_of(env: Any) -> str:
    """What errors call a ParallelEnv."""
    return str(getattr(env, "metadata", {}).get("name", type(env.unwrapped).__name__))


def complete(answer: Any, method: str, name: str) -> Any:
    """What `reset` or `step` returned; raises `ValueError` if it is not what PettingZoo asks for."""
    wanted = _ANSWERS[method]
    if not isinstance(answer, tuple) or len(answer) != len(wanted):
        came = f"{len(answer)} values" if isinstance(answer, tuple) else f"a {type(answer).__name__}"
        raise ValueError(
            f"{method}() must return {', '.join(wanted)}, and that of {name} returned {came}; return all "
            "of them, each a dict by agent."
        )
    for what, x in zip(wanted, answer, strict=True):
        if not isinstance(x, Mapping):
            raise ValueError(
                f"{method}() of {name} gave {what} as a {type(x).__name__}; give a dict with an entry for each agent."
            )
    return answer


def groups_of(env: Any, name: str, given: Mapping[str, Sequence[Any]] | None = None) -> Groups:
    """The agents of a ParallelEnv by group.

    Args:
      env: with `possible_agents`, everybody there may ever be.
      name: of the environment, for errors.
      given: agents by group, each in one. By default `adversary_0` and `adversary_1` are of group `adversary`, if they
        observe and act alike; a group of others with that prefix is named after its first agent.

    Raises:
      ValueError: if agents are unknown, in no group or in two, or those of a group do not observe and act alike.
    """
    agents = list(getattr(env, "possible_agents", None) or [])
    if not agents:
        raise ValueError(f"{name} has no possible_agents; list everybody there may ever be.")
    known, groups = {str(agent): agent for agent in agents}, {}
    if given is None:
        named = {}
        for agent in agents:
            kind = env.observation_space(agent), env.action_space(agent)
            same = [g for g, (prefix, x) in named.items() if (prefix, x) == (_prefix(agent), kind)]
            if not same:
                same = [_prefix(agent) if _prefix(agent) not in named else re.sub(r"\W", "_", str(agent))]
                named[same[0]] = _prefix(agent), kind
            groups.setdefault(same[0], []).append(agent)
        return groups
    told = f"{name} has the agents {', '.join(known)}"
    for group, members in given.items():
        unknown = [str(a) for a in members if str(a) not in known]
        if unknown or not members:
            raise ValueError(f"group {group} has agents {unknown or 'none'}, and {told}; name some of them.")
        groups[group] = [known[str(agent)] for agent in members]
        first, *others = groups[group]
        for agent in others:
            for what in (env.observation_space, env.action_space):
                if what(agent) != what(first):
                    raise ValueError(
                        f"group {group} has {first} with {what(first)} and {agent} with {what(agent)}; give them "
                        "groups of their own."
                    )
    for agent in agents:
        owners = [group for group, members in groups.items() if agent in members]
        if len(owners) != 1 or groups[owners[0]].count(agent) != 1:
            raise ValueError(f"{agent} of {name} is in groups {owners}; put every agent into exactly one, once.")
    return groups


def zeros(space: Any) -> Any:
    """An observation of zeros."""
    if isinstance(space, spaces.Dict):
        return {name: zeros(inner) for name, inner in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(zeros(inner) for inner in space)
    return np.zeros(space.shape, space.dtype)


def _in_turns(env: Any) -> bool:
    """Whether PettingZoo made it of agents that take turns: those who wait act as well, and nobody looks at it."""
    while isinstance(env, BaseParallelWrapper):
        env = env.env
    return isinstance(env, turn_based_aec_to_parallel_wrapper)


def _prefix(agent: Any) -> str:
    """`adversary` of `adversary_0`; agents that are numbers are of group `agent`."""
    return re.sub(r"\W", "_", re.sub(r"_?\d+$", "", str(agent))) or "agent"

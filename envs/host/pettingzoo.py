"""PettingZoo's parallel environments as host environments with groups of agents. Read gymnasium.py first."""

import dataclasses
import functools
import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils import _pytree as pytree

from torchpod.envs.arguments import needs_nothing
from torchpod.envs.host.gymnasium import Gymnasium
from torchpod.envs.host.spaces import action_of, masked, opened, spec_of, to_tensors
from torchpod.envs.host.timesteps import grouped_timestep
from torchpod.specs import EnvSpec
from torchpod.types import ACTION_MASK, TimeStep, Tree


class PettingZoo(Gymnasium):
    """A batch of `pettingzoo.ParallelEnv` behind the contract of `Env`; state None, everything on the CPU.

    Agents of equal names but for a number at the end, who observe and act alike, are a group. Everybody in
    `possible_agents` has a row from beginning to end: before an agent comes and after it left it is not alive
    (`extras["alive"]`), observes zeros and gets no reward. The step in which it leaves shows its final observation, and
    has discount 0, also where it alone is truncated: nothing is known of what comes after. The episode ends with
    its last agents; for those of them who are truncated, and not terminated, the discount is 1.

    Seeds, processes, resets and float actions are as in `Gymnasium`, which steps them. An `action_mask` in a Dict that
    is observed becomes bool, and allows everything where it allows nothing to those who are out of the game, at the end
    of an episode, or waiting for their turn. Of a MultiDiscrete this holds for each of its choices.

    Args:
      task: an id that is registered with PettingZoo, such as "sisl/pursuit-v5"; a module with a `parallel_env`, such as
        "mpe2.simple_spread_v3"; or a function without arguments that returns a ParallelEnv (also the class itself).
      groups: `{group: [agents]}` instead of names; every agent in one, and those of a group alike.
      processes: step in worker processes (forkserver), for steps that take long beside a message to a process and
        back; otherwise in the calling thread.
      options: keyword arguments of `pettingzoo.make` or `parallel_env`, for an id or a module.

    Raises:
      ImportError: if pettingzoo is not installed.
      ValueError: if the environment cannot be made or is none for several agents at a time; if groups are wrong; if an
        observation is none of Box, Discrete, MultiBinary, and Dict and Tuple of these; if an action is none of Box,
        Discrete, MultiDiscrete and Tuple of Discrete; or if options are given with a function. While it plays, if an
        agent that has to act gets no observation, or a mask that allows nothing, if `reset` or `step` returns anything
        but dicts by agent, or if there is an agent who is not in `possible_agents`.
    """

    def __init__(
        self,
        task: str | Callable[[], Any],
        *,
        groups: Mapping[str, Sequence[Any]] | None = None,
        processes: bool = False,
        **options: Any,
    ) -> None:
        if callable(task) and options:
            raise ValueError(f"{sorted(options)} are options of an id or a module; give them to {task} yourself.")
        if not isinstance(task, str):
            needs_nothing(task, "PettingZoo")
        _pettingzoo()
        from torchpod.envs.host.joint import Joint

        self._parallel = functools.partial(_made, task, options)
        self._agents = groups
        super().__init__(functools.partial(Joint, self._parallel, groups), processes=processes)

    def limited(self, max_episode_steps: int) -> "PettingZoo":
        """See `torchpod.envs.transforms.time_limit`."""
        from torchpod.envs.host.joint import Limited

        return self._around(functools.partial(Limited, max_episode_steps=max_episode_steps), max_episode_steps)

    def repeated(self, num: int) -> "PettingZoo":
        """See `torchpod.envs.transforms.action_repeat`."""
        from torchpod.envs.host.joint import Repeated

        limit = self.spec.max_episode_steps
        return self._around(functools.partial(Repeated, num=num), None if limit is None else -(-limit // num))

    def _around(self, wrap: Callable[[Any], Any], limit: int | None) -> "PettingZoo":
        make = self._parallel
        new = PettingZoo(lambda: wrap(make()), groups=self._agents, processes=self._processes)
        new.spec = dataclasses.replace(self.spec, max_episode_steps=limit)
        return new

    def _simulator(self, env: Any) -> Any:
        return super()._simulator(env).env.unwrapped

    def _described(self, probe: Any, name: str) -> tuple[EnvSpec, Callable[[Tree], Any]]:
        self._members, self._in_turns = probe.groups, probe.in_turns
        observation, action, to_native = {}, {}, {}
        for group in probe.groups:
            action[group], to_native[group] = action_of(probe.acts[group], f"{probe.name}: action_space of {group}")
            where = f"{probe.name}: observation_space of {group}"
            observation[group] = masked(spec_of(probe.seen[group], where), action[group], where)
        sizes = {group: len(agents) for group, agents in probe.groups.items()}

        def native(actions: dict[str, Tensor]) -> dict[str, Any]:
            flat = {group: to_native[group](x.flatten(0, 1).numpy()) for group, x in actions.items()}
            return {g: pytree.tree_map(lambda x, n=sizes[g]: x.reshape(-1, n, *x.shape[1:]), flat[g]) for g in flat}

        return EnvSpec(probe.name, observation, action, truncates_early=True, groups=sizes), native

    def _timestep(self, observation: Any, *outcome: np.ndarray) -> TimeStep:
        _, terminated, truncated = outcome
        groups = self.spec.groups or {}  # in their order, which spaces do not keep
        rewards, alive = ({g: observation[g][name] for g in groups} for name in ("reward", "alive"))
        goes_on = ~(terminated | truncated)[:, None]
        seen = {g: self._seen(g, observation[g]["observation"], (alive[g] != 0) & goes_on) for g in groups}
        timestep, self._was_last = grouped_timestep(seen, self._was_last, rewards, terminated, truncated, alive)
        return timestep

    def _seen(self, group: str, observation: Any, acts: np.ndarray) -> Tree:
        """With `acts` `[B, N]` bool, who acts in the next step."""
        lead = (-1, self.spec.groups[group]) if self.spec.groups else (-1,)
        flat = pytree.tree_map(lambda x: x.reshape(-1, *x.shape[2:]), observation)
        tensors = to_tensors(flat, self.spec.observation[group])
        if isinstance(tensors, dict) and ACTION_MASK in tensors:
            tensors[ACTION_MASK] = self._opened(group, tensors[ACTION_MASK], acts)
        return pytree.tree_map(lambda x: x.unflatten(0, lead), tensors)

    def _opened(self, group: str, mask: Tensor, acts: np.ndarray) -> Tensor:
        """A mask `[B * N, A]` that leaves a policy something in each choice: who does not act may do what it likes."""
        mask, stuck = opened(mask, self.spec.action[group], acts.flatten())
        if stuck is not None and not self._in_turns:
            (env, agent), choice = divmod(stuck[0], acts.shape[1]), stuck[1]
            raise ValueError(
                f"{self.spec.name} gave {self._members[group][agent]} an action_mask that allows nothing in choice "
                f"{choice}, in environment {env}; allow everybody something who is in its agents."
            )
        return mask


def _made(task: str | Callable[[], Any], options: dict[str, Any]) -> Any:
    """A ParallelEnv."""
    import pettingzoo

    if callable(task):
        env = task()
    else:
        # PettingZoo's own modules are old names of what it has registered.
        known = re.sub(r"^pettingzoo\.(\w+)\.(\w+)_v(\d+)$", r"\1/\2-v\3", task)
        try:
            if "/" in task or known in pettingzoo.parallel_registry:
                env = pettingzoo.make("parallel", known, **options)
            else:
                env = importlib.import_module(task).parallel_env(**options)
        except Exception as error:
            told = f"{type(error).__name__}: {error}".split("\n")[0].strip(" .")
            raise ValueError(f"PettingZoo cannot make {task} with {options}: {told}.") from error
    if not isinstance(env, pettingzoo.ParallelEnv):
        name = getattr(task, "__name__", type(env).__name__) if callable(task) else task
        kind = "an AECEnv, whose agents take turns" if isinstance(env, pettingzoo.AECEnv) else f"a {type(env).__name__}"
        raise ValueError(f"{name} gives {kind}; use a pettingzoo.ParallelEnv.")
    return env


def _pettingzoo() -> Any:
    try:
        return importlib.import_module("pettingzoo")
    except ImportError as error:
        raise ImportError("PettingZoo needs the package pettingzoo: pip install 'torchpod-rl[pettingzoo]'.") from error

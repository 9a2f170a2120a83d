"""Evaluation: the greedy policy, or one that samples, fresh keys, the first complete episode of each environment.

Returns are sums of raw rewards up to the true game over, whatever clipping or episodic life the agent trained with.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchpod import random
from torchpod.agent import Agent, Variables
from torchpod.compile import Compiler
from torchpod.env import Env
from torchpod.rollout import make_step, start
from torchpod.types import FIRST, Carry

MAX_STEPS = 10_000
"""Where an episode without a time limit is cut."""


class Evaluation(NamedTuple):
    """Outcome per episode; a leading P axis in a population."""

    returns: Tensor
    """`[E]` float32, sum of raw rewards (groups: sum over groups of the mean over agents)."""
    lengths: Tensor
    """`[E]` int64, transitions; resets between the lives of a game are none."""
    finished: Tensor
    """`[E]` bool; False where `max_steps` transitions came before the end of the episode."""
    groups: dict[str, Tensor]
    """By group `[E]`, what its mean agent received; their sum are the returns. Empty where there are no groups."""
    teams: dict[str, Tensor]
    """The same of `Agent.teams`."""
    episode: dict[str, Tensor]
    """`[E]`, what the environment says of the episode at its end (`TimeStep.extras`); 0 where it did not end."""


class Evaluator:
    """Plays one episode in each of `num_episodes` environments, as often as it is called; it compiles once.

    Args:
      agent: the agent; only its methods are used.
      env: the environment; a host environment is stepped uncompiled.
      key: `[3]`; every call, and every member of a population, plays the same episodes.
      num_episodes: E.
      compiler: how to compile; eager if None.
      max_steps: transitions, behind which an episode is cut; by default the time limit of the environment, else
        `MAX_STEPS`.
      num_envs: how many environments on the host there may be at once: more episodes are played in rounds. Of those
        that are made several at once (`Env.rows_each`) there are at least so many, and some episodes may not count.
      explore: draw actions as in training, instead of the greedy ones.
    """

    def __init__(
        self,
        agent: Agent,
        env: Env,
        key: Tensor,
        *,
        num_episodes: int,
        compiler: Compiler | None = None,
        max_steps: int | None = None,
        num_envs: int | None = None,
        explore: bool = False,
    ) -> None:
        compiler = compiler or Compiler(enabled=False)
        self._agent, self._env, self._population = agent, env, compiler.population
        self._max_steps = max_steps or env.spec.max_episode_steps or MAX_STEPS
        self._act_and_step = make_step(agent, env, explore=explore)
        pure = env.traits.pure
        self._step = compiler(self._advance, fall_back=agent.may_fall_back) if pure else self._advance
        rows = getattr(env, "rows_each", 1)
        self._num_episodes, total = num_episodes, -(-num_episodes // rows) * rows
        each = total if pure or num_envs is None else max(num_envs // rows, 1) * rows
        self._rounds = [*zip(*(random.split(k, total).split(each) for k in random.split(key, 2)), strict=True)]

    def __call__(self, variables: Variables, failure: Callable[[], Exception | None] = lambda: None) -> Evaluation:
        """Plays.

        Args:
          variables: parameters and buffers, with a leading P axis if there is a population.
          failure: returns what has failed elsewhere, or None; asked in every step, and what it returns is raised.
        """
        parts = (self._play(variables, failure, *keys) for keys in self._rounds)
        return pytree.tree_map(lambda *xs: torch.cat(xs, -1)[..., : self._num_episodes], *parts)

    def prepare(self, variables: Variables) -> None:
        """Compiles what a call needs: plays one step."""
        with torch.no_grad():
            self._step(variables, *self._begin(*self._rounds[0]))

    def _play(
        self, variables: Variables, failure: Callable[[], Exception | None], env_keys: Tensor, actor_keys: Tensor
    ) -> Evaluation:
        """One episode per key, all at once."""
        with torch.no_grad():
            carry, env_keys, actor_keys, score = self._begin(env_keys, actor_keys)
            for i in range(1, 2 * self._max_steps + 1):  # between two resets there is a transition
                carry, score = self._step(variables, carry, env_keys, actor_keys, score)
                if (failed := failure()) is not None:
                    raise failed
                looks = i % 32 == 0 or i == self._max_steps or not self._env.traits.pure
                if looks and bool((score.finished | (score.lengths >= self._max_steps)).all()):
                    break
        return score

    def _begin(self, env_keys: Tensor, actor_keys: Tensor) -> tuple[Carry, Tensor, Tensor, Evaluation]:
        num_episodes, device = len(env_keys), env_keys.device
        carry = start(self._agent, self._env, env_keys)
        parts = self._env.spec.groups or {}, self._agent.teams, carry.timestep.extras.get("episode", {})
        score = Evaluation(
            torch.zeros(num_episodes, device=device),
            torch.zeros(num_episodes, dtype=torch.int64, device=device),
            torch.zeros(num_episodes, dtype=torch.bool, device=device),
            *({name: torch.zeros(num_episodes, device=device) for name in sorted(names)} for names in parts),
        )
        state = (carry, env_keys, actor_keys, score)
        if self._population > 1:
            state = pytree.tree_map(lambda x: x.expand(self._population, *x.shape).clone(), state)
        return state

    def _advance(
        self, variables: Variables, carry: Carry, env_keys: Tensor, actor_keys: Tensor, score: Evaluation
    ) -> tuple[Carry, Evaluation]:
        carry, _ = self._act_and_step(variables, carry, env_keys, actor_keys)
        extras, num_episodes = carry.timestep.extras, env_keys.shape[0]
        done = score.finished | (score.lengths >= self._max_steps)
        received, over = extras["raw_reward"], ~done & extras["game_over"]
        teams = {name: self._agent.teams[name](received, 1) for name in score.teams}
        raw, teams = pytree.tree_map(lambda x: x.reshape(num_episodes, -1).mean(-1), (received, teams))
        reward = sum(pytree.tree_leaves(raw))
        moved = (carry.timestep.step_type != FIRST) & ~done  # the reset between two lives is no step
        return carry, Evaluation(
            returns=torch.where(done, score.returns, score.returns + reward),
            lengths=score.lengths + moved,
            finished=score.finished | over,
            groups={name: torch.where(done, x, x + raw[name]) for name, x in score.groups.items()},
            teams={name: torch.where(done, x, x + teams[name]) for name, x in score.teams.items()},
            episode={name: torch.where(over, extras["episode"][name], x) for name, x in score.episode.items()},
        )


def evaluate(agent: Agent, env: Env, variables: Variables, key: Tensor, **how: Any) -> Evaluation:
    """Plays once with these variables; the other arguments are those of `Evaluator`."""
    return Evaluator(agent, env, key, **how)(variables)

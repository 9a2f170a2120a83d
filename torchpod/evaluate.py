"""Evaluation: the greedy policy, or one that samples, fresh keys, the first complete episode of each environment.

Returns are sums of raw rewards up to the true game over, whatever clipping or episodic life the agent trained with.
"""

from typing import NamedTuple

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


def evaluate(
    agent: Agent,
    env: Env,
    variables: Variables,
    key: Tensor,
    *,
    num_episodes: int,
    compiler: Compiler | None = None,
    max_steps: int | None = None,
    num_envs: int | None = None,
    explore: bool = False,
) -> Evaluation:
    """Plays one episode in each of `num_episodes` environments.

    Args:
      agent: the agent; only its methods are used.
      env: the environment; a host environment is stepped uncompiled.
      variables: parameters and buffers; with a leading P axis if the compiler's population is above 1.
      key: `[3]`; every member of a population plays the same episodes.
      num_episodes: E.
      compiler: how to compile; eager if None.
      max_steps: transitions, behind which an episode is cut; by default the time limit of the environment, else
        `MAX_STEPS`.
      num_envs: how many environments on the host there may be at once: more episodes are played in rounds.
      explore: draw actions as in training, instead of the greedy ones.
    """
    compiler = compiler or Compiler(enabled=False)
    max_steps = max_steps or env.spec.max_episode_steps or MAX_STEPS
    each = num_episodes if env.traits.pure else num_envs or num_episodes
    shares = [random.split(k, num_episodes).split(each) for k in random.split(key, 2)]
    rounds = [
        _play(agent, env, variables, env_keys, actor_keys, compiler, max_steps, explore)
        for env_keys, actor_keys in zip(*shares, strict=True)
    ]
    return pytree.tree_map(lambda *parts: torch.cat(parts, -1), *rounds)


def _play(
    agent: Agent,
    env: Env,
    variables: Variables,
    env_keys: Tensor,
    actor_keys: Tensor,
    compiler: Compiler,
    max_steps: int,
    explore: bool,
) -> Evaluation:
    """One episode per key, all at once."""
    step, num_episodes, device = make_step(agent, env, explore=explore), len(env_keys), env_keys.device

    def advance(
        variables: Variables, carry: Carry, env_keys: Tensor, actor_keys: Tensor, score: Evaluation
    ) -> tuple[Carry, Evaluation]:
        carry, _ = step(variables, carry, env_keys, actor_keys)
        extras = carry.timestep.extras
        done = score.finished | (score.lengths >= max_steps)
        received, over = extras["raw_reward"], ~done & extras["game_over"]
        teams = {name: agent.teams[name](received, 1) for name in score.teams}
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

    with torch.no_grad():
        carry = start(agent, env, env_keys)
        parts = env.spec.groups or {}, agent.teams, carry.timestep.extras.get("episode", {})
        score = Evaluation(
            torch.zeros(num_episodes, device=device),
            torch.zeros(num_episodes, dtype=torch.int64, device=device),
            torch.zeros(num_episodes, dtype=torch.bool, device=device),
            *({name: torch.zeros(num_episodes, device=device) for name in sorted(names)} for names in parts),
        )
        state = (carry, env_keys, actor_keys, score)
        if compiler.population > 1:
            state = pytree.tree_map(lambda x: x.expand(compiler.population, *x.shape).clone(), state)
        carry, env_keys, actor_keys, score = state
        pure = env.traits.pure
        compiled = compiler(advance, fall_back=agent.may_fall_back) if pure else advance
        for i in range(1, 2 * max_steps + 1):  # between two resets there is a transition
            carry, score = compiled(variables, carry, env_keys, actor_keys, score)
            looks = i % 32 == 0 or i == max_steps or not pure
            if looks and bool((score.finished | (score.lengths >= max_steps)).all()):
                break
    return score

"""Evaluation: the greedy policy, fresh keys, the first complete episode of each environment.

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


class Evaluation(NamedTuple):
    """Outcome per episode; a leading P axis in a population."""

    returns: Tensor
    """`[E]` float32, sum of raw rewards (groups: sum over groups of the mean over agents)."""
    lengths: Tensor
    """`[E]` int64, transitions; resets between the lives of a game are none."""
    finished: Tensor
    """`[E]` bool; False where `max_steps` came before the end of the episode."""


def evaluate(
    agent: Agent,
    env: Env,
    variables: Variables,
    key: Tensor,
    *,
    num_episodes: int,
    compiler: Compiler | None = None,
    max_steps: int | None = None,
) -> Evaluation:
    """Plays one episode in each of `num_episodes` environments.

    Args:
      agent: the agent; only its methods are used.
      env: the environment; a host environment is stepped uncompiled.
      variables: parameters and buffers; with a leading P axis if the compiler's population is above 1.
      key: `[3]`; every member of a population plays the same episodes.
      num_episodes: E.
      compiler: how to compile; eager if None.
      max_steps: stop unfinished episodes here; by default at the time limit of the environment, else 10,000.
    """
    compiler = compiler or Compiler(enabled=False)
    step = make_step(agent, env, explore=False)
    keys = random.split(key, 2)
    env_keys, actor_keys = random.split(keys[0], num_episodes), random.split(keys[1], num_episodes)

    def advance(
        variables: Variables, carry: Carry, env_keys: Tensor, actor_keys: Tensor, score: Evaluation
    ) -> tuple[Carry, Evaluation]:
        carry, _ = step(variables, carry, env_keys, actor_keys)
        raw = pytree.tree_leaves(carry.timestep.extras["raw_reward"])
        reward = sum(leaf.reshape(num_episodes, -1).mean(-1) for leaf in raw)
        returns = torch.where(score.finished, score.returns, score.returns + reward)
        moved = (carry.timestep.step_type != FIRST) & ~score.finished  # the reset between two lives is no step
        lengths = score.lengths + moved
        return carry, Evaluation(returns, lengths, score.finished | carry.timestep.extras["game_over"])

    with torch.no_grad():
        carry = start(agent, env, env_keys)
        score = Evaluation(
            torch.zeros(num_episodes, device=key.device),
            torch.zeros(num_episodes, dtype=torch.int64, device=key.device),
            torch.zeros(num_episodes, dtype=torch.bool, device=key.device),
        )
        state = (carry, env_keys, actor_keys, score)
        if compiler.population > 1:
            state = pytree.tree_map(lambda x: x.expand(compiler.population, *x.shape).clone(), state)
        carry, env_keys, actor_keys, score = state
        pure = env.traits.pure
        compiled = compiler(advance) if pure else advance
        for i in range(max_steps or env.spec.max_episode_steps or 10_000):
            carry, score = compiled(variables, carry, env_keys, actor_keys, score)
            if (i % 32 == 31 or not pure) and bool(score.finished.all()):
                break
    return score

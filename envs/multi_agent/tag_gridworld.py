"""TagGridWorld: taggers chase a runner over a board of cells.

The discrete Tag of WarpDrive, Lan et al. 2021 (https://arxiv.org/abs/2108.13976): rules, rewards and observations are
those of its `TagGridWorld`. Time-outs truncate, and starts may be random, which it has not.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from torchpod import random
from torchpod.env import TensorEnv
from torchpod.envs.arguments import at_least, number, one_of, true_or_false
from torchpod.specs import Box, Discrete, EnvSpec
from torchpod.types import Tree

STARTS = ("center", "scattered", "uniform")


class TagGridWorldState(NamedTuple):
    """Of all A agents, the taggers first and the runner last."""

    x: Tensor
    """`[B, A]` int32, from 0 to `grid_length`, both included."""
    y: Tensor
    """`[B, A]` int32."""
    time: Tensor
    """`[B]` int32, steps since the start."""


class TagGridWorld(TensorEnv):
    """All move at once; the runner is tagged, and the episode terminates, when a tagger is in its cell after the move.

    Groups: `tagger` and `runner`, who is alone. Actions: 0 stay, 1 +x, 2 -x, 3 +y, 4 -y. Agents may share a cell, and
    two that swap theirs do not meet. Whoever moves against a wall stays and pays for it.

    Observation, full: `[4 A + 1]`, the x of all A agents, their y, who is the runner, who one is oneself, the time.
    Partial: `[6]`, one's own x and y, those of the runner (for taggers) or of the nearest tagger (for the runner; of
    equally near ones the first), whether one is the runner, the time. Positions are in board lengths, time in episodes.

    Reports `episode_tag_rate`: the share of episodes that ended with the runner tagged.

    Args:
      num_taggers: in group `tagger`.
      grid_length: coordinates go from 0 to this, so that there are (grid_length + 1)^2 cells.
      start: center: the taggers in the middle and the runner in the corner (0, 0); scattered: each tagger in a random
        cell away from the walls, the runner in the corner; uniform: everybody in any cell.
      wall_hit_penalty: paid for moves against a wall.
      tag_reward_for_tagger: every tagger gets it, whoever of them tags.
      tag_penalty_for_runner: paid when tagged.
      step_cost_for_tagger: each tagger pays it, and the runner gets it, in steps without a tag.
      use_full_observation: or the partial one.
      max_episode_steps: the time limit.
    """

    def __init__(
        self,
        num_taggers: int = 4,
        grid_length: int = 100,
        start: str = "center",
        wall_hit_penalty: float = 0.1,
        tag_reward_for_tagger: float = 10.0,
        tag_penalty_for_runner: float = 5.0,
        step_cost_for_tagger: float = 0.01,
        use_full_observation: bool = True,
        max_episode_steps: int = 100,
    ) -> None:
        at_least(1, num_taggers=num_taggers, max_episode_steps=max_episode_steps)
        at_least(2, grid_length=grid_length)
        one_of("start", start, STARTS)
        true_or_false(use_full_observation=use_full_observation)
        self.num_taggers, self.num_agents = num_taggers, num_taggers + 1
        self.grid_length, self.start = grid_length, start
        self.wall_hit_penalty = number("wall_hit_penalty", wall_hit_penalty)
        self.tag_reward_for_tagger = number("tag_reward_for_tagger", tag_reward_for_tagger)
        self.tag_penalty_for_runner = number("tag_penalty_for_runner", tag_penalty_for_runner)
        self.step_cost_for_tagger = number("step_cost_for_tagger", step_cost_for_tagger)
        self.use_full_observation, self.max_episode_steps = use_full_observation, max_episode_steps
        seen = Box((4 * self.num_agents + 1 if use_full_observation else 6,), 0.0, 1.0)
        groups = {"tagger": num_taggers, "runner": 1}
        self.spec = EnvSpec(
            "tag_gridworld",
            dict.fromkeys(groups, seen),
            dict.fromkeys(groups, Discrete(5)),
            max_episode_steps,
            groups=groups,
        )

    def reset(self, keys: Tensor) -> TagGridWorldState:
        """Everybody in place."""
        time = torch.zeros(keys.shape[:-1], dtype=torch.int32, device=keys.device)
        is_runner = self._is_runner(keys)
        if self.start == "center":
            x = time[..., None] + torch.where(is_runner, 0, self.grid_length // 2).int()
            return TagGridWorldState(x, x, time)
        words = random.bits(keys, 2 * self.num_agents).chunk(2, -1)
        if self.start == "uniform":
            x, y = (random.to_integer(w, self.grid_length + 1).int() for w in words)
        else:
            x, y = (torch.where(is_runner, 0, 1 + random.to_integer(w, self.grid_length - 1)).int() for w in words)
        return TagGridWorldState(x, y, time)

    def transition(
        self, state: TagGridWorldState, action: dict[str, Tensor], keys: Tensor
    ) -> tuple[TagGridWorldState, dict[str, Tensor], Tensor]:
        """Everybody moves, then the cells are compared."""
        chosen, n = torch.cat([action["tagger"], action["runner"]], -1), self.num_taggers
        to_x = state.x + (chosen == 1).int() - (chosen == 2).int()
        to_y = state.y + (chosen == 3).int() - (chosen == 4).int()
        x, y = to_x.clamp(0, self.grid_length), to_y.clamp(0, self.grid_length)
        wall = self.wall_hit_penalty * ((x != to_x) | (y != to_y)).float()
        tagged = self._tagged(x, y)
        tagger = torch.where(tagged, self.tag_reward_for_tagger, -self.step_cost_for_tagger) - wall[..., :n]
        runner = torch.where(tagged, -self.tag_penalty_for_runner, self.step_cost_for_tagger) - wall[..., n:]
        return TagGridWorldState(x, y, state.time + 1), {"tagger": tagger, "runner": runner}, tagged[..., 0]

    def observe(self, state: TagGridWorldState) -> dict[str, Tensor]:
        """`[B, N, 4 A + 1]` or `[B, N, 6]` per group."""
        n, size = self.num_taggers, (*state.x.shape, -1)
        x, y = (place.float() / self.grid_length for place in (state.x, state.y))
        time = (state.time.float() / self.max_episode_steps)[..., None, None].expand(*state.x.shape, 1)
        is_runner = self._is_runner(x).float()
        if self.use_full_observation:
            same = torch.eye(self.num_agents, device=x.device).expand(size)
            everybody = torch.cat([x, y, is_runner.expand_as(x)], -1)[..., None, :].expand(size)
            seen = torch.cat([everybody, same, time], -1)
        else:
            dx, dy = (place[..., :n] - place[..., n:] for place in (state.x, state.y))
            nearest = (dx * dx + dy * dy).argmin(-1, keepdim=True)  # of equal ones the first
            others = (torch.where(is_runner == 1, p.gather(-1, nearest), p[..., n:]) for p in (x, y))
            # Agents last, and then turned: so the compiler vectorises.
            seen = torch.stack([x, y, *others, is_runner.expand_as(x), time[..., 0]], -2).transpose(-1, -2)
        return {"tagger": seen[..., :n, :], "runner": seen[..., n:, :]}

    def extras(self, state: TagGridWorldState) -> dict[str, Tree]:
        """Of an episode, whether the runner was tagged: 1 or 0."""
        return {"episode": {"tag_rate": self._tagged(state.x, state.y)[..., 0].float()}}

    def _tagged(self, x: Tensor, y: Tensor) -> Tensor:
        """`[B, 1]` bool: a tagger is in the runner's cell."""
        n = self.num_taggers
        return ((x[..., :n] == x[..., n:]) & (y[..., :n] == y[..., n:])).any(-1, keepdim=True)

    def _is_runner(self, like: Tensor) -> Tensor:
        """`[A]` bool."""
        return torch.arange(self.num_agents, device=like.device) == self.num_taggers

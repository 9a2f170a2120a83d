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
_LONGEST = 2**15 - 1
"""Of the sides: squares of distances are int32."""


class TagGridWorldState(NamedTuple):
    """Where the taggers are, and the runner: apart, so that what taggers do compiles to few loops."""

    x: dict[str, Tensor]
    """Per group `[B, N]` int32, from 0 to `grid_length`, both included."""
    y: dict[str, Tensor]
    """Per group `[B, N]` int32."""
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
      start: center: the taggers in the middle and the runner in the corner (0, 0), in every episode and environment
        alike; scattered: each tagger in a random cell away from the walls, the runner in the corner; uniform: everybody
        in any cell.
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
        if grid_length > _LONGEST:
            raise ValueError(f"grid_length={grid_length} must be at most {_LONGEST}.")
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
        corner = {"runner": torch.zeros_like(time)[..., None]}
        if self.start == "center":
            middle = torch.full((self.num_taggers,), self.grid_length // 2, dtype=torch.int32, device=keys.device)
            place = {"tagger": time[..., None] + middle} | corner
            return TagGridWorldState(place, place, time)
        words = (self._groups(w) for w in random.bits(keys, 2 * self.num_agents).chunk(2, -1))
        if self.start == "uniform":
            x, y = ({g: random.to_integer(w[g], self.grid_length + 1).int() for g in w} for w in words)
        else:
            inside = (1 + random.to_integer(w["tagger"], self.grid_length - 1) for w in words)
            x, y = ({"tagger": place.int()} | corner for place in inside)
        return TagGridWorldState(x, y, time)

    def transition(
        self, state: TagGridWorldState, action: dict[str, Tensor], keys: Tensor
    ) -> tuple[TagGridWorldState, dict[str, Tensor], Tensor]:
        """Everybody moves, then the cells are compared."""
        x, y, wall = {}, {}, {}
        for group in state.x:
            chosen = action[group].int()
            to_x = state.x[group] + (chosen == 1).int() - (chosen == 2).int()
            to_y = state.y[group] + (chosen == 3).int() - (chosen == 4).int()
            x[group], y[group] = to_x.clamp(0, self.grid_length), to_y.clamp(0, self.grid_length)
            wall[group] = self.wall_hit_penalty * ((x[group] != to_x) | (y[group] != to_y)).float()
        tagged = self._tagged(x, y)
        tagger = torch.where(tagged, self.tag_reward_for_tagger, -self.step_cost_for_tagger) - wall["tagger"]
        runner = torch.where(tagged, -self.tag_penalty_for_runner, self.step_cost_for_tagger) - wall["runner"]
        return TagGridWorldState(x, y, state.time + 1), {"tagger": tagger, "runner": runner}, tagged[..., 0]

    def observe(self, state: TagGridWorldState) -> dict[str, Tensor]:
        """`[B, N, 4 A + 1]` or `[B, N, 6]` per group."""
        time = (state.time.float() / self.max_episode_steps)[..., None]
        if self.use_full_observation:
            x, y = (
                torch.cat([place["tagger"], place["runner"]], -1).float() / self.grid_length
                for place in (state.x, state.y)
            )
            size = (*x.shape, -1)
            same = torch.eye(self.num_agents, device=x.device)
            everybody = torch.cat([x, y, same[-1].expand_as(x)], -1)[..., None, :].expand(size)
            seen = torch.cat([everybody, same.expand(size), time[..., None].expand(*x.shape, 1)], -1)
            return self._groups(seen, -2)
        dx, dy = (place["tagger"] - place["runner"] for place in (state.x, state.y))
        nearest = (dx * dx + dy * dy).argmin(-1, keepdim=True)  # of equal ones the first
        own = {g: (state.x[g], state.y[g]) for g in state.x}
        others = {"tagger": own["runner"], "runner": tuple(p.gather(-1, nearest) for p in own["tagger"])}
        seen = {}
        for group, places in own.items():
            near = (place.float() / self.grid_length for place in (*places, *others[group]))
            is_runner = torch.full_like(time, float(group == "runner"))
            # Agents last, and then turned: so the compiler vectorises.
            columns = [x.expand(*x.shape[:-1], places[0].shape[-1]) for x in (*near, is_runner, time)]
            seen[group] = torch.stack(columns, -2).transpose(-1, -2)
        return seen

    def extras(self, state: TagGridWorldState) -> dict[str, Tree]:
        """Of an episode, whether the runner was tagged: 1 or 0."""
        return {"episode": {"tag_rate": self._tagged(state.x, state.y)[..., 0].float()}}

    def _tagged(self, x: dict[str, Tensor], y: dict[str, Tensor]) -> Tensor:
        """`[B, 1]` bool: a tagger is in the runner's cell."""
        return ((x["tagger"] == x["runner"]) & (y["tagger"] == y["runner"])).any(-1, keepdim=True)

    def _groups(self, everybody: Tensor, axis: int = -1) -> dict[str, Tensor]:
        """The runner is the last."""
        tagger, runner = everybody.split([self.num_taggers, 1], axis)
        return {"tagger": tagger, "runner": runner}

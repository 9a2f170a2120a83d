"""FourRooms: find the goal in a house of four rooms, with doors between them and a floor that slips.

Sutton, Precup and Singh 1999, "Between MDPs and semi-MDPs" (https://doi.org/10.1016/S0004-3702(99)00052-1), figure 2,
with the defaults of gymnax's FourRooms-misc, which terminates at the goal.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchpod import random
from torchpod.env import TensorEnv
from torchpod.envs.arguments import at_least, number, true_or_false
from torchpod.specs import Box, Discrete, EnvSpec

SIZE = 13
GOAL, START = [8, 9], [4, 1]


class FourRoomsState(NamedTuple):
    """Positions (row, column), each `[B, 2]` int64."""

    agent: Tensor
    goal: Tensor


class FourRooms(TensorEnv):
    """Reward 1 at the goal, where the episode terminates; else 0.

    Actions: 0 up, 1 right, 2 down, 3 left. With `fail_probability` one of the other three directions is taken instead,
    each as likely; a move into a wall does not happen. Observation `[B, 4]`: row and column of the agent, then of the
    goal, each from 1 to 11; or with `image` `[B, 13, 13, 3]`: 1 at walls, at the agent, at the goal.

    Args:
      goal: (row, column), or None for a random cell each episode.
      start: (row, column) of the agent, or None for a random cell each episode; never the goal's, if one is random.
      fail_probability: how often a move goes another way.
      image: observe an image instead of four numbers.
      max_episode_steps: the time limit.
    """

    def __init__(
        self,
        goal: Sequence[int] | None = GOAL,
        start: Sequence[int] | None = START,
        fail_probability: float = 1 / 3,
        image: bool = False,
        max_episode_steps: int = 500,
    ) -> None:
        at_least(1, max_episode_steps=max_episode_steps)
        true_or_false(image=image)
        self.goal, self.start = _check_cell("goal", goal), _check_cell("start", start)
        if self.goal is not None and self.goal == self.start:
            raise ValueError(f"goal and start are both {list(self.goal)}; use two different cells.")
        self.fail_probability = number("fail_probability", fail_probability, 0.0, 1.0)
        self.image = image
        observation = Box((SIZE, SIZE, 3), 0.0, 1.0) if image else Box((4,), 1.0, SIZE - 2.0)
        self.spec = EnvSpec("four_rooms", observation, Discrete(4), max_episode_steps)

    def reset(self, keys: Tensor) -> FourRoomsState:
        """Agent and goal in their places, the random ones in free cells."""
        words = random.bits(keys, 2)
        if self.goal is not None:
            goal = _fixed(self.goal, keys)
            return FourRoomsState(
                _random_cell(words[..., 1], goal) if self.start is None else _fixed(self.start, keys), goal
            )
        start = _random_cell(words[..., 1], None) if self.start is None else _fixed(self.start, keys)
        return FourRoomsState(start, _random_cell(words[..., 0], start))

    def transition(self, state: FourRoomsState, action: Tensor, keys: Tensor) -> tuple[FourRoomsState, Tensor, Tensor]:
        """Slips or not, and moves."""
        words = random.bits(keys, 2)
        fails = random.to_uniform(words[..., 0]) < self.fail_probability
        action = torch.where(fails, (action + 1 + random.to_integer(words[..., 1], 3)) % 4, action)
        row, column = state.agent.unbind(-1)
        new_row = row + (action == 2).long() - (action == 0).long()
        new_column = column + (action == 1).long() - (action == 3).long()
        moved = torch.stack([new_row, new_column], -1)
        agent = torch.where(is_wall(new_row, new_column)[..., None], state.agent, moved)
        found = (agent == state.goal).all(-1)
        return FourRoomsState(agent, state.goal), found.float(), found

    def observe(self, state: FourRoomsState) -> Tensor:
        """Positions `[B, 4]`, or the image `[B, 13, 13, 3]`."""
        if not self.image:
            return torch.cat([state.agent, state.goal], -1).float()
        row = torch.arange(SIZE, device=state.agent.device)[:, None]
        column = torch.arange(SIZE, device=state.agent.device)
        agent, goal = (
            (row == x[..., 0, None, None]) & (column == x[..., 1, None, None]) for x in (state.agent, state.goal)
        )
        return torch.stack([is_wall(row, column).expand_as(agent), agent, goal], -1).float()


def is_wall(row: Any, column: Any) -> Any:
    """The house: walls around and between the rooms, with four doors.

    Args:
      row: integers in [0, 13): tensors that broadcast with `column`, or plain numbers.
      column: likewise.
    """
    border = (row == 0) | (row == SIZE - 1) | (column == 0) | (column == SIZE - 1)
    middle = (column == 6) & (row != 3) & (row != 10)
    left = (row == 6) & (column < 6) & (column != 2)
    right = (row == 7) & (column > 6) & (column != 9)
    return border | middle | left | right


def _random_cell(word: Tensor, other: Tensor | None) -> Tensor:
    """A random free cell `[B, 2]`, but not `other` `[B, 2]`."""
    index = torch.arange(SIZE, device=word.device)
    # [169]: the number of each free cell, counted row by row; walls have that of the free cell before them.
    count = (~is_wall(index[:, None], index)).flatten().cumsum(0)
    total = NUM_FREE if other is None else NUM_FREE - 1
    number_ = random.to_integer(word, total)
    if other is not None:
        cell = other[..., 0] * SIZE + other[..., 1]
        taken = count.expand(*cell.shape, -1).gather(-1, cell[..., None])[..., 0] - 1
        number_ = number_ + (number_ >= taken)
    cell = (count <= number_[..., None]).sum(-1)
    return torch.stack([cell // SIZE, cell % SIZE], -1)


NUM_FREE = sum(not is_wall(row, column) for row in range(SIZE) for column in range(SIZE))


def _fixed(cell: tuple[int, int], keys: Tensor) -> Tensor:
    row = torch.full(keys.shape[:-1], cell[0], dtype=torch.int64, device=keys.device)
    return torch.stack([row, torch.full_like(row, cell[1])], -1)


def _check_cell(name: str, cell: Any) -> tuple[int, int] | None:
    if cell is None:
        return None
    good = isinstance(cell, Sequence) and len(cell) == 2 and all(type(x) is int and 0 <= x < SIZE for x in cell)
    if not good or is_wall(*cell):
        raise ValueError(
            f"{name}={cell!r} is wrong; use [row, column] of a free cell, e.g. [1, 1], or null for a random one."
        )
    return cell[0], cell[1]

"""MinAtar's Breakout: keep a ball in play and break bricks with it.

Rules of Young and Tian 2019 (https://arxiv.org/abs/1903.03176), step for step those of the `minatar` package.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from torchpod import random
from torchpod.env import TensorEnv
from torchpod.envs.minatar.board import SIDE, Actions, Board

PADDLE, BALL, TRAIL, BRICK = range(4)
WALL = 2**30 - 1
"""All bricks: rows 1 to 3, bit 10 * (row - 1) + column."""


class BreakoutState(NamedTuple):
    """All `[B]` int64."""

    paddle: Tensor
    """Its column; it is in the last row."""
    row: Tensor
    column: Tensor
    """Of the ball."""
    down: Tensor
    right: Tensor
    """Where the ball flies, 1 or -1 each."""
    last_row: Tensor
    last_column: Tensor
    """Where the ball was before."""
    bricks: Tensor
    """Those that stand, as bits of `WALL`."""
    struck: Tensor
    """1 if the ball has just met a brick: it passes through the next one."""


class Breakout(TensorEnv):
    """Reward 1 per brick; terminates when the ball is missed. When all bricks are gone, three rows come anew.

    Observation `[B, 10, 10, 4]`: paddle, ball, the ball's last place, bricks. Actions: 0 stay, 1 left, 2 right.

    Args:
      max_episode_steps: truncate here; None: never.
      minimal_actions: False takes the six actions of all games: stay, left, up, right, down, fire.
    """

    def __init__(self, max_episode_steps: int | None = 1000, minimal_actions: bool = True) -> None:
        self._actions, self._board = Actions("nlr", minimal_actions), Board(4)
        self.spec = self._board.spec("minatar_breakout", self._actions, max_episode_steps)

    def reset(self, keys: Tensor) -> BreakoutState:
        """The ball starts at the left or at the right of row 3, and flies down and inwards."""
        side = random.to_integer(random.bits(keys, 1)[..., 0], 2)
        zero, row, column = torch.zeros_like(side), torch.full_like(side, 3), side * (SIDE - 1)
        wall = torch.full_like(side, WALL)
        return BreakoutState(zero + 4, row, column, zero + 1, 1 - 2 * side, row, column, wall, zero)

    def transition(self, state: BreakoutState, action: Tensor, keys: Tensor) -> tuple[BreakoutState, Tensor, Tensor]:
        """Moves paddle and ball; then side walls, ceiling, bricks or paddle turn the ball around."""
        s = state
        paddle = (s.paddle + self._actions.sideways(action)).clamp(0, SIDE - 1)
        row, column = s.row + s.down, s.column + s.right
        right = torch.where((column < 0) | (column >= SIDE), -s.right, s.right)
        column = column.clamp(0, SIDE - 1)
        at_ceiling = row < 0
        row = row.clamp(min=0)
        bit = torch.where((row >= 1) & (row <= 3), 1 << (SIDE * (row - 1) + column).clamp(0, 29), 0)
        at_brick = (s.bricks & bit) != 0
        breaks = at_brick & (s.struck == 0)
        bricks = torch.where(breaks, s.bricks & ~bit, s.bricks)
        at_bottom = row == SIDE - 1
        bricks = torch.where(at_bottom & (bricks == 0), WALL, bricks)
        flat = at_bottom & (s.column == paddle)  # straight above the paddle: bounced back
        edge = at_bottom & ~flat & (column == paddle)  # moving onto it: back to where it came from
        down = torch.where(at_ceiling | breaks | flat | edge, -s.down, s.down)
        right = torch.where(edge, -right, right)
        row = torch.where(breaks | flat | edge, s.row, row)
        new = BreakoutState(paddle, row, column, down, right, s.row, s.column, bricks, at_brick.long())
        return new, breaks.float(), at_bottom & ~flat & ~edge

    def observe(self, state: BreakoutState) -> Tensor:
        """The board, made in 5 lines of 80 cells, which are whole vectors; 10 of 40 are 1.5 times as slow."""
        s, board = state, self._board
        cell = torch.arange(400, dtype=torch.int32, device=s.row.device).reshape(5, 80)
        place, channel = cell // 4 - SIDE, cell % 4  # 0 where the first brick is
        in_wall = (channel == BRICK) & (place >= 0) & (place < 3 * SIDE)
        marked = (s.bricks.int()[..., None, None] & torch.where(in_wall, 1 << place.clamp(0, 29), 0)) != 0
        things = ((SIDE - 1, s.paddle, PADDLE), (s.row, s.column, BALL), (s.last_row, s.last_column, TRAIL))
        for row, column, kind in things:
            marked = marked | (cell == board.index(row, column, kind).int()[..., None, None])
        return marked.float().flatten(-2).unflatten(-1, (SIDE, SIDE, 4))

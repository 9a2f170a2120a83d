"""Catch: move a paddle under a falling ball. The game of bsuite, Osband et al. 2020 (https://arxiv.org/abs/1908.03568).

First used by Mnih et al. 2014, "Recurrent models of visual attention" (https://arxiv.org/abs/1406.6247).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from torchpod import random
from torchpod.env import TensorEnv
from torchpod.envs.arguments import at_least
from torchpod.specs import Box, Discrete, EnvSpec


class CatchState(NamedTuple):
    """Positions, each `[B]` int64; the paddle is in the last row."""

    ball_row: Tensor
    ball_column: Tensor
    paddle_column: Tensor


class Catch(TensorEnv):
    """The ball starts in a random column of the first row and falls one row per step.

    Where it lands the episode terminates, with reward 1 if the paddle is under it and -1 if not; before, the
    reward is 0. Observation `[B, rows, columns, 1]`: 1 at the ball and at the paddle, else 0. Actions: 0
    left, 1 stay, 2 right.
    """

    def __init__(self, rows: int = 10, columns: int = 5) -> None:
        at_least(2, rows=rows)
        at_least(1, columns=columns)
        self.rows, self.columns = rows, columns
        self.spec = EnvSpec("catch", observation=Box((rows, columns, 1), 0.0, 1.0), action=Discrete(3))

    def reset(self, keys: Tensor) -> CatchState:
        """Ball at the top, paddle in the middle."""
        column = random.to_integer(random.bits(keys, 1)[..., 0], self.columns)
        return CatchState(torch.zeros_like(column), column, torch.full_like(column, self.columns // 2))

    def transition(self, state: CatchState, action: Tensor, keys: Tensor) -> tuple[CatchState, Tensor, Tensor]:
        """Moves the paddle, then lets the ball fall."""
        paddle = (state.paddle_column + action - 1).clamp(0, self.columns - 1)
        row = state.ball_row + 1
        landed = row >= self.rows - 1
        outcome = torch.where(paddle == state.ball_column, 1.0, -1.0)
        return CatchState(row, state.ball_column, paddle), torch.where(landed, outcome, 0.0), landed

    def observe(self, state: CatchState) -> Tensor:
        """The board `[B, rows, columns, 1]`."""
        cells = torch.arange(self.rows * self.columns, dtype=torch.int32, device=state.ball_row.device)
        ball = (state.ball_row * self.columns + state.ball_column).int()
        paddle = ((self.rows - 1) * self.columns + state.paddle_column).int()
        board = (cells == ball[..., None]) | (cells == paddle[..., None])
        return board.float().reshape(*ball.shape, self.rows, self.columns, 1)

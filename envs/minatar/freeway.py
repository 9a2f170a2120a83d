"""MinAtar's Freeway: walk a chicken across eight lanes of traffic.

Rules of Young and Tian 2019 (https://arxiv.org/abs/1903.03176), step for step those of the `minatar` package.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from torchpod import random
from torchpod.env import TensorEnv
from torchpod.envs.minatar.board import SIDE, Actions, Board, rows_like

CHICKEN, CAR, FASTEST = range(3)
"""Channels; cars that move every n-th step leave their trail in channel FASTEST - 1 + n, n = 1 ... 5."""
COLUMN = 4
"""Of the chicken."""
MAX_PERIOD, PLAYER_PERIOD, TIME_LIMIT = 5, 3, 2500


class FreewayState(NamedTuple):
    """Of each row, int32 `[B, 10]`; and of each environment, int32 `[B]`."""

    x: Tensor
    """`[B, 10]`: column of the car."""
    speed: Tensor
    """`[B, 10]`: how many steps the car takes for a cell, negative if it goes to the left; 0: there is no car."""
    timer: Tensor
    """`[B, 10]`: steps until the car moves."""
    row: Tensor
    """Of the chicken."""
    move_timer: Tensor
    """Steps until the chicken can move again."""
    time_left: Tensor


class Freeway(TensorEnv):
    """Reward 1 for reaching the top; then, and when a car hits it, the chicken is back at the bottom.

    Observation `[B, 10, 10, 7]`: chicken, cars, and where cars come from in one of five channels, by their speed.
    Actions: 0 stay, 1 up, 2 down. Terminates after 2501 steps.

    Args:
      max_episode_steps: truncate here; None: never.
      minimal_actions: False takes the six actions of all games: stay, left, up, right, down, fire.
    """

    def __init__(self, max_episode_steps: int | None = TIME_LIMIT, minimal_actions: bool = True) -> None:
        self._actions, self._board = Actions("nud", minimal_actions), Board(7)
        self.spec = self._board.spec("minatar_freeway", self._actions, max_episode_steps)

    def reset(self, keys: Tensor) -> FreewayState:
        """Cars at the left, of random speeds; the chicken at the bottom."""
        speed = _speeds(keys)
        zero = torch.zeros_like(speed[..., 0])
        return FreewayState(
            torch.zeros_like(speed), speed, speed.abs(), zero + SIDE - 1, zero + PLAYER_PERIOD, zero + TIME_LIMIT
        )

    def transition(self, state: FreewayState, action: Tensor, keys: Tensor) -> tuple[FreewayState, Tensor, Tensor]:
        """The chicken moves, and is home or not; the cars move, and hit it or not."""
        s = state
        move = self._actions.vertical(action) * (s.move_timer == 0).int()
        move_timer = torch.where(move != 0, PLAYER_PERIOD, s.move_timer)
        row = (s.row + move).clamp(0, SIDE - 1)
        home = row == 0
        row = torch.where(home, SIDE - 1, row)
        # All cars get new speeds when the chicken is home.
        speed = torch.where(home[..., None], _speeds(keys), s.speed)
        timer = torch.where(home[..., None], speed.abs(), s.timer)

        moves = timer == 0
        x = torch.remainder(s.x + torch.where(moves, speed.sign(), 0), SIDE)
        timer = torch.where(moves, speed.abs(), timer - 1)
        in_its_row = (rows_like(x) == row[..., None]) & (speed != 0)
        hit = (in_its_row & ((s.x == COLUMN) | (x == COLUMN))).int().sum(-1) > 0
        row = torch.where(hit, SIDE - 1, row)
        move_timer, time_left = (move_timer - 1).clamp(min=0), s.time_left - 1
        return FreewayState(x, speed, timer, row, move_timer, time_left), home.float(), time_left < 0

    def observe(self, state: FreewayState) -> Tensor:
        """The board."""
        s, board = state, self._board
        cars = board.in_rows(torch.where(s.speed != 0, s.x, -1), CAR)
        behind = torch.remainder(s.x - s.speed.sign(), SIDE)
        trails = board.in_rows(torch.where(s.speed != 0, behind, -1), FASTEST - 1 + s.speed.abs())
        return board.finish(cars | trails | board.at(s.row, torch.full_like(s.row, COLUMN), CHICKEN))


def _speeds(keys: Tensor) -> Tensor:
    """One of -5 ... -1, 1 ... 5 in each of rows 1 to 8."""
    number = random.to_integer(random.bits(keys, SIDE), 2 * MAX_PERIOD).int()
    speed = torch.where(number >= MAX_PERIOD, number - MAX_PERIOD + 1, -number - 1)
    rows = rows_like(speed)
    return torch.where((rows > 0) & (rows < SIDE - 1), speed, 0)

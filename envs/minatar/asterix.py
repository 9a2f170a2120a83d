"""MinAtar's Asterix: collect gold and keep out of the way of enemies, both of which cross the board in rows.

Rules of Young and Tian 2019 (https://arxiv.org/abs/1903.03176), step for step those of the `minatar` package.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from torchpod import random
from torchpod.env import TensorEnv
from torchpod.envs.arguments import true_or_false
from torchpod.envs.minatar.board import SIDE, Actions, Board, rows_like

PLAYER, ENEMY, TRAIL, GOLD = range(4)
NOTHING = 0
NUM_LANES = 8
"""Rows 1 to 8, each with at most one thing in it."""
SPAWN_INTERVAL, MOVE_INTERVAL, RAMP_INTERVAL = 10, 5, 100


class AsterixState(NamedTuple):
    """Of each environment, int32 `[B]`; and of each row, int32 `[B, 10]`."""

    kind: Tensor
    """`[B, 10]`: NOTHING, ENEMY or GOLD is in the row."""
    x: Tensor
    """`[B, 10]`: its column."""
    right: Tensor
    """`[B, 10]`: 1 if it goes to the right, -1 if to the left."""
    row: Tensor
    column: Tensor
    """Of the player."""
    spawn_timer: Tensor
    spawn_interval: Tensor
    move_timer: Tensor
    move_interval: Tensor
    ramp_timer: Tensor
    ramp_index: Tensor
    """How often the game has become harder."""


class Asterix(TensorEnv):
    """Reward 1 per gold; terminates when the player meets an enemy. Things appear and move faster and faster.

    Observation `[B, 10, 10, 4]`: player, enemies, where things come from, gold. Actions: 0 stay, 1 left, 2 up, 3 right,
    4 down.

    Args:
      max_episode_steps: truncate here; None: never.
      minimal_actions: False takes the six actions of all games; the sixth, fire, does nothing.
      ramping: whether the game becomes harder, every 100 steps.
    """

    def __init__(
        self, max_episode_steps: int | None = 1000, minimal_actions: bool = True, ramping: bool = True
    ) -> None:
        true_or_false(ramping=ramping)
        self._actions, self._board, self._ramping = Actions("nlurd", minimal_actions), Board(4), ramping
        self.spec = self._board.spec("minatar_asterix", self._actions, max_episode_steps)

    def reset(self, keys: Tensor) -> AsterixState:
        """An empty board, with the player in its middle."""
        zero = torch.zeros(keys.shape[:-1], dtype=torch.int32, device=keys.device)
        rows = torch.zeros((*zero.shape, SIDE), dtype=torch.int32, device=keys.device)
        timers = (zero + t for t in (SPAWN_INTERVAL, SPAWN_INTERVAL, MOVE_INTERVAL, MOVE_INTERVAL, RAMP_INTERVAL, 0))
        return AsterixState(rows, rows, rows, zero + 5, zero + 5, *timers)

    def transition(self, state: AsterixState, action: Tensor, keys: Tensor) -> tuple[AsterixState, Tensor, Tensor]:
        """Something may appear; the player moves; then the others may; what meets is settled before and after that."""
        s = self._spawn(state, keys)
        row = (s.row + self._actions.vertical(action)).clamp(1, NUM_LANES)
        column = (s.column + self._actions.sideways(action)).clamp(0, SIDE - 1)
        kind, x, right = (lane.gather(-1, row[..., None].long())[..., 0] for lane in (s.kind, s.x, s.right))
        moves = s.move_timer == 0
        # There is one thing in the player's row, to be met before it moves or after.
        met = (x == column) | (moves & (x + right == column))
        collected, died = met & (kind == GOLD), met & (kind == ENEMY)
        x = s.x + s.right * moves.int()[..., None]
        gone = (x < 0) | (x >= SIDE) | (collected[..., None] & (rows_like(x) == row[..., None]))
        s = s._replace(
            kind=torch.where(gone, NOTHING, s.kind),
            x=x,
            row=row,
            column=column,
            move_timer=torch.where(moves, s.move_interval, s.move_timer) - 1,
            spawn_timer=s.spawn_timer - 1,
        )
        return self._ramp(s) if self._ramping else s, collected.float(), died

    def observe(self, state: AsterixState) -> Tensor:
        """The board."""
        s, board = state, self._board
        there = s.kind != NOTHING
        things = board.in_rows(torch.where(there, s.x, -1), s.kind)
        trails = board.in_rows(torch.where(there, s.x - s.right, -1), TRAIL)
        return board.finish(things | trails | board.at(s.row, s.column, PLAYER))

    def _spawn(self, state: AsterixState, keys: Tensor) -> AsterixState:
        """When the timer is up, an enemy, or with probability 1/3 gold, enters a free row from either side."""
        s, words = state, random.bits(keys, 3)
        from_left, gold = words[..., 0] < 2**31, random.to_uniform(words[..., 1]) < 1 / 3
        free = torch.where(s.kind == NOTHING, 1 << rows_like(s.kind), 0).sum(-1)
        free_rows, counts = _tables(free.device)
        num_free = counts[free]
        row = free_rows[free, random.to_integer(words[..., 2], num_free)]
        due = s.spawn_timer == 0
        chosen = (rows_like(s.kind) == row[..., None]) & (due & (num_free > 0))[..., None]
        return s._replace(
            kind=torch.where(chosen, torch.where(gold, GOLD, ENEMY).int()[..., None], s.kind),
            right=torch.where(chosen, torch.where(from_left, 1, -1).int()[..., None], s.right),
            x=torch.where(chosen, torch.where(from_left, 0, SIDE - 1).int()[..., None], s.x),
            spawn_timer=torch.where(due, s.spawn_interval, s.spawn_timer),
        )

    def _ramp(self, state: AsterixState) -> AsterixState:
        """Every 100 steps things appear faster, and every other time they also move faster."""
        s = state
        active = (s.spawn_interval > 1) | (s.move_interval > 1)
        due = active & (s.ramp_timer < 0)
        faster = due & (s.move_interval > 1) & (s.ramp_index % 2 == 1)
        return s._replace(
            move_interval=s.move_interval - faster.int(),
            spawn_interval=s.spawn_interval - (due & (s.spawn_interval > 1)).int(),
            ramp_index=s.ramp_index + due.int(),
            ramp_timer=torch.where(due, RAMP_INTERVAL, s.ramp_timer - active.int()),
        )


def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """For every set of free rows, bit i for row i: the rows of lanes, free ones first, and how many these are."""
    rows = torch.arange(1, NUM_LANES + 1, device=device)
    taken = 1 - (torch.arange(2 ** (NUM_LANES + 2), device=device)[:, None] >> rows) % 2
    return taken.argsort(dim=-1, stable=True) + 1, NUM_LANES - taken.sum(-1)

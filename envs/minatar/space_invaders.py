"""MinAtar's Space Invaders: shoot a block of aliens before it, or one of its bullets, reaches the cannon.

Rules of Young and Tian 2019 (https://arxiv.org/abs/1903.03176), step for step those of the `minatar` package.
"""

import functools
import operator
from typing import NamedTuple

import torch
from torch import Tensor

from torchpod.env import TensorEnv
from torchpod.envs.arguments import true_or_false
from torchpod.envs.minatar.board import SIDE, Actions, Board, rows_like

CANNON, ALIEN, ALIEN_LEFT, ALIEN_RIGHT, BULLET, ENEMY_BULLET = range(6)
BOTTOM = SIDE - 1
FULL_ROW = 0b0011111100
"""A row of new aliens, columns 2 to 7: bit i for column i."""
SHOT_INTERVAL, ALIEN_MOVE_INTERVAL, ALIEN_SHOT_INTERVAL, SHORTEST_MOVE_INTERVAL = 5, 12, 10, 6


class SpaceInvadersState(NamedTuple):
    """Of each row, int32 `[B, 10]` with bit i for column i; and of each environment, int32 `[B]`."""

    aliens: Tensor
    bullets: Tensor
    enemy_bullets: Tensor
    cannon: Tensor
    """Its column; it is in the last row."""
    right: Tensor
    """Where the aliens go, 1 or -1."""
    shot_timer: Tensor
    alien_move_timer: Tensor
    alien_move_interval: Tensor
    """Of a full block; the fewer aliens are left the faster they are."""
    alien_shot_timer: Tensor


class SpaceInvaders(TensorEnv):
    """Reward 1 per alien; terminates when an alien or a bullet reaches the cannon, or aliens the bottom's corner.

    Observation `[B, 10, 10, 6]`: cannon, aliens, aliens if they go left, if they go right, own bullets, theirs.
    Actions: 0 stay, 1 left, 2 right, 3 fire.

    Args:
      max_episode_steps: truncate here; None: never.
      minimal_actions: False takes the six actions of all games: stay, left, up, right, down, fire.
      ramping: whether each new block of aliens moves faster than the last.
    """

    def __init__(
        self, max_episode_steps: int | None = 1000, minimal_actions: bool = True, ramping: bool = True
    ) -> None:
        true_or_false(ramping=ramping)
        self._actions, self._board, self._ramping = Actions("nlrf", minimal_actions), Board(6), ramping
        self.spec = self._board.spec("minatar_space_invaders", self._actions, max_episode_steps)

    def reset(self, keys: Tensor) -> SpaceInvadersState:
        """Four rows of six aliens."""
        zero = torch.zeros(keys.shape[:-1], dtype=torch.int32, device=keys.device)
        rows = torch.zeros((*zero.shape, SIDE), dtype=torch.int32, device=keys.device)
        timers = (zero + t for t in (0, ALIEN_MOVE_INTERVAL, ALIEN_MOVE_INTERVAL, ALIEN_SHOT_INTERVAL))
        return SpaceInvadersState(_new_aliens(rows), rows, rows, zero + 5, zero - 1, *timers)

    def transition(
        self, state: SpaceInvadersState, action: Tensor, keys: Tensor
    ) -> tuple[SpaceInvadersState, Tensor, Tensor]:
        """Cannon, bullets, aliens, their shot; then what was hit."""
        s, rows = state, rows_like(state.aliens)
        fires = self._actions.is_("f", action) & (s.shot_timer == 0)
        cannon = (s.cannon + self._actions.sideways(action)).clamp(0, SIDE - 1)
        shot_timer = torch.where(fires, SHOT_INTERVAL, s.shot_timer)
        here = 1 << cannon
        shot = torch.where(fires, here, 0)[..., None]
        bullets = torch.where(rows == BOTTOM - 1, shot, s.bullets.roll(-1, -1) * (rows < BOTTOM - 1))
        enemy_bullets = s.enemy_bullets.roll(1, -1) * (rows > 0)
        died = ((enemy_bullets[..., BOTTOM] | s.aliens[..., BOTTOM]) & here) != 0

        moves = s.alien_move_timer == 0
        columns = _columns(s.aliens)
        at_edge = torch.where(s.right > 0, (columns >> (SIDE - 1)) & 1, columns & 1) != 0
        lowers, shifts = (moves & at_edge)[..., None], (moves & ~at_edge)[..., None]
        sideways = torch.where((s.right > 0)[..., None], s.aliens << 1, s.aliens >> 1)
        aliens = torch.where(lowers, s.aliens.roll(1, -1), torch.where(shifts, sideways, s.aliens))
        right = torch.where(moves & at_edge, -s.right, s.right)
        died = died | (moves & at_edge & (s.aliens[..., BOTTOM] != 0)) | ((aliens[..., BOTTOM] & here) != 0)
        count = _count(s.aliens)
        alien_move_timer = torch.where(moves, torch.minimum(count, s.alien_move_interval), s.alien_move_timer) - 1

        shoots = s.alien_shot_timer == 0
        enemy_bullets = enemy_bullets | torch.where(shoots[..., None], _nearest(aliens, cannon), 0)
        alien_shot_timer = torch.where(shoots, ALIEN_SHOT_INTERVAL, s.alien_shot_timer) - 1

        killed = aliens & bullets
        num_killed = _count(killed)
        aliens, bullets = aliens ^ killed, bullets ^ killed
        cleared = num_killed == count
        faster = cleared & (s.alien_move_interval > SHORTEST_MOVE_INTERVAL) if self._ramping else cleared & False
        new = SpaceInvadersState(
            torch.where(cleared[..., None], _new_aliens(aliens), aliens),
            bullets,
            enemy_bullets,
            cannon,
            right,
            (shot_timer - 1).clamp(min=0),
            alien_move_timer,
            s.alien_move_interval - faster.int(),
            alien_shot_timer,
        )
        return new, num_killed.float(), died

    def observe(self, state: SpaceInvadersState) -> Tensor:
        """The board."""
        s = state
        _, column, channel = self._board.cells(s.cannon.device)
        left, right, bullet, enemy_bullet = (
            torch.where((channel == c) | (channel == also), 1 << column, 0)
            for c, also in ((ALIEN, ALIEN_LEFT), (ALIEN, ALIEN_RIGHT), (BULLET, -1), (ENEMY_BULLET, -1))
        )
        aliens = s.aliens[..., None] & torch.where((s.right > 0)[..., None, None], right, left)
        bullets, enemy_bullets = s.bullets[..., None] & bullet, s.enemy_bullets[..., None] & enemy_bullet
        cannon = self._board.at(BOTTOM, s.cannon, CANNON)
        return self._board.finish(((aliens | bullets | enemy_bullets) != 0) | cannon)


def _new_aliens(like: Tensor) -> Tensor:
    return torch.where(rows_like(like) < 4, FULL_ROW, torch.zeros_like(like))


def _columns(rows: Tensor) -> Tensor:
    """Which columns `[B, 10]` have a bit in any row: int32 `[B]`."""
    return functools.reduce(operator.or_, rows.unbind(-1))


def _count(rows: Tensor) -> Tensor:
    """Bits in all rows `[B, 10]`: int32 `[B]`."""
    pairs = rows - ((rows >> 1) & 0b0101010101)
    nibbles = (pairs & 0b1100110011) + ((pairs >> 2) & 0b0011001100110011)
    return ((nibbles & 0b1111) + ((nibbles >> 4) & 0b1111) + (nibbles >> 8)).sum(-1).int()


def _nearest(aliens: Tensor, cannon: Tensor) -> Tensor:
    """The lowest alien of the column nearest to the cannon, the left one of two: `[B, 10]` with at most one bit."""
    columns, candidates = _columns(aliens), rows_like(aliens)
    far = 2 * (candidates - cannon[..., None]).abs() + (candidates > cannon[..., None]).int()
    far = torch.where(((columns[..., None] >> candidates) & 1) != 0, far, 4 * SIDE)
    column = far.argmin(-1).int()
    there = ((aliens >> column[..., None]) & 1) != 0
    lowest = torch.where(there, rows_like(aliens), -1).amax(-1)
    return torch.where(rows_like(aliens) == lowest[..., None], (1 << column)[..., None], 0)

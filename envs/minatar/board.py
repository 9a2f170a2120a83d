"""What the games of MinAtar share: the board, and its actions."""

import torch
from torch import Tensor

from torchpod.envs.arguments import at_least, true_or_false
from torchpod.specs import Box, Discrete, EnvSpec

SIDE = 10
"""Rows and columns of a board."""
ALL = "nlurdf"
"""MinAtar's actions: none, left, up, right, down, fire."""


class Board:
    """The observation of a game: float32 `[B, 10, 10, C]`, 0 or 1. Inductor vectorises that; bool it does not.

    While it is made it has the shape `[B, 10, 10 * C]`: rows of cells `column * C + channel`.
    """

    def __init__(self, num_channels: int) -> None:
        self.num_channels = num_channels

    def cells(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Row `[10, 1]`, column `[10 * C]` and channel `[10 * C]` of the cells, int32."""
        cell = torch.arange(SIDE * self.num_channels, dtype=torch.int32, device=device)
        row = torch.arange(SIDE, dtype=torch.int32, device=device)[:, None]
        return row, cell // self.num_channels, cell % self.num_channels

    def spec(self, name: str, actions: "Actions", max_episode_steps: int | None) -> EnvSpec:
        """Of a game."""
        if max_episode_steps is not None:
            at_least(1, max_episode_steps=max_episode_steps)
        board = Box((SIDE, SIDE, self.num_channels), 0.0, 1.0)
        return EnvSpec(name, board, Discrete(len(actions.letters)), max_episode_steps)

    def at(self, row: Tensor | int, column: Tensor, channel: int) -> Tensor:
        """Marks one cell of each board: bool `[B, 10, 10 * C]`. `row` and `column` are `[B]`."""
        cells = torch.arange(SIDE * self.num_channels, dtype=torch.int32, device=column.device)
        row = row.int()[..., None, None] if isinstance(row, Tensor) else row
        in_row = rows_like(column)[:, None] == row
        return in_row & (cells == (column * self.num_channels + channel).int()[..., None, None])

    def in_rows(self, column: Tensor, channel: Tensor | int) -> Tensor:
        """Marks one cell of each row, `[B, 10]`; none where the column is not on the board."""
        cells = torch.arange(SIDE * self.num_channels, dtype=torch.int32, device=column.device)
        cell = (column * self.num_channels + channel).int()
        on_board = (column >= 0) & (column < SIDE)
        return cells == torch.where(on_board, cell, -1)[..., None]

    def index(self, row: Tensor | int, column: Tensor, channel: Tensor | int) -> Tensor:
        """Of a cell in the flattened board."""
        return (row * SIDE + column) * self.num_channels + channel

    def finish(self, marked: Tensor) -> Tensor:
        """Bool `[B, 10, 10 * C]` as an observation."""
        return marked.float().unflatten(-1, (SIDE, self.num_channels))


def rows_like(rows: Tensor) -> Tensor:
    """The numbers of the rows, int32 `[10]`, on the device of `rows`."""
    return torch.arange(SIDE, dtype=torch.int32, device=rows.device)


class Actions:
    """The actions that a game takes, in the order of their numbers, as letters of `ALL`.

    Args:
      minimal: those that do something in the game.
      only_minimal: leave the others out, as the `v1` environments of the package do.
    """

    def __init__(self, minimal: str, only_minimal: bool) -> None:
        true_or_false(minimal_actions=only_minimal)
        self.letters = minimal if only_minimal else ALL

    def sideways(self, action: Tensor) -> Tensor:
        """int32, -1 (left), 0 or 1 column."""
        return self.is_("r", action).int() - self.is_("l", action).int()

    def vertical(self, action: Tensor) -> Tensor:
        """int32, -1 (up), 0 or 1 row."""
        return self.is_("d", action).int() - self.is_("u", action).int()

    def is_(self, letter: str, action: Tensor) -> Tensor:
        """Whether the action is that one."""
        return action == self.letters.find(letter)  # -1, which is no action, where the game has none such

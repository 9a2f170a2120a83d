"""DeepSea: find the one way to the treasure. The game of bsuite, Osband et al. 2020 (https://arxiv.org/abs/1908.03568).

First used by Osband et al. 2017, "Deep exploration via randomized value functions"
(https://arxiv.org/abs/1703.07608). Step for step the episodes are those of bsuite's own code.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchpod import random
from torchpod.env import TensorEnv
from torchpod.envs.arguments import at_least, true_or_false
from torchpod.specs import Box, Discrete, EnvSpec


class DeepSeaState(NamedTuple):
    """Where the diver is, each `[B]` int64."""

    row: Tensor
    column: Tensor


class DeepSea(TensorEnv):
    """The diver starts in the first row and column, and sinks one row per step, to the left or to the right.

    After `size` steps the episode terminates. To step right from the last column, which only `size` steps to the
    right reach, gives reward 1; every step to the right costs `unscaled_move_cost` / `size`. The best policy
    returns 1 - `unscaled_move_cost`; a random one finds the 1 in one of 2^`size` episodes: of 1024 with 10, the
    smallest size of bsuite's experiment, which goes up to 50.

    Observation `[B, size, size, 1]`: 1 at the diver, else 0, and all 0 when the episode is over. Actions: 0 and
    1; which of them is right was drawn for each cell from `mapping_seed`, the same for all environments and
    episodes, as bsuite draws it once for each environment. With `randomize_actions=False` it is always 1.

    With `deterministic=False` a step to the right fails with probability 1 / `size`: the diver sinks straight
    down, and pays. The last step from the first and the last column then adds a standard normal to the reward.
    """

    def __init__(
        self,
        size: int = 10,
        deterministic: bool = True,
        unscaled_move_cost: float = 0.01,
        randomize_actions: bool = True,
        mapping_seed: int = 0,
    ) -> None:
        at_least(1, size=size)
        true_or_false(deterministic=deterministic, randomize_actions=randomize_actions)
        at_least(0, mapping_seed=mapping_seed)
        if mapping_seed >= 2**64:
            raise ValueError(f"mapping_seed={mapping_seed} is out of range; use an integer in [0, 2^64).")
        cost = unscaled_move_cost
        if not isinstance(cost, float | int) or isinstance(cost, bool) or not 0 <= cost < math.inf:
            raise ValueError(f"unscaled_move_cost={cost!r} is wrong; use a number of at least 0.")
        self.size, self.deterministic, self.randomize_actions = size, deterministic, randomize_actions
        self.move_cost = cost / size
        self.mapping_seed = mapping_seed
        self.spec = EnvSpec("deep_sea", observation=Box((size, size, 1), 0.0, 1.0), action=Discrete(2))

    def reset(self, keys: Tensor) -> DeepSeaState:
        """Top left."""
        return DeepSeaState(torch.zeros_like(keys[..., 0]), torch.zeros_like(keys[..., 0]))

    def transition(self, state: DeepSeaState, action: Tensor, keys: Tensor) -> tuple[DeepSeaState, Tensor, Tensor]:
        """Sinks, to the side that the action means here."""
        row, column = state
        right = action == self.right_action(row, column)
        reward = torch.where(right, torch.where(column == self.size - 1, 1.0, 0.0) - self.move_cost, 0.0)
        over = row >= self.size - 1
        moves = right
        if not self.deterministic:
            words = random.bits(keys, 3)
            moves = right & (random.to_uniform(words[..., 0]) > 1 / self.size)
            noise = random.to_normal(words[..., 1:])[..., 0]
            at_an_end = (column == 0) | (column == self.size - 1)
            reward = reward + torch.where(over & at_an_end, noise, 0.0)
        shift = torch.where(moves, 1, torch.where(right, 0, -1))
        return DeepSeaState(row + 1, (column + shift).clamp(0, self.size - 1)), reward, over

    def observe(self, state: DeepSeaState) -> Tensor:
        """The sea `[B, size, size, 1]`."""
        cells = torch.arange(self.size**2, dtype=torch.int32, device=state.row.device)
        here = (state.row * self.size + state.column).int()  # beyond all cells when the episode is over
        return (cells == here[..., None]).float().reshape(*here.shape, self.size, self.size, 1)

    def right_action(self, row: Tensor, column: Tensor) -> Tensor:
        """The action that means right in a cell, `[B]` int64: a draw with the number of the cell as its counter."""
        if not self.randomize_actions:
            return torch.ones_like(row)
        # The table of all cells, which is a constant of the compiled program.
        cells = torch.arange(self.size**2, device=row.device)
        words = (torch.full_like(cells, word) for word in (self.mapping_seed % 2**32, self.mapping_seed >> 32))
        table = random.to_integer(random.bits(torch.stack([*words, cells], -1), 1)[:, 0], 2)
        return table[(row * self.size + column).clamp(max=self.size**2 - 1)]  # when the episode is over, none counts

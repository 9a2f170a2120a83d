"""GridWorld: collect objects in a grid, thousands of different grids in one batch.

The tabular and random grid worlds of Oh et al. 2020, "Discovering reinforcement learning algorithms"
(https://arxiv.org/abs/2007.08794), appendix A; their ten configurations are in grid_configs.py.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchpod import random
from torchpod.env import TensorEnv
from torchpod.envs.arguments import at_least, one_of, true_or_false
from torchpod.envs.grids.grid_configs import (
    CONFIGURATIONS,
    MAX_TABULAR_OBJECTS,
    Range,
    check_room,
    parse_objects,
    parse_walls,
)
from torchpod.specs import Box, Discrete, EnvSpec
from torchpod.types import TimeStep

NOWHERE = 1 << 30
"""A number beyond that of any cell."""


class World(NamedTuple):
    """What an environment keeps for life. Cells are counted row by row; N objects, those of one type side by side.

    `GridWorld.draw` makes worlds; fields from `homes` on may then be replaced.
    """

    walls: Tensor
    """`[B, cells]` bool."""
    free: Tensor
    """`[B, cells]` int32: the free cells in order, then the walls."""
    order: Tensor
    """`[B, cells]` int32: where a free cell comes in `free`; -1 for walls."""
    num_free: Tensor
    """`[B]` int64."""
    homes: Tensor
    """`[B, N]` int64: the free cell of each object, no two the same; unused where placement is random."""
    num_objects: Tensor
    """`[B]` int64: how many of the N objects there are, the first ones."""
    reward: Tensor
    """`[B, N]` float32."""
    termination: Tensor
    """`[B, N]` float32, the probability that the episode terminates when the object is collected."""
    respawn: Tensor
    """`[B, N]` float32, the probability per step that it comes back."""


class GridWorldState(NamedTuple):
    """One episode in one world."""

    world: World
    agent: Tensor
    """`[B]` int64, its cell."""
    objects: Tensor
    """`[B, N]` int64, the cell of each object."""
    present: Tensor
    """`[B, N]` bool: not collected."""


class GridWorld(TensorEnv):
    """Who steps on an object, or stays on it, collects it: its reward, and with its probability the end of the episode.

    Actions: the 3 x 3 moves row by row, 0 up and left, 1 up, ..., 4 stay, ..., 8 down and right; a move into a wall or
    out of the grid does not happen, a diagonal one between two walls does. With `explicit_collect` these collect
    nothing, and 9 to 17 are the same moves with collecting. From the step after that in which it was collected, an
    object comes back with its probability per step.

    Placement "tabular": an object has one cell for life, even if the agent stands there when it comes back. Observation
    `[B, cells * 2^N]`: one-hot of the agent's cell + cells * (sum of 2^i over objects i that are present).
    Placement "random": each episode gives each object a new cell, and so does coming back, one without wall, agent or
    object. Observation `[B, H, W, 2 + types]`: 1 at the agent, at objects of each type, at walls.
    The agent starts each episode in a random free cell without object.

    Worlds: what is fixed for life is drawn when an environment starts and held in the state, so that one batch runs as
    many different worlds as it has rows. For several environments in each world, draw worlds, repeat their rows, and
    hand them to `init`.

    Args:
      configuration: one of `CONFIGURATIONS`; what is given below replaces part of it.
      walls: rows of `#` and `.`.
      objects: dicts `{reward, termination, respawn, count}`, one per type; a number, or `[low, high]` from which
        each environment draws its own.
      num_objects: how many of the objects there are, a number or `[low, high]` to draw from; by default all.
      placement: "tabular" or "random".
      max_episode_steps: the time limit.
      explicit_collect: 18 actions instead of 9.
      lifetime_seed: None: each environment draws its own world; an integer: all live in the world of this seed.
    """

    def __init__(
        self,
        configuration: str = "dense",
        walls: Sequence[str] | None = None,
        objects: Sequence[dict[str, Any]] | None = None,
        num_objects: int | Sequence[int] | None = None,
        placement: str | None = None,
        max_episode_steps: int | None = None,
        explicit_collect: bool = False,
        lifetime_seed: int | None = None,
    ) -> None:
        one_of("configuration", configuration, CONFIGURATIONS)
        config = CONFIGURATIONS[configuration]
        placement = config.placement if placement is None else placement
        one_of("placement", placement, ("tabular", "random"))
        max_episode_steps = config.max_episode_steps if max_episode_steps is None else max_episode_steps
        at_least(1, max_episode_steps=max_episode_steps)
        true_or_false(explicit_collect=explicit_collect)
        if lifetime_seed is not None:
            at_least(0, lifetime_seed=lifetime_seed)
        self.walls = config.walls if walls is None else parse_walls(walls)
        self.types = config.objects if objects is None else parse_objects(objects)
        self.total = sum(kind.count for kind in self.types)
        """N."""
        self.num_objects = _count_range(num_objects, self.total)
        check_room("".join(self.walls).count("."), self.total)
        self.is_random, self.explicit_collect = placement == "random", explicit_collect
        self.lifetime_seed = lifetime_seed
        self.rows, self.columns = len(self.walls), len(self.walls[0])
        self.cells = self.rows * self.columns
        if not self.is_random and self.total > MAX_TABULAR_OBJECTS:
            raise ValueError(
                f"objects has {self.total} of them, and a tabular observation has cells * 2^objects entries; use at "
                f"most {MAX_TABULAR_OBJECTS}, or placement=random."
            )
        image = (self.rows, self.columns, 2 + len(self.types))
        self.spec = EnvSpec(
            "grid_world",
            observation=Box(image if self.is_random else (self.cells * 2**self.total,), 0.0, 1.0),
            action=Discrete(18 if explicit_collect else 9),
            max_episode_steps=max_episode_steps,
        )

    def draw(self, keys: Tensor, walls: Tensor | None = None) -> World:
        """Worlds, one per key `[B, 3]`; equal keys, equal worlds.

        Args:
          keys: `[B, 3]`.
          walls: `[B, H, W]` bool, instead of the same walls for all.

        Raises:
          ValueError: if `walls` has the wrong shape or leaves too little room.
        """
        size, device = keys.shape[0], keys.device
        if walls is None:
            mask = [[character == "#" for character in row] for row in self.walls]
            walls = torch.tensor(mask, device=device).expand(size, -1, -1)
        else:
            _check_walls(walls, (size, self.rows, self.columns), self.total)
        walls = walls.flatten(1).clone()
        order = torch.where(walls, -1, (~walls).cumsum(-1) - 1).int()
        free = walls.int().argsort(dim=-1, stable=True).int()
        words = random.bits(random.fold_in(keys, 0), 1 + self.total + 3 * len(self.types))
        low, high = self.num_objects
        numbers = words[..., 1 + self.total :].unflatten(-1, (len(self.types), 3))
        world = World(
            walls,
            free,
            order,
            num_free=(~walls).sum(-1),
            homes=torch.zeros(size, self.total, dtype=torch.int64, device=device),
            num_objects=low + random.to_integer(words[..., 0], high - low + 1),
            reward=self._per_object(numbers[..., 0], [kind.reward for kind in self.types]),
            termination=self._per_object(numbers[..., 1], [kind.termination for kind in self.types]),
            respawn=self._per_object(numbers[..., 2], [kind.respawn for kind in self.types]),
        )
        return world._replace(homes=self._place_all(world, words[..., 1 : 1 + self.total]))

    def init(self, keys: Tensor, world: World | None = None) -> tuple[Any, TimeStep]:
        """See `Env.init`.

        Args:
          keys: `[B, 3]`.
          world: `[B, ...]`, the worlds to live in; by default drawn.

        Raises:
          ValueError: if a part of `world` has the wrong shape or values out of range.
        """
        if world is None:
            return super().init(keys)
        self._check_world(world, keys.shape[0])
        return self.begin(self._start(world, keys), keys)

    def reset(self, keys: Tensor) -> GridWorldState:
        """A new life: a world, and an episode in it."""
        seed = self.lifetime_seed
        return self._start(self.draw(keys if seed is None else random.key(seed, keys.device).expand_as(keys)), keys)

    def restart(self, state: GridWorldState, keys: Tensor) -> GridWorldState:
        """A new episode in the same world."""
        return self._start(state.world, keys)

    def _start(self, world: World, keys: Tensor) -> GridWorldState:
        words = self._words(keys)
        objects = self._place_all(world, words[..., 1 : 1 + self.total]) if self.is_random else world.homes
        present = _range(self.total, keys) < world.num_objects[..., None]
        return GridWorldState(world, _free_cell(world, objects, present, words[..., 0]), objects, present)

    def transition(self, state: GridWorldState, action: Tensor, keys: Tensor) -> tuple[GridWorldState, Tensor, Tensor]:
        """Moves, collects, and lets objects come back."""
        world, agent, objects, present = state
        words = self._words(keys)
        coming, placing = words[..., 1 : 1 + self.total], words[..., 1 + self.total :]
        move = action % 9
        row, column = agent // self.columns + move // 3 - 1, agent % self.columns + move % 3 - 1
        inside = (row >= 0) & (row < self.rows) & (column >= 0) & (column < self.columns)
        target = torch.where(inside, row * self.columns + column, agent)
        agent = torch.where(_at(world.walls, target), agent, target)

        collected = present & (objects == agent[..., None])
        if self.explicit_collect:
            collected = collected & (action >= 9)[..., None]
        reward = torch.where(collected, world.reward, 0.0).sum(-1)
        chance = torch.where(collected, world.termination, 0.0).sum(-1)  # of one object: no two share a cell
        terminated = random.to_uniform(words[..., 0]) < chance

        index = _range(self.total, keys)
        exists = index < world.num_objects[..., None]
        back = ~present & exists & (random.to_uniform(coming) < world.respawn)
        present = present & ~collected
        if self.is_random:
            # The agent's cell is taken too, but only once if it stands on an object that it did not collect.
            alone = ~(present & (objects == agent[..., None])).any(-1, keepdim=True)
            for i in range(self.total):  # one after the other, so that no two get the same cell
                taken = torch.cat([present & (index != i), alone], -1)
                cells = torch.cat([objects, agent[..., None]], -1)
                this = back & (index == i)
                objects = torch.where(this, _free_cell(world, cells, taken, placing[..., i])[..., None], objects)
                present = present | this
        return GridWorldState(world, agent, objects, present | back), reward, terminated

    def observe(self, state: GridWorldState) -> Tensor:
        """One-hot `[B, cells * 2^N]`, or the image `[B, H, W, 2 + types]`."""
        if not self.is_random:
            which = (state.present * (1 << _range(self.total, state.agent))).sum(-1)
            number = state.agent + self.cells * which
            return (_range(self.cells * 2**self.total, number) == number[..., None]).float()
        cell = _range(self.cells, state.agent)
        there = (state.objects[..., None] == cell) & state.present[..., None]  # [B, N, cells]
        kinds = there.split([kind.count for kind in self.types], -2)
        channels = [state.agent[..., None] == cell, *(kind.any(-2) for kind in kinds), state.world.walls]
        return torch.stack(channels, -1).unflatten(-2, (self.rows, self.columns)).float()

    def _words(self, keys: Tensor) -> Tensor:
        """The same block for a restart and a transition, so that a compiler draws it once."""
        return random.bits(keys, 1 + self.total * (2 if self.is_random else 1))

    def _per_object(self, words: Tensor, ranges: list[Range]) -> Tensor:
        """One number per type `[B, types]`, repeated for each of its objects `[B, N]`."""
        drawn = [random.to_uniform(words[..., i], *ends) for i, ends in enumerate(ranges)]
        return torch.stack([x for x, kind in zip(drawn, self.types, strict=True) for _ in range(kind.count)], -1)

    def _place_all(self, world: World, words: Tensor) -> Tensor:
        """A random free cell for each object `[B, N]`, no two the same."""
        cells = torch.zeros_like(words)
        index = _range(self.total, words)
        for i in range(self.total):
            cell = _free_cell(world, cells, (index < i).expand_as(words), words[..., i])
            cells = torch.where(index == i, cell[..., None], cells)
        return cells

    def _check_world(self, world: World, size: int) -> None:
        wanted = {"num_free": (size,), "num_objects": (size,)}
        wanted |= dict.fromkeys(("walls", "free", "order"), (size, self.cells))
        for name, value in world._asdict().items():
            shape = wanted.get(name, (size, self.total))
            if value.shape != shape:
                raise ValueError(
                    f"world.{name} must have shape {list(shape)} for {size} keys; it has {list(value.shape)}. "
                    "Start from draw(keys) with one key per row."
                )
        for name, high in (("termination", 1), ("respawn", 1), ("num_objects", self.total)):
            value = getattr(world, name)
            if not ((value >= 0) & (value <= high)).all():
                raise ValueError(f"world.{name} must lie from 0 to {high}; it has {value.min():g} to {value.max():g}.")
        homes = world.homes.sort(-1).values
        inside = (homes >= 0) & (homes < self.cells)
        if not inside.all() or (homes.diff() == 0).any() or world.walls.gather(-1, homes).any():
            raise ValueError(
                "world.homes must name a free cell for each object, no two the same; use those of draw(keys, walls)."
            )


def _free_cell(world: World, cells: Tensor, taken: Tensor, word: Tensor) -> Tensor:
    """A random free cell `[B]`, each with the same probability, that is none of some `cells` `[B, M]`.

    Args:
      world: the walls.
      cells: `[B, M]` int64, free cells; those that are taken differ from each other.
      taken: `[B, M]` bool, which of `cells` to leave out.
      word: `[B]`, random.
    """
    number = random.to_integer(word, world.num_free - taken.sum(-1))  # among the free cells that are left
    order = torch.where(taken, world.order.gather(-1, cells), NOWHERE)
    # Left over before the j-th (from 0) of the taken cells, which is the t_j-th free one, are t_j - j.
    left = order - (order[..., None, :] < order[..., None]).sum(-1)
    return _at(world.free, number + (left <= number[..., None]).sum(-1)).long()


def _at(table: Tensor, index: Tensor) -> Tensor:
    return table.gather(-1, index[..., None])[..., 0]


def _range(num: int, like: Tensor) -> Tensor:
    return torch.arange(num, device=like.device)


def _count_range(num_objects: Any, total: int) -> tuple[int, int]:
    ends = total if num_objects is None else num_objects
    if not isinstance(ends, Sequence):
        ends = (ends, ends)
    if len(ends) != 2 or any(type(x) is not int for x in ends) or not 0 <= ends[0] <= ends[1] <= total:
        raise ValueError(
            f"num_objects={num_objects!r} is wrong; use an integer from 0 to {total}, the number of objects, or "
            "[low, high] to draw one per environment."
        )
    return ends[0], ends[1]


def _check_walls(walls: Tensor, shape: tuple[int, ...], num_objects: int) -> None:
    if walls.shape != shape or walls.dtype != torch.bool:
        raise ValueError(
            f"walls must be bool of shape {list(shape)}; it is {walls.dtype} of shape {list(walls.shape)}."
        )
    check_room(int((~walls).sum((-2, -1)).min()), num_objects)

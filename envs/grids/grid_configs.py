"""What a GridWorld is made of, the ten configurations of its paper, and the checks of a user's own.

Objects, sizes and time limits are those of Oh et al. 2020, "Discovering reinforcement learning algorithms"
(https://arxiv.org/abs/2007.08794), appendix A, tables of the tabular and of the random grid worlds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from torchpod.envs.arguments import at_least, number

Range = tuple[float, float]
"""`(low, high)`: one value, uniform in between, is drawn for each environment. Equal: that value."""

MAX_TABULAR_OBJECTS = 12


@dataclass(frozen=True)
class ObjectType:
    """Objects that look alike."""

    reward: Range
    """For collecting one."""
    termination: Range
    """Probability that the episode terminates when one is collected."""
    respawn: Range
    """Probability per step that one which was collected comes back."""
    count: int = 1


@dataclass(frozen=True)
class GridConfig:
    """A grid world."""

    walls: tuple[str, ...]
    """One string per row: `#` wall, `.` free. There is a wall around the grid, which is not shown."""
    objects: tuple[ObjectType, ...]
    max_episode_steps: int
    placement: str = "tabular"
    """tabular: objects keep their cells for life; random: they get new ones each episode and respawn."""


def _type(count: int, reward: float, termination: float, respawn: float) -> ObjectType:
    return ObjectType((reward, reward), (termination, termination), (respawn, respawn), count)


def _empty(rows: int, columns: int) -> tuple[str, ...]:
    return ("." * columns,) * rows


_DENSE = (_type(2, 1, 0, 0.05), _type(1, -1, 0.5, 0.1), _type(1, -1, 0, 0.5))
_LONG = (_type(2, 1, 0, 0.01), _type(2, -1, 0.5, 1))
_LONGER_WALLS = ("....#....", ".........", "....#....", "...###...", "....#....", ".........", "....#....")
_CROSS = "##.#####.##"
_PILLAR, _GAP = ".....#.....", "..........."
_LONG_DENSE_WALLS = (_GAP, *[_PILLAR] * 3, _CROSS, *[_PILLAR] * 2, _GAP, *[_PILLAR] * 3)
_SMALL_WALLS = (".......", "..#....", ".......", "....#..", ".......")

CONFIGURATIONS = {
    "dense": GridConfig(_empty(11, 11), _DENSE, 500),
    "sparse": GridConfig(_empty(13, 13), (_type(1, 1, 1, 0), _type(1, -1, 1, 0)), 50),
    "long": GridConfig(_empty(11, 11), _LONG, 1000),
    "longer": GridConfig(_LONGER_WALLS, (_type(2, 1, 0.1, 0.01), _type(5, -1, 0.8, 1)), 2000),
    "long_dense": GridConfig(_LONG_DENSE_WALLS, (_type(4, 1, 0, 0.005),), 2000),
    "random_dense": GridConfig(_empty(11, 11), _DENSE, 500, "random"),
    "random_long": GridConfig(_empty(11, 11), _LONG, 1000, "random"),
    "random_small": GridConfig(_SMALL_WALLS, (_type(2, 1, 0, 0.05), _type(2, -1, 0.5, 0.1)), 500, "random"),
    "random_small_sparse": GridConfig(_empty(5, 7), (_type(1, 1, 1, 1), _type(2, -1, 1, 1)), 50, "random"),
    "random_very_dense": GridConfig(_empty(11, 11), (_type(1, 1, 0, 1),), 2000, "random"),
}


def parse_walls(walls: Any) -> tuple[str, ...]:
    """Rows of equal length of `#` and `.`."""
    if isinstance(walls, str) or not isinstance(walls, Sequence) or not all(isinstance(row, str) for row in walls):
        raise ValueError(f'walls={walls!r} is wrong; use a list of strings, one per row, e.g. ["#..#", "...."].')
    if not walls or not walls[0]:
        raise ValueError('walls is empty; use at least one row and one column, e.g. ["...", "..."].')
    for i, row in enumerate(walls):
        if len(row) != len(walls[0]):
            raise ValueError(
                f"walls has {len(walls[0])} characters in row 0 and {len(row)} in row {i}; make all rows equally long."
            )
        for character in row:
            if character not in "#.":
                raise ValueError(f"walls has {character!r} in row {i}; use # for a wall and . for a free cell.")
    return tuple(walls)


def parse_objects(objects: Any) -> tuple[ObjectType, ...]:
    """A list of dicts `{reward, termination, respawn}`, each a number or `[low, high]`, and an integer `count`."""
    if not isinstance(objects, Sequence) or isinstance(objects, str) or not objects:
        raise ValueError(f"objects={objects!r} is wrong; use a list of at least one {{reward, termination, respawn}}.")
    return tuple(_parse_object(f"objects[{i}]", item) for i, item in enumerate(objects))


def _parse_object(name: str, item: Any) -> ObjectType:
    known = [field.name for field in fields(ObjectType)]
    if not isinstance(item, Mapping) or set(item) - set(known) or set(known[:3]) - set(item):
        raise ValueError(
            f"{name}={item!r} is wrong; use a dict with reward, termination, respawn, and count if there are several."
        )
    count = item.get("count", 1)
    at_least(1, **{f"{name}.count": count})
    limits = {"reward": (-float("inf"), float("inf")), "termination": (0.0, 1.0), "respawn": (0.0, 1.0)}
    ranges = {key: parse_range(f"{name}.{key}", item[key], *low_high) for key, low_high in limits.items()}
    return ObjectType(**ranges, count=count)


def parse_range(name: str, value: Any, low: float, high: float) -> Range:
    """A number, or two of them in order."""
    if isinstance(value, int | float):
        only = number(name, value, low, high)
        return only, only
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        raise ValueError(f"{name}={value!r} is wrong; use a number, or [low, high] to draw one per environment.")
    first, last = (number(name, x, low, high) for x in value)
    if first > last:
        raise ValueError(f"{name}={value!r} is wrong; write the lower number first, [{last:g}, {first:g}].")
    return first, last


def check_room(num_free: int, num_objects: int) -> None:
    """Objects and agent all need a cell of their own."""
    if num_free < num_objects + 1:
        raise ValueError(
            f"walls leaves {num_free} free cells, and {num_objects} objects and the agent need {num_objects + 1}; "
            "take away walls or objects."
        )

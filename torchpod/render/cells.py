"""Boards of cells, and what environments without a drawing of their own get: `default`."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchpod.env import Env
from torchpod.render.canvas import (
    AMBER,
    BLUE,
    DARK,
    FLOOR,
    GREEN,
    GREY,
    INK,
    LIGHT,
    PAPER,
    PINK,
    RED,
    SKY,
    YELLOW,
    Canvas,
    mix,
)
from torchpod.specs import Box, SpecTree
from torchpod.types import Tree

PALETTE = (BLUE, RED, GREEN, AMBER, PINK, SKY, DARK, YELLOW, GREY)
LEGEND = 140
"""Width in pixels that a board leaves for its legend, at the right."""
MAX_BARS = 24
MARGIN = 12


class Mark(NamedTuple):
    """How the cells of a channel look."""

    name: str
    """In the legend."""
    colour: str
    shape: str = "square"
    """square, disc, dot (a small disc), trail (a small faint square), wall (the whole cell) or hidden."""


class Board:
    """Rows and columns of cells, as large as the canvas allows, with a thin grid where cells are large enough."""

    def __init__(self, canvas: Canvas, rows: int, columns: int, legend: int = LEGEND) -> None:
        width, height = canvas.width - legend - 2 * MARGIN, canvas.height - 2 * MARGIN
        self.canvas = canvas
        self.cell = min(width / columns, height / rows)
        if self.cell > 2:
            self.cell = int(self.cell)
        self.left = MARGIN + (width - columns * self.cell) / 2
        self.top = MARGIN + (height - rows * self.cell) / 2
        self.right = self.left + columns * self.cell
        bottom = self.top + rows * self.cell
        canvas.rectangle((self.left, self.top), (self.right, bottom), FLOOR)
        if self.cell >= 6:
            for i in range(rows + 1):
                canvas.line([(self.left, self.top + i * self.cell), (self.right, self.top + i * self.cell)], LIGHT, 1)
            for i in range(columns + 1):
                canvas.line([(self.left + i * self.cell, self.top), (self.left + i * self.cell, bottom)], LIGHT, 1)

    def put(self, row: float, column: float, colour: str, shape: str = "square") -> None:
        """Marks a cell."""
        mark(self.canvas, self.left + column * self.cell, self.top + row * self.cell, self.cell, colour, shape)

    def label(self, row: float, column: float, text: str) -> None:
        """White text in a cell."""
        at = self.left + (column + 0.5) * self.cell, self.top + (row + 0.5) * self.cell
        self.canvas.text(at, text, PAPER, min(0.4, 1.2 / len(text)) * self.cell, "mm")

    def legend(self, marks: Sequence[Mark]) -> None:
        """What the marks mean, at the right of the board."""
        shown = [each for each in marks if each.shape != "hidden"]
        for i, (name, colour, shape) in enumerate(shown):
            y = self.top + 28 * i
            mark(self.canvas, self.right + 16, y, 20, colour, shape)
            self.canvas.text((self.right + 44, y + 10), name, DARK, 13)


def mark(canvas: Canvas, x: float, y: float, cell: float, colour: str, shape: str) -> None:
    """Draws a mark into the cell with the top left corner `(x, y)`."""
    centre = x + cell / 2, y + cell / 2
    if shape in ("disc", "dot"):
        canvas.circle(centre, cell * (0.4 if shape == "disc" else 0.2), colour)
    elif shape != "hidden":
        gap = {"wall": 0.0, "trail": 0.3}.get(shape, 0.07) * cell
        colour = mix(colour, FLOOR, 0.55) if shape == "trail" else colour
        canvas.rectangle(
            (x + gap, y + gap), (x + cell - gap, y + cell - gap), colour, 0 if shape == "wall" else cell / 8
        )


def draw_channels(canvas: Canvas, values: NDArray[np.floating], marks: Sequence[Mark]) -> None:
    """A board whose cells are marked by channel: `values` `[H, W, C]`, from 0 to 1, is how strongly.

    The first channel is on top, trails and walls are below all others.
    """
    named = len(marks) <= 12 and any(each.name for each in marks)
    board = Board(canvas, *values.shape[:2], legend=LEGEND if named else 0)
    below = [i for i, each in enumerate(marks) if each.shape in ("trail", "wall")]
    above = [i for i in range(len(marks)) if i not in below]
    for i in [*reversed(below), *reversed(above)]:
        for row, column in zip(*values[:, :, i].nonzero(), strict=True):
            colour = mix(FLOOR, marks[i].colour, float(values[row, column, i]))
            board.put(row, column, colour, marks[i].shape)
    if named:
        board.legend(marks)


def default(canvas: Canvas, env: Env, state: Tree, observation: Tree) -> None:
    """Draws what the agent sees: images `[H, W, C]` as cells, one colour per channel; other numbers as bars."""
    del state
    spec = env.spec.observation
    if isinstance(observation, Tensor) and observation.ndim == 3:
        values = _unit(observation, spec)
        if observation.dtype == torch.uint8 and values.shape[-1] == 3:
            _draw_colours(canvas, values)
        else:
            count = values.shape[-1]
            shape = "square" if min(canvas.width / values.shape[1], canvas.height / values.shape[0]) >= 8 else "wall"
            name = "channel {}" if 1 < count <= 12 else ""
            draw_channels(
                canvas, values, [Mark(name.format(i), PALETTE[i % len(PALETTE)], shape) for i in range(count)]
            )
        return
    rows = list(_numbers("", spec, observation))
    if len(rows) > MAX_BARS:  # too many to be named: cells, row by row
        columns = int(np.ceil(np.sqrt(len(rows))))
        lengths = np.array([length for _, _, length in rows] + [0.0] * (-len(rows) % columns)).reshape(-1, columns)
        values = np.stack([lengths.clip(0, 1), (-lengths).clip(0, 1)], -1)
        draw_channels(canvas, values, [Mark("above 0", BLUE), Mark("below 0", RED)])
    else:
        draw_bars(canvas, rows)


def draw_bars(canvas: Canvas, rows: Sequence[tuple[str, float, float]]) -> None:
    """Bars to the right and to the left: names, the numbers beside them, and lengths from -1 to 1."""
    left, right = min(40.0 + 8 * max(len(name) for name, _, _ in rows), canvas.width / 3), canvas.width - 80.0
    middle, step = (left + right) / 2, min(44.0, (canvas.height - 2 * MARGIN) / max(len(rows), 1))
    y = (canvas.height - step * len(rows)) / 2 + step / 2
    size = min(14.0, 0.8 * step)
    for name, number, length in rows:
        half = 0.32 * step
        canvas.rectangle((left, y - half), (right, y + half), FLOOR, 3)
        end = middle + length * (right - middle)
        canvas.rectangle((min(middle, end), y - half), (max(middle, end), y + half), BLUE if length > 0 else RED)
        canvas.text((left - 10, y), name, DARK, size, "rm")
        canvas.text((canvas.width - 12, y), f"{number:.3g}", INK, size, "rm")
        y += step
    canvas.line([(middle, MARGIN), (middle, canvas.height - MARGIN)], GREY, 1)


def _draw_colours(canvas: Canvas, values: NDArray[np.floating]) -> None:
    board = Board(canvas, *values.shape[:2], legend=0)
    for row, column in np.ndindex(*values.shape[:2]):
        board.put(row, column, "#" + "".join(f"{round(255 * x):02X}" for x in values[row, column]), "wall")


def _unit(leaf: Tensor, spec: SpecTree) -> NDArray[np.floating]:
    """The values moved into [0, 1], NaN to 0: by the bounds of the spec if it has some, else by those of the values."""
    x = leaf.double().numpy()
    if leaf.dtype == torch.uint8:
        return x / 255
    low, high = (spec.low, spec.high) if isinstance(spec, Box) else (-np.inf, np.inf)
    finite = x[np.isfinite(x)]
    low = finite.min(initial=min(0.0, high)) if np.isinf(low) else low
    high = finite.max(initial=max(1.0, low)) if np.isinf(high) else high
    return np.nan_to_num((x - low) / (high - low or 1.0)).clip(0, 1)


def _numbers(name: str, spec: SpecTree, leaf: Any) -> Any:
    """(name, number, length of its bar) of every entry of an observation; NaN has no bar."""
    if isinstance(leaf, dict):
        for key, value in leaf.items():
            yield from _numbers(f"{name}{key} ", spec[key] if isinstance(spec, dict) else None, value)
        return
    limit = max(abs(spec.low), abs(spec.high)) if isinstance(spec, Box) else np.inf
    for i, number in enumerate(leaf.double().flatten().tolist()):
        # Without a bound large numbers are squeezed, so that every bar ends within the frame.
        squeezed = math.copysign(1 - 1 / (1 + abs(number)), number)
        length = number / (limit or 1.0) if math.isfinite(limit) else squeezed
        yield f"{name}{i}", number, 0.0 if math.isnan(number) else max(-1.0, min(1.0, length))

"""Panels of curves over the time of an episode, for drawings that look back (`Drawing.history`)."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchpod.render.canvas import DARK, FLOOR, LIGHT, Canvas, mix

LABEL, LABEL_ROOM = 10.0, 18.0
"""Height of the names of curves, and the width that they take at the right edge, in pixels."""


class Panel(NamedTuple):
    """Where a panel is and what it shows."""

    left: float
    top: float
    width: float
    height: float
    title: str
    colour: str
    low: float
    high: float
    """Curves are cut off below and above these."""


class Named(NamedTuple):
    """A curve that stands out."""

    name: str
    """Of at most two letters, at its end."""
    colour: str
    curve: NDArray[np.floating]
    """`[t + 1]`."""


def draw_curves(
    canvas: Canvas,
    panel: Panel,
    bold: NDArray[np.floating],
    length: int,
    *,
    thin: NDArray[np.floating] | None = None,
    named: Sequence[Named] = (),
    value: str = "",
) -> None:
    """Draws a panel.

    Args:
      canvas: on which.
      panel: its frame, title above it.
      bold: `[t + 1]`, the curve up to now.
      length: t at the right edge.
      thin: `[t + 1, n]`, faint curves behind it.
      named: curves between the two.
      value: right of the title, the number of now.
    """
    p = panel
    canvas.text((p.left, p.top + 8), p.title, DARK, 12)
    canvas.text((p.left + p.width, p.top + 8), value, p.colour, 12, "rm")
    top, bottom = p.top + 18, p.top + p.height
    canvas.rectangle((p.left, top), (p.left + p.width, bottom), FLOOR, 3)
    if p.low < 0 < p.high:
        zero = bottom - (bottom - top) * -p.low / (p.high - p.low)
        canvas.line([(p.left, zero), (p.left + p.width, zero)], LIGHT, 1)
    # One point in two pixels is enough, and the last one.
    num, width = len(bold), p.width - (LABEL_ROOM if named else 0.0)
    every = max(1, round(2 * length / width))
    steps = np.unique(np.append(np.arange(0, num, every), num - 1))
    x = (p.left + width * steps / length).tolist()

    def heights(curve: NDArray[np.floating]) -> NDArray[np.floating]:
        share = ((curve - p.low) / (p.high - p.low)).clip(0.0, 1.0)
        return bottom - 1 - (bottom - top - 2) * share

    def draw(curve: NDArray[np.floating], colour: str, width: float) -> None:
        canvas.line(list(zip(x, heights(curve[steps]).tolist(), strict=True)), colour, width)

    for curve in [] if thin is None else thin.T:
        draw(curve, mix(p.colour, FLOOR, 0.78), 0.7)
    for _, colour, curve in named:
        draw(curve, colour, 1.2)
    draw(bold, p.colour, 2)
    by_height = sorted(named, key=lambda one: -one.curve[-1])
    ends = heights(np.array([one.curve[-1] for one in by_height]))
    for (name, colour, _), y in zip(by_height, _apart(ends, top, bottom).tolist(), strict=True):
        canvas.text((x[-1] + 3, y), name, colour, LABEL)


def _apart(heights: NDArray[np.floating], top: float, bottom: float) -> NDArray[np.floating]:
    """Where labels go whose heights `[n]` ascend: there, or as near as none lies on another."""
    place = LABEL * np.arange(len(heights))
    lowest = bottom - LABEL / 2 - place[::-1]
    return np.minimum(np.maximum.accumulate(heights.clip(min=top + LABEL / 2) - place) + place, lowest)

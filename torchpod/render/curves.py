"""Panels of curves over the time of an episode, for drawings that look back (`Drawing.history`)."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchpod.render.canvas import DARK, FLOOR, LIGHT, Canvas, mix


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


def draw_curves(
    canvas: Canvas,
    panel: Panel,
    bold: NDArray[np.floating],
    length: int,
    *,
    thin: NDArray[np.floating] | None = None,
    value: str = "",
) -> None:
    """Draws a panel.

    Args:
      canvas: on which.
      panel: its frame, title above it.
      bold: `[t + 1]`, the curve up to now.
      length: t at the right edge.
      thin: `[t + 1, n]`, faint curves behind it.
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
    num = len(bold)
    every = max(1, round(2 * length / p.width))
    steps = np.unique(np.append(np.arange(0, num, every), num - 1))
    x = (p.left + p.width * steps / length).tolist()

    def draw(curve: NDArray[np.floating], colour: str, width: float) -> None:
        share = ((curve[steps] - p.low) / (p.high - p.low)).clip(0.0, 1.0)
        y = (bottom - 1 - (bottom - top - 2) * share).tolist()
        canvas.line(list(zip(x, y, strict=True)), colour, width)

    for curve in [] if thin is None else thin.T:
        draw(curve, mix(p.colour, FLOOR, 0.72), 0.7)
    draw(bold, p.colour, 2)

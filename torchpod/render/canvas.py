"""The canvas that environments are drawn on, and its colours. It needs Pillow, from the extra `video`."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Point = tuple[float, float]
"""(x, y) in pixels, from the top left."""

# Okabe and Ito's colours, told apart by colour-blind readers too, and greys.
BLUE, RED, GREEN, PINK = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
AMBER, SKY, YELLOW = "#E69F00", "#56B4E9", "#F0E442"
PAPER, FLOOR, LIGHT, GREY, DARK, INK = "#FFFFFF", "#F4F6F8", "#DFE3E8", "#8A929C", "#48505A", "#1F242A"

CAPTION = 32
"""Height in pixels of the line of text at the bottom of each frame."""
_SCALE = 3
"""Everything is drawn so many times larger and then averaged, so that lines are smooth."""


class Canvas:
    """A white picture with room for a caption below; `width` and `height` are without it, in pixels.

    Raises:
      ImportError: if Pillow is not installed.
    """

    def __init__(self, width: int, height: int) -> None:
        try:
            from PIL import Image, ImageDraw
        except ImportError as error:
            raise ImportError("drawing needs Pillow: pip install 'torchpod-rl[video]'.") from error
        self.width, self.height = width, height
        self._image = Image.new("RGB", (width * _SCALE, (height + CAPTION) * _SCALE), PAPER)
        self._draw = ImageDraw.Draw(self._image)

    def rectangle(self, corner: Point, opposite: Point, colour: str, radius: float = 0.0) -> None:
        """A filled one, with round corners if there is a radius, from the top left corner to the opposite one."""
        (x_0, y_0), (x_1, y_1) = _scaled((corner, opposite))
        if x_1 - 1 >= x_0 and y_1 - 1 >= y_0:  # Pillow refuses empty ones
            self._draw.rounded_rectangle((x_0, y_0, x_1 - 1, y_1 - 1), radius * _SCALE, colour)

    def circle(self, centre: Point, radius: float, colour: str, hole: str | None = None, width: float = 2.0) -> None:
        """A filled one; with a colour for its hole, a ring of that width."""
        for r, fill in ((radius, colour), (radius - width, hole)):
            if fill is not None:
                self._draw.circle(_scaled((centre,))[0], r * _SCALE, fill)

    def line(self, points: Sequence[Point], colour: str, width: float = 2.0) -> None:
        """Through all points; from a width of a pixel on with round ends and joints."""
        is_thin = width < 1
        if len(points) > 1:
            self._draw.line(_scaled(points), colour, round(width * _SCALE), joint=None if is_thin else "curve")
        for point in () if is_thin else (points[0], points[-1]):
            self.circle(point, width / 2, colour)

    def polygon(self, points: Sequence[Point], colour: str) -> None:
        """A filled one."""
        self._draw.polygon(_scaled(points), colour)

    def text(self, at: Point, text: str, colour: str = INK, size: float = 14.0, anchor: str = "lm") -> None:
        """One line; `anchor` as in Pillow: l, m or r for left, middle or right, then m for the middle of the height."""
        self._draw.text(_scaled((at,))[0], text, colour, _font(round(size * _SCALE)), anchor)

    def caption(self, texts: Sequence[str]) -> None:
        """The line at the bottom: texts side by side, each in its place, so that numbers do not jump."""
        self.rectangle((0, self.height), (self.width, self.height + CAPTION), FLOOR)
        for i, text in enumerate(texts):
            self.text((12 + i * (self.width - 12) / len(texts), self.height + CAPTION / 2), text, DARK, 13)

    def pixels(self) -> NDArray[np.uint8]:
        """`[height + CAPTION, width, 3]`."""
        return np.asarray(self._image.reduce(_SCALE))


def mix(colour: str, other: str, amount: float) -> str:
    """A colour between two: the first with amount 0, the other with 1."""
    parts = [[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in (colour, other)]
    return "#" + "".join(f"{round(a + (b - a) * amount):02X}" for a, b in zip(*parts, strict=True))


def _scaled(points: Sequence[Point]) -> list[Point]:
    return [(x * _SCALE, y * _SCALE) for x, y in points]


@functools.cache
def _font(size: int) -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(size)

"""Drawings of Tag: taggers are red, runners blue, both with trails, and who was tagged fades to grey."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchpod.envs.multi_agent.tag_continuous import TagContinuous, TagContinuousState
from torchpod.envs.multi_agent.tag_gridworld import TagGridWorld, TagGridWorldState
from torchpod.render.canvas import BLUE, DARK, FLOOR, GREY, INK, PAPER, RED, Canvas, Point, mix
from torchpod.render.cells import LEGEND, MARGIN
from torchpod.render.curves import Panel, draw_curves
from torchpod.types import Tree

TRAIL = 12
"""Steps that a trail is long."""
FADE = 8
"""Steps in which a tagged runner becomes grey."""
GONE = mix(GREY, FLOOR, 0.45)


class Field:
    """The square that is played on, with an edge, and room for discs on it."""

    def __init__(self, canvas: Canvas, length: float, radius: float) -> None:
        self.canvas, self.radius = canvas, radius
        side = min(canvas.width - LEGEND - 2 * MARGIN, canvas.height - 2 * MARGIN)
        self.left, self.top, self.side = float(MARGIN), float(MARGIN), float(side)
        canvas.rectangle((self.left, self.top), (self.left + side, self.top + side), DARK, 4)
        canvas.rectangle((self.left + 2, self.top + 2), (self.left + side - 2, self.top + side - 2), FLOOR, 3)
        self._gap = radius + 4
        self.scale = (side - 2 * self._gap) / length
        self._length = length

    def at(self, x: float, y: float) -> Point:
        """In pixels; y goes up."""
        return self.left + self._gap + x * self.scale, self.top + self._gap + (self._length - y) * self.scale

    def trail(self, xs: list[float], ys: list[float], colour: str) -> None:
        """Where an agent came from, fainter the longer ago."""
        points = [self.at(x, y) for x, y in zip(xs, ys, strict=True)]
        for i in range(1, len(points)):
            if points[i - 1] != points[i]:
                age = (len(points) - i) / TRAIL
                self.canvas.line(points[i - 1 : i + 1], mix(colour, FLOOR, 0.35 + 0.6 * age), 0.5 * self.radius)

    def disc(self, at: Point, colour: str, radius: float | None = None) -> None:
        """An agent, set apart from those below it."""
        radius = radius or self.radius
        self.canvas.circle(at, radius + 1, PAPER)
        self.canvas.circle(at, radius, colour)

    def legend(self, rows: list[tuple[str, str, Any]]) -> None:
        """Names, colours and numbers, at the right."""
        left, right = self.left + self.side + 18, self.canvas.width - MARGIN
        for i, (name, colour, number) in enumerate(rows):
            y = self.top + 12 + 26 * i
            self.canvas.circle((left + 6, y), 6, colour)
            self.canvas.text((left + 20, y), name, DARK, 13)
            self.canvas.text((right, y), str(number), INK, 13, "rm")

    def panel(self, title: str, colour: str, high: float) -> Panel:
        """Room for a curve below the legend."""
        left = self.left + self.side + 18
        return Panel(left, self.top + 110, self.canvas.width - MARGIN - left, 96, title, colour, 0.0, high)


def draw_tag_gridworld(canvas: Canvas, env: TagGridWorld, states: TagGridWorldState, observation: Tree) -> None:
    """Agents as discs, larger than cells where these are small; a number says how many taggers are in a cell.

    The curve is how far the nearest tagger is from the runner, in cells.
    """
    n, cells = env.num_taggers, env.grid_length + 1
    field = Field(canvas, env.grid_length, max(7.0, min(16.0, 150 / cells)))
    if cells <= 30:
        for i in range(cells):
            canvas.line([field.at(i, 0), field.at(i, env.grid_length)], mix(GREY, FLOOR, 0.8), 1)
            canvas.line([field.at(0, i), field.at(env.grid_length, i)], mix(GREY, FLOOR, 0.8), 1)
    xs, ys = (torch.cat([p["tagger"], p["runner"]], -1)[-TRAIL:].tolist() for p in (states.x, states.y))
    for i in range(env.num_agents):
        field.trail([row[i] for row in xs], [row[i] for row in ys], RED if i < n else BLUE)
    places = list(zip(xs[-1], ys[-1], strict=True))
    taggers, runner = places[:n], places[n]
    for place in dict.fromkeys(taggers):
        field.disc(field.at(*place), RED)
        if (number := taggers.count(place)) > 1:
            canvas.text(field.at(*place), str(number), PAPER, 1.2 * field.radius, "mm")
    if runner in taggers:
        canvas.circle(field.at(*runner), field.radius + 9, RED, PAPER, 3)
        canvas.circle(field.at(*runner), field.radius + 4, RED)
    field.disc(field.at(*runner), BLUE)
    field.legend([("taggers", RED, n), ("tagged" if runner in taggers else "runner", BLUE, "")])
    away = (_numpy(p["tagger"] - p["runner"]) for p in (states.x, states.y))
    nearest = np.hypot(*away).min(1)
    panel = field.panel("nearest tagger", RED, max(float(nearest.max()), 1.0))
    draw_curves(canvas, panel, nearest, env.spec.max_episode_steps or 1, value=f"{nearest[-1]:.1f}")


def draw_tag_continuous(canvas: Canvas, env: TagContinuous, states: TagContinuousState, observation: Tree) -> None:
    """Agents as discs with trails; a faint ring is as far as a tagger reaches, a bright one around who was just tagged.

    The curve is how many runners are in the game.
    """
    n = env.num_taggers
    field = Field(canvas, env.grid_length, max(3.0, min(7.0, 60 / math.sqrt(env.num_agents))))
    recent: TagContinuousState = pytree.tree_map(lambda x: x[-max(TRAIL, FADE) :], states)
    xs, ys, alive = recent.x.tolist(), recent.y.tolist(), recent.alive.tolist()
    now = [field.at(x, y) for x, y in zip(xs[-1], ys[-1], strict=True)]
    since = [next((age for age, row in enumerate(reversed(alive)) if row[i]), FADE) for i in range(env.num_agents)]
    reach = env.reach * field.scale
    for i in range(n):
        if reach > field.radius + 2:
            canvas.circle(now[i], reach, mix(RED, FLOOR, 0.7), mix(RED, FLOOR, 0.9), 1)
    # Who is out is below all others, taggers are on top; `since` is 0 for who is in the game.
    order = sorted(range(env.num_agents), key=lambda i: (since[i] == 0, i < n))
    for i in order:
        if since[i] == 0:
            field.trail([row[i] for row in xs[-TRAIL:]], [row[i] for row in ys[-TRAIL:]], RED if i < n else BLUE)
    for i in order:
        if since[i] == 0:
            field.disc(now[i], RED if i < n else BLUE)
            continue
        faded = min(since[i] / FADE, 1.0)
        if faded < 1:
            canvas.circle(now[i], field.radius * (1 + 2 * faded), mix(RED, FLOOR, faded), FLOOR, 2)
        field.disc(now[i], mix(BLUE, GONE, faded), field.radius * (1 - 0.4 * faded))
    left = _numpy(states.alive[:, n:]).sum(1)
    num = env.num_agents - n
    field.legend([("taggers", RED, n), ("runners", BLUE, int(left[-1])), ("tagged", GONE, num - int(left[-1]))])
    draw_curves(
        canvas,
        field.panel("runners", BLUE, 1.05 * num),
        left,
        env.spec.max_episode_steps or 1,
        value=f"{100 * left[-1] / num:.0f} %",
    )


def _numpy(x: Tensor) -> np.ndarray:
    return x.double().numpy()

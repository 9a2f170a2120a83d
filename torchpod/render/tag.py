"""Drawings of Tag: taggers are red, runners blue, and whoever has left the game is grey."""

import math

from torchpod.envs.multi_agent.tag_continuous import TagContinuous, TagContinuousState
from torchpod.envs.multi_agent.tag_gridworld import TagGridWorld, TagGridWorldState
from torchpod.render.canvas import BLUE, FLOOR, GREY, LIGHT, PAPER, RED, Canvas, mix
from torchpod.render.cells import Board, Mark
from torchpod.types import Tree

TAGGER, RUNNER, GONE = (
    Mark("tagger", RED, "disc"),
    Mark("runner", BLUE, "disc"),
    Mark("out", mix(GREY, FLOOR, 0.5), "disc"),
)


def draw_tag_gridworld(canvas: Canvas, env: TagGridWorld, state: TagGridWorldState, observation: Tree) -> None:
    """Agents as discs, larger than cells where these are small; a number says how many taggers are in a cell."""
    size = env.grid_length + 1
    shown = size if size <= 50 else 1  # cells that are too small are not shown
    board = Board(canvas, shown, shown)
    cell = (board.right - board.left) / size
    places = list(zip(state.x.tolist(), state.y.tolist(), strict=True))
    radius = max(0.4 * cell, 7.0)

    def centre(x: int, y: int) -> tuple[float, float]:  # y goes up
        return board.left + (x + 0.5) * cell, board.top + (size - y - 0.5) * cell

    for place in dict.fromkeys(places[:-1]):
        canvas.circle(centre(*place), radius, PAPER)
        canvas.circle(centre(*place), radius - 1, RED)
        if (num := places[:-1].count(place)) > 1:
            canvas.text(centre(*place), str(num), PAPER, 1.2 * radius, "mm")
    canvas.circle(centre(*places[-1]), radius, PAPER)
    canvas.circle(centre(*places[-1]), radius - 1, BLUE)
    if places[-1] in places[:-1]:
        canvas.circle(centre(*places[-1]), radius + 4, RED, BLUE, 4)
    board.legend([TAGGER, RUNNER])


def draw_tag_continuous(canvas: Canvas, env: TagContinuous, state: TagContinuousState, observation: Tree) -> None:
    """Agents as discs with a line to where they will be in four steps; a faint ring is as far as a tagger reaches."""
    board = Board(canvas, 1, 1)
    scale, n = (board.right - board.left) / env.grid_length, env.num_taggers
    radius = max(3.0, min(7.0, 60 / math.sqrt(env.num_agents)))
    rows = list(zip(*(f.tolist() for f in (state.x, state.y, state.heading, state.speed, state.alive)), strict=True))

    def at(x: float, y: float) -> tuple[float, float]:  # y goes up, and nothing leaves the field
        x, y = (min(max(c, 0.0), env.grid_length) for c in (x, y))
        return board.left + x * scale, board.top + (env.grid_length - y) * scale

    reach = env.reach * scale
    for x, y, *_ in rows[:n]:
        if reach > radius + 2:
            canvas.circle(at(x, y), reach, mix(RED, FLOOR, 0.7), mix(RED, FLOOR, 0.9), 1)
    # Those that are out are below all others, taggers are on top.
    for i, (x, y, heading, speed, alive) in sorted(enumerate(rows), key=lambda row: (row[1][4], -row[0])):
        colour = (RED if i < n else BLUE) if alive else GONE.colour
        if alive and speed > 0:
            ahead = at(x + 4 * speed * math.cos(heading), y + 4 * speed * math.sin(heading))
            canvas.line([at(x, y), ahead], mix(colour, LIGHT, 0.55), 2)
        canvas.circle(at(x, y), radius + 1, FLOOR)
        canvas.circle(at(x, y), radius, colour)
    board.legend([TAGGER, RUNNER, GONE])

"""Drawings of worlds of cells: Catch, DeepSea, FourRooms, GridWorld; and the marks of MinAtar's channels."""

from typing import Any

import numpy as np
from torch import Tensor

from torchpod.envs.bsuite.catch import Catch, CatchState
from torchpod.envs.bsuite.deep_sea import DeepSea, DeepSeaState
from torchpod.envs.grids.four_rooms import SIZE, FourRooms, FourRoomsState, is_wall
from torchpod.envs.grids.grid_world import GridWorld, GridWorldState
from torchpod.render.canvas import AMBER, BLUE, DARK, FLOOR, GREEN, GREY, LIGHT, PINK, RED, SKY, Canvas, mix
from torchpod.render.cells import Board, Mark, draw_channels
from torchpod.types import Tree

AGENT, WALL = Mark("agent", BLUE, "disc"), Mark("wall", DARK, "wall")

ASTERIX = (Mark("player", BLUE, "disc"), Mark("enemy", RED), Mark("trail", GREY, "trail"), Mark("gold", AMBER, "disc"))
BREAKOUT = (Mark("paddle", BLUE), Mark("ball", RED, "disc"), Mark("trail", RED, "trail"), Mark("brick", AMBER))
FREEWAY = (
    Mark("chicken", AMBER, "disc"),
    Mark("car", BLUE),
    *(Mark(f"speed 1/{i + 1}", mix(RED, SKY, i / 4), "trail") for i in range(5)),
)
SEAQUEST = (
    Mark("front", BLUE),
    Mark("back", mix(BLUE, FLOOR, 0.4)),
    Mark("bullet", DARK, "dot"),
    Mark("trail", GREY, "trail"),
    Mark("enemy bullet", PINK, "dot"),
    Mark("fish", RED, "disc"),
    Mark("submarine", RED),
    Mark("oxygen", SKY),
    Mark("on board", GREEN),
    Mark("diver", AMBER, "disc"),
)
SPACE_INVADERS = (
    Mark("cannon", BLUE),
    Mark("alien", GREEN),
    Mark("goes left", GREEN, "hidden"),
    Mark("goes right", GREEN, "hidden"),
    Mark("bullet", DARK, "dot"),
    Mark("alien bullet", RED, "dot"),
)


def draw_catch(canvas: Canvas, env: Catch, state: CatchState, observation: Tree) -> None:
    """The ball above the paddle."""
    cells = np.zeros((env.rows, env.columns, 2))
    cells[int(state.ball_row), int(state.ball_column), 0] = 1
    cells[env.rows - 1, int(state.paddle_column), 1] = 1
    draw_channels(canvas, cells, [Mark("ball", RED, "disc"), Mark("paddle", BLUE)])


def draw_deep_sea(canvas: Canvas, env: DeepSea, state: DeepSeaState, observation: Tree) -> None:
    """The diver, the treasure at the bottom right, and the part of the sea that cannot be reached."""
    size = env.size
    row, column = min(int(state.row), size - 1), int(state.column)  # at the end the diver is below the sea
    cells = np.zeros((size, size, 3))
    cells[row, column, 0] = 1
    cells[size - 1, size - 1, 1] = 1
    cells[:, :, 2] = np.arange(size) > np.arange(size)[:, None]
    marks = Mark("diver", BLUE, "disc"), Mark("treasure", AMBER), Mark("out of reach", LIGHT, "wall")
    draw_channels(canvas, cells, marks)


def draw_four_rooms(canvas: Canvas, env: FourRooms, state: FourRoomsState, observation: Tree) -> None:
    """The house, whatever the agent observes of it."""
    cells = np.zeros((SIZE, SIZE, 3))
    for i, position in enumerate((state.agent, state.goal)):
        cells[tuple(position.tolist())][i] = 1
    cells[:, :, 2] = [[is_wall(row, column) for column in range(SIZE)] for row in range(SIZE)]
    draw_channels(canvas, cells, [AGENT, Mark("goal", GREEN), WALL])


def draw_grid_world(canvas: Canvas, env: GridWorld, state: GridWorldState, observation: Tree) -> None:
    """Objects green or red, by their reward, which is written on them; a faint one has been collected."""
    board = Board(canvas, env.rows, env.columns)
    columns, world = env.columns, state.world
    for cell in world.walls.nonzero().flatten().tolist():
        board.put(cell // columns, cell % columns, WALL.colour, "wall")
    legend = {}
    for i in range(int(world.num_objects)):
        row, column = divmod(int(state.objects[i]), columns)
        reward, present = _round(world.reward[i]), bool(state.present[i])
        colour = GREEN if float(world.reward[i]) > 0 else RED
        if present:
            board.put(row, column, colour)
            board.label(row, column, reward)
        elif not env.is_random:  # it comes back here
            board.put(row, column, colour, "trail")
        legend[reward] = Mark(f"reward {reward}", colour)
    board.put(*divmod(int(state.agent), columns), AGENT.colour, AGENT.shape)
    collected = [] if env.is_random else [Mark("collected", GREY, "trail")]
    walls = [WALL] if world.walls.any() else []
    board.legend([AGENT, *list(legend.values())[:8], *collected, *walls])


def _round(reward: Tensor) -> Any:
    return f"{float(reward):+.2g}"

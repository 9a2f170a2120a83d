"""Drawings of the classic control tasks, from the states of torchpod/envs/classic."""

import math
from typing import Any

from torch import Tensor

from torchpod.env import Env
from torchpod.envs.classic import mountain_car, mountain_car_continuous
from torchpod.envs.classic.cartpole import X_LIMIT
from torchpod.render.canvas import AMBER, BLUE, DARK, FLOOR, GREEN, GREY, INK, LIGHT, PAPER, RED, Canvas, Point
from torchpod.types import Tree


def draw_cartpole(canvas: Canvas, env: Env, state: Tensor, observation: Tree) -> None:
    """The cart on its rail, which ends where the episode does."""
    position, _, angle, _ = state.tolist()
    scale, rail = (canvas.width - 40) / (2 * X_LIMIT + 0.8), canvas.height - 70.0
    left, middle = canvas.width / 2 - X_LIMIT * scale, canvas.width / 2
    canvas.line([(0, rail), (canvas.width, rail)], LIGHT, 3)
    canvas.line([(left, rail), (canvas.width - left, rail)], GREY, 3)
    for x in (left, middle, canvas.width - left):
        canvas.line([(x, rail - 6), (x, rail + 6)], GREY, 2)
    x = middle + position * scale
    top = rail - 36
    canvas.rectangle((x - 36, top), (x + 36, rail - 8), DARK, 6)
    for wheel in (-20, 20):
        canvas.circle((x + wheel, rail - 8), 8, INK, GREY, 4)
    length = 2.0 * scale
    tip = x + length * math.sin(angle), top - length * math.cos(angle)
    canvas.line([(x, top + 4), tip], AMBER, 12)
    canvas.circle((x, top + 4), 6, BLUE)


def draw_pendulum(canvas: Canvas, env: Env, state: Tensor, observation: Tree) -> None:
    """The pendulum; a faint mark says where it should stand."""
    angle, velocity = state.tolist()
    centre, length = (canvas.width / 2, canvas.height / 2), 0.36 * canvas.height
    canvas.circle(centre, length + 16, LIGHT, PAPER, 2)
    canvas.line([centre, _turned(centre, length, 0.0)], FLOOR, 26)
    for i in range(12):
        ends = (_turned(centre, length + extra, math.pi * i / 6) for extra in (10, 16))
        canvas.line(list(ends), GREY, 2)
    # Gymnasium counts the angle against the clock.
    tip = _turned(centre, length, -angle)
    canvas.line([centre, tip], RED, 24)
    canvas.circle(centre, 6, INK)
    canvas.text((canvas.width - 12, 18), f"{velocity:+.1f} rad/s", DARK, 13, "rm")


def draw_point_mass(canvas: Canvas, env: Env, state: Tensor, observation: Tree) -> None:
    """The mass, where it is to be, and where it will be in half a second if nothing pushes it."""
    scale, centre = canvas.width / 5, (canvas.width / 2, canvas.height / 2)

    def place(x: float, y: float) -> tuple[float, float]:
        return centre[0] + scale * x, centre[1] - scale * y

    for i in range(-2, 3):
        canvas.line([place(i, -2.4), place(i, 2.4)], LIGHT, 1)
        canvas.line([place(-2.4, i), place(2.4, i)], LIGHT, 1)
    canvas.circle(centre, 16, GREEN, PAPER, 3)
    x, y, v_x, v_y = state.tolist()
    canvas.line([place(x, y), place(x + v_x / 2, y + v_y / 2)], GREY, 3)
    canvas.circle(place(x, y), 10, BLUE)


def draw_acrobot(canvas: Canvas, env: Env, state: Tensor, observation: Tree) -> None:
    """Both links, and the height that the tip must reach."""
    theta_1, theta_2, _, _ = state.tolist()
    length = 0.215 * canvas.height
    bar = canvas.width / 2, canvas.height / 2 + 10
    for x in range(0, canvas.width, 16):
        canvas.line([(x, bar[1] - length), (x + 8, bar[1] - length)], GREEN, 2)
    canvas.text((8, bar[1] - length - 14), "goal", GREEN, 13)
    elbow = _turned(bar, length, math.pi - theta_1)
    tip = _turned(elbow, length, math.pi - theta_1 - theta_2)
    canvas.line([(bar[0] - 40, bar[1]), (bar[0] + 40, bar[1])], LIGHT, 4)
    canvas.line([bar, elbow], BLUE, 16)
    canvas.line([elbow, tip], AMBER, 16)
    for joint in (bar, elbow):
        canvas.circle(joint, 5, PAPER)


def draw_mountain_car(canvas: Canvas, env: Env, state: Tensor, observation: Tree) -> None:
    """The car in its valley, and the flag."""
    task: Any = mountain_car_continuous if "continuous" in env.spec.name else mountain_car
    low, high = mountain_car.MIN_POSITION, mountain_car.MAX_POSITION
    scale = canvas.width / (high - low)

    def ground(position: float) -> Point:
        return (position - low) * scale, canvas.height - 40 - 0.45 * scale * (math.sin(3 * position) + 1)

    hill = [ground(low + (high - low) * i / 100) for i in range(101)]
    canvas.polygon([(0, canvas.height), *hill, (canvas.width, canvas.height)], LIGHT)
    canvas.line(hill, GREY, 3)
    x, y = ground(task.GOAL)
    canvas.line([(x, y), (x, y - 46)], DARK, 3)
    canvas.polygon([(x, y - 46), (x + 24, y - 38), (x, y - 30)], GREEN)

    position = state[0].item()
    slope = math.atan(0.45 * 3 * math.cos(3 * position))
    forward, up = (math.cos(slope), -math.sin(slope)), (-math.sin(slope), -math.cos(slope))
    x, y = ground(position)

    def at(along: float, above: float) -> Point:
        return x + along * forward[0] + above * up[0], y + along * forward[1] + above * up[1]

    canvas.polygon([at(-22, 8), at(22, 8), at(22, 18), at(-22, 18)], RED)
    canvas.polygon([at(-14, 18), at(10, 18), at(5, 28), at(-10, 28)], BLUE)
    for wheel in (-13, 13):
        canvas.circle(at(wheel, 7), 7, INK, GREY, 4)


def _turned(centre: Point, length: float, angle: float) -> Point:
    """The end of a line from `centre` that is upright with angle 0 and turns with the clock."""
    return centre[0] + length * math.sin(angle), centre[1] - length * math.cos(angle)

"""Which environment is drawn how: DRAWINGS maps a class to its drawing; all others get `cells.default`.

Give your own environment a drawing where you define it:

    from torchpod.render import DRAWINGS, Drawing

    DRAWINGS[MyEnv] = Drawing(draw_my_env, size=(400, 300), fps=20)
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import _pytree as pytree

from torchpod import envs
from torchpod.env import Env, TensorEnv
from torchpod.envs.transforms import Transform, innermost
from torchpod.render import chains, classic, covid, grids, tag
from torchpod.render.canvas import CAPTION, Canvas
from torchpod.render.cells import Mark, default, draw_channels
from torchpod.types import TimeStep, Tree
from torchpod.watched import sentence


class Drawing(NamedTuple):
    """How frames are made."""

    draw: Callable[[Canvas, Any, Any, Any], None]
    """`draw(canvas, env, state, observation)`: the state as `reset` returns it and the observation, both of one
    environment, without a batch axis, on the CPU."""
    size: tuple[int, int] = (540, 400)
    """Width and height of the picture in even numbers of pixels; the caption comes below."""
    fps: int = 10
    """Frames, which are steps, per second of a video."""
    history: bool = False
    """True: `state` is all states of the episode up to now, with an axis of time in front: `[t + 1, ...]`."""


def _draw_board(marks: Sequence[Mark], canvas: Canvas, env: Env, state: Tree, observation: Tensor) -> None:
    draw_channels(canvas, observation.numpy(), marks)


def _board(marks: Sequence[Mark]) -> Drawing:
    return Drawing(functools.partial(_draw_board, marks))


DEFAULT = Drawing(default)
DRAWINGS: dict[type, Drawing] = {
    envs.Acrobot: Drawing(classic.draw_acrobot, (400, 400), 15),
    envs.Asterix: _board(grids.ASTERIX),
    envs.BernoulliBandit: Drawing(chains.draw_bernoulli_bandit, (400, 260)),
    envs.Breakout: _board(grids.BREAKOUT),
    envs.CartPole: Drawing(classic.draw_cartpole, (480, 300), 30),
    envs.Catch: Drawing(grids.draw_catch, fps=8),
    envs.CovidEconomy: Drawing(covid.draw_covid_economy, (760, 588), 20, history=True),
    envs.DeepSea: Drawing(grids.draw_deep_sea, fps=8),
    envs.DelayedChain: Drawing(chains.draw_delayed_chain, (480, 260), 8),
    envs.FourRooms: Drawing(grids.draw_four_rooms),
    envs.Freeway: _board(grids.FREEWAY),
    envs.GridWorld: Drawing(grids.draw_grid_world),
    envs.MemoryChain: Drawing(chains.draw_memory_chain, (480, 180), 4),
    envs.MountainCar: Drawing(classic.draw_mountain_car, (480, 340), 30),
    envs.MountainCarContinuous: Drawing(classic.draw_mountain_car, (480, 340), 30),
    envs.Pendulum: Drawing(classic.draw_pendulum, (400, 400), 30),
    envs.PointMass: Drawing(classic.draw_point_mass, (400, 400), 10),
    envs.Seaquest: _board(grids.SEAQUEST),
    envs.SpaceInvaders: _board(grids.SPACE_INVADERS),
    envs.TagContinuous: Drawing(tag.draw_tag_continuous, (620, 480), 15, history=True),
    envs.TagGridWorld: Drawing(tag.draw_tag_gridworld, (620, 480), history=True),
}


def drawing_of(env: Env) -> Drawing:
    """That of the environment's class, behind its transforms, or of the nearest of its bases; else the default."""
    while isinstance(env, Transform):
        env = env.env
    return next((DRAWINGS[base] for base in type(env).__mro__ if base in DRAWINGS), DEFAULT)


def frame_size(env: Env) -> tuple[int, int]:
    """Height and width of a frame, caption included."""
    width, height = drawing_of(env).size
    return height + CAPTION, width


def render(
    env: Env,
    state: Tree,
    timestep: TimeStep,
    row: int = 0,
    caption: Sequence[str] = (),
    history: Tree | None = None,
) -> NDArray[np.uint8]:
    """A frame `[*frame_size(env), 3]`.

    Args:
      env: any environment that is pure.
      state: what `init` or `step` returned, `[B, ...]`.
      timestep: likewise.
      row: which environment of the batch.
      caption: texts for the line at the bottom.
      history: states of the episode up to this one, `[t + 1, B, ...]`, for drawings that look back; None: this one.

    Raises:
      ImportError: if Pillow is not installed.
      ValueError: if the drawing does not take what it is given.
    """
    drawing, (inner, own, as_reset) = drawing_of(env), innermost(env, state)
    # Draws what is there, not what transforms make of it.
    seen = cast(TensorEnv, inner).observe(own) if as_reset else timestep.observation
    if drawing.history:
        own = pytree.tree_map(lambda x: x[None], own) if history is None else innermost(env, history)[1]
    own = pytree.tree_map(lambda x: (x[:, row] if drawing.history else x[row]).detach().cpu(), own)
    seen = pytree.tree_map(lambda x: x[row].detach().cpu(), seen)
    canvas = Canvas(*drawing.size)
    try:
        drawing.draw(canvas, inner, own, seen)
    except TypeError as error:
        raise ValueError(
            f"{getattr(drawing.draw, '__name__', drawing.draw)} cannot draw {env.spec.name}: {sentence(error)} It is "
            "called as draw(canvas, env, state, observation); TORCHPOD_TRACEBACK=1 shows where."
        ) from error
    canvas.caption(caption)
    return canvas.pixels()


def describe(step: int, reward: float, total: float) -> tuple[str, str, str]:
    """The caption of a frame: where in the episode it is."""
    return f"step {step}", f"reward {_short(reward)}", f"return {_short(total)}"


def _short(number: float) -> str:
    if not math.isfinite(number) or number == round(number) and abs(number) < 1e6:
        return f"{number:g}"
    return f"{number:.2f}" if abs(number) >= 0.01 else f"{number:.1g}"

"""Videos of episodes: `torchpod eval RUN --video FILE`. Drawing is render/; playing is as in evaluate.py."""

import contextlib
import importlib
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import _pytree as pytree

from torchpod import random
from torchpod.agent import Agent, Variables
from torchpod.env import Env
from torchpod.render import describe, drawing_of, render
from torchpod.rollout import make_step, start
from torchpod.types import FIRST

Frame = NDArray[np.uint8]
"""`[height, width, 3]`, both even."""


def check_video(path: Path, env: Env) -> None:
    """Refuses what could not be written, before anything is played.

    Raises:
      ValueError: if the suffix is not known, or the environment cannot be drawn.
      ImportError: if the extra is not installed.
    """
    if path.suffix not in WRITERS:
        raise ValueError(f"{path} has the suffix {path.suffix or 'none'!r}; use one of {', '.join(WRITERS)}.")
    if not env.traits.pure:
        raise ValueError(
            f"{env.spec.name} cannot be drawn: it is no tensor environment; record it with its own library, e.g. "
            "gymnasium.wrappers.RecordVideo."
        )
    for module in ("PIL", "av") if path.suffix == ".mp4" else ("PIL",):
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ImportError(f"{path} needs {module}: pip install torchpod-rl[video].") from error


def play(
    agent: Agent, env: Env, variables: Variables, key: Tensor, *, num_episodes: int
) -> Iterator[tuple[Frame, float]]:
    """Frames of a greedy episode, each with the return so far: the first that `evaluate` plays with the same key.

    Args:
      agent: the agent; only its methods are used.
      env: a pure environment.
      variables: parameters and buffers of one agent.
      key: `[3]`.
      num_episodes: of the evaluation.
    """
    env_keys, actor_keys = (random.split(k, num_episodes)[:1] for k in random.split(key, 2))
    step = make_step(agent, env, explore=False)
    with torch.no_grad():
        carry = start(agent, env, env_keys)
        count, total = 0, 0.0
        yield render(env, carry.env_state, carry.timestep, caption=describe(0, 0.0, 0.0)), total
        for _ in range(env.spec.max_episode_steps or 10_000):
            carry, _ = step(variables, carry, env_keys, actor_keys)
            timestep = carry.timestep
            reward = sum(float(leaf.mean()) for leaf in pytree.tree_leaves(timestep.extras["raw_reward"]))
            count, total = count + int(timestep.step_type != FIRST), total + reward
            yield render(env, carry.env_state, timestep, caption=describe(count, reward, total)), total
            if timestep.extras["game_over"]:
                return


def record(path: Path, agent: Agent, env: Env, variables: Variables, key: Tensor, *, num_episodes: int) -> str:
    """Writes an episode, see `play`; returns a line that says what is in the file."""
    length, last = 0, 0.0

    def frames() -> Iterator[Frame]:
        nonlocal length, last
        for frame, total in play(agent, env, variables, key, num_episodes=num_episodes):
            length, last = length + 1, total
            yield frame

    write_video(path, frames(), drawing_of(env).fps)
    return f"{path}: {length} frames, return {last:.1f}"


def write_video(path: Path, frames: Iterable[Frame], fps: int) -> None:
    """Writes frames as .gif or .mp4; the folder is made if it does not exist, and a failure leaves no file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    try:
        WRITERS[path.suffix](part, iter(frames), fps)
        part.replace(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            part.unlink()


def _write_gif(path: Path, frames: Iterator[Frame], fps: int) -> None:
    """Durations are in hundredths of a second: 30 frames per second become 33."""
    from PIL import Image

    images = (Image.fromarray(frame).quantize(256, dither=Image.Dither.NONE) for frame in frames)
    first = next(images)
    duration = 10 * round(100 / fps)
    first.save(path, "gif", save_all=True, append_images=images, duration=duration, loop=0)


def _write_mp4(path: Path, frames: Iterator[Frame], fps: int) -> None:
    """H.264, which every browser plays."""
    import av

    with av.open(str(path), "w", format="mp4") as container:
        stream: Any = container.add_stream("libx264", rate=fps, options={"crf": "18"})
        first = next(frames)
        stream.pix_fmt, (stream.height, stream.width) = "yuv420p", first.shape[:2]
        for frame in itertools.chain([first], frames):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))


WRITERS = {".gif": _write_gif, ".mp4": _write_mp4}

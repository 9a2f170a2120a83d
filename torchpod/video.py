"""Videos of episodes: `torchpod eval RUN --video FILE`. Drawing is render/, the episode is from recording.py."""

import importlib
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils import _pytree as pytree

from torchpod.env import Env
from torchpod.files import replacing
from torchpod.metrics import short
from torchpod.recording import Recording
from torchpod.render import describe, drawing_of, render
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
            raise ImportError(f"{path} needs {module}: pip install 'torchpod-rl[video]'.") from error


def play(env: Env, recording: Recording) -> Iterator[tuple[Frame, float]]:
    """Frames of an episode, each with the return so far; the first is before the first step.

    Args:
      env: a pure environment.
      recording: an episode of it.
    """
    count, total = 0, 0.0
    for i, reward in enumerate(recording.rewards.tolist()):
        timestep = pytree.tree_map(lambda x, i=i: x[i], recording.timestep)
        states = pytree.tree_map(lambda x, i=i: x[: i + 1], recording.env_state)
        count, total = count + int(i > 0 and timestep.step_type != FIRST), total + reward
        state = pytree.tree_map(lambda x: x[-1], states)
        yield render(env, state, timestep, caption=describe(count, reward, total), history=states), total


def record(path: Path, env: Env, recording: Recording) -> str:
    """Draws an episode; returns a line that says what is in the file."""
    length, last = 0, 0.0

    def frames() -> Iterator[Frame]:
        nonlocal length, last
        for frame, total in play(env, recording):
            length, last = length + 1, total
            yield frame

    write_video(path, frames(), drawing_of(env).fps)
    return f"{path}: {length} frames, return {short(last)}"


def write_video(path: Path, frames: Iterable[Frame], fps: int) -> None:
    """Writes frames as .gif or .mp4; the folder is made if it does not exist, and a failure leaves no file."""
    with replacing(path) as part:
        WRITERS[path.suffix](part, iter(frames), fps)


def _write_gif(path: Path, frames: Iterator[Frame], fps: int) -> None:
    """Durations are in hundredths of a second: 30 frames per second become 33."""
    from PIL import Image

    images = (
        Image.fromarray(frame).quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE) for frame in frames
    )
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

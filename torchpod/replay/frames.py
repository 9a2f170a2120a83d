"""Stacks of frames, of which replay keeps the newest: how they are taken apart, and put together again to the bit.

An observation `[..., C]` holds `count` frames side by side in its last axis, the newest last. It goes on from the one
before it, or repeats one frame, as at the beginning of a game. What goes on is found by comparing the two.
"""

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchpod.types import Tree


def apart(observation: Tree, count: int, axis: int) -> dict[str, Tensor]:
    """The newest frames, as `observation`, and whether the step after each goes on from there, as `goes_on`.

    Args:
      observation: `[T + 1, B, ..., C]`.
      count: frames in C.
      axis: that of time.

    Raises:
      ValueError: if it is no single tensor of so many frames.
    """
    if not isinstance(observation, Tensor) or observation.shape[-1] % count or observation.dim() < axis + 3:
        found = pytree.tree_map(lambda x: list(x.shape[axis + 2 :]), observation)
        raise ValueError(
            f"algo.replay.frame_stack={count} takes one observation whose last axis holds {count} frames, and this "
            f"one is {found}; set it to the environment's own, or to 1."
        )
    each, num = observation.shape[-1] // count, observation.shape[axis] - 1
    # Bytes that lie together, the newest frame of the step after among them, which does not count: ten times as fast as
    # to compare slices of three bytes in four.
    flat = observation.flatten(axis + 2)
    older, newer = flat.narrow(axis, 1, num)[..., :-each], flat.narrow(axis, 0, num)[..., each:]
    place = torch.arange(older.shape[-1], device=flat.device) % observation.shape[-1]
    is_newest = place >= observation.shape[-1] - each
    same = (older == newer).bitwise_or_(is_newest).view(torch.uint8)  # `amin` is vectorised, `all` is not
    return {"observation": observation[..., -each:], "goes_on": same.amin(-1) > 0}


def together(newest: Tensor, goes_on: Tensor, slot: Tensor, env: Tensor, count: int) -> Tensor:
    """The observations `[..., C]` of slots and environments of a ring.

    Args:
      newest: `[S, B, ..., C / count]`.
      goes_on: bool `[S, B]`.
      slot: int64, of any shape.
      env: int64, as `slot` or to be broadcast to it.
      count: frames.
    """
    num_slots, num_envs = goes_on.shape
    before = goes_on.flatten()
    sources, going = [slot], torch.ones_like(slot, dtype=torch.bool)
    for _ in range(count - 1):
        last = (sources[0] - 1) % num_slots
        going = going & before[last * num_envs + env]
        sources.insert(0, torch.where(going, last, sources[0]))
    frames = newest.flatten(0, 1)[torch.stack(sources) * num_envs + env]
    return frames.movedim(0, -2).flatten(-2)


def check(observation: Tree, parts: dict[str, Tensor], count: int, axis: int, *, begins: bool) -> None:
    """Raises `ValueError` for observations that could not be put together again.

    Args:
      observation: `[T + 1, B, ..., C]`.
      parts: of `apart`.
      count: frames.
      axis: that of time.
      begins: the first step begins episodes; otherwise it goes on from one that is not known here.
    """
    assert isinstance(observation, Tensor)
    shape = observation.narrow(axis, 0, 1).shape[: axis + 2]
    others = ~torch.cat([torch.full(shape, not begins, device=observation.device), parts["goes_on"]], axis)
    stack = observation[others]
    newest = stack[..., -(stack.shape[-1] // count) :]
    broken = (stack != newest.repeat(*[1] * (stack.dim() - 1), count)).flatten(1).any(-1)
    if broken.any():
        *_, step, env = others.nonzero()[broken][0].tolist()
        raise ValueError(
            f"algo.replay.frame_stack={count}: the observation of environment {env} in step {step} is no stack of "
            f"{count} frames that goes on from the one before or repeats one frame; set it to 1."
        )

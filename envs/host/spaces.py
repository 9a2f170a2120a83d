"""Gymnasium's spaces as specs, and what is in them as tensors and back."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchpod.actions import mask_by_choice
from torchpod.specs import Array, Box, Discrete, MultiDiscrete, SpecTree
from torchpod.types import ACTION_MASK, Tree

_UNBOUNDED = 1e6  # EnvPool writes "no bound" as 1e10, or as the range of a double; Gymnasium as infinity
_MAX_JOINT = 10_000  # a choice among more actions would be too wide


def action_of(
    space: Any, where: str, *, apart: bool = False
) -> tuple[Box | Discrete | MultiDiscrete, Callable[[np.ndarray], Any]]:
    """The spec of an action space, and the function that turns actions of the spec `[B, ...]` into the space's.

    Args:
      space: of Gymnasium.
      where: it stands, for the error.
      apart: the integers of a Box are a MultiDiscrete, not numbered.

    Raises:
      ValueError: for a space that no agent here could act in.
    """
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        return Discrete(int(space.n)), lambda action: (action + space.start).astype(space.dtype)
    if isinstance(space, spaces.MultiDiscrete):
        return MultiDiscrete(tuple(space.nvec.flatten().tolist())), lambda action: (
            action.reshape(-1, *space.shape) + space.start
        ).astype(space.dtype)
    if isinstance(space, spaces.Tuple) and all(isinstance(x, spaces.Discrete) for x in space) and len(space):
        return MultiDiscrete(tuple(int(x.n) for x in space)), lambda action: tuple(
            (own + x.start).astype(x.dtype) for own, x in zip(action.T, space, strict=True)
        )
    if not isinstance(space, spaces.Box):
        raise ValueError(f"{where} is {space}; use Box, Discrete, MultiDiscrete, or a Tuple of Discrete.")
    if 0 in space.shape:
        raise ValueError(f"{where} is {space}, of no numbers; give it some.")
    low, high, dtype = space.low, space.high, space.dtype
    if space.dtype is not None and space.dtype.kind != "f":
        shape, counts = space.shape, [int(b) - int(a) + 1 for a, b in zip(low.flat, high.flat, strict=True)]
        if max(counts) > _MAX_JOINT:
            raise ValueError(f"{where} is {space}, an integer of more than {_MAX_JOINT} values; choose another space.")
        if apart or math.prod(counts) > _MAX_JOINT:
            return MultiDiscrete(tuple(counts)), lambda action: (action.reshape(-1, *shape) + low).astype(space.dtype)
        return Discrete(math.prod(counts)), lambda action: (
            np.stack(np.unravel_index(action, counts), -1).reshape(-1, *shape) + low
        ).astype(space.dtype)

    def bounded(action: np.ndarray) -> np.ndarray:
        return action.clip(low, high).astype(dtype, copy=False)

    if float(max(abs(low).max(), abs(high).max())) > _UNBOUNDED:
        return Box(space.shape), bounded
    if (low == low.flat[0]).all() and (high == high.flat[0]).all():
        return Box(space.shape, float(low.flat[0]), float(high.flat[0])), bounded
    center, half = (high + low) / 2, (high - low) / 2
    return Box(space.shape, -1.0, 1.0), lambda action: bounded(center + half * action)


def spec_of(space: Any, where: str) -> SpecTree:
    """The spec of an observation space. Images of bytes `[C, H, W]` become `[H, W, C]`, as everywhere; floats stay.

    Raises:
      ValueError: for a space that no agent here could read.
    """
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        return {name: spec_of(inner, f"{where}[{name!r}]") for name, inner in space.items()}
    if isinstance(space, spaces.Tuple):
        return {str(i): spec_of(inner, f"{where}[{i}]") for i, inner in enumerate(space)}
    if isinstance(space, spaces.Discrete):
        # What begins below 0, or far above it, is no index, and becomes a number.
        return Discrete(int(space.start + space.n)) if 0 <= space.start <= space.n else Array(())
    if isinstance(space, spaces.Box | spaces.MultiBinary):
        dtype = torch.uint8 if space.dtype == np.uint8 else torch.float32
        return numbers(space.shape, dtype)
    raise ValueError(f"{where} is {space}; use Box, Discrete, MultiBinary, or Dict and Tuple of these.")


def numbers(shape: tuple[int, ...], dtype: torch.dtype) -> Array:
    """The spec of an observed tensor; bytes whose first of three axes is the shortest are an image `[C, H, W]`."""
    channels_first = len(shape) == 3 and dtype == torch.uint8 and shape[0] < min(shape[1:])
    return Array((*shape[1:], shape[0]) if channels_first else shape, dtype)


def channels_last(tensor: Tensor, spec: Any) -> Tensor:
    """`[B, *spec.shape]`, a view of an image that came as `[B, C, H, W]`."""
    channels_first = tensor.shape[1:] != spec.shape and tensor.shape[1:] == (spec.shape[-1], *spec.shape[:-1])
    # Moving them costs many times what a copy does, which a device does better.
    return tensor.movedim(1, -1) if channels_first else tensor


def masked(observation: SpecTree, action: Box | Discrete | MultiDiscrete, where: str) -> SpecTree:
    """With a mask of bools, if there is one.

    Raises:
      ValueError: if it has not one entry per value.
    """
    if not isinstance(observation, dict) or ACTION_MASK not in observation:
        return observation
    given = observation[ACTION_MASK].shape
    if given != (sum(action.nvec) if isinstance(action, MultiDiscrete) else getattr(action, "num_values", 0),):
        raise ValueError(f"{where}: action_mask is {list(given)}, and the action {action}; give one entry per value.")
    return observation | {ACTION_MASK: Array(given, torch.bool)}


def opened(mask: Tensor, action: SpecTree, acts: np.ndarray) -> tuple[Tensor, tuple[int, int] | None]:
    """A mask `[B, A]` that leaves a policy something in each choice: who does not act may do what it likes.

    Returns:
      The mask; and row and choice where somebody of `acts`, `[B]` bool, is allowed nothing, None if there is none.
    """
    parts, stuck = [], None
    for i, part in enumerate(mask_by_choice(mask, action)):
        nothing = ~part.any(-1)
        rows = np.flatnonzero(nothing.numpy() & acts)
        stuck = (int(rows[0]), i) if stuck is None and rows.size else stuck
        parts.append(part | nothing[:, None])
    return torch.cat(parts, -1), stuck


def to_tensors(observation: Any, spec: SpecTree) -> Tree:
    """Arrays as tensors of the spec's types, which share their memory where the type is right; images as views.

    Raises:
      ValueError: for an integer outside a Discrete.
    """
    if isinstance(spec, dict):
        parts = dict(zip(spec, observation, strict=True)) if isinstance(observation, tuple) else observation
        return {name: to_tensors(parts[name], inner) for name, inner in spec.items()}
    tensor = torch.from_numpy(np.ascontiguousarray(observation)).to(spec.dtype)
    if isinstance(spec, Discrete):
        low, high = map(int, tensor.aminmax())
        if low < 0 or high >= spec.num_values:
            came, last = low if low < 0 else high, spec.num_values - 1
            raise ValueError(f"an observation is {came}, and its space is 0 to {last}; make them agree.")
    return channels_last(tensor, spec)


def misfit(observation: Any, space: Any) -> str | None:
    """Which part of an observation is not there, or has another shape or type than in its space; None if all fit."""
    from gymnasium import spaces

    if isinstance(space, spaces.Dict | spaces.Tuple):
        inner: dict[Any, Any] = dict(space.items() if isinstance(space, spaces.Dict) else enumerate(space))
        parts = observation if isinstance(observation, tuple | list) else ()
        there: dict[Any, Any] = observation if isinstance(observation, dict) else dict(enumerate(parts))
        if missing := inner.keys() - there.keys():
            return f"without {min(missing)!r}, which its space has"
        wrong = (misfit(there[name], part) for name, part in inner.items())
        return next((part for part in wrong if part is not None), None)
    if observation is None:
        return f"that is None, and the space says {list(space.shape)}"
    found = np.asarray(observation)
    if found.shape != space.shape:
        return f"of shape {list(found.shape)}, and the space says {list(space.shape)}"
    fits = space.dtype is None or np.can_cast(found.dtype, space.dtype, "same_kind")
    return None if fits else f"of {found.dtype}, and the space says {space.dtype}"

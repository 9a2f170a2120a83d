"""Shapes and ranges of what environments emit and accept, without the batch axis."""

import math
import numbers
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchpod.ops.features import one_hot, scaled

SpecTree = Any
"""A spec, or nested dicts of specs."""
MOST_VALUES = 10_000
"""Of an observed choice: a first layer has a column for each."""


@dataclass(frozen=True)
class Array:
    """A tensor of any value."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        _require_sizes("shape", self.shape, "sizes", least=0)
        _require_dtype(self.dtype)


@dataclass(frozen=True)
class Box:
    """A float tensor, each number of which is within `[low, high]`, a pair for all of them.

    Where the numbers of an action have bounds of their own, let it be `Box(shape, -1.0, 1.0)` and scale it in the
    environment, as torchpod.envs.Gymnasium does.
    """

    shape: tuple[int, ...]
    low: float = -float("inf")
    high: float = float("inf")
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if not all(isinstance(x, numbers.Real) for x in (self.low, self.high)) or not self.low <= self.high:
            raise ValueError(
                f"Box(shape, low, high) needs two numbers, low <= high, for all of its entries, not low={self.low!r} "
                f"and high={self.high!r}; where entries differ in their bounds, use Box(shape, -1.0, 1.0) and scale "
                "them in the environment."
            )
        _require_sizes("shape", self.shape, "sizes", least=0)
        _require_dtype(self.dtype)

    @property
    def bounded(self) -> bool:
        """Whether both bounds are finite."""
        return math.isfinite(self.low) and math.isfinite(self.high)


@dataclass(frozen=True)
class Discrete:
    """An integer in `{0, ..., num_values - 1}`."""

    num_values: int
    dtype: torch.dtype = torch.int64

    def __post_init__(self) -> None:
        if not _is_count(self.num_values):
            raise ValueError(f"Discrete needs an integer, at least one value, not num_values={self.num_values!r}.")
        _require_dtype(self.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """Always a scalar."""
        return ()


@dataclass(frozen=True)
class MultiDiscrete:
    """Several integers, the i-th in `{0, ..., nvec[i] - 1}`, along the last axis."""

    nvec: tuple[int, ...]
    dtype: torch.dtype = torch.int64

    def __post_init__(self) -> None:
        _require_sizes("nvec", self.nvec, "numbers of values", least=1)
        if not self.nvec:
            raise ValueError("MultiDiscrete needs at least one integer, not nvec=(), e.g. (2,).")
        _require_dtype(self.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """`(len(nvec),)`."""
        return (len(self.nvec),)


@dataclass(frozen=True)
class Traits:
    """What an environment can do; the loops choose their path by it.

    A tensor environment has all but `differentiable`, which it claims where it holds; one that calls a foreign kernel
    may have fewer, a host environment none.
    """

    pure: bool = True
    """`step` is a function of its arguments: same in, same out."""
    capturable: bool = True
    """`step` can be compiled and captured in a CUDA graph."""
    differentiable: bool = False
    """Gradients flow from reward and observation to action and state."""
    vmappable: bool = True
    """`torch.vmap` over populations works."""


HOST = Traits(pure=False, capturable=False, differentiable=False, vmappable=False)


@dataclass(frozen=True)
class EnvSpec:
    """Everything a loop or an agent must know before the first step."""

    name: str
    observation: SpecTree
    action: SpecTree
    max_episode_steps: int | None = None
    """Episodes are truncated after this many steps; None for never."""
    truncates_early: bool = False
    """Episodes may also be truncated before that, by rules of the environment's own (out of bounds, a lost simulation):
    LAST with discount 1 at any step."""
    groups: dict[str, int] | None = None
    """Number of agents per group, `{group: N}`; None for one agent without an N axis."""

    def __post_init__(self) -> None:
        limit, groups = self.max_episode_steps, self.groups
        if limit is not None and not _is_count(limit):
            raise ValueError(
                f"max_episode_steps={limit!r} of {self.name} must be an integer of at least 1, or None for no limit."
            )
        if groups is not None and not (isinstance(groups, dict) and all(map(_is_count, groups.values()))):
            raise ValueError(
                f"groups={groups!r} of {self.name} must be a dict of how many agents each group has, at least 1, e.g. "
                '{"scouts": 3}, or None for one agent.'
            )
        _require_numbers(self.observation, "observation", self.name)
        _require_numbers(self.action, "action", self.name)


def _is_count(x: Any, least: int = 1) -> bool:
    return isinstance(x, numbers.Integral) and int(x) >= least


def _require_sizes(name: str, sizes: Any, what: str, *, least: int) -> None:
    if not isinstance(sizes, tuple | list) or not all(_is_count(x, least) for x in sizes):
        like = f"({sizes},)" if _is_count(sizes, least) else "(2,)"
        raise ValueError(f"{name}={sizes!r} must be a tuple of {what}, integers of at least {least}, e.g. {like}.")


def _require_dtype(dtype: Any) -> None:
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype={dtype!r} must be a dtype of torch's, e.g. torch.float32.")


def _require_numbers(spec: SpecTree, what: str, env: str) -> None:
    """Networks, statistics and replay have nothing to do with a part that holds no number."""
    if isinstance(spec, dict):
        for key, part in spec.items():
            _require_numbers(part, f"{what}[{key!r}]", env)
    elif not isinstance(spec, Array | Box | Discrete | MultiDiscrete):
        raise ValueError(
            f"{what} of {env} must be an Array, Box, Discrete or MultiDiscrete of torchpod.specs, or a dict of them, "
            f"not {spec!r}."
        )
    found = "{}" if spec == {} else f"of shape {spec.shape}" if not isinstance(spec, dict) and 0 in spec.shape else None
    if found is not None:
        raise ValueError(
            f"{what} of {env} is {found} and holds no number: leave such a part out, or have a constant in its place."
        )


def shape_of(spec: SpecTree) -> Any:
    """The shape, or dict of shapes, of a spec tree."""
    return {k: shape_of(v) for k, v in spec.items()} if isinstance(spec, dict) else spec.shape


def width(spec: Any) -> int:
    """How many numbers `features` gives.

    Raises:
      ValueError: for a choice of more than `MOST_VALUES`.
    """
    values = (spec.num_values,) if isinstance(spec, Discrete) else spec.nvec if isinstance(spec, MultiDiscrete) else ()
    if max(values, default=0) > MOST_VALUES:
        raise ValueError(
            f"an observation is one of {max(values)} values, and networks see one number for each of up to "
            f"{MOST_VALUES}; observe something smaller, or a Box."
        )
    return sum(values) if values else math.prod(spec.shape)


def features(x: Tensor, spec: Any) -> Tensor:
    """A tensor `[..., *spec.shape]` as `[..., width(spec)]`: a choice as a 1 among zeros, bytes scaled to [0, 1]."""
    if isinstance(spec, Discrete):
        return one_hot(x, spec.num_values)
    if isinstance(spec, MultiDiscrete):
        return torch.cat([one_hot(part, n) for part, n in zip(x.unbind(-1), spec.nvec, strict=True)], -1)
    return scaled(x).reshape(*x.shape[: x.ndim - len(spec.shape)], -1)

"""Who is nearest to whom, among many on a plane, the same to the bit on every device and by every compiler.

A compiled program for a CPU calls one operator (kernels/cpu_nearest.cpp), which keeps the nearest in a cache.
"""

import functools
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 8
"""Agents of which the nearest stands for all, when the nearest are looked for."""
PIECE = 128
"""Agents that look for their nearest at a time, without a compiler."""
MAX_PASSES = 16
"""For more neighbours than this, `topk` finds the smallest keys: every pass is another loop to compile."""
NOBODY = 0x7F800000 << 32
"""The first key of somebody who is infinitely far."""
LARGEST = torch.finfo(torch.float32).max

_LIBRARY = torch.library.Library("torchpod", "FRAGMENT")
_LIBRARY.define(
    "nearest(Tensor x, Tensor y, Tensor alive, int num) -> (Tensor, Tensor)", tags=(torch.Tag.needs_contiguous_strides,)
)


def distance(dx: Tensor, dy: Tensor) -> Tensor:
    """Euclid's, float32, every step rounded once, as NumPy does: agents along a side are often equally far."""
    return _root(_squared(dx, dy))


def nearest(x: Tensor, y: Tensor, alive: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """The nearest others in the game, the nearest first and of equally near ones the first.

    Of many agents, those with neighbouring ids form blocks of `BLOCK`, and only the distance to the nearest of each
    block is kept: the `num` nearest agents are in the `num` blocks whose nearest is nearest, of equally near ones the
    first. So no matrix of all pairs is made, where there are more than 2 K blocks; and without a compiler, which would
    fuse what is between, `PIECE` agents look at a time. Bits of positive floats are ordered like the floats; with the
    id behind them no two are equal, and every device and compiler finds the same. Who looks is the last axis of
    everything: there compilers for CPUs vectorise.

    Args:
      x: `[B, A]` float32.
      y: `[B, A]` float32.
      alive: `[B, A]` bool.
      num: K, from 1 to A - 1.

    Returns:
      ids `[B, A, K]` int64, and whether there is such an agent, `[B, A, K]` bool.

    Raises:
      ValueError: for other shapes, an `alive` that is not bool, or a K that is not in [1, A).
    """
    if not (x.ndim == 2 and x.shape == y.shape == alive.shape and alive.dtype == torch.bool):
        shapes = ", ".join(f"{tuple(f.shape)} {f.dtype}" for f in (x, y, alive))
        raise ValueError(f"nearest: x, y and alive must be of one shape [B, A], and alive bool; they are {shapes}.")
    if not 1 <= num < x.shape[-1]:
        raise ValueError(f"nearest: num={num} must be at least 1 and less than the {x.shape[-1]} agents.")
    program = torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling()
    if program and x.is_cpu and x.dtype == y.dtype == torch.float32:
        return torch.ops.torchpod.nearest(x, y, alive, num)
    return _searched(x, y, alive, num)


def _searched(x: Tensor, y: Tensor, alive: Tensor, num: int) -> tuple[Tensor, Tensor]:
    size = x.shape[-1]
    count = torch.arange(size, dtype=torch.int32, device=x.device)
    xs, ys = (torch.where(alive, f, math.inf) for f in (x, y))
    if torch.compiler.is_compiling():
        keys = _nearest_keys(xs, ys, x, y, count, num)
    else:
        pieces = zip(x.split(PIECE, -1), y.split(PIECE, -1), count.split(PIECE), strict=True)
        keys = torch.cat([_nearest_keys(xs, ys, x_, y_, own, num) for x_, y_, own in pieces], -1)
    there = keys < NOBODY
    return torch.where(there, keys & 0xFFFFFFFF, 0).transpose(1, 2), there.transpose(1, 2)


def _nearest_keys(xs: Tensor, ys: Tensor, x: Tensor, y: Tensor, own: Tensor, num: int) -> Tensor:
    """`[B, K, P]` int64, for the P agents at `x` and `y` `[B, P]` whose ids are `own` `[P]`."""
    size = xs.shape[-1]
    num_blocks = -(-size // BLOCK)
    count = torch.arange(size, dtype=torch.int32, device=x.device)

    def squared(ids: Tensor, x_: Tensor, y_: Tensor) -> Tensor:
        return torch.where(ids == own, math.inf, _squared(x_ - x[:, None], y_ - y[:, None]))

    if num_blocks <= 2 * num:
        ids = count[:, None]
        found = squared(ids, xs[..., None], ys[..., None])  # [B, A, P]
    else:
        xs, ys = (pad(f, (0, num_blocks * BLOCK - size), value=math.inf) for f in (xs, ys))
        blocks = count[:num_blocks, None]
        members = (squared(blocks * BLOCK + i, xs[:, i::BLOCK, None], ys[:, i::BLOCK, None]) for i in range(BLOCK))
        best = functools.reduce(torch.minimum, members)  # [B, A / BLOCK, P]
        chosen = (_smallest(_keys(_root(best), blocks), num) & 0xFFFFFFFF).int()
        ids = (chosen[:, None] * BLOCK + count[:BLOCK, None, None]).flatten(1, 2)  # [B, BLOCK K, P]
        index = ids.flatten(1).long()
        found = squared(ids, *(f.gather(1, index).view(ids.shape) for f in (xs, ys)))
    return _smallest(_keys(_root(found), ids), num)


def _keys(distance: Tensor, ids: Tensor) -> Tensor:
    return (distance.view(torch.int32).long() << 32) | ids


def _smallest(keys: Tensor, num: int) -> Tensor:
    """The `num` smallest along axis 1, in order; no two keys are equal. A pass for each of a few vectorises."""
    if num > MAX_PASSES:
        return keys.topk(num, 1, largest=False).values
    found = [keys.amin(1)]
    for _ in range(num - 1):
        found.append(torch.where(keys > found[-1][:, None], keys, 2**63 - 1).amin(1))
    return torch.stack(found, 1)


def _squared(dx: Tensor, dy: Tensor) -> Tensor:
    """Euclid's distance, squared, float32. Agents along a side are often equally far but for the last bit.

    So every step is rounded alike: the clamp, which changes nothing but infinity, keeps compilers from fusing a square
    with the sum.
    """
    x, y = ((d * d).clamp(max=LARGEST) for d in (dx, dy))
    return x + y


def _root(squared: Tensor) -> Tensor:
    """Rounded once, as compilers do. Torch's own root of float32 on a CPU is MKL's, one in six of which is not."""
    return squared.sqrt() if torch.compiler.is_compiling() else squared.double().sqrt().float()


def _mapped(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
    """The mapped axis is a part of the batch."""

    def flat(x: Tensor, dim: int | None) -> Tensor:
        x = x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
        return x.flatten(0, 1)

    *tensors, num = args
    found = torch.ops.torchpod.nearest(*(flat(x, dim) for x, dim in zip(tensors, in_dims, strict=False)), num)
    return tuple(x.unflatten(0, (info.batch_size, -1)) for x in found), (0, 0)


def _fakes(x: Tensor, y: Tensor, alive: Tensor, num: int) -> tuple[Tensor, Tensor]:
    shape = (*x.shape, num)
    return x.new_empty(shape, dtype=torch.int64), x.new_empty(shape, dtype=torch.bool)


torch.library.register_fake("torchpod::nearest", _fakes, lib=_LIBRARY)
torch.library.register_vmap("torchpod::nearest", _mapped, lib=_LIBRARY)

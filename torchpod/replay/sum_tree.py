"""Prioritised sampling: a tree of sums with 16 children per node, as plain tensors.

Schaul et al. 2016, "Prioritized experience replay" (https://arxiv.org/abs/1511.05952), appendix B.2.1, with a binary
tree. Here a node is the running sums of its 16 children, one cache line, in which a search takes four comparisons: 5
lines for a million leaves. Sums are taken anew from what is below, never incremented, so that they do not drift.

A tree is a list: the leaves `[..., N]`, then running sums within every 16 of them `[..., N]`, of the totals of these
`[..., N / 16]`, and so on up to 16; all are padded with zeros to multiples of 16. The leading axes are those of a
population.
"""

import torch
from torch import Tensor

FAN = 16


def make(num_leaves: int, lead: tuple[int, ...] = (), device: torch.device | str = "cpu") -> list[Tensor]:
    """A tree of zeros, float32.

    Args:
      num_leaves: at least 1.
      lead: leading axes.
      device: where it lives.
    """
    sizes = [-(-num_leaves // FAN) * FAN] * 2
    while sizes[-1] > FAN:
        sizes.append(-(-sizes[-1] // FAN // FAN) * FAN)
    return [torch.zeros(*lead, size, device=device) for size in sizes]


def write(tree: list[Tensor], index: Tensor, values: Tensor) -> None:
    """Sets leaves, in place; of several values for one leaf the largest counts.

    Args:
      tree: from `make`.
      index: int64 `[..., K]` of leaves.
      values: float32 `[..., K]`, at least 0.
    """
    tree[0].scatter_reduce_(-1, index, values, "amax", include_self=False)
    items = tree[0]
    for upto in tree[1:]:
        nodes = upto.unflatten(-1, (-1, FAN))
        index = torch.div(index, FAN, rounding_mode="floor")
        rows = index.unsqueeze(-1).expand(*index.shape, FAN)
        if items.shape != upto.shape:  # never of the leaves, which would be copied
            items = torch.nn.functional.pad(items, (0, upto.shape[-1] - items.shape[-1]))
        nodes.scatter_(-2, rows, items.unflatten(-1, (-1, FAN)).gather(-2, rows).cumsum(-1))
        items = nodes[..., -1]


def total(tree: list[Tensor]) -> Tensor:
    """The sum of all leaves, `[...]`."""
    return tree[-1][..., -1]


def find(tree: list[Tensor], height: Tensor) -> Tensor:
    """Leaves by their share of the total: leaf i for heights in [sum of those before it, and of it). Pure.

    Args:
      tree: from `make`, without leading axes.
      height: `[K]` in [0, `total`), float64 for more than 2^16 leaves or so: float32 has 2^24 places.

    Returns:
      int64 `[K]`. A leaf of 0 is never found, unless all are: then it is the last of the padding.
    """
    node = torch.zeros_like(height, dtype=torch.int64)
    for upto in reversed(tree[1:]):
        first = (node * FAN).clamp(max=upto.shape[-1] - FAN)  # beyond it if all leaves are 0
        # Rounding may have left the height at the total or above, behind the last child that is not 0.
        height = torch.minimum(height, upto[first + FAN - 1] * (1.0 - 2.0**-23))
        place = torch.zeros_like(node)
        for step in (8, 4, 2, 1):
            place = place + step * (upto[first + place + step - 1] <= height)
        height = height - torch.where(place > 0, upto[first + (place - 1).clamp(min=0)], 0.0)
        node = first + place
    return node

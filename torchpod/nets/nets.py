"""MLP, CNN and GRU cell, with the orthogonal initialisation that PPO wants.

`nn.GRU` and BatchNorm neither compile fullgraph nor vmap; these do. Every network takes any number of leading axes.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchpod import specs

ACTIVATIONS = {"tanh": nn.Tanh, "relu": nn.ReLU, "silu": nn.SiLU}


def make_activation(name: str) -> nn.Module:
    """An activation by name.

    Raises:
      ValueError: if there is none of that name.
    """
    if name not in ACTIVATIONS:
        raise ValueError(f"activation={name} is not known; use one of {', '.join(ACTIVATIONS)}.")
    return ACTIVATIONS[name]()


def orthogonal(layer: nn.Linear | nn.Conv2d, gain: float = math.sqrt(2.0)) -> nn.Module:
    """Orthogonal weight and zero bias, as in Andrychowicz et al. 2021 (https://arxiv.org/abs/2006.05990)."""
    nn.init.orthogonal_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


class MLP(nn.Sequential):
    """Dense layers with an activation after each: `[..., in]` to `[..., sizes[-1]]`."""

    def __init__(self, in_features: int, sizes: Sequence[int], activation: str = "tanh") -> None:
        layers: list[nn.Module] = []
        for size in sizes:
            layers += [orthogonal(nn.Linear(in_features, size)), make_activation(activation)]
            in_features = size
        super().__init__(*layers)
        self.out_features = in_features


class CNN(nn.Module):
    """A small convolutional network for images `[..., H, W, C]`: one 3x3 layer per channel count, then one dense."""

    def __init__(
        self, shape: tuple[int, ...], channels: Sequence[int] = (16,), hidden: int = 128, activation: str = "relu"
    ) -> None:
        super().__init__()
        height, width, in_channels = shape
        convs: list[nn.Module] = []
        for out in channels:
            convs += [orthogonal(nn.Conv2d(in_channels, out, 3, padding=1)), make_activation(activation)]
            in_channels = out
        self.convs = nn.Sequential(*convs)
        self.dense = MLP(in_channels * height * width, [hidden], activation)
        self.out_features = hidden

    def forward(self, x: Tensor) -> Tensor:
        """`[..., H, W, C]` to `[..., hidden]`."""
        lead = x.shape[:-3]
        y = self.convs(x.flatten(0, -4).movedim(-1, -3) if lead else x.movedim(-1, -3)[None])
        return self.dense(y.flatten(-3).reshape(*lead, -1))


class Encoder(nn.Module):
    """Picks the network that fits an observation spec: CNN for `[H, W, C]`, else an MLP on everything flattened.

    Without `channels` images are flattened too.

    A dict observation is flattened and concatenated in the order of its keys, without its `action_mask`.
    """

    def __init__(self, spec: specs.SpecTree, hidden: Sequence[int], activation: str, channels: Sequence[int]) -> None:
        super().__init__()
        self.names = [k for k in sorted(spec) if k != "action_mask"] if isinstance(spec, dict) else None
        leaves: list[Any] = [spec[k] for k in self.names] if isinstance(spec, dict) and self.names else [spec]
        self.event_dims = [len(leaf.shape) for leaf in leaves]
        self.is_image = len(leaves) == 1 and len(leaves[0].shape) == 3 and len(channels) > 0
        if self.is_image:
            self.net: CNN | MLP = CNN(leaves[0].shape, channels, hidden[-1])
        else:
            self.net = MLP(sum(math.prod(leaf.shape) for leaf in leaves), hidden, activation)
        self.out_features = self.net.out_features

    def forward(self, observation: Tensor | dict[str, Tensor]) -> Tensor:
        """Observation `[..., *shape]` to features `[..., out_features]`."""
        if isinstance(observation, dict):
            leaves = [observation[k] for k in self.names or ()]
        else:
            leaves = [observation]
        if self.is_image:
            return self.net(leaves[0].float())
        pairs = zip(leaves, self.event_dims, strict=True)
        flat = [leaf.float().reshape(*leaf.shape[: leaf.ndim - dims], -1) for leaf, dims in pairs]
        return self.net(flat[0] if len(flat) == 1 else torch.cat(flat, -1))


class GRUCell(nn.Module):
    """Gated recurrent unit of Cho et al. 2014 (https://arxiv.org/abs/1406.1078), one step."""

    def __init__(self, in_features: int, hidden: int) -> None:
        super().__init__()
        self.input = orthogonal(nn.Linear(in_features, 3 * hidden), 1.0)
        self.recurrent = orthogonal(nn.Linear(hidden, 3 * hidden), 1.0)
        self.hidden = hidden

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        """Input `[B, in]` and state `[B, hidden]` to the next state `[B, hidden]`."""
        return self.step(self.input(x), h)

    def step(self, gates: Tensor, h: Tensor) -> Tensor:
        """As `forward`, with the input's share `self.input(x)` computed before (for all steps in one product)."""
        x_r, x_z, x_n = gates.chunk(3, -1)
        h_r, h_z, h_n = self.recurrent(h).chunk(3, -1)
        r, z = torch.sigmoid(x_r + h_r), torch.sigmoid(x_z + h_z)
        n = torch.tanh(x_n + r * h_n)
        return (1 - z) * n + z * h

"""MLP, CNN and GRU cell, with the orthogonal initialisation that PPO wants.

`nn.GRU` and BatchNorm neither compile fullgraph nor vmap; these do. Every network takes any number of leading axes.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from torchpod import specs
from torchpod.ops.features import scaled
from torchpod.types import ACTION_MASK

ACTIVATIONS = {"tanh": nn.Tanh, "relu": nn.ReLU, "silu": nn.SiLU}


def make_activation(name: str) -> nn.Module:
    """An activation by name.

    Raises:
      ValueError: if there is none of that name.
    """
    if name not in ACTIVATIONS:
        raise ValueError(f"activation={name} is not known; use one of {', '.join(ACTIVATIONS)}.")
    return ACTIVATIONS[name]()


Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)


def orthogonal(layer: Layer, gain: float = math.sqrt(2.0)) -> Layer:
    """Orthogonal weight and zero bias, as in Andrychowicz et al. 2021 (https://arxiv.org/abs/2006.05990)."""
    nn.init.orthogonal_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


class MLP(nn.Sequential):
    """Dense layers with an activation after each: `[..., in]` to `[..., sizes[-1]]`.

    Raises:
      ValueError: if a layer would have no units.
    """

    def __init__(self, in_features: int, sizes: Sequence[int], activation: str = "tanh") -> None:
        if min(sizes, default=1) < 1:
            raise ValueError(f"hidden has a layer of {min(sizes)} units, and must be at least 1 each.")
        layers: list[nn.Module] = []
        for size in sizes:
            layers += [orthogonal(nn.Linear(in_features, size)), make_activation(activation)]
            in_features = size
        super().__init__(*layers)
        self.out_features = in_features


class CNN(nn.Module):
    """Convolutions and one dense layer, for images `[..., H, W, C]`.

    Args:
      shape: `(H, W, C)`.
      convs: from `[B, C, H, W]` to `[B, C', H', W']`, with an activation at its end.
      hidden: features after the dense layer.

    Raises:
      ValueError: if nothing is left of an image so small.
    """

    def __init__(self, shape: tuple[int, ...], convs: nn.Sequential, hidden: int) -> None:
        super().__init__()
        height, width, channels = shape
        try:
            features = convs(torch.zeros(1, channels, height, width)).numel()
        except RuntimeError as error:
            raise ValueError(
                f"images {list(shape)} are too small for these convolutions, which leave nothing of them; use "
                "torso=small or larger images."
            ) from error
        self.convs, self.dense = convs, MLP(features, [hidden], "relu")
        self.out_features = hidden

    def forward(self, x: Tensor) -> Tensor:
        """`[..., H, W, C]` to `[..., hidden]`."""
        lead = x.shape[:-3]
        y = self.convs(x.flatten(0, -4).movedim(-1, -3) if lead else x.movedim(-1, -3)[None])
        return self.dense(y.flatten(-3).reshape(*lead, -1))


class Residual(nn.Module):
    """`x + conv(relu(conv(relu(x))))`, 3x3, of Espeholt et al. 2018, figure 3."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        first, second = (orthogonal(nn.Conv2d(channels, channels, 3, padding=1)) for _ in range(2))
        self.branch = nn.Sequential(nn.ReLU(), first, nn.ReLU(), second)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, C, H, W]` to the same shape."""
        return x + self.branch(x)


TORSOS = ("small", "nature", "impala_shallow", "impala_deep")


def make_torso(
    name: str, shape: tuple[int, ...], *, channels: Sequence[int], hidden: int, width: int = 1, depth: int = 1
) -> CNN:
    """The convolutional network of that name for images `[H, W, C]`.

    Args:
      name: "small": 3x3 of `channels`, dense `hidden`. "nature": Mnih et al. 2015
        (https://doi.org/10.1038/nature14236), dense 512. "impala_shallow" and "impala_deep": Espeholt et al. 2018
        (https://arxiv.org/abs/1802.01561), figure 3, dense 256.
      shape: `(H, W, C)`.
      channels: of "small".
      hidden: of "small".
      width: multiplies the channels of "impala_deep".
      depth: multiplies the residual blocks of "impala_deep".

    Raises:
      ValueError: if there is none of that name, or nothing is left of an image so small.
    """
    if name not in TORSOS:
        raise ValueError(f"torso={name} is not known; use one of {', '.join(TORSOS)}.")
    if name == "impala_deep":
        layers, before = [], shape[-1]
        for after in (16 * width, 32 * width, 32 * width):
            layers += [orthogonal(nn.Conv2d(before, after, 3, padding=1)), nn.MaxPool2d(3, 2, 1)]
            layers += [Residual(after) for _ in range(2 * depth)]
            before = after
        return CNN(shape, nn.Sequential(*layers, nn.ReLU()), 256)
    specs, hidden = {
        "small": ([(c, 3, 1, 1) for c in channels], hidden),
        "nature": ([(32, 8, 4, 0), (64, 4, 2, 0), (64, 3, 1, 0)], 512),
        "impala_shallow": ([(16, 8, 4, 0), (32, 4, 2, 0)], 256),
    }[name]
    layers, before = [], shape[-1]
    for after, kernel, stride, padding in specs:
        layers += [orthogonal(nn.Conv2d(before, after, kernel, stride, padding)), nn.ReLU()]
        before = after
    return CNN(shape, nn.Sequential(*layers), hidden)


STATE = "seen by all agents"
"""In a dict observation, what only values may see: of a critic that knows more than the policy."""


def choose_torso(
    spec: specs.EnvSpec, name: str, *, channels: Sequence[int], hidden: int, width: int = 1, depth: int = 1
) -> Callable[[tuple[int, ...]], CNN] | None:
    """What an `Encoder` uses for images, with the arguments of `make_torso`; None if it is to flatten them.

    Raises:
      ValueError: if a torso other than "small", which is the default, was asked for, and a policy sees no image.
    """
    leaves = list(seen(spec.observation).values())
    if name != "small" and [len(leaf.shape) for leaf in leaves] != [3]:
        raise ValueError(
            f"torso={name} is for observations of one image [H, W, C], and those of {spec.name} are "
            f"{specs.shape_of(spec.observation)}; leave torso out, and an MLP sees everything flattened."
        )
    if name == "small" and not channels:
        return None
    return functools.partial(make_torso, name, channels=channels, hidden=hidden, width=width, depth=depth)


def seen(spec: specs.SpecTree, sees_state: bool = False) -> dict[str | None, Any]:
    """What networks see of an observation, by name; what is no dict has the name None."""
    hidden_from_it = (ACTION_MASK,) if sees_state else (ACTION_MASK, STATE)
    for name, inner in spec.items() if isinstance(spec, dict) else ():
        if isinstance(inner, dict) and name not in hidden_from_it:
            raise ValueError(
                f"observation[{name!r}] has entries of its own, {sorted(inner)}, and networks see one level of names; "
                "add '+env.transforms=[flatten]', or torchpod.envs.transforms.Flatten."
            )
    return {k: spec[k] for k in sorted(spec) if k not in hidden_from_it} if isinstance(spec, dict) else {None: spec}


class Encoder(nn.Module):
    """Picks the network that fits an observation spec: `torso` for `[H, W, C]`, else an MLP on everything flattened.

    Bytes are scaled to [0, 1], and a Discrete is a vector of zeros with a single 1. A dict observation is flattened
    and concatenated in the order of its keys, without its `action_mask`, and without its `STATE` unless it is to see
    that.

    Args:
      spec: of the observation.
      hidden: sizes of the MLP.
      activation: of the MLP.
      torso: makes the network for images of a shape `(H, W, C)`; None: flatten them too.
      sees_state: whether it sees `STATE`.
    """

    def __init__(
        self,
        spec: specs.SpecTree,
        hidden: Sequence[int],
        activation: str,
        torso: Callable[[tuple[int, ...]], CNN] | None = None,
        sees_state: bool = False,
    ) -> None:
        super().__init__()
        self.names, self.specs = zip(*seen(spec, sees_state).items(), strict=True)
        self.is_image = torso is not None and len(self.specs) == 1 and len(self.specs[0].shape) == 3
        if torso is not None and self.is_image:
            self.net: CNN | MLP = torso(self.specs[0].shape)
        else:
            self.net = MLP(sum(map(specs.width, self.specs)), hidden, activation)
        self.out_features = self.net.out_features

    def forward(self, observation: Tensor | dict[str, Tensor]) -> Tensor:
        """Observation `[..., *shape]` to features `[..., out_features]`."""
        if isinstance(observation, dict):
            leaves = [observation[k] for k in self.names]
        else:
            leaves = [observation]
        if self.is_image:
            return self.net(scaled(leaves[0]))
        flat = [specs.features(leaf, spec) for leaf, spec in zip(leaves, self.specs, strict=True)]
        return self.net(flat[0] if len(flat) == 1 else torch.cat(flat, -1))


class GRUCell(nn.Module):
    """Gated recurrent unit of Cho et al. 2014 (https://arxiv.org/abs/1406.1078), one step; the state is the output."""

    def __init__(self, in_features: int, hidden: int) -> None:
        super().__init__()
        self.input = orthogonal(nn.Linear(in_features, 3 * hidden), 1.0)
        self.recurrent = orthogonal(nn.Linear(hidden, 3 * hidden), 1.0)
        self.state_size = hidden

    def step(self, gates: Tensor, state: Tensor) -> Tensor:
        """The next state `[B, state_size]`.

        Args:
          gates: the input's share, `self.input(x)`, so that one product computes it for all steps.
          state: `[B, state_size]`.
        """
        x_r, x_z, x_n = gates.chunk(3, -1)
        h_r, h_z, h_n = self.recurrent(state).chunk(3, -1)
        r, z = torch.sigmoid(x_r + h_r), torch.sigmoid(x_z + h_z)
        n = torch.tanh(x_n + r * h_n)
        return (1 - z) * n + z * state

    def output(self, state: Tensor) -> Tensor:
        """What the heads see of a state: `[..., hidden]`."""
        return state


class LSTMCell(nn.Module):
    """Long short-term memory of Gers et al. 2000 (https://doi.org/10.1162/089976600300015015), one step.

    Used as `GRUCell`; a state is output and cell side by side, `[B, 2 * hidden]`. The forget gate has a bias of 1 more.
    """

    def __init__(self, in_features: int, hidden: int) -> None:
        super().__init__()
        self.input = orthogonal(nn.Linear(in_features, 4 * hidden), 1.0)
        self.recurrent = orthogonal(nn.Linear(hidden, 4 * hidden), 1.0)
        self.state_size = 2 * hidden

    def step(self, gates: Tensor, state: Tensor) -> Tensor:
        """As `GRUCell.step`."""
        output, memory = state.chunk(2, -1)
        enter, forget, new, leave = (gates + self.recurrent(output)).chunk(4, -1)
        memory = torch.sigmoid(forget + 1) * memory + torch.sigmoid(enter) * torch.tanh(new)
        return torch.cat([torch.sigmoid(leave) * torch.tanh(memory), memory], -1)

    def output(self, state: Tensor) -> Tensor:
        """As `GRUCell.output`."""
        return state[..., : self.state_size // 2]


CELLS = {"gru": GRUCell, "lstm": LSTMCell}

"""Running mean and variance: buffers of an agent, which the learner updates, over all ranks, after each update."""

import torch
from torch import Tensor, nn

from torchpod import specs
from torchpod.ops.moments import Moments
from torchpod.types import Tree


class RunningMoments(nn.Module):
    """What was seen so far, per entry of `shape`; `Agent.statistics` says of what.

    The statistics of an iteration hold from the next one on, so that acting and learning see the same numbers.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(shape, dtype=torch.float64))

    @property
    def moments(self) -> Moments:
        """As they are."""
        return Moments(self.get_buffer("total"), self.get_buffer("mean"), self.get_buffer("variance"))

    @property
    def std(self) -> Tensor:
        """Standard deviation `[*shape]` float32, never 0; 1 of what has not changed yet, whose scale is not known."""
        variance = self.moments.variance
        return torch.where(variance > 1e-12, variance + 1e-8, 1.0).sqrt().float()

    def forward(self, x: Tensor) -> Tensor:
        """`[..., *shape]` to mean 0 and variance 1, clipped to [-10, 10]."""
        return ((x - self.moments.mean.float()) / self.std).clamp(-10.0, 10.0)


class ObservationNormalizer(nn.Module):
    """Normalises the float entries of an observation; images of bytes, integers and masks stay as they are."""

    def __init__(self, spec: specs.SpecTree) -> None:
        super().__init__()
        leaves = spec if isinstance(spec, dict) else {"observation": spec}
        floats = {name: leaf.shape for name, leaf in leaves.items() if leaf.dtype.is_floating_point}
        self._names = {name: _module_name(name) for name in floats}
        self.moments = nn.ModuleDict({self._names[name]: RunningMoments(shape) for name, shape in floats.items()})

    def forward(self, observation: Tree) -> Tree:
        """`[..., *shape]` of each entry."""
        if not isinstance(observation, dict):
            return self.moments["observation"](observation) if self.moments else observation
        names = self._names
        return {k: self.moments[names[k]](x) if k in names else x for k, x in observation.items()}

    def seen(self, observation: Tree) -> dict[str, Tensor]:
        """The entries that are normalised, by the names of their `RunningMoments` within this module."""
        leaves = observation if isinstance(observation, dict) else {"observation": observation}
        return {f"moments.{module}": leaves[name] for name, module in self._names.items()}


def _module_name(name: str) -> str:
    """What the module of an entry is called: its name, or where `nn.ModuleDict` takes no such name, "%" and the name.

    A dot is then "%2E" and a percent sign "%25", as in an address, so that no two names become one.
    """
    if name and "." not in name and not name.startswith("%") and not hasattr(nn.ModuleDict(), name):
        return name
    return "%" + name.replace("%", "%25").replace(".", "%2E")

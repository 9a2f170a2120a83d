"""Distributions over actions: what a network must say of them, how to draw one, and how likely it was."""

import math

import torch
from torch import Tensor, nn

from torchpod import random
from torchpod.ops import distributions as dists
from torchpod.specs import Box, Discrete, MultiDiscrete, SpecTree


class Head(nn.Module):
    """A distribution over the actions of a spec."""

    num_outputs: int
    """Numbers that the network must say."""

    def draw(self, policy: Tensor, keys: Tensor, explore: bool) -> Tensor:
        """An action `[..., *shape]`: a random one, or the likeliest.

        Args:
          policy: `[..., num_outputs]`, what the network says.
          keys: `[..., 3]`.
          explore: whether at random.
        """
        raise NotImplementedError

    def log_prob(self, policy: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability `[...]` of actions, and entropy `[...]` in nats."""
        raise NotImplementedError


class Categorical(Head):
    """One of some actions, by logits; -inf for those that are not allowed."""

    def __init__(self, spec: Discrete) -> None:
        super().__init__()
        self.num_outputs = spec.num_values

    def draw(self, policy: Tensor, keys: Tensor, explore: bool) -> Tensor:
        """See `Head.draw`."""
        return random.categorical(keys, policy) if explore else policy.argmax(-1)

    def log_prob(self, policy: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """See `Head.log_prob`."""
        return dists.categorical_log_prob(policy, action), dists.categorical_entropy(policy)


class MultiCategorical(Head):
    """Several choices that do not depend on each other, their logits side by side."""

    def __init__(self, spec: MultiDiscrete) -> None:
        super().__init__()
        self.nvec, self.num_outputs = list(spec.nvec), sum(spec.nvec)

    def draw(self, policy: Tensor, keys: Tensor, explore: bool) -> Tensor:
        """See `Head.draw`."""
        parts = policy.split(self.nvec, -1)
        if not explore:
            return torch.stack([x.argmax(-1) for x in parts], -1)
        heights = random.uniform(keys, len(parts)).split(1, -1)
        return torch.stack([random.choose(h, x) for h, x in zip(heights, parts, strict=True)], -1)

    def log_prob(self, policy: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """See `Head.log_prob`; sums over the choices."""
        parts = policy.split(self.nvec, -1)
        chosen = [dists.categorical_log_prob(x, a) for x, a in zip(parts, action.unbind(-1), strict=True)]
        return torch.stack(chosen).sum(0), torch.stack([dists.categorical_entropy(x) for x in parts]).sum(0)


class Gaussian(Head):
    """A diagonal normal whose mean the network says, in units of half the action range; its spread is a parameter."""

    def __init__(self, spec: Box, initial_log_std: float) -> None:
        super().__init__()
        self.shape, self.num_outputs = spec.shape, math.prod(spec.shape)
        is_bounded = spec.bounded
        self.center, self.scale = ((spec.high + spec.low) / 2, (spec.high - spec.low) / 2) if is_bounded else (0.0, 1.0)
        self.log_std = nn.Parameter(torch.full((self.num_outputs,), initial_log_std))

    def draw(self, policy: Tensor, keys: Tensor, explore: bool) -> Tensor:
        """See `Head.draw`."""
        noise = random.normal(keys, policy.shape[-1]) if explore else torch.zeros_like(policy)
        raw = policy + self.log_std.exp() * noise
        return (self.center + self.scale * raw).reshape(*raw.shape[:-1], *self.shape)

    def log_prob(self, policy: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """See `Head.log_prob`; of the action in those units."""
        raw = (action.reshape(policy.shape) - self.center) / self.scale
        log_std = self.log_std.expand_as(policy)
        return dists.normal_log_prob(policy, log_std, raw), dists.normal_entropy(log_std)


def make_head(spec: SpecTree, initial_log_std: float) -> Head | None:
    """The distribution for an action spec; None if there is none.

    Args:
      spec: of the action.
      initial_log_std: of a `Gaussian`.
    """
    if isinstance(spec, Discrete):
        return Categorical(spec)
    if isinstance(spec, MultiDiscrete):
        return MultiCategorical(spec)
    return Gaussian(spec, initial_log_std) if isinstance(spec, Box) else None

"""Log-probabilities and entropies of the two policies that most agents use, as plain functions."""

import math

import torch
from torch import Tensor


def categorical_log_prob(logits: Tensor, action: Tensor) -> Tensor:
    """Log-probability of integer actions.

    Args:
      logits: `[..., A]` float; -inf for actions that are masked out.
      action: `[...]` int64.

    Returns:
      `[...]`.
    """
    # A comparison, not `gather`: that one, and the scatter of its gradient, take inductor 0.1 ms per 2048 rows on CPU.
    chosen = torch.arange(logits.shape[-1], device=logits.device) == action.unsqueeze(-1)
    return torch.where(chosen, logits.log_softmax(-1), 0.0).sum(-1)


def categorical_entropy(logits: Tensor) -> Tensor:
    """Entropy in nats of softmax(logits) `[..., A]`: `[...]`; actions masked with -inf contribute nothing."""
    log_p = logits.log_softmax(-1)
    p = log_p.exp()
    return -(p * torch.where(p > 0, log_p, 0.0)).sum(-1)


def normal_log_prob(mean: Tensor, log_std: Tensor, x: Tensor) -> Tensor:
    """Log-density of a diagonal normal, summed over the last axis: `[..., A]` to `[...]`."""
    z = (x - mean) * (-log_std).exp()
    return (-0.5 * z * z - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)


def normal_entropy(log_std: Tensor) -> Tensor:
    """Entropy in nats of a diagonal normal, summed over the last axis: `[..., A]` to `[...]`."""
    return (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)

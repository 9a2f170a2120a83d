"""Returns and advantages, as scans of log2(T) parallel steps.

`y_t = x_t + decay_t * y_{t+1}` is associative, so it is solved by doubling (Hillis and Steele 1986): T log T work in
log2(T) passes over the data instead of T dependent steps. Compiles in a second for any T, vmaps and differentiates.
"""

import torch
from torch import Tensor


def discounted_sum(x_T: Tensor, decay_T: Tensor, *, reverse: bool = True) -> Tensor:
    """Solves `y_t = x_t + decay_t * y_{t+1}` with `y_T = 0`, along axis 0.

    Args:
      x_T: `[T, ...]` float.
      decay_T: `[T, ...]` float, same shape.
      reverse: False solves `y_t = x_t + decay_t * y_{t-1}` with `y_{-1} = 0` instead.

    Returns:
      `[T, ...]`.

    Raises:
      ValueError: if the shapes differ.
    """
    if x_T.shape != decay_T.shape:
        raise ValueError(f"discounted_sum: x has shape {tuple(x_T.shape)}, decay {tuple(decay_T.shape)}.")
    length, shift = x_T.shape[0], 1
    while shift < length:
        x_T = x_T + decay_T * _shifted(x_T, shift, reverse)
        decay_T = decay_T * _shifted(decay_T, shift, reverse)
        shift *= 2
    return x_T


def _shifted(x: Tensor, shift: int, reverse: bool) -> Tensor:
    zeros = torch.zeros_like(x[:shift])
    return torch.cat([x[shift:], zeros]) if reverse else torch.cat([zeros, x[:-shift]])


def gae(
    reward_t: Tensor, discount_t: Tensor, is_last_t: Tensor, v_tm1: Tensor, v_t: Tensor, *, lambda_: float | Tensor
) -> Tensor:
    """Generalised advantage estimates.

    Eq. 16 of Schulman et al. 2016 (https://arxiv.org/abs/1506.02438), cut at episode ends:
    `A_{t-1} = r_t + discount_t v_t - v_{t-1} + (not last_t) discount_t lambda A_t`. A truncated episode bootstraps
    from the value of its true final observation, `v_t`; a terminated one has `discount_t = 0`.

    Args:
      reward_t: `[T, ...]` float32, reward of transition t-1 -> t.
      discount_t: `[T, ...]` float32, gamma, or 0 where the transition terminated.
      is_last_t: `[T, ...]` bool, True where timestep t ends an episode.
      v_tm1: `[T, ...]` float32, values of timesteps 0 ... T-1.
      v_t: `[T, ...]` float32, values of timesteps 1 ... T.
      lambda_: trade-off between bias (0: one step) and variance (1: Monte Carlo).

    Returns:
      `[T, ...]` advantages. Rows that start at a LAST timestep are resets and mean nothing: mask them.
    """
    delta = reward_t + discount_t * v_t - v_tm1
    return discounted_sum(delta, discount_t * lambda_ * (~is_last_t))

"""Returns and advantages, as scans of log2(T) parallel steps.

`y_t = x_t + decay_t * y_{t+1}` is associative, so it is solved by doubling (Hillis and Steele 1986): T log T work in
log2(T) passes over the data instead of T dependent steps. Compiles in a second for any T, vmaps and differentiates.
A compiled program for a CPU, where nothing is differentiated, calls one operator instead, which takes T steps
(kernels/cpu_scan.cpp): of PPO's 18 s to compile on one core of an AMD EPYC, the log2(T) passes were 2.4.
"""

from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("torchpod", "FRAGMENT")
_LIBRARY.define("discounted_sum(Tensor x, Tensor decay) -> Tensor", tags=(torch.Tag.needs_contiguous_strides,))


def discounted_sum(x_T: Tensor, decay_T: Tensor) -> Tensor:
    """Solves `y_t = x_t + decay_t * y_{t+1}` with `y_T = 0`, along axis 0.

    Args:
      x_T: `[T, ...]` float.
      decay_T: `[T, ...]` float, same shape.

    Returns:
      `[T, ...]`.

    Raises:
      ValueError: if the shapes differ.
    """
    if x_T.shape != decay_T.shape:
        raise ValueError(
            f"discounted_sum needs x and decay of one shape, and they have {list(x_T.shape)} and "
            f"{list(decay_T.shape)}; expand one to the other's."
        )
    program = torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling()
    if program and x_T.is_cpu and x_T.dtype == decay_T.dtype and x_T.dtype in (torch.float32, torch.float64):
        return torch.ops.torchpod.discounted_sum(x_T, decay_T)
    return _doubled(x_T, decay_T)


def _doubled(x_T: Tensor, decay_T: Tensor) -> Tensor:
    length, shift = x_T.shape[0], 1
    while shift < length:
        x_T = x_T + decay_T * _shifted(x_T, shift)
        decay_T = decay_T * _shifted(decay_T, shift)
        shift *= 2
    return x_T


def _shifted(x: Tensor, shift: int) -> Tensor:
    return torch.cat([x[shift:], torch.zeros_like(x[:shift])])


def _differentiated(x_T: Tensor, decay_T: Tensor) -> Tensor:
    if torch.is_grad_enabled() and (x_T.requires_grad or decay_T.requires_grad):
        return _doubled(x_T, decay_T)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.torchpod.discounted_sum(x_T, decay_T)


def _mapped(info: Any, in_dims: tuple[int | None, ...], x_T: Tensor, decay_T: Tensor) -> Any:
    """The mapped axis comes last."""

    def moved(x: Tensor, dim: int | None) -> Tensor:
        return x.unsqueeze(-1).expand(*x.shape, info.batch_size) if dim is None else x.movedim(dim, -1)

    y = torch.ops.torchpod.discounted_sum(moved(x_T, in_dims[0]), moved(decay_T, in_dims[1]))
    return y, y.ndim - 1


_LIBRARY.impl("discounted_sum", _differentiated, "Autograd")
torch.library.register_fake("torchpod::discounted_sum", lambda x_T, decay_T: x_T.new_empty(x_T.shape), lib=_LIBRARY)
torch.library.register_vmap("torchpod::discounted_sum", _mapped, lib=_LIBRARY)


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


def vtrace(
    log_ratio_t: Tensor,
    reward_t: Tensor,
    discount_t: Tensor,
    is_last_t: Tensor,
    v_tm1: Tensor,
    v_t: Tensor,
    *,
    lambda_: float | Tensor = 1.0,
    rho_clip: float | Tensor = 1.0,
    c_clip: float | Tensor = 1.0,
) -> tuple[Tensor, Tensor]:
    """V-trace value targets and policy advantages.

    Eq. 1 and section 4.2 of Espeholt et al. 2018 (https://arxiv.org/abs/1802.01561), cut at episode ends as `gae` is:
    `v_{t-1} = V_{t-1} + rho (r_t + discount_t V_t - V_{t-1}) + (not last_t) discount_t c (v_t - V_t)` with
    `rho = min(rho_clip, pi / mu)` and `c = lambda min(c_clip, pi / mu)`; the advantage is
    `rho (r_t + discount_t v_t - V_{t-1})`, where `v_t` is the plain value `V_t` at the end of an episode and at T.

    Args:
      log_ratio_t: `[T, ...]` float32, log pi(a) - log mu(a) of the action of transition t-1 -> t, under the policy that
        learns and the one that acted.
      reward_t: `[T, ...]` float32, reward of the transition.
      discount_t: `[T, ...]` float32, gamma, or 0 where the transition terminated.
      is_last_t: `[T, ...]` bool, True where timestep t ends an episode.
      v_tm1: `[T, ...]` float32, values of timesteps 0 ... T-1.
      v_t: `[T, ...]` float32, values of timesteps 1 ... T.
      lambda_: trade-off between bias (0: one step) and variance (1: the paper).
      rho_clip: bounds the fixed point; at least `c_clip`.
      c_clip: bounds how far a surprise travels back.

    Returns:
      `[T, ...]` targets and `[T, ...]` advantages. Rows that start at a LAST timestep are resets: mask them.
    """
    ratio = log_ratio_t.exp()
    rho, c = ratio.clamp(max=rho_clip), lambda_ * ratio.clamp(max=c_clip)
    goes_on = ~is_last_t
    surprise = discounted_sum(rho * (reward_t + discount_t * v_t - v_tm1), discount_t * c * goes_on)
    target = v_tm1 + surprise
    next_target = v_t + torch.cat([surprise[1:], torch.zeros_like(surprise[:1])]) * goes_on
    return target, rho * (reward_t + discount_t * next_target - v_tm1)


def n_step(
    reward_t: Tensor, discount_t: Tensor, is_last_t: Tensor, *, discount: float | Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The return of the first T steps, which end earlier where their episode does.

    Section 2 of Mnih et al. 2016 (https://arxiv.org/abs/1602.01783): `G = r_1 + ... + g^{m-1} r_m`, to which
    `g^m v(s_m)` is added, with m = T, or the time at which the episode ends.

    Args:
      reward_t: `[T, ...]` float32, reward of transition t-1 -> t.
      discount_t: `[T, ...]` float32, of the environment: 0 where the transition terminated, else 1.
      is_last_t: `[T, ...]` bool, True where timestep t ends an episode.
      discount: g.

    Returns:
      The return `[...]`, the discount of the value at its end `[...]`, which is 0 if that is terminal, and m, int64
      `[...]`, in 1 ... T.
    """
    total, factor = torch.zeros_like(reward_t[0]), torch.ones_like(reward_t[0])
    steps, going = torch.zeros_like(is_last_t[0], dtype=torch.int64), torch.ones_like(is_last_t[0])
    for reward, alive, is_last in zip(reward_t, discount_t, is_last_t, strict=True):
        total = total + torch.where(going, factor * reward, 0.0)
        factor = torch.where(going, factor * discount * alive, factor)
        steps = steps + going
        going = going & ~is_last
    return total, factor, steps

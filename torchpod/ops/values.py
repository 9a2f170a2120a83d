"""Scales on which values are learned."""

from torch import Tensor


def rescale(x: Tensor, epsilon: float) -> Tensor:
    """`h(x) = sign(x) (sqrt(|x| + 1) - 1) + epsilon x`, eq. 1 of R2D2, after Pohlen et al. 2018.

    It shrinks large values, so that one network learns rewards of any size (https://arxiv.org/abs/1805.11593).

    Args:
      x: `[...]` float.
      epsilon: slope far out; 0: `x` as it is.
    """
    if epsilon == 0:
        return x
    return x / ((x.abs() + 1.0).sqrt() + 1.0) + epsilon * x  # the same, and exact where x is small


def unscale(x: Tensor, epsilon: float) -> Tensor:
    """The inverse of `rescale`, proposition A.2 of Pohlen et al. 2018; `[...]`.

    As they write it, all digits of a small x are lost in float32. With `s = sqrt(|x| + 1) - 1`, x is `s^2 + 2 s`, and
    `h = s + epsilon (s^2 + 2 s)` is solved for s without a difference.
    """
    if epsilon == 0:
        return x
    slope = 1.0 + 2.0 * epsilon
    s = 2.0 * x.abs() / (slope + (slope * slope + 4.0 * epsilon * x.abs()).sqrt())
    return x.sign() * s * (s + 2.0)

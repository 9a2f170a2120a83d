"""Statistics over a handful of runs: the interquartile mean and bootstrap intervals. NumPy only.

After Agarwal et al. 2021, "Deep reinforcement learning at the edge of the statistical precipice"
(https://arxiv.org/abs/2108.13264).
"""

from collections.abc import Callable
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray


@overload
def iqm(x: ArrayLike) -> float: ...
@overload
def iqm(x: ArrayLike, axis: int) -> NDArray[np.float64]: ...
def iqm(x: ArrayLike, axis: int | None = None) -> float | NDArray[np.float64]:
    """Interquartile mean: the mean of what is left without the lowest and the highest quarter.

    Of n numbers, floor(n / 4) are dropped at each end, as `scipy.stats.trim_mean(x, 0.25)` does: below four it is the
    mean. It is more robust than the mean and wastes less data than the median.

    Args:
      x: numbers, none of them NaN.
      axis: the axis to reduce; all of `x` if None.

    Raises:
      ValueError: if `x` is empty or holds NaN.
    """
    values = _checked(x)
    ordered = np.sort(values, axis=axis)
    if axis is None:
        ordered, axis = ordered.ravel(), 0
    count = ordered.shape[axis]
    kept = np.take(ordered, np.arange(count // 4, count - count // 4), axis=axis).mean(axis)
    return float(kept) if kept.ndim == 0 else kept


@overload
def bootstrap_ci(
    x: ArrayLike,
    statistic: Callable[[NDArray[np.float64]], float],
    confidence: float = ...,
    num_resamples: int = ...,
    seed: int = ...,
) -> tuple[float, float]: ...
@overload
def bootstrap_ci(
    x: ArrayLike,
    statistic: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    confidence: float = ...,
    num_resamples: int = ...,
    seed: int = ...,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]: ...
def bootstrap_ci(
    x: ArrayLike,
    statistic: Callable[[NDArray[np.float64]], Any],
    confidence: float = 0.95,
    num_resamples: int = 2000,
    seed: int = 0,
) -> tuple[Any, Any]:
    """Stratified percentile bootstrap (Agarwal et al. 2021, section 4).

    Runs are drawn with replacement, in every column on their own, so that each resample has as many runs of each
    evaluation as the data. With very few runs intervals are too narrow, and with one run they have no width.

    Args:
      x: `[runs]`, or `[runs, evaluations]` where an evaluation is a task, or a point of a learning curve.
      statistic: maps a resample, of the shape of `x`, to a number, or to an array: then each of its entries gets an
        interval, e.g. `lambda curves: iqm(curves, axis=0)`.
      confidence: of the interval.
      num_resamples: more of them make the ends of the interval less noisy.
      seed: the same seed gives the same interval.

    Returns:
      The lower and the upper end.

    Raises:
      ValueError: if `x` is empty, holds NaN or has more than two axes, or `confidence` is not between 0 and 1.
    """
    values = _checked(x)
    if values.ndim not in (1, 2):
        raise ValueError(f"x has shape {values.shape}; expected [runs] or [runs, evaluations].")
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence={confidence} must lie between 0 and 1, e.g. 0.95.")
    rng = np.random.default_rng(seed)
    resamples = (
        np.take_along_axis(values, rng.integers(len(values), size=values.shape), 0) for _ in range(num_resamples)
    )
    estimates = np.stack([np.asarray(statistic(resample), dtype=np.float64) for resample in resamples])
    low, high = np.quantile(estimates, [(1.0 - confidence) / 2.0, (1.0 + confidence) / 2.0], axis=0)
    return (float(low), float(high)) if low.ndim == 0 else (low, high)


def _checked(x: ArrayLike) -> NDArray[np.float64]:
    values = np.asarray(x, dtype=np.float64)
    if values.size == 0 or np.isnan(values).any():
        problem = "is empty" if values.size == 0 else f"holds {np.isnan(values).sum()} NaN"
        raise ValueError(f"x {problem}; expected one number per run, so drop runs without a result first.")
    return values

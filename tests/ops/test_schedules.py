"""Piecewise-linear schedules, against NumPy's interpolation."""

import numpy as np
import pytest
import torch

from torchpod.ops.schedules import piecewise_linear


@pytest.mark.parametrize("num_points", [1, 2, 5])
def test_it_is_numpys_interpolation(seed, num_points):
    rng = np.random.default_rng(seed)
    steps = np.sort(rng.choice(10**9, num_points, replace=False))
    values = rng.standard_normal(num_points)
    points = list(zip(steps.tolist(), values.tolist(), strict=True))
    at = np.concatenate([steps, rng.integers(0, 2 * 10**9, 200), [0, 2**53]])
    found = piecewise_linear(points, torch.tensor(at))
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), np.interp(at, steps, values), rtol=1e-6, atol=1e-7)


def test_steps_that_float32_cannot_tell_apart_are_told_apart():
    start = 10**9
    found = piecewise_linear([(start, 0.0), (start + 10, 1.0)], start + torch.arange(12))
    np.testing.assert_allclose(found.numpy(), np.minimum(np.arange(12) / 10, 1), rtol=1e-6)

"""Scales on which values are learned."""

import numpy as np
import pytest
import torch

from torchpod.ops.values import rescale, unscale


@pytest.mark.parametrize("epsilon", [1e-3, 1e-2, 1.0])
def test_it_is_equation_1_and_its_inverse_for_numbers_of_any_size(seed, epsilon):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(1000) * 10 ** rng.uniform(-6, 6, 1000)
    expected = np.sign(x) * (np.sqrt(np.abs(x) + 1) - 1) + epsilon * x
    large = np.abs(x) > 1e-3  # the reference loses digits below
    np.testing.assert_allclose(rescale(torch.tensor(x), epsilon).numpy()[large], expected[large], rtol=1e-11)
    single = torch.tensor(x, dtype=torch.float32)
    torch.testing.assert_close(unscale(rescale(single, epsilon), epsilon), single, rtol=3e-6, atol=0)
    small = torch.tensor([1e-12, -1e-12], dtype=torch.float64)
    torch.testing.assert_close(rescale(small, epsilon), small * (0.5 + epsilon), rtol=1e-9, atol=0)


def test_with_epsilon_0_nothing_changes(seed):
    x = torch.randn(10, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(rescale(x, 0), x) and torch.equal(unscale(x, 0), x)


def test_it_can_be_differentiated_at_0():
    x = torch.zeros(1, requires_grad=True)
    rescale(x, 1e-3).sum().backward()
    assert x.grad is not None and float(x.grad) == pytest.approx(0.501)

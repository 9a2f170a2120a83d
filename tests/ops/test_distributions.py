import math

import pytest
import torch
from torch.distributions import Categorical, Independent, Normal

from torchpod.ops import distributions as dists

INF = float("inf")


@pytest.fixture
def generator(seed):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("num", [1, 2, 18])
def test_categorical_equals_torch_distributions(generator, num):
    logits = 5 * torch.randn(4, 6, num, dtype=torch.float64, generator=generator)
    action = torch.randint(num, (4, 6), generator=generator)
    reference = Categorical(logits=logits)
    torch.testing.assert_close(dists.categorical_log_prob(logits, action), reference.log_prob(action))
    torch.testing.assert_close(dists.categorical_entropy(logits), reference.entropy())


def test_masked_actions_contribute_neither_entropy_nor_probability(generator):
    logits = torch.randn(8, 5, dtype=torch.float64, generator=generator)
    masked = logits.clone()
    masked[:, [1, 4]] = -INF
    allowed = Categorical(logits=logits[:, [0, 2, 3]])
    torch.testing.assert_close(dists.categorical_entropy(masked), allowed.entropy())
    for i, action in enumerate([0, 2, 3]):
        mine = dists.categorical_log_prob(masked, torch.full((8,), action))
        torch.testing.assert_close(mine, allowed.log_prob(torch.full((8,), i)))
    assert (dists.categorical_log_prob(masked, torch.ones(8, dtype=torch.int64)) == -INF).all()


def test_one_allowed_action_has_entropy_0_and_log_probability_0():
    logits = torch.tensor([-INF, 3.0, -INF])
    assert dists.categorical_entropy(logits) == 0
    assert dists.categorical_log_prob(logits, torch.tensor(1)) == 0


def test_gradients_are_finite_and_right_where_actions_are_masked(generator):
    free = torch.randn(4, 5, dtype=torch.float64, generator=generator).requires_grad_()
    mask = torch.tensor([True, False, True, True, False])
    action = torch.tensor([0, 2, 3, 0])

    def both(x):
        logits = x.masked_fill(~mask, -INF)
        return dists.categorical_log_prob(logits, action), dists.categorical_entropy(logits)

    assert torch.autograd.gradcheck(both, (free,))
    (gradient,) = torch.autograd.grad(sum(x.sum() for x in both(free)), free)
    assert gradient.isfinite().all() and (gradient[:, ~mask] == 0).all() and (gradient[:, mask] != 0).any()


def test_diagonal_normal_equals_torch_distributions(generator):
    mean, log_std, x = torch.randn(3, 4, 6, 3, dtype=torch.float64, generator=generator)
    reference = Independent(Normal(mean, log_std.exp()), 1)
    torch.testing.assert_close(dists.normal_log_prob(mean, log_std, x), reference.log_prob(x))
    torch.testing.assert_close(dists.normal_entropy(log_std), reference.entropy())


def test_standard_normal_has_the_textbook_numbers():
    zero = torch.zeros(1)
    assert math.isclose(dists.normal_log_prob(zero, zero, zero).item(), -0.9189385, abs_tol=1e-6)
    assert math.isclose(dists.normal_entropy(zero).item(), 1.4189385, abs_tol=1e-6)

import numpy as np
import torch

from torchpod.ops.moments import Moments, merge, sums_about


def nothing(*shape):
    return Moments(torch.zeros(()).double(), torch.zeros(shape).double(), torch.ones(shape).double())


def test_batches_one_after_the_other_give_the_moments_of_all(seed):
    rng = np.random.default_rng(seed)
    batches = [1e3 + rng.normal(size=(n, 4, 2, 3)) * rng.uniform(0.01, 100, (2, 3)) for n in (1, 7, 30)]
    moments = nothing(2, 3)
    for batch in batches:
        moments = merge(moments, sums_about(moments.mean, torch.from_numpy(batch)))
    rows = np.concatenate(batches).reshape(-1, 2, 3)
    assert moments.total == len(rows)
    np.testing.assert_allclose(moments.mean, rows.mean(0), rtol=1e-12)
    np.testing.assert_allclose(moments.variance, rows.var(0), rtol=1e-8)


def test_sums_of_several_ranks_add_up(seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(8, 5, generator=generator)
    moments = merge(nothing(5), sums_about(torch.zeros(5).double(), torch.rand(3, 5, generator=generator)))
    whole = merge(moments, sums_about(moments.mean, x))
    halves = merge(moments, sums_about(moments.mean, x[:4]) + sums_about(moments.mean, x[4:]))
    for a, b in zip(whole, halves, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-14)
    assert whole.mean.dtype == torch.float64


def test_a_constant_has_variance_0_and_never_less():
    moments = nothing()
    for _ in range(5):
        moments = merge(moments, sums_about(moments.mean, torch.full((3,), 0.1)))
    assert 0 <= moments.variance < 1e-20

"""The rewrites of CPU graphs change nothing but speed."""

import numpy as np
import pytest
import torch

from torchpod.compile import Compiler, RecompilationError
from torchpod.kernels.cpu_kernels import rational_tanh


def test_rational_tanh_is_within_six_ulps_of_tanh():
    x = torch.cat([torch.linspace(-12, 12, 200_001), torch.randn(100_000) * 1e-3, torch.tensor([0.0])])
    want = torch.tanh(x.double())
    ulp = torch.from_numpy(np.spacing(want.abs().float().numpy())).double()
    error = ((rational_tanh(x).double() - want).abs() / ulp).max()
    assert error <= 6.5, error


@pytest.mark.parametrize(
    ("rows", "inner", "cols"), [(64, 300, 4), (300, 64, 2), (300, 2, 64), (300, 1, 8), (7, 5, 3), (32, 0, 5)]
)
def test_products_of_every_form_equal_eager_ones(rows, inner, cols):
    def fn(a, b, bias):
        return torch.tanh(a @ b), torch.addmm(bias, a, b)

    args = torch.randn(rows, inner), torch.randn(inner, cols), torch.randn(cols)
    for got, want in zip(Compiler(True)(fn)(*args), fn(*args), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)  # 300 products, summed in another order


def test_another_shape_is_refused_with_the_reason():
    def double(x):
        return x * 2

    compiled = Compiler(True)(double)
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))
    with pytest.raises(RecompilationError, match="double was compiled for 1 input signature.*size mismatch"):
        compiled(torch.ones(4))


def test_one_tensor_in_two_places_is_no_new_signature():
    compiled = Compiler(True)(lambda a, b: (a + b, a))
    x = torch.ones(2)
    assert torch.equal(compiled(torch.ones(2), torch.zeros(2))[0], x)
    assert torch.equal(compiled(x, x)[0], 2 * x)

"""Discounted sums in CPU programs: when they are one operator, and that it computes the loop."""

import numpy as np
import pytest
import torch

from tests.ops.test_returns import slow_discounted_sum
from torchpod.compile import Compiler
from torchpod.kernels.inductor import trace
from torchpod.ops.returns import discounted_sum


def is_one_operator(fn, *args):
    """Whether the graph of a function calls it."""
    return any("discounted_sum" in str(node.target) for node in trace(fn, args)[0].graph.nodes)


@pytest.mark.parametrize("shape", [(1, 5), (2, 3, 2), (33,), (128, 64), (7, 4, 17)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_it_equals_the_loop(seed, shape, dtype, tolerance):
    rng = np.random.default_rng(seed)
    x, decay = rng.normal(size=shape), rng.random(shape) * (rng.random(shape) > 0.1)
    args = torch.tensor(x, dtype=dtype), torch.tensor(decay, dtype=dtype)
    assert is_one_operator(discounted_sum, *args)
    y = Compiler(True)(discounted_sum)(*args)
    assert y.dtype == dtype
    np.testing.assert_allclose(y, slow_discounted_sum(x, decay), rtol=tolerance, atol=20 * tolerance)


def test_it_takes_any_layout_and_either_argument_may_be_shared_by_a_population(seed):
    generator = torch.Generator().manual_seed(seed)
    x, decay = torch.randn(3, 4, 20, 6, generator=generator), torch.rand(6, 20, generator=generator)

    def fn(x, decay):
        def of_one(x):  # [B, T]
            return discounted_sum(x.T, decay.T) - discounted_sum(decay.T, x.T)

        return torch.vmap(of_one)(x)

    args = x[1].permute(0, 2, 1), decay
    assert is_one_operator(fn, *args)
    torch.testing.assert_close(Compiler(True)(fn)(*args), fn(*args), rtol=1e-4, atol=1e-4)


def test_members_of_a_population_compute_what_they_compute_alone(seed):
    generator = torch.Generator().manual_seed(seed)
    x, decay = torch.randn(3, 16, 8, generator=generator), torch.rand(3, 16, 8, generator=generator)
    many, alone = Compiler(True, 3)(discounted_sum)(x, decay), Compiler(True)(discounted_sum)
    for i in range(3):
        assert torch.equal(many[i], alone(x[i].clone(), decay[i].clone()))


@pytest.mark.parametrize("population", [1, 3])
def test_what_is_differentiated_is_left_to_torch(population, seed):
    generator = torch.Generator().manual_seed(seed)
    lead = () if population == 1 else (population,)
    x, decay = torch.randn(*lead, 12, 4, generator=generator), torch.rand(*lead, 12, 4, generator=generator)

    def fn(x, decay):
        def loss(decay):
            return discounted_sum(x, decay).square().sum(), discounted_sum(x, x.detach())

        return torch.func.grad(loss, has_aux=True)(decay)

    one = (x, decay) if population == 1 else (x[0], decay[0])
    assert is_one_operator(fn, *one)  # the one that is not
    gradient, aux = Compiler(True, population)(fn)(x, decay)
    exact = Compiler(False, population)(fn)(x.double(), decay.double())
    torch.testing.assert_close(gradient.double(), exact[0], rtol=1e-4, atol=1e-4 * float(exact[0].abs().max()))
    torch.testing.assert_close(aux.double(), exact[1], rtol=1e-4, atol=1e-4 * float(exact[1].abs().max()))

    def all_of_it(decay):
        return torch.func.grad(lambda decay: discounted_sum(one[0], decay).sum())(decay)

    assert not is_one_operator(all_of_it, one[1])


def test_other_types_and_programs_for_other_devices_are_left_to_torch():
    x = torch.rand(5, 3)
    assert not is_one_operator(discounted_sum, x.bfloat16(), x.bfloat16())
    assert not is_one_operator(discounted_sum, x, x.double())
    assert not is_one_operator(discounted_sum, x.to("meta"), x.to("meta"))


def test_threads_share_out_the_columns(seed):
    generator = torch.Generator().manual_seed(seed)
    x, decay = torch.randn(64, 2500, generator=generator), torch.rand(64, 2500, generator=generator)
    fn = Compiler(True)(discounted_sum)
    alone = fn(x, decay)
    torch.set_num_threads(3)
    try:
        assert torch.equal(fn(x, decay), alone)
    finally:
        torch.set_num_threads(1)

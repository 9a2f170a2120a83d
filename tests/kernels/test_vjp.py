"""Forward and backward pass as two programs: against `torch.func.vjp` of the function as it stands."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from torchpod.compile import Compiler, RecompilationError

TABLE = torch.arange(12.0)


def images(primals, x, count):
    """Operators with several results, a parameter without effect, a table, constants, and results that are inputs."""
    weight, bias = primals["weight"], primals["bias"]
    y = F.max_pool2d(F.conv2d(0.1 * x, weight, bias).tanh(), 2)
    top, index = y.flatten(1).topk(3, -1)
    value = (y.flatten(1)[:, :12] * TABLE).sum(-1) + primals["scale"] * primals["scale"]
    return {"top": top, "value": value, "bias": bias}, (index, count + 1, x, y > 0, value)


def recurrent(primals, x, count):
    state = primals["state"]
    state = torch.where(count[:, None] % 2 == 0, 0.0, state)
    state = torch.tanh(x.flatten(1)[:, :6] @ primals["weight"][:, :6, 0, 0].T[:6] + state)
    return {"state": state}, (count,)


def arguments(seed):
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape):
        return torch.randn(shape, generator=generator)

    primals = {
        "weight": noise(5, 6, 3, 3),
        "bias": noise(5),
        "scale": noise(),
        "state": noise(4, 5),
        "unused": noise(2, 3),
    }
    return primals, noise(4, 6, 8, 8), torch.arange(4)


def expected(fn, args, cotangents):
    outputs, pull_back, *rest = torch.func.vjp(lambda x: fn(x, *args[1:]), args[0], has_aux=True)
    (aux,) = rest
    return outputs, aux, pull_back(cotangents)[0]


def require_close(ours, theirs):
    for a, b in zip(pytree.tree_leaves(ours), pytree.tree_leaves(theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("fn", [images, recurrent])
def test_both_programs_give_what_the_function_gives(fn, enabled, seed):
    vjp = Compiler(enabled).vjp(fn)
    pulls = []
    for i in range(3):  # what the first pass keeps outlives the second
        args = arguments(seed + i)
        outputs, aux, pull_back = vjp(*args)
        cotangents = pytree.tree_map(torch.randn_like, outputs)
        pulls.append((pull_back, cotangents, expected(fn, args, cotangents)))
        require_close((outputs, aux), pulls[-1][2][:2])
        assert not any(x.requires_grad for x in pytree.tree_leaves((outputs, aux)))
    for pull_back, cotangents, (_, _, gradients) in reversed(pulls):
        ours = pull_back(cotangents)
        assert ours.keys() == gradients.keys()
        require_close(ours, gradients)
        assert not ours["unused"].any()


@pytest.mark.parametrize("enabled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_members_of_a_population_have_gradients_of_their_own(enabled, seed):
    members = [arguments(seed + i) for i in range(2)]
    both = pytree.tree_map(lambda *xs: torch.stack(xs), *members)
    outputs, aux, pull_back = Compiler(enabled, 2).vjp(images)(*both)
    cotangents = pytree.tree_map(torch.randn_like, outputs)
    gradients = pull_back(cotangents)
    for i, args in enumerate(members):
        own = pytree.tree_map(lambda x, i=i: x[i], (outputs, aux, gradients))
        require_close(own, expected(images, args, pytree.tree_map(lambda x, i=i: x[i], cotangents)))


def test_other_shapes_are_refused(seed):
    vjp = Compiler(True).vjp(recurrent)
    primals, x, count = arguments(seed)
    vjp(primals, x, count)
    with pytest.raises(RecompilationError, match="recurrent was compiled for 1 input signature"):
        vjp(primals | {"state": primals["state"][:2]}, x[:2], count[:2])


@pytest.mark.parametrize("enabled", [False, True])
def test_an_output_may_lie_in_memory_the_other_way_round(enabled, seed):
    args = tuple(torch.randn(6, 4, generator=torch.Generator().manual_seed(seed + i)) for i in range(2))
    cotangent = torch.randn(4, 6)
    *_, pull_back = Compiler(enabled).vjp(lambda p, x: ((p * x).t(), ()))(*args)
    require_close(pull_back(cotangent), cotangent.t() * args[1])

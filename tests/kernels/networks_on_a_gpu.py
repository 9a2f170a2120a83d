"""Which networks share operators on a GPU, interpreted and compared with what they should: run by test_gpu_mlp.py."""

import json

import torch

from torchpod.bench.lowered_worker import Lowering

ROWS, SIZES = 20, (5, 16, 16)


def parameters(last, count=2):
    """Of networks that differ in their outputs."""
    return [
        [
            p
            for i, o in zip(SIZES, (*SIZES[1:], last + n), strict=True)
            for p in (torch.randn(o, i) / i**0.5, torch.randn(o))
        ]
        for n in range(count)
    ]


def network(x, own, activation=torch.tanh):
    """Its output."""
    for weight, bias in zip(own[:-2:2], own[1:-2:2], strict=True):
        x = activation(torch.nn.functional.linear(x, weight, bias))
    return torch.nn.functional.linear(x, *own[-2:])


def both(x, a, b):
    """Acting."""
    return network(x, a), network(x, b)


def three(x, a, b, c):
    """Two together, and one alone."""
    return network(x, a), network(x, b), network(x, c)


def loss(parts, x):
    """Of all networks."""
    return sum((network(x, own).sin() * (1 + i)).sum() for i, own in enumerate(parts))


def gradients(x, a, b):
    """Of two networks."""
    return torch.func.grad(loss)((a, b), x)


def one_gradient(x, a, b):
    """A policy that learns, and a critic that does not."""
    value = network(x, b).sum(1, keepdim=True)
    return torch.func.grad(lambda own: ((network(x, own) - value).square()).sum())(a), value


def after_another(x, a, b):
    """A loss that is weighed by the gradient of the other network."""
    first = torch.func.grad(lambda own: network(x, own).square().mean())(a)
    return first, torch.func.grad(lambda own: (network(x, own).sin() * first[1].mean()).sum())(b)


def made_by_another(x, a, b):
    """A parameter that is what the other network says."""
    y = network(x, a)
    return y, network(x, [*b[:-1], b[-1] + y.mean()])


def late(x, a, b):
    """Parameters that are computed after the other network."""
    return network(x, a), network(x, [p.sin() for p in b])


def unlike(x, a, b):
    """Other activations."""
    return network(x, a), network(x, b, torch.relu)


def shared(fn, count=2):
    """Networks of each operator, forward and backward; the program is compared with the function."""
    args = (torch.randn(ROWS, SIZES[0]), *parameters(2, count))
    lowering = Lowering(check=True)
    lowering(fn)(*args)
    (program,) = lowering.programs.values()
    return sorted(program.networks)


torch.manual_seed(0)
CASES = (both, three, gradients, one_gradient, after_another, made_by_another, late, unlike)
print(json.dumps({fn.__name__: shared(fn, 3 if fn is three else 2) for fn in CASES}))

"""What lowered_worker.py must not let through; run by test_lowered.py in a process that can trace for CUDA."""

import json

import torch

from torchpod.bench import interpreted
from torchpod.bench.lowered_worker import Lowering
from torchpod.kernels.inductor import inductor_config


def told(fn, *, rest=None, **settings):
    """The error of a function that is called with a vector and a matrix."""
    compiled = Lowering(check=True)(fn)
    try:
        with inductor_config.patch(settings):
            compiled(torch.arange(6.0), torch.ones(6, 4).mul(torch.arange(4.0))[:, ::2])
    except RuntimeError as error:
        return str(error)
    return None


def right(x, y):
    """Reads a matrix whose rows are not beside each other."""
    return (y * x[:, None]).sum(0).tanh(), (x > 2).long()


def to_host(x, y):
    """Copies to the CPU and back."""
    return (x.cpu() + 1).to(x.device)


found = {"right": told(right), "to_host": told(to_host)}
run = interpreted.Interpreted.run


def off_by_one(self, *args, **kwargs):
    """As a kernel that is wrong."""
    run(self, *args, **kwargs)
    for x in args:
        if isinstance(x, torch.Tensor) and x.shape == (6,) and x.dtype == torch.int64:
            x += 1


def small(x, y):
    """Numbers of which a sixth is nothing beside 1."""
    return (x + y.sum(1)) * 1e-6


def infinite(x, y):
    """An infinite number beside others."""
    return torch.where(x == 1, torch.inf, x * y.sum(1) + 1)


def a_sixth_more(self, *args, **kwargs):
    """As a kernel that is wrong in floats that are finite."""
    run(self, *args, **kwargs)
    for x in args:
        if isinstance(x, torch.Tensor) and x.shape == (6,) and x.dtype == torch.float32 and x[0] != 0:
            x *= 7 / 6


def finite(self, *args, **kwargs):
    """As a kernel that is wrong in those that are not."""
    run(self, *args, **kwargs)
    for x in args:
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            x.nan_to_num_(posinf=1.0)


interpreted.Interpreted.run = off_by_one
found["wrong"] = told(right)
interpreted.Interpreted.run = a_sixth_more
found["small"] = told(small)
interpreted.Interpreted.run = finite
found["infinite"] = told(infinite)
source = "from types import SimpleNamespace\nkernel = SimpleNamespace(configs=[1, 2])\n"
try:
    interpreted.load("kernel", source)
except RuntimeError as error:
    found["timed"] = str(error)
print(json.dumps(found))

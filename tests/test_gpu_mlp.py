"""Networks as kernels of a GPU, interpreted; and on a GPU."""

import itertools
import json

import pytest
import torch

from torchpod import mlp
from torchpod.bench import lowered

SHARED_BYTES = 227 * 1024
"""Of a multiprocessor of an H100, for one block of threads."""


def printed(*arguments):
    ended = lowered.run("tests.triton_kernels", *arguments)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


def test_outputs_and_gradients_are_those_of_the_network(seed):
    """Alone and in a population, 2 to 4 layers, tanh and relu, sizes that are no powers of two, one and 150 rows."""
    found = printed(str(seed), "--check")
    assert len(found) == 24 and all(0 < error < 1e-5 for case in found for error in case)


@pytest.mark.slow
def test_the_widest_networks_fit_on_an_h100():
    found = printed()
    assert len(found) == 8 and all(0 < shared <= SHARED_BYTES for shared in found.values()), found


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "tolerance"), [("highest", 1e-5), ("high", 5e-3)])
@pytest.mark.parametrize("lead", [(), (3,)])
@pytest.mark.parametrize("kind", mlp.ACTIVATIONS.values())
@pytest.mark.parametrize("rows", [1, 20_011])  # the second: blocks take several times rows
@pytest.mark.parametrize("sizes", [(4, 64, 64, 2), (400, 64, 64, 3), (70, 32, 48, 16, 5)])
def test_the_operators_on_a_gpu_are_those_on_a_cpu(sizes, rows, kind, lead, precision, tolerance):
    for device in ("cpu", "cuda"):
        mlp.load(device)
    name = f"mlp{len(sizes) - 1}"
    alone, forward, backward = (getattr(torch.ops.torchpod, f"{name}{part}") for part in ("", "_kept", "_backward"))
    x, dy = torch.randn(*lead, rows, sizes[0]), torch.randn(*lead, rows, sizes[-1])
    parameters = [
        p for i, o in itertools.pairwise(sizes) for p in (torch.randn(*lead, o, i) / i**0.5, torch.randn(*lead, o))
    ]
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        results = []
        for device in ("cpu", "cuda"):
            tensors = [p.to(device) for p in parameters]
            y, *hidden = forward(x.to(device), *tensors, kind)
            assert torch.equal(alone(x.to(device), *tensors, kind), y)
            gradients = backward(dy.to(device), x.to(device), *hidden, *tensors[2::2], kind)
            again = backward(dy.to(device), x.to(device), *hidden, *tensors[2::2], kind)
            assert all(torch.equal(a, b) for a, b in zip(gradients, again, strict=True))
            results.append([t.cpu() for t in (y, *hidden, *gradients)])
    finally:
        torch.set_float32_matmul_precision(before)
    for a, b in zip(*results, strict=True):
        assert float((a - b).abs().max() / a.abs().max()) < tolerance

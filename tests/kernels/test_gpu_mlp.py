"""Networks as kernels of a GPU, interpreted; and on a GPU."""

import itertools
import json

import pytest
import torch

from torchpod.bench import lowered
from torchpod.kernels import gxx, mlp

SHARED_BYTES = 227 * 1024
"""Of a multiprocessor of an H100, for one block of threads."""


def printed(*arguments):
    ended = lowered.run("tests.kernels.triton_kernels", *arguments)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


def test_outputs_and_gradients_are_those_of_the_network(seed):
    """One or two, alone and in a population, 2 to 4 layers, tanh and relu, sizes that are no powers of two."""
    found = printed(str(seed), "--check")
    # Below 1e-6, unless the input of a relu is 0 but for rounding: then one side may pass it on.
    assert len(found) == 16 and all(0 < error < 1e-4 for case in found for error in case)


@pytest.mark.slow
def test_networks_share_operators_unless_one_needs_the_other():
    """Each line: the networks of every operator, forward and backward."""
    ended = lowered.run("tests.kernels.networks_on_a_gpu", "--check")
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1]) == {
        "both": ["mlps 2"],
        "three": ["mlps 1", "mlps 2"],
        "gradients": ["mlps 2", "mlps_backward 2"],
        "one_gradient": ["mlps 1", "mlps 1", "mlps_backward 1"],
        "after_another": ["mlps 1", "mlps 1", "mlps_backward 1", "mlps_backward 1"],
        "made_by_another": ["mlps 1", "mlps 1"],
        "late": ["mlps 2"],
        "unlike": ["mlps 1", "mlps 1"],
    }


@pytest.mark.slow
def test_the_widest_networks_fit_on_an_h100():
    found = printed()
    assert len(found) == 8 and all(0 < shared <= SHARED_BYTES for shared in found.values()), found


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "tolerance"), [("highest", 3e-5), ("high", 1e-2)])
@pytest.mark.parametrize("lead", [(), (3,)])
@pytest.mark.parametrize("kind", mlp.ACTIVATIONS.values())
@pytest.mark.parametrize("rows", [1, 5003])  # the second: blocks take several times rows
@pytest.mark.parametrize("sizes", [(4, 64, 64, 2), (400, 64, 64, 3), (70, 32, 48, 16, 5)])
@pytest.mark.parametrize("networks", [1, 2])
def test_the_operators_on_a_gpu_are_those_on_a_cpu(networks, sizes, rows, kind, lead, precision, tolerance):
    """The gradients are compared where relu has the same side of its kink for both, whatever was rounded."""
    for device in ("cpu", "cuda"):
        mlp.load(device)
        gxx.load_needed()
    last = [sizes[-1], 1][:networks]
    own = [
        [
            p
            for i, o in itertools.pairwise((*sizes[:-1], size))
            for p in (torch.randn(*lead, o, i) / i**0.5, torch.randn(*lead, o))
        ]
        for size in last
    ]
    dys = [torch.randn(*lead, rows, size) for size in last]
    x = torch.randn(*lead, rows, sizes[0]) if kind == 1 else away_from_the_kink(own, lead, rows)
    expected = [on_cpu(x, parameters, dy, kind) for parameters, dy in zip(own, dys, strict=True)]
    ops, parameters, on_gpu = torch.ops.torchpod, [p.cuda() for ps in own for p in ps], x.cuda()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        made = ops.mlps(on_gpu, parameters, networks, kind, sizes[0] > mlp.MANY_INPUTS)
        told = [dy.cuda() for dy in dys], on_gpu, made[networks:], parameters, kind
        gradients, again = ops.mlps_backward(*told), ops.mlps_backward(*told)
    finally:
        torch.set_float32_matmul_precision(before)
    assert all(torch.equal(a, b) for a, b in zip(gradients, again, strict=True))
    outputs = [y for y, _ in expected]
    for a, b in zip([*outputs, *(g for _, gs in expected for g in gs)], [*made[:networks], *gradients], strict=True):
        assert float((a - b.cpu()).abs().max() / a.abs().max().clamp(min=1.0)) < tolerance


def on_cpu(x, parameters, dy, kind):
    """Output and gradients of a network."""
    name = f"mlp{len(parameters) // 2}"
    forward, backward = (getattr(torch.ops.torchpod, f"{name}{part}") for part in ("_kept", "_backward"))
    y, *hidden = forward(x, *parameters, kind)
    return y, backward(dy, x, *hidden, *parameters[2::2], kind)


def away_from_the_kink(networks, lead, rows):
    """Inputs for which nothing is so near to 0 before relu that in TF32 it might be on the other side."""
    x = torch.randn(*lead, max(1000, 16 * rows), networks[0][0].shape[-1])
    near = torch.zeros(x.shape[:-1], dtype=torch.bool)
    for parameters in networks:
        h = x
        for weight, bias in zip(parameters[:-2:2], parameters[1:-2:2], strict=True):
            z = h @ weight.mT + bias[..., None, :]
            near |= (z.abs() < 1.2e-3 * z.abs().amax((-1, -2), keepdim=True)).any(-1)
            h = z.relu()
    members = [(x, near)] if not lead else zip(x, near, strict=True)
    far = [one[~unfit][:rows] for one, unfit in members]
    assert all(len(one) == rows for one in far)
    return torch.stack(far).view(*lead, rows, -1)

"""The Triton kernels of gpu_mlp.py, on a CPU: run by test_gpu_mlp.py in a process that has Triton.

With --check they are interpreted and compared with float64, else machine code for an H100 is made of them.
"""

import importlib
import itertools
import json
import sys
from typing import Any

import torch

from torchpod.kernels import gpu_mlp, mlp

SIZES = ((4, 64, 64, 2), (3, 16, 1), (70, 32, 48, 16, 5))
WIDEST = ((64, 64, 64, 64, 64), (400, 64, 64, 3))


def network(x, parameters, relu):
    """Its output."""
    for weight, bias in zip(parameters[:-2:2], parameters[1:-2:2], strict=True):
        x = x @ weight.mT + bias[..., None, :]
        x = x.relu() if relu else x.tanh()
    return x @ parameters[-2].mT + parameters[-1][..., None, :]


def errors(lead, rows, sizes, relu, networks, generator):
    """Largest relative differences of outputs and gradients."""

    def draw(*shape):
        return torch.randn(*lead, *shape, generator=generator)

    def furthest(found, expected):
        found, expected = list(found), list(expected)
        assert [(x.shape, x.is_contiguous()) for x in found] == [(y.shape, True) for y in expected]
        assert all(x.storage_offset() % 4 == 0 for x in found)  # what inductor believes of an operator's results
        return max(float((x - y).abs().max() / y.abs().max()) for x, y in zip(found, expected, strict=True))

    last = [sizes[-1], 18][:networks]
    x, dys = draw(rows, sizes[0]), [draw(rows, size) for size in last]
    parameters = [
        parameter
        for size in last
        for i, o in itertools.pairwise((*sizes[:-1], size))
        for parameter in (draw(o, i) / i**0.5, draw(o))
    ]
    exact, own = [p.double().requires_grad_() for p in parameters], len(parameters) // networks
    expected = [network(x.double(), exact[i * own : (i + 1) * own], relu) for i in range(networks)]
    gradients = torch.autograd.grad(expected, exact, [dy.double() for dy in dys])
    kind = 2 if relu else 1
    outputs = gpu_mlp.forward(x, parameters, networks, kind, sizes[0] > mlp.MANY_INPUTS)
    outputs, hidden = outputs[:networks], outputs[networks:]
    assert len(hidden) == (networks if sizes[0] > mlp.MANY_INPUTS else 0)
    with torch.no_grad():
        forward = furthest(outputs, [y.detach() for y in expected])
    return forward, furthest(gpu_mlp.backward(dys, x, hidden, parameters, kind), gradients)


def interpreted(seed):
    """Of a third of the cases; of which, the seed says."""
    generator = torch.Generator().manual_seed(seed)
    gpu_mlp.BLOCKS = 4  # so that a block takes several times rows
    cases = itertools.product(((), (3,)), (1, 150), SIZES, (False, True), (1, 2))
    return [errors(*case, generator) for i, case in enumerate(cases) if (i + i // 12 + seed) % 3 == 0]


def machine_code():
    """Bytes of shared memory that each kernel takes."""
    triton, compiler = (importlib.import_module(f"triton{name}") for name in (".compiler", ".backends.compiler"))
    found, names = {}, [f"{x}{i}" for i in range(4) for x in "WB"]
    for precision, sizes in itertools.product(("high", "highest"), WIDEST):
        torch.set_float32_matmul_precision(precision)
        places = {name: 64 * i for i, name in enumerate(names)}
        many = sizes[0] > mlp.MANY_INPUTS
        forward = gpu_mlp.FORWARD_MANY if many else gpu_mlp.FORWARD
        kernels: list[tuple[Any, tuple[int, int, int], dict[str, Any]]] = [
            (gpu_mlp._forward, forward, {"KEEP": many}),
            (gpu_mlp._backward, (gpu_mlp._most_back(len(sizes) - 1), mlp.MANY_INPUTS, 1), {"TOTAL": 16384, **places}),
        ]
        for kernel, (rows, inputs, stages), own in kernels:
            constants: dict[str, Any] = gpu_mlp._common(list(sizes[:-1]), [sizes[-1]] * 2, 2, rows, inputs)
            constants |= {"RELU": False, **own}
            numbers = ("rows", "num_blocks", "outputs", "outputs_")
            kinds = {n: "constexpr" if n in constants else "i32" if n in numbers else "*fp32" for n in kernel.arg_names}
            source = triton.ASTSource(kernel, kinds, constexprs=constants)
            options = {"num_warps": gpu_mlp.WARPS, "num_stages": stages}
            made = triton.compile(source, target=compiler.GPUTarget("cuda", 90, 32), options=options)
            assert len(made.asm["cubin"]) > 1000
            found[f"{kernel.__name__}{sizes}, {precision}"] = made.metadata.shared
    return found


print(json.dumps(interpreted(int(sys.argv[1])) if "--check" in sys.argv else machine_code()))

"""The Triton kernels of gpu_mlp.py, on a CPU: run by test_gpu_mlp.py in a process that has Triton.

With --check they are interpreted and compared with float64, else machine code for an H100 is made of them.
"""

import importlib
import itertools
import json
import sys
from typing import Any

import torch

from torchpod import gpu_mlp

SIZES = ((4, 64, 64, 2), (3, 16, 1), (70, 32, 48, 16, 5))
WIDEST = ((64, 64, 64, 64, 64), (400, 64, 64, 3))


def network(x, parameters, relu):
    """Output and hidden layers."""
    hidden = []
    for weight, bias in zip(parameters[::2], parameters[1::2], strict=True):
        x = x @ weight.mT + bias[..., None, :]
        hidden.append(x.relu() if relu else x.tanh())
        x, output = hidden[-1], x
    return output, *hidden[:-1]


def errors(lead, rows, sizes, relu, generator):
    """Largest relative differences of outputs and gradients."""

    def draw(*shape):
        return torch.randn(*lead, *shape, generator=generator)

    def furthest(found, expected):
        found, expected = list(found), list(expected)
        assert [(x.shape, x.is_contiguous()) for x in found] == [(y.shape, True) for y in expected]
        assert all(x.storage_offset() % 4 == 0 for x in found)  # what inductor believes of an operator's results
        return max(float((x - y).abs().max() / y.abs().max()) for x, y in zip(found, expected, strict=True))

    x, dy = draw(rows, sizes[0]), draw(rows, sizes[-1])
    pairs = [(draw(o, i) / i**0.5, draw(o)) for i, o in itertools.pairwise(sizes)]
    parameters = [parameter for pair in pairs for parameter in pair]
    exact = [p.double().requires_grad_() for p in parameters]
    expected = network(x.double(), exact, relu)
    gradients = torch.autograd.grad(expected[0], exact, dy.double())
    kind = 2 if relu else 1
    kept = gpu_mlp.forward_kept(x, *parameters, kind)
    with torch.no_grad():
        forward = max(
            furthest([gpu_mlp.forward(x, *parameters, kind)], expected[:1]),
            furthest(kept, [y.detach() for y in expected]),
        )
    return forward, furthest(gpu_mlp.backward(dy, x, *kept[1:], *parameters[2::2], kind), gradients)


def interpreted(seed):
    """Of all cases."""
    generator = torch.Generator().manual_seed(seed)
    gpu_mlp.BLOCKS = 2  # so that a block takes several times rows
    cases = itertools.product(((), (3,)), (1, 150), SIZES, (False, True))
    return [errors(*case, generator) for case in cases]


def machine_code():
    """Bytes of shared memory that each kernel takes."""
    triton, compiler = (importlib.import_module(f"triton{name}") for name in (".compiler", ".backends.compiler"))
    found, names = {}, [f"{x}{i}" for i in range(4) for x in "WB"]
    for precision, sizes in itertools.product(("high", "highest"), WIDEST):
        torch.set_float32_matmul_precision(precision)
        layers = {"LAYERS": len(sizes) - 1, "RELU": False}
        places = {name: 64 * i for i, name in enumerate(names)}
        forward = {**gpu_mlp._common(list(sizes), gpu_mlp.ROWS), **layers, "KEEP": True}
        backward = {**gpu_mlp._common(list(sizes), gpu_mlp.ROWS_BACK), **layers, "TOTAL": 16384, **places}
        cases: list[tuple[Any, dict[str, Any], int]] = [
            (gpu_mlp._forward, forward, gpu_mlp.WARPS),
            (gpu_mlp._backward, backward, gpu_mlp.WARPS_BACK),
        ]
        for kernel, constants, warps in cases:
            numbers = ("rows", "num_blocks")
            kinds = {n: "constexpr" if n in constants else "i32" if n in numbers else "*fp32" for n in kernel.arg_names}
            source = triton.ASTSource(kernel, kinds, constexprs=constants)
            made = triton.compile(source, target=compiler.GPUTarget("cuda", 90, 32), options={"num_warps": warps})
            assert len(made.asm["cubin"]) > 1000
            found[f"{kernel.__name__}{sizes}, {precision}"] = made.metadata.shared
    return found


print(json.dumps(interpreted(int(sys.argv[1])) if "--check" in sys.argv else machine_code()))

"""What inductor does not know about small float32 networks on a CPU, as a pass over its graphs."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._inductor import inductor_prims
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx

# Coefficients of a [13/6] rational minimax approximation of tanh on [-7.9, 7.9], good to 6 ulps (the one that Eigen
# and XLA use). Inductor's vectorised tanh (SLEEF, 1 ulp) takes 1.09 ns per element on one core, this one 0.32 ns.
TANH_CLAMP = 7.90531110763549805
TANH_P = (
    -2.76076847742355e-16,
    2.00018790482477e-13,
    -8.60467152213735e-11,
    5.12229709037114e-08,
    1.48572235717979e-05,
    6.37261928875436e-04,
    4.89352455891786e-03,
)
TANH_Q = (1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03)


def rational_tanh(x: Tensor) -> Tensor:
    """Tanh in float32 as a quotient of two polynomials; within 6 ulps."""
    x = x.clamp(-TANH_CLAMP, TANH_CLAMP)
    square = x * x

    def polynomial(coefficients: tuple[float, ...]) -> Tensor:
        value = square * coefficients[0] + coefficients[1]
        for c in coefficients[2:]:
            value = value * square + c
        return value

    return x * polynomial(TANH_P) / polynomial(TANH_Q)


def _transposed_mm(a: Tensor, b: Tensor) -> Tensor:
    return (b.t() @ a.t()).t()


def _outer_products(a: Tensor, b: Tensor) -> Tensor:
    b = inductor_prims.force_stride_order(b, (b.shape[1], 1))  # vectorised along its rows
    terms = [a[:, i, None] * b[i] for i in range(b.shape[0])]
    return functools.reduce(torch.add, terms)


def _mm(rows: int, inner: int, cols: int) -> Callable[..., Tensor]:
    """How to multiply `[rows, inner] @ [inner, cols]`; microseconds on one core are MKL's, for 2048 and 64.

    - `[64, 2048] @ [2048, 4]`, a weight gradient: 216, and 23 as `([4, 2048] @ [2048, 64])^T`.
    - `[2048, 64] @ [64, 2]`, a policy head: 41, and 24 as `([2, 64] @ [64, 2048])^T`; and what follows, softmax and
      losses, is vectorised over the rows.
    - `[2048, 2] @ [2, 64]`, back through that head: 20, and nothing when it is fused into the derivative of tanh.
    """
    if 0 < inner <= 4 and rows >= 16:
        return _outer_products
    return _transposed_mm if cols <= 8 and rows >= 16 else torch.mm


def _rewrite(node: torch.fx.Node) -> Callable[..., Tensor] | None:
    """What to put in the place of one node, as a function of its arguments."""
    aten = torch.ops.aten

    def product(a: Any, b: Any) -> Callable[..., Tensor]:
        rows, inner = a.meta["val"].shape
        return _mm(rows, inner, b.meta["val"].shape[1])

    match node.target:
        case aten.tanh.default:
            return rational_tanh
        case aten.mm.default:
            multiply = product(*node.args)
            return None if multiply is torch.mm else multiply
        case aten.addmm.default if not node.kwargs:  # no alpha, no beta
            multiply = product(*node.args[1:])
            return lambda bias, a, b: multiply(a, b) + bias
    return None


class CpuKernels(CustomGraphPass):
    """Inductor pass for float32 CPU graphs: rational tanh, thin matrix products, biases fused into what follows.

    `addmm` first copies the bias over its whole result, 16 us for `[2048, 64]`; added by the kernel that takes the
    tanh it costs nothing.
    """

    def uuid(self) -> Any:
        """Part of inductor's cache key, which knows our operators by name alone, and not what quicker.py generates."""
        own = ("mlp.py", "cpu_mlp.cpp", "gpu_mlp.py", "quicker.py")
        names = *(f"kernels/{name}" for name in own), "random.py", "ops/neighbors.py", "ops/returns.py"
        return get_hash_for_files((__file__, *(str(Path(__file__).parents[1] / name) for name in names)))

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Rewrites the graph in place."""
        for node in list(graph.nodes):
            value = node.meta.get("val")
            if node.op != "call_function" or not isinstance(value, FakeTensor):
                continue
            if value.device.type != "cpu" or value.dtype != torch.float32:
                continue
            rewrite = _rewrite(node)
            if rewrite is None:
                continue
            values = [arg.meta["val"] for arg in node.args]
            with value.fake_mode:
                body = make_fx(rewrite, decomposition_table=select_decomp_table())(*values).graph
            inputs = dict(zip((n for n in body.nodes if n.op == "placeholder"), node.args, strict=True))
            with graph.inserting_before(node):
                result = graph.graph_copy(body, inputs)
            assert isinstance(result, torch.fx.Node)
            node.replace_all_uses_with(result)
            graph.erase_node(node)

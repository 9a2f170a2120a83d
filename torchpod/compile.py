"""Compilation: what the loops do to each of their pure functions before they call it.

`Compiler` turns a function into a compiled one that refuses to recompile silently, vmapped over a population if there
is one. On CPU it adds a pass of two rewrites that inductor lacks (`CpuKernels`); on CUDA the compiled functions are
captured, many at a time, by `graph.py`.
"""

import contextlib
import os
import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree


class RecompilationError(RuntimeError):
    """A compiled function met inputs that it was not compiled for, in the middle of a run."""


class Compiler:
    """Compiles the functions of one run.

    Args:
      enabled: False calls every function as it is (`compile=false`).
      population: number of members; above 1 every function is mapped over a leading P axis of all its arguments.
      max_compilations: how many input signatures one function may be compiled for. One more raises.
    """

    def __init__(self, enabled: bool, population: int = 1, max_compilations: int = 1) -> None:
        if enabled and shutil.which(os.environ.get("CXX", "g++")) is None and not torch.cuda.is_available():
            raise RuntimeError(
                "compile=true needs a C++ compiler, and g++ was not found; install it (Debian: apt-get install g++), "
                "or run with compile=false."
            )
        self.enabled, self.population, self.max_compilations = enabled, population, max_compilations

    def __call__(self, fn: Callable[..., Any], *, compilations: int | None = None) -> Callable[..., Any]:
        """The function, vmapped and compiled as this run wants it."""
        limit = compilations or self.max_compilations
        if not self.enabled:
            return fn if self.population == 1 else _each_member(fn, self.population)
        return guarded_compile(fn if self.population == 1 else torch.vmap(fn), fn.__qualname__, limit)


def guarded_compile(fn: Callable[..., Any], name: str, limit: int) -> Callable[..., Any]:
    """`torch.compile(fullgraph=True)` that raises instead of compiling more than `limit` times."""
    count = 0

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        nonlocal count
        if count >= limit:
            raise RecompilationError(
                f"{name} was compiled for {limit} input signature(s) and met another: {_recompile_reason()}. "
                "Keep shapes, dtypes and Python values the same from step to step, or run with compile=false."
            )
        count += 1
        from torch._inductor.compile_fx import compile_fx

        with torch._inductor.config.patch(post_grad_custom_post_pass=CpuKernels()):
            return compile_fx(graph, inputs)

    def traced(*args: Any) -> Any:
        return _unalias(fn(*args))

    # Dynamo keeps what it compiled on the code object; with one of its own, each function has its own cache and limit.
    traced.__code__ = traced.__code__.replace()

    # Only shapes, dtypes and strides are guarded: everything else a function of ours closes over is constant, and the
    # other guards took half of the time of a call on small batches.
    options = {"guard_filter_fn": lambda guards: [guard.guard_type == "TENSOR_MATCH" for guard in guards]}
    compiled = torch.compile(traced, backend=backend, fullgraph=True, dynamic=False, options=options)

    def guarded(*args: Any) -> Any:
        try:
            return compiled(*args)
        except torch._dynamo.exc.BackendCompilerFailed as error:
            if isinstance(error.inner_exception, RecompilationError):
                raise error.inner_exception from None
            raise

    return guarded


def _unalias(tree: Any) -> Any:
    """Clones tensors that appear twice: an output that is fed back as two inputs of one memory would recompile."""
    leaves, spec = pytree.tree_flatten(tree)
    fresh: list[Any] = []
    for leaf in leaves:
        fresh.append(leaf.clone() if any(leaf is other for other in fresh) else leaf)
    return pytree.tree_unflatten(fresh, spec)


def _recompile_reason() -> str:
    from torch._dynamo.utils import get_metrics_context

    reason = get_metrics_context()._metrics.get("recompile_reason")
    return str(reason).split("\n")[0] if reason else "dynamo names no guard"


def _each_member(fn: Callable[..., Any], population: int) -> Callable[..., Any]:
    """The meaning of a population, without vmap: one call per member, results stacked. Bit-equal to single runs."""

    def mapped(*args: Any) -> Any:
        outs = [fn(*pytree.tree_map(lambda x, i=i: x[i], args)) for i in range(population)]
        return pytree.tree_map(lambda *leaves: torch.stack(leaves), *outs)

    return mapped


@contextlib.contextmanager
def span(name: str) -> Any:
    """An NVTX and profiler range `torchpod/<name>` while TORCHPOD_PROFILE=1; free otherwise and inside a graph."""
    if torch.compiler.is_compiling() or not _PROFILE:
        yield
        return
    with torch.profiler.record_function(f"torchpod/{name}"):
        if torch.cuda.is_available():
            torch.cuda.nvtx.range_push(f"torchpod/{name}")
        yield
        if torch.cuda.is_available():
            torch.cuda.nvtx.range_pop()


_PROFILE = os.environ.get("TORCHPOD_PROFILE") == "1"

# Coefficients of a [13/6] rational minimax approximation of tanh on [-7.9, 7.9], good to 3 ulps (the one that Eigen
# and XLA use). Inductor's vectorised tanh (SLEEF, 1 ulp) takes 1.09 ns per element on one core, this one 0.32 ns.
_TANH_CLAMP = 7.90531110763549805
_TANH_P = (
    -2.76076847742355e-16,
    2.00018790482477e-13,
    -8.60467152213735e-11,
    5.12229709037114e-08,
    1.48572235717979e-05,
    6.37261928875436e-04,
    4.89352455891786e-03,
)
_TANH_Q = (1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03)


def rational_tanh(x: Tensor) -> Tensor:
    """Tanh in float32 as a quotient of two polynomials; within 3 ulps."""
    x = x.clamp(-_TANH_CLAMP, _TANH_CLAMP)
    square = x * x

    def polynomial(coefficients: tuple[float, ...]) -> Tensor:
        value = square * coefficients[0] + coefficients[1]
        for c in coefficients[2:]:
            value = value * square + c
        return value

    return x * polynomial(_TANH_P) / polynomial(_TANH_Q)


def _transposed_mm(a: Tensor, b: Tensor) -> Tensor:
    return (b.t() @ a.t()).t()


def _outer_products(a: Tensor, b: Tensor) -> Tensor:
    terms = [a[:, i, None] * b[i] for i in range(b.shape[0])]
    return terms[0] if len(terms) == 1 else terms[0] + terms[1]


def _mm(rows: int, inner: int, cols: int) -> Callable[..., Tensor]:
    """How to multiply `[rows, inner] @ [inner, cols]`; microseconds on one core are MKL's, for 2048 and 64.

    - `[64, 2048] @ [2048, 4]`, a weight gradient: 216, and 23 as `([4, 2048] @ [2048, 64])^T`.
    - `[2048, 64] @ [64, 2]`, a policy head: 41, and 24 as `([2, 64] @ [64, 2048])^T`; and what follows, softmax and
      losses, is vectorised over the rows.
    - `[2048, 2] @ [2, 64]`, back through that head: 20, and nothing when it is fused into the derivative of tanh.
    """
    if inner <= 2 and rows >= 16:
        return _outer_products
    return _transposed_mm if cols <= 8 and rows >= 16 else torch.mm


def _rewrite(node: torch.fx.Node) -> Callable[..., Tensor] | None:
    """What to put in the place of one node, as a function of its arguments."""
    aten = torch.ops.aten

    def product(a: torch.fx.Node, b: torch.fx.Node) -> Callable[..., Tensor]:
        return _mm(*a.meta["val"].shape, b.meta["val"].shape[1])

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
        """Part of inductor's cache key."""
        return get_hash_for_files((__file__,))

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Rewrites the graph in place."""
        for node in list(graph.nodes):
            value = node.meta.get("val")
            if node.op != "call_function" or not isinstance(value, Tensor):
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

"""Inductor's Python, half of the time to compile, without what it does for nothing.

Times are of PPO on CartPole, six programs, one core of an AMD EPYC; what is computed stays the same, to the last bit.
Garbage, tails and ranges together are 14.1 s to compile against 11.9; what each part takes is told by a profile.
"""

import contextlib
import functools
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import sympy

YOUNG = 50_000
"""Objects before Python looks for garbage, while it compiles."""


class _Rarely:
    """Who compiles now, and how often Python looked for garbage before."""

    lock = threading.Lock()
    inside = 0
    before = gc.get_threshold()


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Python's default is to look for garbage every 700 objects: 1.3 s, and 0.6 s so.

    Half of that goes through all that torch consists of, four times. It is for all threads.
    """
    with _Rarely.lock:
        if not _Rarely.inside:
            _Rarely.before = often, *older = gc.get_threshold()
            gc.set_threshold(max(often, YOUNG) if often else 0, *older)  # 0 is never
        _Rarely.inside += 1
    try:
        yield
    finally:
        with _Rarely.lock:
            _Rarely.inside -= 1
            if not _Rarely.inside:
                gc.set_threshold(*_Rarely.before)


@functools.cache
def quicken() -> None:
    """Makes inductor quicker, in this process.

    - The table of result types, of which there is one, was filled anew for each of 14,000 operations, 1 s.
    - Each kernel was written for a tail of its loop even where the loop has none, and that left out at last, 0.8 s.
    - What two ranges of values have in common was found by sympy for each use of a variable, 0.7 s.
    - The stride of an index that is a sum of multiples of variables is read from it, not simplified, about 0.6 s.
    - A tile was transposed again for each operation that loads it, and g++ took 19 s for one such kernel of a
      population of 16: 33.4 s to compile, and 17.5.
    """
    from torch._inductor import dtype_propagation, sizevars, utils
    from torch._inductor.codegen import cpp
    from torch._inductor.scheduler import SchedulerNode
    from torch.utils._sympy.value_ranges import ValueRanges

    table = dtype_propagation.DtypePropagationOpsHandler
    fill = table.__init__

    @functools.cache
    def filled(handler: Any, num_rules: int) -> None:
        fill(handler)

    def init(handler: Any) -> None:
        filled(handler, len(utils.op_dtype_propagation_rules))

    cast(Any, table).__init__ = init
    cast(Any, SchedulerNode).codegen = _without_empty_tails(SchedulerNode.codegen)
    tile = cast(Any, cpp.CppTile2DKernel)
    tile.gen_transposed_tile_load_store = _transposed_once(tile.gen_transposed_tile_load_store)
    cast(Any, ValueRanges).__and__ = functools.lru_cache(4096)(ValueRanges.__and__)
    quick = _quick_stride(sizevars.stride_at_vec_range)
    cast(Any, sizevars).stride_at_vec_range = cast(Any, cpp).stride_at_vec_range = quick


def _without_empty_tails(codegen: Callable[..., None]) -> Callable[..., None]:
    """Of a node of a fused kernel, where `V.kernel` is one of its variants: scalar, vectors, tails of these.

    Of tiles of two dimensions the tail of the outer loop alone says that nothing is left of them: a tail of the inner
    one that is empty may still be where a reduction over it is stored.
    """
    from torch._inductor.codegen.cpp import CppTile2DKernel, CppVecKernel
    from torch._inductor.virtualized import V

    def codegen_unless_empty(node: Any, index_vars: Any) -> None:
        kernel: Any = V.kernel
        if isinstance(kernel, CppTile2DKernel):
            empty = kernel.outer_tail_size == 0
        else:
            empty = isinstance(kernel, CppVecKernel) and kernel.tail_size == 0
        if not empty:
            codegen(node, index_vars)

    return codegen_unless_empty


def _transposed_once(generate: Callable[..., str]) -> Callable[..., str]:
    """Of a tile that is loaded or stored: loads are before the loop over its rows, where nothing is stored."""

    def generate_once(kernel: Any, name: str, var: str, index: Any, is_store: bool, store_mode: Any = None) -> str:
        tile = generate(kernel, name, var, index, is_store, store_mode)
        lines = kernel.preloads._lines
        if not is_store and lines[-1] in lines[:-1]:
            lines.pop()
        return tile

    return generate_once


def _quick_stride(stride_at_vec_range: Callable[..., Any]) -> Callable[..., Any]:
    @functools.cache
    def quick(index: sympy.Expr, var: sympy.Symbol, vec_length: int | None = None) -> sympy.Expr:
        terms = [term.as_coeff_Mul() for term in sympy.Add.make_args(index)]
        if all(rest.is_Symbol or rest == 1 for _, rest in terms):
            return sum((factor for factor, rest in terms if rest == var), sympy.Integer(0))
        return stride_at_vec_range(index, var, vec_length)

    return quick

"""Inductor generates the same, and sooner."""

import gc
import importlib.util
import itertools
import random
import re
import threading

import pytest
import sympy
import torch
from torch._inductor import config as inductor_config

from torchpod.kernels import quicker, together
from torchpod.kernels.inductor import Compiled, CompileError


def test_the_table_of_result_types_is_filled_once():
    from torch._inductor.dtype_propagation import DtypePropagationOpsHandler

    Compiled(lambda x: (x + 1.5,), "f", 1)(torch.ones(3))
    assert DtypePropagationOpsHandler().add is DtypePropagationOpsHandler().add


def test_strides_are_those_that_sympy_finds_by_simplifying(seed, monkeypatch):
    from torch.utils._sympy.functions import FloorDiv, ModularIndexing

    rng, (x, y) = random.Random(seed), sympy.symbols("x0 x1", integer=True)
    slow = untouched("sizevars").stride_at_vec_range
    quick = quicker._quick_stride(slow)
    for _ in range(50):
        a, b, c = (sympy.Integer(rng.choice([-64, -1, 0, 1, 3, 16, 128])) for _ in range(3))
        for index in (a * x + b * y + c, a * FloorDiv(x, 16) + b * x, a * ModularIndexing(x, 1, 32) + b * y, a * x * y):
            for var, length in ((x, 16), (y, 16), (x, None)):
                assert quick(index, var, length) == slow(index, var, length), (index, var, length)
    monkeypatch.setattr(sympy, "simplify", None)
    assert quicker._quick_stride(slow)(5 * x + y + 3, x, 8) == 5


def functions(rng):
    """In one dimension and in tiles of two: with vectors and without tails, with both, and with tails alone."""
    sizes = [2, 16, 32, rng.randrange(3, 16), rng.randrange(17, 63)]
    for n, m in itertools.product(sizes, repeat=2):
        x, y = torch.randn(n, m), torch.rand(m, n)
        yield lambda x, y: ((x.exp() * y.T).sigmoid(), y.T.contiguous() + 1, torch.where(y > 0.5, y.cumsum(0), 0)), x, y
        yield lambda x, y: (x.sum(0), x.amax(1), y.var(0), y.argmax(1), x.mean(), (x[:, ::2] > 0).any(0)), x, y
        yield lambda x, y: (z := x * y.T, z.sum(0), z.T.contiguous(), (x - y.T).var(0), x.amax(0) + y.amax(1)), x, y
        yield lambda x, y: (z := x * y.T, z.sum(1), (x > y.T).any(1), (x - y.T).amin(1), x.sum(1) * y.sum(0)), x, y
        yield (
            lambda x, y: (x.sum(1, keepdim=True) * x, x.index_add(0, torch.arange(len(x)) // 2, x), (x * 99).long()),
            x,
            y,
        )


def untouched(name):
    """A module of inductor without what quicker.py puts into it."""
    spec = importlib.util.find_spec(f"torch._inductor.{name}")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_kernels_are_the_same_but_for_tiles_that_are_transposed_again(seed, monkeypatch):
    """With kernels for empty tails, and transposing for each operation, as inductor does by itself."""
    from torch._inductor.codegen.cpp import CppTile2DKernel
    from torch._inductor.scheduler import SchedulerNode

    sources = []

    def noted(source, flags):
        sources[-1].append(re.sub(r"[0-9a-f]{12}", "", source))
        raise LookupError

    def generate():
        sources.append([])
        for fn, *args in functions(random.Random(seed)):
            with inductor_config.patch(force_disable_caches=True), pytest.raises(CompileError, match="LookupError"):
                Compiled(fn, "f", 1)(*args)

    def without_repetitions(source):
        """Before each loop: a tile that was transposed already is there."""
        kept, block = [], set()
        for line in source.splitlines():
            if "for(" in line or "for (" in line:
                block = set()
            if "transpose_mxn" not in line or line not in block:
                kept.append(line)
            block.add(line)
        return kept

    together.install()
    monkeypatch.setattr(together, "_program", noted)
    generate()
    monkeypatch.setattr(SchedulerNode, "codegen", untouched("scheduler").SchedulerNode.codegen)
    name = "gen_transposed_tile_load_store"
    monkeypatch.setattr(CppTile2DKernel, name, getattr(untouched("codegen.cpp").CppTile2DKernel, name))
    generate()
    quick, slow = sources
    assert len(slow) == 125 and len([x for x in slow if without_repetitions(x) != x.splitlines()]) > 10
    assert [without_repetitions(source) for source in slow] == [source.splitlines() for source in quick]


def test_garbage_is_looked_for_rarely_while_anybody_compiles():
    before, entered, leave = gc.get_threshold(), threading.Event(), threading.Event()

    def compile_something():
        with quicker.rare_collections():
            entered.set()
            leave.wait()

    other = threading.Thread(target=compile_something)
    with quicker.rare_collections():
        other.start()
        entered.wait()
        assert gc.get_threshold() == (quicker.YOUNG, *before[1:])
    assert gc.get_threshold() == (quicker.YOUNG, *before[1:])
    leave.set()
    other.join()
    assert gc.get_threshold() == before


@pytest.mark.parametrize("threshold", [0, 100_000])
def test_who_looks_for_garbage_more_rarely_still_keeps_to_that(threshold):
    before = gc.get_threshold()
    gc.set_threshold(threshold, *before[1:])
    try:
        with quicker.rare_collections():
            assert gc.get_threshold() == (threshold, *before[1:])
        assert gc.get_threshold() == (threshold, *before[1:])
    finally:
        gc.set_threshold(*before)

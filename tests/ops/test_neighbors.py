"""The nearest neighbours: those of a sort, whoever looks for them, with vectors of any width."""

import os
import platform
import subprocess
import sys

import numpy as np
import pytest
import torch

from torchpod import random
from torchpod.compile import Compiler
from torchpod.kernels.inductor import trace
from torchpod.ops.neighbors import _root, _searched, distance, nearest

SIZES = [(5, 4), (9, 1), (30, 3), (64, 8), (100, 10), (133, 99), (140, 3), (280, 17)]


def scattered(seed, size, cells=5, batch=4, share=0.6):
    """Places on a small grid, where many are equally near, and who is in the game."""
    words = random.bits(random.split(random.key(seed), batch), 3 * size).chunk(3, -1)
    x, y = (random.to_integer(w, cells).float() for w in words[:2])
    return x, y, random.to_uniform(words[2]) < share


def sorted_by_hand(x, y, alive, num):
    """Ids, per environment and agent."""
    x, y, alive = (f.tolist() for f in (x, y, alive))

    def of(b, i):
        others = [j for j in range(len(x[b])) if j != i and alive[b][j]]
        return sorted(others, key=lambda j: ((x[b][j] - x[b][i]) ** 2 + (y[b][j] - y[b][i]) ** 2, j))[:num]

    return [[of(b, i) for i in range(len(x[b]))] for b in range(len(x))]


@pytest.mark.parametrize("compile", [False, True])
def test_roots_are_numpys_to_the_bit(compile, seed):
    """Torch's own are not: an agent that is as far as another, but for the last bit, changed places with it."""
    squares = torch.rand(10_000, generator=torch.Generator().manual_seed(seed)) * 800
    squares[0] = torch.inf
    assert np.array_equal(Compiler(compile)(_root)(squares).numpy(), np.sqrt(squares.numpy()))
    assert distance(torch.tensor(3.0), torch.tensor(-4.0)) == 5.0


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize(("size", "num"), SIZES)
def test_the_nearest_are_those_of_a_sort(size, num, compile, seed):
    where = scattered(seed, size)
    ids, there = Compiler(compile)(lambda x, y, alive: nearest(x, y, alive, num))(*where)
    expected = sorted_by_hand(*where, num)
    for b in range(4):
        for i in range(size):
            assert ids[b, i][there[b, i]].tolist() == expected[b][i]
    assert ids.dtype == torch.int64 and ids.shape == there.shape == (4, size, num)
    assert (ids[~there] == 0).all()


@pytest.mark.parametrize(
    ("cells", "scale", "share"), [(3, 1.0, 0.6), (2**20, 1e-3, 1.0), (100, 1e-24, 0.9), (9, 1, 0.01)]
)
def test_the_operator_of_cpu_programs_finds_what_tensors_find(cells, scale, share, seed):
    """Also where squares are too small for float32; 1100 agents twice are enough for two threads."""
    x, y, alive = scattered(seed, 1100, cells, 2, share)
    x, y = x * scale, y * scale

    def fn(x, y, alive):
        return nearest(x, y, alive, 10)

    assert any("torchpod.nearest" in str(node.target) for node in trace(fn, (x, y, alive))[0].graph.nodes)
    torch.set_num_threads(2)
    try:
        found = Compiler(True)(fn)(x, y, alive)
    finally:
        torch.set_num_threads(1)
    for actual, expected in zip(found, _searched(x, y, alive, 10), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("compile", [False, True])
def test_what_does_not_fit_is_refused(compile):
    x, alive = torch.zeros(2, 5), torch.ones(2, 5, dtype=torch.bool)

    def find(*arguments):
        return Compiler(compile)(lambda: nearest(*arguments))()

    for arguments in ((x, x[:1], alive, 2), (x, x, alive[:, 1:], 2), (x, x, alive.int(), 2), (x[0], x[0], alive[0], 2)):
        with pytest.raises(ValueError, match="must be of one shape"):
            find(*arguments)
    for num in (0, 5):
        with pytest.raises(ValueError, match=f"num={num} must be at least 1 and less than the 5 agents"):
            find(x, x, alive, num)


def test_members_of_a_population_may_share_an_argument(seed):
    x, y, alive = (f.unflatten(0, (3, 2)) for f in scattered(seed, 21, batch=6))

    def fn(x, y, alive):
        return torch.vmap(lambda x, y: nearest(x, y, alive, 4), (1, 0))(x.transpose(0, 1), y)

    found = Compiler(True)(fn)(x, y, alive[0])
    for i in range(3):
        for actual, expected in zip(found, nearest(x[i], y[i], alive[0], 4), strict=True):
            assert torch.equal(actual[i], expected)


NARROWER = """
import sys
from torchpod.kernels import cpu_ops, gxx
cpu_ops.FILES["torchpod.nearest"] += tuple(sys.argv[2:])
from tests.ops.test_neighbors import *
cpu_ops.load("torchpod.nearest")
gxx.load_needed()
for size, num in SIZES:
    where = scattered(int(sys.argv[1]), size)
    for actual, expected in zip(torch.ops.torchpod.nearest(*where, num), nearest(*where, num), strict=True):
        assert torch.equal(actual, expected)
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="flags are those of x86")
@pytest.mark.slow
@pytest.mark.parametrize(("capability", "flags"), [("avx2", ("-mno-avx512f",)), ("default", ("-mno-avx",))])
def test_vectors_of_any_width_find_the_same(capability, flags, seed):
    command = [sys.executable, "-c", NARROWER, str(seed), *flags]
    told = os.environ | {"ATEN_CPU_CAPABILITY": capability}
    done = subprocess.run(command, env=told, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_agent_whose_place_is_unknown_is_nobodys_neighbour(seed):
    x, y, alive = scattered(seed, 40)
    x = x.float()
    x[0, 3] = torch.nan
    y = y.float()
    for actual, expected in zip(
        Compiler(True)(lambda *a: nearest(*a, 7))(x, y, alive), _searched(x, y, alive, 7), strict=True
    ):
        assert torch.equal(actual, expected)

"""cpu_vectors.h: inductor's programs compute what torch does, whatever the length of a vector's last part."""

import os
import subprocess
import sys

import pytest
import torch

from tests.marks import with_slow
from torchpod.kernels.inductor import Compiled

DTYPES = (torch.int32, torch.int64, torch.float32, torch.float64)
LENGTHS = (3, 8, 21, 64, 77)
SHAPES = ((7, 6, 9), (3, 8, 8), (2, 13, 21), (4, 1, 5), (2, 6, 100), (3, 17, 3), (2, 16, 16))


def drawn(shape, dtype):
    """Of integers, all bits."""
    if dtype.is_floating_point:
        return torch.randn(shape, dtype=dtype)
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max, shape, dtype=dtype)


def require_equal_compiled(fn, xs):
    """Of `fn(*x)` for each x, to the last bit; one program for all."""
    actual, expected = Compiled(lambda xs: [y for x in xs for y in fn(*x)], "f", 1)(xs), [y for x in xs for y in fn(*x)]
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.fixture(autouse=True)
def generator(seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_integers(dtype):
    def fn(a, b, shift):
        least = (a & 0xFFFFFFFF) * (b & 0xFFFFFF)
        return a * b, a - b, a >> shift, least, torch.where(a > b, a, b), a.double(), a.float() + b[:, :1], a > 3

    def numbers(length):
        a, bits = drawn((5, length), dtype), torch.iinfo(dtype).bits
        a[0, :3] = torch.tensor([0, -1, torch.iinfo(dtype).min])
        return a, drawn((5, length), dtype), torch.randint(0, bits, (5, length), dtype=dtype)

    require_equal_compiled(fn, [numbers(length) for length in LENGTHS])


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_nothing_is_divided_by_what_is_not_there(dtype):
    def numbers(length):
        b = drawn((3, length), dtype) // 1000
        return drawn((3, length), dtype), torch.where(b == 0, 7, b)

    require_equal_compiled(lambda a, b: (a // b, a % b), [numbers(length) for length in LENGTHS])


@pytest.mark.parametrize("dtype", with_slow(DTYPES, {*DTYPES} - {torch.float32}), ids=str)
def test_transposition(dtype):
    def fn(x):
        """There and back, so that what is read and what is written is in parts."""
        there = (x // 2 if dtype in DTYPES[:2] else x + 1).transpose(-1, -2).contiguous()
        back = torch.stack([x[:, i] - 1 for i in range(x.shape[1])], -1)
        return there, back, x.transpose(-1, -2).reshape(x.shape[0], -1) - 1, x.amax(-2)

    require_equal_compiled(fn, [(drawn(shape, dtype),) for shape in SHAPES])


def test_what_is_behind_a_part_is_left_alone():
    def fn(x):
        return x * 2, torch.cat([x, -x, x[:, :1]], -1), x.abs().amax(-1)

    require_equal_compiled(fn, [(torch.randn(6, length),) for length in range(1, 18)])


@pytest.mark.parametrize("dtype", with_slow(DTYPES, (torch.int64, torch.float64)), ids=str)
def test_what_was_written_number_by_number_is_read(dtype):
    """In pairs: compilers may not take the reading before the writing."""

    def fn(x, y, mask, pairs):
        return [torch.where(mask[:, None], pairs, torch.stack([x * 3, y * 2], -1))]

    def numbers(length):
        x, y = drawn((2, length), dtype)
        return x, y, torch.zeros(length, dtype=torch.bool), drawn((length, 2), dtype)

    for length in (3, 8):
        require_equal_compiled(fn, [numbers(length)])


@pytest.mark.parametrize("dtype", with_slow(DTYPES, (torch.int64, torch.float64)), ids=str)
def test_masks(dtype):
    def fn(x, mask):
        return torch.where(mask, x, 3), x > 0, (x > 0) & ~mask, torch.where(mask, x.double(), 0.5), mask.float() + 1

    require_equal_compiled(fn, [(drawn((5, n), dtype), torch.rand(5, n) < 0.5) for n in LENGTHS])


def run_with(capability, *which):
    """These tests in another process, on a processor that has less."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", __file__, *which]
    told = os.environ | {"ATEN_CPU_CAPABILITY": capability}
    done = subprocess.run(command, env=told, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


@pytest.mark.slow
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="AVX2 is what the tests above had")
def test_most_of_the_above_with_avx2():
    run_with("avx2", "-k", "float32 or int64 or behind")


@pytest.mark.slow
def test_programs_without_vectors():
    run_with("default", "-k", "masks and float32")

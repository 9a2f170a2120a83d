import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

from torchpod.compile import CompileError, Compiler
from torchpod.kernels import cpu_memory, inductor


def test_slices_of_a_concatenation_are_those_of_its_pieces(monkeypatch):
    """Slices inside a piece, across pieces, from the end, along another axis, and of the whole."""
    seen = []
    skip = inductor._skip_cats

    def watched(graph):
        skip(graph)
        seen.append(sum(node.target is torch.ops.aten.cat.default for node in graph.nodes))

    monkeypatch.setattr(inductor, "_skip_cats", watched)

    def inside(a, b):
        c = torch.cat([a, b], -1)
        return c[:, 0:1] + 1.0, c[:, 1:3] * 2.0, c[:, 3:5] - 1.0

    def across(a, b):
        c = torch.cat([a, b], 1)
        return c[:, 2:4] + 1.0, c[:, :-1] + 1.0, c[:, -1:] + 1.0, c[1:2] + 1.0, c.exp()

    def promoted(a, b):
        return (torch.cat([a.long(), b.int()], -1)[:, 3:5] * 3_000_000_000,)

    a, b = 9 * torch.rand(4, 3), 9 * torch.rand(4, 2)
    for fn in (inside, across, promoted):
        for got, want in zip(Compiler(True)(fn)(a, b), fn(a, b), strict=True):
            torch.testing.assert_close(got, want)
    assert seen == [0, 1, 1]


def test_other_threads_get_on_while_a_kernel_runs():
    def slow(x):
        for _ in range(100):
            x = (x * 1.0001).sin()
        return x

    compiled, x = Compiler(enabled=True)(slow), torch.rand(2_000_000)
    compiled(x)
    began = time.perf_counter()
    compiled(x)
    alone, gaps = time.perf_counter() - began, []
    thread = threading.Thread(target=compiled, args=(x,))
    last = time.perf_counter()
    thread.start()
    while thread.is_alive():
        now = time.perf_counter()
        gaps.append(now - last)
        last = now
    assert max(gaps) < alone / 2


def programs_of(fn, *args, monkeypatch):
    """Compiles, and returns the results and the operators that are left for each call."""
    graphs, fold = [], inductor._fold_constants

    def spy(graph):
        fold(graph)
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])

    monkeypatch.setattr(inductor, "_fold_constants", spy)
    return Compiler(True)(fn)(*args), graphs[0]


def test_tables_are_made_when_a_function_is_compiled(monkeypatch, seed):
    walls, aten = torch.tensor([[0, 1, 0], [1, 1, 0]]), torch.ops.aten

    def fn(x):
        cells = torch.arange(6, device=x.device)
        rows, columns = cells // 3, cells % 3
        bits = torch.where(columns == 1, 1 << rows, 0)
        order = (5 - cells).sort().values
        return x & bits, x + order, walls.to(x.device) * 2 + x.reshape(2, 3), torch.tensor([7, 8], device=x.device)

    x = torch.randint(100, (6,), generator=torch.Generator().manual_seed(seed))
    got, left = programs_of(fn, x, monkeypatch=monkeypatch)
    for a, b in zip(got, fn(x), strict=True):
        assert torch.equal(a, b) and a.dtype == b.dtype
    assert set(left) <= {aten.bitwise_and.Tensor, aten.add.Tensor, aten.view.default, aten.reshape.default}


def test_what_is_spread_over_a_batch_is_no_table(monkeypatch):
    def fn(x):
        return (torch.arange(4).expand(8192, 4) * 3 + 1) + x

    x = torch.zeros(8192, 4, dtype=torch.int64)
    got, left = programs_of(fn, x, monkeypatch=monkeypatch)
    assert torch.equal(got, fn(x))
    assert torch.ops.aten.mul.Tensor in left


def test_a_result_that_is_a_table_is_new_in_every_call():
    """Whoever gets it may write to it."""
    compiled = Compiler(True)(lambda x: (x + 1, torch.arange(4) * 2))
    first = compiled(torch.zeros(1))[1]
    first.add_(100)
    assert compiled(torch.zeros(1))[1].tolist() == [0, 2, 4, 6]


def test_a_machine_with_a_gpu_and_a_compiler_of_c_needs_none_of_cpp(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cpu_memory, "install", lambda: 1 / 0)
    assert Compiler(True).enabled


def test_what_is_compiled_ahead_is_not_called_and_then_as_ever(seed):
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))
    first = inductor.Compiled(lambda x: {"y": (x.T * 2.0 + 1.0).contiguous(), "n": (x > 0.0).sum()}, "first", 1)
    second = inductor.Compiled(lambda tree: tree["y"].exp() * tree["n"], "second", 1)
    with inductor.ahead():
        made = first(x)
        assert made["y"].shape == (3, 5) and made["n"].dtype == torch.int64
        assert not made["y"].any() and not second(made).any()
        assert first(x)["y"] is made["y"]
    torch.testing.assert_close(second(first(x)), (x.T * 2.0 + 1.0).exp() * (x > 0.0).sum())
    assert len(first._programs) == len(second._programs) == 1


def test_a_program_compiled_ahead_for_what_never_comes_makes_room():
    double = Compiler(enabled=True)(lambda x: x * 2.0)
    with inductor.ahead():
        double(torch.ones(3))
    torch.testing.assert_close(double(torch.ones(4)), torch.full((4,), 2.0))
    with pytest.raises(inductor.RecompilationError, match="met another"):
        double(torch.ones(5))


def test_another_constant_or_another_tensor_in_the_arguments_is_another_signature():
    """It is compiled for, or refused: never the result of the first."""
    x = torch.rand(3)
    scaled = Compiler(True, max_compilations=2)(lambda x, scale: x * scale)
    for scale in (2, 3, 2):
        assert torch.equal(scaled(x, scale), x * scale)
    with pytest.raises(inductor.RecompilationError, match=r"constants of the arguments are \(.*4.*\), and were \(.*3"):
        scaled(x, 4)
    summed = Compiler(True, max_compilations=2)(lambda tree: sum(tree.values()))
    for tree in ({"a": x}, {"a": x, "b": 2 * x}, {"a": x}):
        assert torch.equal(summed(tree), x * (1 if len(tree) == 1 else 3))


def test_a_constant_of_another_type_is_another_signature():
    scaled, x = Compiler(True, max_compilations=2)(lambda x, n: x * n), torch.arange(3)
    assert scaled(x, 2).dtype == torch.int64 and scaled(x, 2.0).dtype == torch.float32
    with pytest.raises(inductor.RecompilationError):
        scaled(x, np.ones(3))


def test_what_is_drawn_from_a_table_is_drawn_in_every_call():
    shares = torch.full((1000,), 0.5)
    draw = Compiler(True)(lambda x: x + torch.multinomial(shares, 8, replacement=True))
    assert len({tuple(draw(torch.zeros(8, dtype=torch.int64)).tolist()) for _ in range(3)}) == 3


def test_programs_ahead_are_compiled_by_other_threads(monkeypatch):
    from torch._inductor import cpp_builder

    threads = []
    run = cpp_builder.run_compile_cmd

    def watched(command, cwd):
        threads.append(threading.current_thread())
        return run(command, cwd)

    monkeypatch.setattr(cpp_builder, "run_compile_cmd", watched)
    number = time.time()  # so that no cache has it
    compiled = Compiler(enabled=True)(lambda x: x * number)
    with inductor.ahead():
        compiled(torch.ones(7))
    assert threads and threading.main_thread() not in threads
    torch.testing.assert_close(compiled(torch.ones(7)), torch.full((7,), number))


MORE_THREADS = """
import threading
import torch
from torchpod.compile import Compiler
x = torch.rand(1 << 20)
want = x.exp().log().sum().item()
torch.set_num_threads(2)
total, found = Compiler(True)(lambda x: x.exp().log().sum()), []
for num_threads in (2, 3, 8, 1):
    torch.set_num_threads(num_threads)
    found.append(total(x).item())
other = threading.Thread(target=lambda: found.append(total(x).item()))  # with OpenMP's own number
other.start()
other.join()
print(max(abs(x / want - 1) for x in found), len(found))
"""


def test_a_program_may_be_called_with_more_threads_than_it_was_compiled_with(monkeypatch):
    """In a process of its own: one that writes past its arrays ends it."""
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    done = subprocess.run([sys.executable, "-c", MORE_THREADS], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    error, count = done.stdout.split()
    assert float(error) < 1e-4 and count == "5"


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: torch.from_numpy(x.numpy()) * 2,
        lambda x: torch.from_numpy(np.asarray(x.detach())),
        lambda x: torch.as_tensor(np.where(x > 0, 1.0, 0.0)),
        lambda x: x * float(np.linalg.norm(x)),
        lambda x: torch.as_tensor(np.from_dlpack(x)),
    ],
)
def test_numpy_cannot_read_what_is_traced(fn):
    """It would read memory that nobody has written."""
    told = (
        r"test_inductor\.py:\d+, `lambda x: .*`, does not compile \(NumPy cannot read .*\); use torch's operators, or"
    )
    with pytest.raises(CompileError, match=told):
        Compiler(True)(fn)(torch.randn(3))
    assert fn(torch.randn(3)).shape == (3,) and np.asarray(torch.ones(2)).sum() == 2  # as before


def test_numbers_that_are_no_arguments_may_be_numpys():
    table = np.arange(3.0, dtype=np.float32)
    assert Compiler(True)(lambda x: x + torch.from_numpy(table))(torch.ones(3)).tolist() == [1.0, 2.0, 3.0]

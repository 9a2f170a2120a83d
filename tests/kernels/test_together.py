"""Programs that are compiled together: what they compute, how many files there are, and who waits for whom."""

import threading
from pathlib import Path

import pytest
import torch

from torchpod.kernels import gxx, together
from torchpod.kernels.inductor import Compiled, ahead


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path / "torchpod"


def sources(folder: Path) -> list[str]:
    return [path.read_text() for path in folder.glob("*.cpp")]


def three(seed: int) -> list[Compiled]:
    """Functions whose kernels have the same names."""
    numbers = torch.randn(3, generator=torch.Generator().manual_seed(seed)).tolist()
    return [
        Compiled(lambda x, a=numbers[0]: (x * a, x.sum()), "f", 1),
        Compiled(lambda x, a=numbers[1]: ((x + a).exp(), x > a), "g", 1),
        Compiled(lambda x, a=numbers[2]: (x - a, (x * x).sum() + a), "h", 1),
    ]


@pytest.mark.parametrize("cores", [1, 2, 3])
def test_programs_of_several_functions_are_each_their_own(cores, seed, monkeypatch, empty_cache):
    monkeypatch.setattr(gxx, "cores", lambda: cores)
    functions, x = three(seed), torch.randn(65, generator=torch.Generator().manual_seed(seed + 1))
    with ahead():
        for function in functions:
            assert not any(y.any() for y in function(x))  # zeros
    found = [function(x) for function in functions]
    for function, said in zip(functions, found, strict=True):
        torch.testing.assert_close(said, function._traced(x))
    entries = [function._programs[0].entry for function in functions]
    assert len({entry.address for entry in entries if entry is not None}) == 3
    assert sum(text.count("namespace p") for text in sources(empty_cache)) == 3
    if cores == 1:
        assert len(sources(empty_cache)) == 1


def test_together_and_alone_are_equal_to_the_bit(seed, monkeypatch, tmp_path):
    monkeypatch.setattr(gxx, "cores", lambda: 1)
    generator, results = torch.Generator().manual_seed(seed), []
    x, weight = torch.randn(65, 33, generator=generator), torch.randn(33, 33, generator=generator)

    def functions() -> list[Compiled]:
        norm = Compiled(lambda x, w: ((x - x.mean(0)) / (x.var(0) + 1e-5).sqrt() * w[0], x.logsumexp(1)), "norm", 1)
        polynomial = Compiled(lambda x, w: (torch.sin(x) * w[1] + x * x * 0.3 - w[2], (x @ w).tanh()), "sum", 1)
        return [norm, polynomial]

    for together_ in (True, False):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / str(together_)))
        made = functions()
        if together_:
            with ahead():
                for function in made:
                    function(x, weight)
        results.append([y for function in made for y in function(x, weight)])
        assert len(sources(tmp_path / str(together_) / "torchpod")) == (1 if together_ else 2)
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_what_was_compiled_is_not_compiled_again(seed, monkeypatch, empty_cache):
    x = torch.ones(7)
    with ahead():
        for function in three(seed):
            function(x)
    before = sorted(empty_cache.iterdir())

    def refuse(programs):
        raise AssertionError("compiled again")

    monkeypatch.setattr(together, "_compile", refuse)
    with ahead():
        again = three(seed)
        for function in again:
            function(x)
    for function in three(seed) + again:
        torch.testing.assert_close(function(x), function._traced(x))
    assert sorted(empty_cache.iterdir()) == before


def test_what_is_needed_at_once_is_compiled_at_once(monkeypatch, empty_cache):
    monkeypatch.setattr(gxx, "cores", lambda: 1)
    later = Compiled(lambda x: (x + 1.25,), "later", 1)
    with ahead():
        later(torch.ones(3))
        assert not sources(empty_cache)
        later._programs[0]._finish()
        assert len(sources(empty_cache)) == 1
    assert later(torch.ones(3))[0].tolist() == [2.25] * 3


@pytest.mark.parametrize("cores", [1, 2])
def test_behind_an_error_only_what_is_needed_is_compiled(cores, monkeypatch, empty_cache):
    monkeypatch.setattr(gxx, "cores", lambda: cores)
    began, go_on, compile_ = threading.Event(), threading.Event(), together._compile

    def slow(programs):
        if threading.current_thread() is not threading.main_thread():
            began.set()
            assert go_on.wait(60)
        compile_(programs)

    monkeypatch.setattr(together, "_compile", slow)
    functions = [Compiled(lambda x, i=i: (x * i,), "f", 1) for i in range(1, 4)]
    with pytest.raises(KeyError), ahead():
        functions[0](torch.ones(3))
        assert cores == 1 or began.wait(60)  # the other core has the first, and the others wait
        for function in functions[1:]:
            function(torch.ones(3))
        raise KeyError
    go_on.set()
    assert functions[2](torch.ones(3))[0].tolist() == [3.0] * 3
    assert functions[0](torch.ones(3))[0].tolist() == [1.0] * 3
    assert sorted(text.count("namespace p") for text in sources(empty_cache)) == [1, 1]


def test_who_is_interrupted_while_it_compiles_may_try_again(monkeypatch, empty_cache):
    monkeypatch.setattr(gxx, "cores", lambda: 1)
    functions, compile_ = three(0), together._compile

    def interrupted(programs):
        raise KeyboardInterrupt

    monkeypatch.setattr(together, "_compile", interrupted)
    with pytest.raises(KeyboardInterrupt), ahead():
        for function in functions:
            function(torch.ones(3))
    with pytest.raises(KeyboardInterrupt):
        functions[0](torch.ones(3))
    monkeypatch.setattr(together, "_compile", compile_)
    for function in functions:
        torch.testing.assert_close(function(torch.ones(3)), function._traced(torch.ones(3)))


def test_a_folder_whose_libraries_cannot_be_loaded_is_named(empty_cache):
    broken = program(empty_cache, "pbroken", GOOD)
    empty_cache.mkdir()
    broken.path.write_text("no library")
    with pytest.raises(OSError, match="pbroken.so cannot be loaded .* TORCHINDUCTOR_CACHE_DIR"):
        broken.load()


def program(folder: Path, key: str, body: str) -> together.Program:
    source = f"#include <torch/csrc/inductor/cpp_wrapper/cpu.h>\n{body}"
    return together._program("", ())._replace(key=key, source=source, folder=folder)


GOOD = "void inductor_entry_impl(AtenTensorHandle*, AtenTensorHandle*) {}\n"


def test_a_program_that_does_not_compile_is_the_only_one_to_fail(monkeypatch, empty_cache):
    from torch._inductor.exc import CppCompileError

    monkeypatch.setattr(gxx, "cores", lambda: 1)
    background = together.Background()
    good, bad = (program(empty_cache, key, body) for key, body in (("pgood", GOOD), ("pbad", GOOD + "int x = ;")))
    waits = [background.submit(x) for x in (bad, good)]
    background.finish()
    waits[1]()
    assert good.path.exists() and not bad.path.exists()
    with pytest.raises(CppCompileError):
        waits[0]()


def test_programs_too_large_for_one_file_are_in_several(monkeypatch, empty_cache):
    monkeypatch.setattr(gxx, "cores", lambda: 1)
    monkeypatch.setattr(together, "LARGEST", 250)
    background = together.Background()
    each = [program(empty_cache, f"p{i}", GOOD) for i in range(3)]
    waits = [background.submit(x) for x in each]
    background.finish()
    for wait in waits:
        wait()
    assert sorted(text.count("namespace p") for text in sources(empty_cache)) == [1, 2]


def test_two_who_want_the_same_programs_compile_them_once(monkeypatch, empty_cache):
    each = [program(empty_cache, key, GOOD) for key in ("pone", "ptwo")]
    orders = (each, each[::-1])
    threads = [threading.Thread(target=together._compile, args=(order,)) for order in orders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert len(sources(empty_cache)) == 1 and all(x.path.exists() for x in each)

"""How inductor calls g++ in our programs."""

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from torchpod.kernels import gxx
from torchpod.kernels.inductor import Compiled


def test_programs_include_nothing_but_what_the_precompiled_header_has(seed):
    x = torch.randn(48, generator=torch.Generator().manual_seed(seed))
    compiled = Compiled(lambda x: (x.exp() * seed,), "f", 1)
    torch.testing.assert_close(compiled(x)[0], x.exp() * seed)
    (program,) = compiled._programs
    assert program.entry is not None
    source = Path(program.entry.library).resolve().with_suffix(".cpp").read_text()
    included = set(re.findall(r"#include <(.*)>", source))
    assert included & set(gxx.HEADERS)
    assert included <= {*gxx.HEADERS, "cstdlib", "cerrno"}, (
        "the header must have them, or they are read for each program"
    )


def test_the_header_is_precompiled_once_for_all_programs_of_one_kind(monkeypatch):
    from torch._inductor import codecache

    monkeypatch.setattr(gxx, "cores", lambda: 2)
    folder = Path(codecache._HEADER_DIR)
    gxx.know_processor()
    Compiled(lambda x: (x + 1.5,), "f", 1)(torch.ones(3))
    before = set(folder.glob("*.gch"))
    Compiled(lambda x: (x - 2.5, x.sum()), "g", 1)(torch.ones(5, 2))
    assert before and set(folder.glob("*.gch")) == before


def test_on_one_core_the_header_is_precompiled_once_a_few_files_were_compiled_without(tmp_path, monkeypatch, seed):
    from torch._inductor import codecache

    made = []
    monkeypatch.setattr(codecache, "_HEADER_DIR", str(tmp_path))
    monkeypatch.setattr(codecache, "_worker_compile_cpp", lambda _, builders: made.append(builders))
    monkeypatch.setattr(gxx, "cores", lambda: 1)
    for i in range(gxx.FILES_WITHOUT_HEADER + 1):
        assert not made
        x = torch.full((3,), float(seed))
        torch.testing.assert_close(Compiled(lambda x, i=i: (x * seed + i,), "f", 1)(x)[0], x * seed + i)
    assert len(made) == 1


def test_a_compiler_that_refuses_the_flags_of_the_processor_is_asked_by_inductor(monkeypatch):
    from torch._inductor import cpp_builder

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", lambda: "false")
    assert not gxx._compiler_knows_processor()


@pytest.mark.slow
def test_the_vector_instructions_that_are_found_are_those_that_inductor_finds_by_building_libraries():
    tell = """
from torch._inductor import cpu_vec_isa
print([(str(isa), isa.build_arch_flags()) for isa in cpu_vec_isa.valid_vec_isa_list()], cpu_vec_isa.pick_vec_isa())
"""
    quickly = "from torchpod.kernels import gxx; gxx.know_processor()"
    found, built = (
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
        for script in (quickly + tell, tell)
    )
    assert found and found == built


@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.slow
def test_sources_are_cached_per_width_of_vectors(differentiable, tmp_path):
    """Machines that share a folder may have different ones."""
    script = f"""
import torch
from torch._dynamo.utils import counters
from torchpod.kernels.inductor import Compiled
Compiled(lambda x: x.exp() + 1, "f", 1)(torch.ones(8, requires_grad={differentiable})).sum()
print(counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"] > 0)
"""

    def is_cached(capability):
        told = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "ATEN_CPU_CAPABILITY": capability}
        done = subprocess.run([sys.executable, "-c", script], env=told, capture_output=True, text=True, check=True)
        return done.stdout == "True\n"

    widest = torch.backends.cpu.get_cpu_capability().lower()
    if widest not in ("avx2", "avx512"):
        pytest.skip(f"this processor has {widest}, no vectors of two widths")
    assert not is_cached("avx2")
    assert is_cached("avx512") == (widest == "avx2")
    assert is_cached("avx2")


def test_a_library_is_compiled_once_per_machine(tmp_path, monkeypatch):
    from torch._inductor import cpp_builder

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library = gxx.library("cpu_memory.cpp", "-lc10")
    assert library.torchpod_memory
    assert [path.name for path in (tmp_path / "torchpod").iterdir()] == [Path(library._name).name]

    def refuse(command, cwd):
        raise AssertionError("compiled again")

    monkeypatch.setattr(cpp_builder, "run_compile_cmd", refuse)
    assert gxx.library("cpu_memory.cpp", "-lc10")._name == library._name
    monkeypatch.setattr(gxx, "processor", lambda: "another")
    with pytest.raises(AssertionError, match="compiled again"):
        gxx.library("cpu_memory.cpp", "-lc10")


def test_a_library_that_is_needed_is_compiled_while_its_maker_goes_on(tmp_path, monkeypatch):
    from torch._inductor import cpp_builder

    compile_it, may_compile = cpp_builder.run_compile_cmd, threading.Event()

    def when_it_may(command, cwd):
        assert may_compile.wait(60)
        compile_it(command, cwd)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(gxx, "_NEEDED", [])
    monkeypatch.setattr(gxx, "cores", lambda: 2)
    monkeypatch.setattr(cpp_builder, "run_compile_cmd", when_it_may)
    for _ in range(2):
        gxx.need("cpu_memory.cpp", "-lc10")
    assert not list((tmp_path / "torchpod").glob("*.so"))
    may_compile.set()
    gxx.load_needed()
    assert len(list((tmp_path / "torchpod").glob("*.so"))) == 1


@pytest.mark.parametrize("cores", [1, 2])
def test_a_library_that_cannot_be_compiled_fails_all_that_need_it_until_it_can(cores, tmp_path, monkeypatch):
    from torch._inductor import cpp_builder

    def refuse(command, cwd):
        raise OSError("no space")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(gxx, "_NEEDED", [])
    monkeypatch.setattr(gxx, "cores", lambda: cores)
    with monkeypatch.context() as refusing:
        refusing.setattr(cpp_builder, "run_compile_cmd", refuse)
        gxx.need("cpu_memory.cpp", "-lc10")
        for _ in range(2):
            with pytest.raises(OSError, match="no space"):
                gxx.load_needed()
    gxx.load_needed()
    assert len(list((tmp_path / "torchpod").iterdir())) == 1


def test_what_is_needed_meanwhile_is_loaded_too(monkeypatch):
    loaded = []

    def library(*needed):
        if not loaded:
            gxx._NEEDED.append(("second.cpp",))  # by another thread
        loaded.append(needed)

    monkeypatch.setattr(gxx, "library", library)
    monkeypatch.setattr(gxx, "_NEEDED", [("first.cpp",)])
    gxx.load_needed()
    gxx.load_needed()
    assert loaded == [("first.cpp",), ("second.cpp",)] and not gxx._NEEDED


@pytest.mark.parametrize("damaged", ["once", "always"])
def test_a_library_that_cannot_be_loaded_is_compiled_again(damaged, tmp_path, monkeypatch):
    calls = []

    def built(source, *flags):
        calls.append(source.name)
        good = len(calls) == 2 and damaged == "once"
        (tmp_path / "x.so").write_bytes(Path(library).read_bytes() if good else b"")
        return tmp_path / "x.so"

    library = torch._C.__file__
    monkeypatch.setattr(gxx, "built", built)
    if damaged == "once":
        assert gxx.library("cpu_memory.cpp")._name == str(tmp_path / "x.so")
    else:
        with pytest.raises(OSError, match=r"x\.so cannot be loaded \(.*file too short.*\); if .* by XDG_CACHE_HOME\."):
            gxx.library("cpu_memory.cpp")
    assert calls == ["cpu_memory.cpp"] * 2


def test_libraries_lie_among_programs_where_there_is_no_cache(monkeypatch):
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert gxx._library_folder() == Path(cache_dir())
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # nor a home
    assert gxx._library_folder() == Path(cache_dir())

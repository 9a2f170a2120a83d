"""g++: libraries of this package, and quicker calls of it by inductor: a third of the time to compile.

together.py has what compiles inductor's programs.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import torch
from torch._inductor import config as inductor_config

HEADERS = (
    "torch/csrc/inductor/cpp_wrapper/cpu.h",
    "torch/csrc/inductor/cpp_prefix.h",
    "torch/csrc/inductor/aoti_torch/c/shim.h",
    "Python.h",
    "sstream",
)
"""What inductor's programs for a CPU include."""
FILES_WITHOUT_HEADER = 2
"""On one core: see `precompiled`."""


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_BEGUN: dict[tuple[str, ...], Future[Path]] = {}
"""Libraries that are compiled in the background, or there already, by file and flags."""
os.register_at_fork(after_in_child=_BEGUN.clear)  # by threads of the parent's
_NEEDED: list[tuple[str, ...]] = []
"""Files and flags of libraries that no program may run without."""


def begin(name: str, *flags: str) -> None:
    """Compiles a library in the background, if there is a core for that; `library` waits for it."""
    if cores() == 1 or (name, *flags) in _BEGUN:
        return
    source = Path(__file__).with_name(name)
    path, options = _target(source, *flags)
    if path.exists():
        _BEGUN[name, *flags] = Future()
        _BEGUN[name, *flags].set_result(path)
    else:
        thread = ThreadPoolExecutor(1, "torchpod-gxx")
        _BEGUN[name, *flags] = thread.submit(_build, source, path, options)
        thread.shutdown(wait=False)  # it ends with that


def need(name: str, *flags: str) -> None:
    """Of a library that a program will call: it is compiled in the background, and loaded before any program runs."""
    begin(name, *flags)
    _NEEDED.append((name, *flags))


def load_needed() -> None:
    """Waits for the libraries that are needed, and loads them; one that cannot be had is needed still."""
    for needed in tuple(_NEEDED):  # others may need some meanwhile
        library(*needed)
        with contextlib.suppress(ValueError):  # or have loaded it
            _NEEDED.remove(needed)


def library(name: str, *flags: str) -> ctypes.CDLL:
    """Compiles a C++ file of this folder, once per machine, and loads it; `flags` are those of `built`.

    Raises:
      OSError: if libraries in the folder where it is kept may not be run.
    """
    source = Path(__file__).with_name(name)
    begun = _BEGUN.pop((name, *flags), None)
    path = built(source, *flags) if begun is None else begun.result()
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        path.unlink(missing_ok=True)  # damaged, perhaps
    built(source, *flags)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise OSError(
            f"{path} cannot be loaded ({error}); if its folder is mounted with noexec, name another one by "
            "XDG_CACHE_HOME."
        ) from error


def built(source: Path, *flags: str) -> Path:
    """Compiles a C++ file, once per machine.

    It is kept in `~/.cache/torchpod` (`XDG_CACHE_HOME`), or among inductor's programs if nothing can be written there.

    Args:
      source: the file.
      flags: for g++, besides those of inductor's programs.
    """
    path, options = _target(source, *flags)
    return _build(source, path, options)


def _target(source: Path, *flags: str) -> tuple[Path, Any]:
    """Where a library is, or will be, and inductor's options to compile it with, as its settings are now."""
    from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    know_processor()
    options = CppTorchDeviceOptions(vec_isa=pick_vec_isa(), device_type="cpu", extra_flags=flags)
    command_line = CppBuilder(name=source.stem, sources=str(source), BuildOption=options).get_command_line()
    made_of = source.read_text(), command_line, versions(), processor()
    key = hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]
    return _library_folder() / f"{source.stem}-{key}.so", options


def _build(source: Path, path: Path, options: Any) -> Path:
    """Compiles it, if it is not there."""
    from torch._inductor.cpp_builder import CppBuilder

    if not path.exists():
        # So that nobody sees half of it. (A TemporaryDirectory would go when a child, forked meanwhile, ends.)
        scratch = tempfile.mkdtemp(dir=path.parent)
        try:
            builder = CppBuilder(name=source.stem, sources=str(source), output_dir=scratch, BuildOption=options)
            builder.build()
            os.replace(builder.get_target_file_path(), path)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return path


def _library_folder() -> Path:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "torchpod"
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, RuntimeError):  # the latter where there is no home
        return Path(cache_dir())


def versions() -> tuple[str, ...]:
    """What compiles a header or a library, and against what."""
    from torch._inductor.cpp_builder import get_compiler_version_info, get_cpp_compiler

    compiler = get_compiler_version_info(get_cpp_compiler())
    return torch.__version__, str(torch.version.git_version), sys.version, compiler


def processor() -> str:
    """What `-march=native` depends on: homes, and the libraries in them, may be shared by machines."""
    cpuinfo = Path("/proc/cpuinfo")
    told = re.findall(r"^(?:model name|flags|Features)\s*:.*$", cpuinfo.read_text() if cpuinfo.exists() else "", re.M)
    return " ".join([platform.machine(), platform.processor(), *sorted(set(told))])


@functools.cache
def know_processor() -> None:
    """Tells inductor, in this process, whether the compiler knows what the processor can do.

    It is asked in a tenth of a second, instead of by building and loading up to seven libraries, 6 s, and from a full
    cache 0.7 s.
    """
    from torch._inductor import cpu_vec_isa

    if inductor_config.cpp.vec_isa_ok is None and _compiler_knows_processor():
        inductor_config.cpp.vec_isa_ok = True
        # What is not asked there: bfloat16, VNNI, AMX.
        cast(Any, cpu_vec_isa.VecISA).check_build = lambda isa, code: _compiler_takes(isa.build_arch_flags())


@functools.cache
def cache_per_width() -> None:
    """Has inductor's cache of sources ask, in this process, for which vectors they are.

    It does not: where machines share a cache, loops for those of one would write past their outputs on another.
    """
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    know_processor()
    cast(Any, torch.compiler.config).cache_key_tag += f" {pick_vec_isa()}"


def precompiled(command_line: str, options: Any) -> str:
    """Where the header lies whose precompiled form serves a program that is compiled by `command_line`.

    It has all that programs include: inductor precompiles the first of `HEADERS` alone, and each program takes half a
    second more. It is known by the versions of torch and compiler: inductor preprocesses it in every process, 0.2 s, to
    see whether it has changed.

    It takes g++ 7 s on a core of an Intel Xeon, and saves each file 2.5 there. Of several cores another one traces
    meanwhile; on one the first files of a machine, `FILES_WITHOUT_HEADER`, include it as it is.

    Args:
      command_line: of g++.
      options: of inductor, to compile the header with: g++ takes it for programs that are compiled likewise.
    """
    from torch._inductor import codecache
    from torch._inductor.cpp_builder import CppBuilder

    header = Path(torch.__file__).parent / "include" / HEADERS[0]
    made_of = command_line, versions(), header.stat().st_mtime
    folder = Path(codecache._HEADER_DIR)
    key, path = codecache.write(
        "".join(f"#include <{header}>\n" for header in HEADERS),
        "h",
        extra=repr(made_of),
        specified_dir=str(folder),
    )
    builder = CppBuilder(name=path, sources=path, BuildOption=options)
    if os.path.exists(builder.get_target_file_path()):
        return path
    with open(f"{path}.without", "ab") as without:  # a byte for each file
        go_without = cores() == 1 and without.tell() < FILES_WITHOUT_HEADER
        without.write(b"." * go_without)
    if not go_without:
        (folder / "locks").mkdir(exist_ok=True)
        codecache._worker_compile_cpp(str(folder / "locks" / f"{key}.lock"), (builder,))
    return path


def _compiler_knows_processor() -> bool:
    """Whether the compiler takes the flags of all vector instructions that torch finds in this processor."""
    from torch._inductor import cpu_vec_isa

    if not hasattr(cpu_vec_isa, "x86_isa_checker"):
        return False
    found = cpu_vec_isa.x86_isa_checker()
    known = [isa for isa in cpu_vec_isa.supported_vec_isa_list if all(x in found for x in str(isa).split())]
    return bool(known) and _compiler_takes(" ".join(isa.build_arch_flags() for isa in known))


def _compiler_takes(flags: str) -> bool:
    from torch._inductor.cpp_builder import get_cpp_compiler

    command = [get_cpp_compiler(), *re.findall(r"-m\S+", flags), "-fsyntax-only", "-x", "c++", os.devnull]
    return subprocess.run(command, capture_output=True).returncode == 0

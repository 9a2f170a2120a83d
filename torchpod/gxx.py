"""g++: libraries of this package, and quicker calls of it by inductor, which are most of the time to compile."""

import ctypes
import functools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

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


def library(name: str, *flags: str) -> ctypes.CDLL:
    """Compiles a C++ file of this package, once per compile cache, and loads it.

    Args:
      name: of the file.
      flags: for g++, besides those of inductor's programs.
    """
    from torch._inductor.codecache import CppCodeCache

    quicken()
    return CppCodeCache.load((Path(__file__).parent / name).read_text(), extra_flags=flags)


@functools.cache
def quicken() -> None:
    """Changes how inductor calls g++, for this process. Times are of one core and of PPO on CartPole, 7 programs.

    - Programs share one precompiled header, with all that they include: inductor precompiles the first of `HEADERS`
      alone, and each program then takes half a second more.
    - That header is known by the versions of torch and compiler. Inductor preprocesses it in every process, 0.2 s,
      to see whether it has changed.
    - Whether the compiler knows what the processor can do is asked once, in a tenth of a second, instead of by
      building and loading three libraries, 6 s, and from a full cache 0.7 s.
    """
    from torch._inductor import codecache

    if inductor_config.cpp.vec_isa_ok is None and _compiler_knows_processor():
        inductor_config.cpp.vec_isa_ok = True
    original = codecache._precompile_header

    @functools.cache
    def precompiled(header: str, command_line: str, **options: Any) -> str:
        if header != HEADERS[0]:
            return original(header, command_line, **options)
        return _precompiled(command_line, **options)

    codecache._precompile_header = precompiled


def _precompiled(command_line: str, **options: Any) -> str:
    """Where the header lies whose precompiled form serves a program that is compiled by `command_line`."""
    from torch._inductor import codecache
    from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions, get_compiler_version_info

    options.pop("extra_flags", None)  # for the linker
    build = CppTorchDeviceOptions(**options, precompiling=True)
    header = Path(torch.__file__).parent / "include" / HEADERS[0]
    compiler = get_compiler_version_info(build.get_compiler())
    versions = torch.__version__, torch.version.git_version, header.stat().st_mtime, sys.version, compiler
    folder = Path(codecache._HEADER_DIR)
    key, path = codecache.write(
        "".join(f"#include <{header}>\n" for header in HEADERS),
        "h",
        extra=repr((command_line, versions)),
        specified_dir=str(folder),
    )
    (folder / "locks").mkdir(exist_ok=True)
    builder = CppBuilder(name=path, sources=path, BuildOption=build)
    codecache._worker_compile_cpp(str(folder / "locks" / f"{key}.lock"), (builder,))
    return path


def _compiler_knows_processor() -> bool:
    """Whether the compiler takes the flags of all vector instructions that torch finds in this processor."""
    from torch._inductor import cpu_vec_isa
    from torch._inductor.cpp_builder import get_cpp_compiler

    if not hasattr(cpu_vec_isa, "x86_isa_checker"):
        return False
    found = cpu_vec_isa.x86_isa_checker()
    known = [isa for isa in cpu_vec_isa.supported_vec_isa_list if all(x in found for x in str(isa).split())]
    flags = [flag for isa in known for flag in re.findall(r"-m\S+", isa.build_arch_flags())]
    command = [get_cpp_compiler(), *flags, "-fsyntax-only", "-x", "c++", os.devnull]
    return bool(known) and subprocess.run(command, capture_output=True).returncode == 0

"""Inductor's programs for a CPU, compiled together and in the background. Read gxx.py first.

To read the headers, precompiled as they are, to make what programs need of the same templates, and to link takes g++ a
second of the two that a small program takes. So it gets all programs that are waiting at once, as namespaces of one
file; one core of an Intel Xeon compiles the seven of PPO on CartPole in 8.3 s instead of 13.6. A program is known by
its source: a link `KEY.so` among inductor's programs leads to the library that it is in.
"""

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, cast

import torch
from torch._inductor import config as inductor_config

from torchpod.kernels import gxx
from torchpod.kernels.quicker import quicken

LARGEST = 500_000
"""Characters of the programs in one file: the memory that g++ needs grows with them, 0.45 GB at 430,000."""
_APART = (
    "__attribute__((noinline)) void inductor_cpu_throw_if_integer_div_error(std::atomic<int>&);",
    "__attribute__((noinline)) void inductor_cpu_note_integer_div_by_zero();",
)
"""Kernels are flat, all that they call is a part of them: what the compiler makes of one, and so every bit that it
computes, does not depend on what it is compiled with. But for errors, which would take a second."""
_ENTRY = "\nvoid inductor_entry_impl("
"""Where the calls of the kernels begin: a third of a program, of which -O3 makes nothing that is worth a quarter of
g++'s time (one core of an AMD EPYC, PPO on CartPole: 7.8 s, and 5.8 with -O1 for these)."""
_VECTORS = Path(__file__).with_name("cpu_vectors.h").read_text()
_CALLS = {
    re.compile(r"\b(at::vec::VectorizedN?<[^<>]+>)::loadu\("): r"torchpod::loadu<\1>(",
    re.compile(r"\b(at::vec::VecMask<[^<>]+>)::from\("): r"torchpod::mask_from<\1>(",
    re.compile(r"\b(tmp\w+)\.store\("): r"torchpod::store(\1, ",
}
"""What a program says, and what it says instead, for the functions of `_VECTORS`, which are better than torch's."""
_INCLUDE = re.compile(r"^[ \t]*#include.*$", re.MULTILINE)


class Program(NamedTuple):
    """What is to be compiled."""

    key: str
    """Its namespace, and the name of the Python module."""
    source: str
    folder: Path
    options: Any
    """Of inductor, for g++."""
    header: Callable[[], str] | None
    """Where the header is, precompiled: see `gxx.precompiled`."""

    @property
    def path(self) -> Path:
        """Of the link to its library."""
        return self.folder / f"{self.key}.so"

    def load(self) -> ModuleType:
        """The module whose `inductor_entry_cpp` runs it.

        Raises:
          OSError: if libraries in this folder may not be run.
        """
        pointer = cast(Any, torch._C)._dynamo.guards._torchinductor_pyobject_tensor_data_ptr
        os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = str(pointer)
        spec = importlib.util.spec_from_file_location(self.key, self.path)
        assert spec is not None and spec.loader is not None
        try:
            module = importlib.util.module_from_spec(spec)
        except ImportError as error:
            raise OSError(
                f"{self.path} cannot be loaded ({error}); if its folder is mounted with noexec, name another one by "
                "TORCHINDUCTOR_CACHE_DIR."
            ) from error
        spec.loader.exec_module(module)
        return module


Item = tuple[Program, Future[None]]
"""A program, and who waits for it."""


def entry_of(module: ModuleType) -> Any:
    """The C function of a program: `void (AtenTensorHandle* inputs, AtenTensorHandle* outputs)`."""
    return getattr(ctypes.CDLL(str(module.__file__)), f"enter_{module.__name__}")


class Background:
    """Compiles programs while their maker goes on: a g++ for each core but the maker's takes all that waits."""

    def __init__(self) -> None:
        self._lock, self._waiting, self._stopped = threading.Lock(), list[Item](), False
        self._pool = ThreadPoolExecutor(gxx.cores() - 1) if gxx.cores() > 1 else None

    def submit(self, program: Program) -> Callable[[], None]:
        """Returns what waits until it is compiled, and compiles it if nobody does."""
        item = program, Future[None]()
        with self._lock:
            self._waiting.append(item)
        if self._pool is not None:
            self._pool.submit(self._compile_all)

        def wait() -> None:
            while not item[1].done():
                with self._lock:
                    mine = item in self._waiting
                    if mine:
                        self._waiting.remove(item)
                if mine:
                    self._compile([item], wanted=True)
                else:
                    futures.wait([item[1]], timeout=0.1)
            item[1].result()

        return wait

    def finish(self) -> None:
        """Compiles what waits, with a g++ per core, and waits for all."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        parts: list[list[Item]] = [[] for _ in range(gxx.cores())]
        for item in sorted(waiting, key=lambda item: -len(item[0].source)):
            min(parts, key=lambda part: sum(len(program.source) for program, _ in part)).append(item)
        try:
            if self._pool is not None:
                for part in parts[1:]:
                    self._pool.submit(self._compile, part)
            self._compile(parts[0])
            if self._pool is not None:
                self._pool.shutdown()
        finally:
            self.stop()

    def stop(self) -> None:
        """No g++ is started any more but by those who wait."""
        self._stopped = True
        if self._pool is not None:
            self._pool.shutdown(wait=False)

    def _compile_all(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, []
        self._compile(waiting)

    def _compile(self, items: Sequence[Item], wanted: bool = False) -> None:
        """As few files as there may be; what an error or a stop leaves waits again."""
        groups: list[list[Item]] = []
        for item in items:
            size = len(item[0].source) + sum(len(program.source) for program, _ in groups[-1]) if groups else 0
            if not groups or size > LARGEST or item[0].options is not groups[-1][0][0].options:
                groups.append([])
            groups[-1].append(item)
        try:
            for group in groups:
                if wanted or not self._stopped:
                    self._compile_group(group)
        finally:
            with self._lock:
                self._waiting += [item for item in items if not item[1].done()]

    def _compile_group(self, group: Sequence[Item]) -> None:
        from torch._inductor.exc import CppCompileError

        try:
            _compile([program for program, _ in group])
        except CppCompileError as error:
            if len(group) == 1:
                group[0][1].set_exception(error)
            else:  # by themselves, so that each has its own error
                for item in group:
                    if not self._stopped:
                        self._compile_group([item])
        else:
            for _, future in group:
                future.set_result(None)


class _Here(threading.local):
    background: Background | None = None


_HERE = _Here()


@contextlib.contextmanager
def in_background() -> Iterator[None]:
    """Programs that this thread lowers here are compiled together, while it goes on or at the end; see `loaded`."""
    background = _HERE.background = Background()
    try:
        yield
    except BaseException:
        background.stop()  # what is needed after all is compiled when it is
        raise
    finally:
        _HERE.background = None
    background.finish()


class _Later:
    """The function of a program that may still be compiled."""

    def __init__(self, get: Callable[[], Callable[..., Any]]) -> None:
        self.get = get


def loaded(compiled: Any) -> Any:
    """Inductor's program, once g++ is ready with it and with what it calls."""
    gxx.load_needed()
    for cell in getattr(getattr(compiled, "current_callable", None), "__closure__", None) or ():
        if isinstance(cell.cell_contents, _Later):
            cell.cell_contents = cell.cell_contents.get()
    return compiled


@functools.cache
def install() -> None:
    """Has inductor's programs for a CPU compiled and loaded here, in this process."""
    from torch._inductor.codecache import CppWrapperCodeCache as Cache

    gxx.cache_per_width()
    quicken()
    original = Cache.load_async

    def load_async(
        main_code: str,
        device_type: str = "cpu",
        submit_fn: Any = None,
        extra_flags: Sequence[str] = (),
        optimized_code: str | None = None,
        **options: Any,
    ) -> Callable[[], Any]:
        if device_type != "cpu" or optimized_code is not None:
            return original(main_code, device_type, submit_fn, extra_flags, optimized_code, **options)
        program = _program(main_code, tuple(extra_flags))
        wait: Callable[[], None] | None = None
        if not program.path.exists():
            background = _HERE.background
            wait = functools.partial(_compile, [program]) if background is None else background.submit(program)

        def get() -> ModuleType:
            if wait is not None:
                wait()
            return program.load()

        return get

    def load_pybinding(*args: Any, **kwargs: Any) -> Any:
        later = _Later(Cache.load_pybinding_async(*args, **kwargs))
        return later.get() if _HERE.background is None else later

    cast(Any, Cache).load_async = load_async
    cast(Any, Cache).load_pybinding = load_pybinding


def _program(source: str, flags: tuple[str, ...]) -> Program:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    cpp = inductor_config.cpp
    options, header, made_of = _options(
        flags, cpp.enable_floating_point_contract_flag, cpp.simdlen, inductor_config.cpp_cache_precompile_headers
    )
    key = "p" + hashlib.sha256(repr((source, made_of)).encode()).hexdigest()[:24]
    return Program(key, source, Path(cache_dir()) / "torchpod", options, header)


@functools.cache
def _options(flags: tuple[str, ...], *config: Any) -> tuple[Any, Callable[[], str] | None, str]:
    """What inductor's programs are compiled with, their header, and what else than their source they depend on.

    Args:
      flags: of g++, besides inductor's own.
      config: what these follow from; whether there is a precompiled header comes last.
    """
    from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    settings = {"vec_isa": pick_vec_isa(), "device_type": "cpu", "include_pytorch": True, "shared": True}
    options = CppTorchDeviceOptions(**settings, extra_flags=flags)
    command_line = CppBuilder(name="o", sources="i", BuildOption=options).get_command_line()
    header = None
    if config[-1]:
        to_precompile = CppTorchDeviceOptions(**settings, precompiling=True)  # reads the config, as it is now
        header = functools.partial(gxx.precompiled, command_line, to_precompile)
    made_of = command_line, gxx.versions(), gxx.processor(), _VECTORS, Path(__file__).read_text()
    return options, header, repr(made_of)


def _compile(programs: Sequence[Program]) -> None:
    """Compiles those that nobody has compiled meanwhile, e.g. another rank, as one file."""
    from torch._inductor.codecache import LOCK_TIMEOUT, get_lock_dir
    from torch._inductor.cpp_builder import CppBuilder
    from torch.utils._filelock import FileLock

    by_key = {program.key: program for program in programs}
    with contextlib.ExitStack() as stack:
        for key in sorted(by_key):  # in one order, or two who wait for each other would wait for ever
            stack.enter_context(FileLock(os.path.join(get_lock_dir(), f"{key}.lock"), timeout=LOCK_TIMEOUT))
        missing = [program for program in by_key.values() if not program.path.exists()]
        if not missing:
            return
        folder = missing[0].folder
        folder.mkdir(parents=True, exist_ok=True)
        name = "g" + hashlib.sha256(" ".join(program.key for program in missing).encode()).hexdigest()[:24]
        source = folder / f"{name}.cpp"
        source.write_text(_whole(missing))
        if missing[0].header is not None:
            missing[0].options.precompiled_header = missing[0].header()
        builder = CppBuilder(name=name, sources=str(source), output_dir=str(folder), BuildOption=missing[0].options)
        builder.build()
        for program in missing:
            link = program.path.with_suffix(f".{os.getpid()}")
            link.unlink(missing_ok=True)
            link.symlink_to(Path(builder.get_target_file_path()).name)
            os.replace(link, program.path)


def _whole(programs: Sequence[Program]) -> str:
    """One file of all: a namespace for each, behind what any of them includes."""
    includes = dict.fromkeys(line.strip() for program in programs for line in _INCLUDE.findall(program.source))
    parts = []
    for key, source, *_ in programs:
        # Kernels of C++ instead of C may have the same names; the module and its initialiser get one of their own.
        own = _INCLUDE.sub("", source).replace('extern "C"', "__attribute__((flatten))")
        for pattern, call in _CALLS.items():
            own = pattern.sub(call, own)
        own = own.replace(_ENTRY, f'\n__attribute__((optimize("O1"))){_ENTRY}')
        own = own.replace("PyInit_inductor_entry_cpp", f"PyInit_{key}")
        own = own.replace('PyModuleDef_HEAD_INIT, "inductor_entry_cpp"', f'PyModuleDef_HEAD_INIT, "{key}"')
        enter = f'extern "C" void enter_{key}(AtenTensorHandle* inputs, AtenTensorHandle* outputs)'
        parts.append(f"namespace {key} {{\n{own}\n{enter} {{ inductor_entry_impl(inputs, outputs); }}\n}}\n")
    return "\n".join([*includes, _VECTORS, *_APART, *parts])

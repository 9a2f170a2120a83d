"""Compilation: what the loops do to each of their pure functions before they call it.

`Compiler` turns a function into a compiled one that refuses to recompile silently (kernels/inductor.py), vmapped over
a population if there is one. On CPU a pass of ours rewrites what inductor does badly (kernels/cpu_kernels.py); on CUDA
the compiled functions are captured, many at a time, by graph.py.
"""

import contextlib
import logging
import os
import shutil
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchpod.kernels import cpu_calls, cpu_memory
from torchpod.kernels.inductor import Compiled, CompileError, RecompilationError, ahead
from torchpod.kernels.recorded import Recorded
from torchpod.kernels.vjp import Vjp, compiled_vjp, eager_vjp
from torchpod.trees import member, stack

# A warning about machines without a GPU, on every machine without a GPU.
logging.getLogger("torch.utils.cpp_extension").addFilter(lambda record: "No CUDA runtime" not in record.getMessage())

__all__ = ["CompileError", "Compiler", "RecompilationError", "span"]


class Compiler:
    """Compiles the functions of one run.

    Args:
      enabled: False calls every function as it is (`compile=false`).
      population: number of members; above 1 every function is mapped over a leading P axis of all its arguments.
      max_compilations: how many input signatures one function may be compiled for. One more raises.
    """

    def __init__(self, enabled: bool, population: int = 1, max_compilations: int = 1) -> None:
        compiler = os.environ.get("CXX", "g++")
        has_compiler = shutil.which(compiler) is not None
        # On a GPU any C compiler will do, with which Triton builds what launches its kernels.
        of_c = ((os.environ.get("CC") or "cc").split()[0], "gcc", "clang") if torch.cuda.is_available() else ()
        if enabled and not has_compiler and not any(map(shutil.which, of_c)):
            raise RuntimeError(
                f"compile=true needs a C++ compiler, and {compiler} was not found; install g++ (Debian: apt-get "
                "install g++), or run with compile=false."
            )
        if enabled and has_compiler:
            cpu_memory.install()
            cpu_calls.begin()
        self.enabled, self.population, self.max_compilations = enabled, population, max_compilations
        self._made: weakref.WeakSet[Compiled] = weakref.WeakSet()  # an evaluation's programs go when it is over
        self._told: dict[str, object] = {}

    def __call__(
        self, fn: Callable[..., Any], *, compilations: int | None = None, fall_back: bool = False
    ) -> Callable[..., Any]:
        """The function, vmapped and compiled as this run wants it.

        Args:
          fn: pure.
          compilations: input signatures, if other than `max_compilations`.
          fall_back: run it uncompiled, with a warning, if it cannot be compiled; for each member of a population.
        """
        limit = compilations or self.max_compilations
        as_it_is = fn if self.population == 1 else _each_member(fn, self.population)
        if not self.enabled:
            return as_it_is
        mapped = fn if self.population == 1 else torch.vmap(fn)
        fallback = as_it_is if fall_back else None
        compiled = Compiled(mapped, fn.__qualname__, limit, fallback=fallback, told=self._told)
        self._made.add(compiled)
        return compiled

    def ahead(self, fn: Callable[..., Any], *args: Any) -> None:
        """Compiles the functions that `fn(*args)` calls, all at once, and calls none of them (kernels/inductor.py)."""
        if self.enabled:
            with ahead():
                fn(*pytree.tree_map(torch.clone, args))

    @property
    def fell_back(self) -> bool:
        """Whether a function runs uncompiled after all. It may ask the device for numbers, which a graph cannot."""
        return any(fn.fell_back for fn in self._made)

    def captures(self, device: torch.device) -> bool:
        """Whether programs there are to become graphs: what is not compiled may copy from the host, ask, or print."""
        return self.enabled and device.type == "cuda"

    def recorded(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """A function that does nothing but call compiled ones, without Python between them (kernels/recorded.py)."""
        return Recorded(fn) if self.enabled and not _PROFILE else fn

    def vjp(self, fn: Callable[..., tuple[Any, Any]]) -> Vjp:
        """Of `fn(primals, *rest) -> (outputs, aux)`: a pass that keeps what its derivative needs (kernels/vjp.py)."""
        if not self.enabled:
            return eager_vjp(fn, self.population)
        return compiled_vjp(fn, fn.__qualname__, self.max_compilations, self.population)


def _each_member(fn: Callable[..., Any], population: int) -> Callable[..., Any]:
    """The meaning of a population, without vmap: one call per member, results stacked. Bit-equal to single runs."""

    def mapped(*args: Any) -> Any:
        return stack([fn(*member(args, i)) for i in range(population)])

    return mapped


@contextlib.contextmanager
def span(name: str) -> Any:
    """An NVTX and profiler range `torchpod/<name>` while TORCHPOD_PROFILE=1; free otherwise and inside a graph."""
    if torch.compiler.is_compiling() or not _PROFILE:
        yield
        return
    with torch.profiler.record_function(f"torchpod/{name}"):
        if torch.cuda.is_available():
            torch.cuda.nvtx.range_push(f"torchpod/{name}")
        try:
            yield
        finally:
            if torch.cuda.is_available():
                torch.cuda.nvtx.range_pop()


_PROFILE = os.environ.get("TORCHPOD_PROFILE") == "1"

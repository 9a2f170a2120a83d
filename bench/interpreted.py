"""Runs inductor's Triton kernels on the CPU, in Triton's interpreter: one block of threads after the other, in NumPy.

Read lowered_worker.py first. Triton must have been imported with TRITON_INTERPRET=1. What only a GPU decides is not
seen: the order in which its matrix products add up, the last bits of its functions, races between blocks.
"""

import importlib
from typing import Any

import numpy as np
import torch

from torchpod.kernels import mlp

FUNCTIONS = {
    "isnan": np.isnan,
    "isinf": np.isinf,
    "rsqrt": lambda x: (1 / np.sqrt(x)).astype(x.dtype),
    "pow": np.power,
    "signbit": np.signbit,
    "nearbyint": np.rint,
    "llrint": lambda x: np.rint(x).astype(np.int64),
}
"""Of CUDA's libdevice, where NumPy has them under other names."""


def load(name: str, source: str) -> Any:
    """Inductor's handle of a kernel.

    Raises:
      RuntimeError: if it could be one of several.
    """
    from torch._inductor.codecache import PyCodeCache

    kernel = getattr(PyCodeCache.load(source), name)
    if len(kernel.configs) != 1:
        raise RuntimeError(
            f"on a GPU {name} would be the quickest of {len(kernel.configs)} kernels, by a timing there."
        )
    return kernel


class Interpreted:
    """A kernel, called as inductor's programs call it.

    Args:
      name: of the kernel.
      source: of the Python module that defines it.
    """

    def __init__(self, name: str, source: str) -> None:
        self._kernel = load(name, source)

    def run(self, *args: Any, stream: Any = None) -> None:
        """All blocks."""
        from torch._inductor.runtime.triton_heuristics import GridExpr

        kernel, config = self._kernel, self._kernel.configs[0]
        names = [x for x in kernel.triton_meta["signature"] if x not in config.kwargs]
        grid = GridExpr.from_meta(kernel.inductor_meta, config).eval_slow(dict(zip(names, args, strict=False)))
        kernel.fn[grid](*args, **config.kwargs)


class Libdevice:
    """CUDA's functions of floats, by NumPy."""

    def __getattr__(self, name: str) -> Any:
        """The function of that name."""
        function = FUNCTIONS.get(name) or getattr(np, name)

        def call(*args: Any) -> Any:
            tl, interpreter = (importlib.import_module(f"triton.{x}") for x in ("language", "runtime.interpreter"))
            with np.errstate(all="ignore"):
                result = np.asarray(function(*(x.handle.data for x in args)))
            kind = tl.int1 if result.dtype == bool else args[0].dtype.scalar
            return tl.core.tensor(interpreter.TensorHandle(result, kind), args[0].type.with_element_ty(kind))

        return call


def prepare() -> None:
    """Lets inductor's programs for a GPU run on tensors of the CPU, in this process from now on."""
    helpers, guards = (
        importlib.import_module(f"torch.{x}") for x in ("_inductor.runtime.triton_helpers", "_C._dynamo.guards")
    )
    helpers.__dict__["libdevice"] = Libdevice()
    mlp.implement_in_triton("cpu")
    setattr(guards, "_empty_strided_cuda", guards._empty_strided_cpu)  # noqa: B010 (a module of C++ has no type)
    for name in ("set_device", "_exchange_device", "_maybe_exchange_device"):
        setattr(torch.cuda, name, lambda device: 0)

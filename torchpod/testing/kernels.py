"""Operators of a user's own (`torch.library`): whether they return what the compiler is told that they do.

A compiled program takes shapes, dtypes and strides of their results from the fake implementation and never looks again:
where a kernel returns something else, the program reads and writes memory of others.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from torchpod.testing.contract import ContractError, require


def compare_with_fakes(call: Callable[[], Any]) -> None:
    """Calls, and compares every result of an operator that is not torch's own with what its fake promises.

    Raises:
      ContractError: names the operator, what was promised and what came.
    """
    try:
        with _Comparing():
            call()
    except ContractError:
        raise
    except Exception as error:
        torch.compiler.reset()  # or torch.cond, which knows no modes, would fail from now on
        call()  # an error of the caller's own comes again
        warnings.warn(f"operators could not be compared with their fakes: {error}", stacklevel=2)


class _Comparing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace not in _OWN:
            _compare(func, args, kwargs or {}, result)
        return result


_OWN = ("aten", "prim", "prims", "torchpod")


def _compare(func: Any, args: Any, kwargs: Any, result: Any) -> None:
    name = f"the operator {func.name().removesuffix('.default')}"
    mode = FakeTensorMode()
    fake_args, fake_kwargs = pytree.tree_map_only(Tensor, mode.from_tensor, (args, kwargs))
    try:
        with mode:
            fake = func(*fake_args, **fake_kwargs)
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise ContractError(
            f"{name} has no fake implementation that works, and compilation needs one: {type(error).__name__}: "
            f"{reason} Write one with register_fake (docs/write-a-kernel.md), or say traits = Traits(capturable=False)."
        ) from error
    promised, came = pytree.tree_leaves(fake), pytree.tree_leaves(result)
    require(
        len(promised) == len(came), f"{name} promises {len(promised)} results by register_fake and gave {len(came)}."
    )
    for i, (p, c) in enumerate(zip(promised, came, strict=True)):
        if isinstance(p, Tensor) and isinstance(c, Tensor):
            which = f"result {i} of {name}" if len(came) > 1 else f"the result of {name}"
            require(
                _describe(p) == _describe(c),
                f"{which} must be {_describe(p)}, as its register_fake promises; it is {_describe(c)}.",
            )


def _describe(x: Tensor) -> str:
    """What the compiler relies on."""
    strides = "" if x.is_contiguous() else f" with strides {list(x.stride())}"
    return f"a {x.dtype} tensor of shape {list(x.shape)}{strides} on {x.device}"

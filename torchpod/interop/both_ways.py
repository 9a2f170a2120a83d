"""Branches on data in other people's code, taken both ways: `if kl.mean() > target: ...` compiles.

A traced program has no branches in Python. `both_ways` runs a function once for every way through its branches, and
takes the results of the way that the data says, by `torch.where`. What all ways compute is computed once. A way that
itself raises a ValueError, RuntimeError or AssertionError is a check of the data, `if not x.isfinite().all(): raise`,
and is taken to pass; any other error is a mistake, and is raised. Gradients of every way must be finite, also where it
is not taken: `torch.where` multiplies them by 0.
"""

import collections
import dis
import sys
from collections.abc import Callable
from types import EllipsisType, TracebackType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from torchpod.types import Tree

MAX_BRANCHES = 4
"""In one way: there may be 2^4 of them. A fifth is left to torch, which refuses it."""


def both_ways(run: Callable[[], Tree]) -> Tree:
    """What a function returns, whichever way the data takes.

    Args:
      run: returns a tree of tensors; called several times, and may not change what it is given.

    Raises:
      RuntimeError: if two ways return different trees.
      Exception: of a way, if it is no check; or of all ways, if each raises one.
    """
    made = _Made()

    def follow(answers: tuple[bool, ...]) -> tuple[Tree, Exception | None]:
        """Of the ways that begin so; an error if all of them raise one."""
        way, result, error = _Way(answers, made), None, None
        try:
            with way:
                result = run()
        except Exception as raised:
            if not _is_check(raised):
                raise
            error = raised
        for i in reversed(range(len(answers), len(way.asked))):
            other, failed = follow((*answers, *[False] * (i - len(answers)), True))
            if error is not None and failed is None:
                result, error = other, None
            elif failed is None:
                result = _chosen(way.asked[i], other, result)
        return result, error

    result, error = follow(())
    if error is not None:
        raise error
    return result


def _is_check(error: Exception) -> bool:
    """Whether a `raise` or `assert` of the function made it, not what it calls: Python, torch, or what is around it."""
    if not isinstance(error, ValueError | RuntimeError | AssertionError) or isinstance(error, NotImplementedError):
        return False
    at = cast(TracebackType, error.__traceback__)
    while at.tb_next is not None:
        at = at.tb_next
    module = str(at.tb_frame.f_globals.get("__name__"))
    if module.partition(".")[0] in _OTHERS or module.startswith("torchpod.interop."):
        return False
    return dis.opname[at.tb_frame.f_code.co_code[at.tb_lasti]] == "RAISE_VARARGS"


def _chosen(condition: Tensor, a: Tree, b: Tree) -> Tree:
    """`a` where it is true, else `b`."""
    if pytree.tree_structure(a) != pytree.tree_structure(b):
        raise RuntimeError("a branch on data returns other things than the other branch; return the same tree.")
    return pytree.tree_map(lambda x, y: x if x is y else torch.where(condition.reshape(()), x, y), a, b)


class _Way(TorchFunctionMode):
    """A context in which branches on data take the way that `answers` says, and then the false one."""

    def __init__(self, answers: tuple[bool, ...], made: "_Made") -> None:
        super().__init__()
        self._answers, self._made = answers, made
        self._count: collections.Counter[Any] = collections.Counter()
        self.asked: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__bool__ and len(self.asked) < MAX_BRANCHES:
            self.asked.append(args[0])
            return len(self.asked) <= len(self._answers) and self._answers[len(self.asked) - 1]
        if func is Tensor.__format__:
            return "?"  # of an error that is not raised
        if func in _READS and args[0].device.type != "cpu" and (func is not Tensor.to or "cpu" in map(str, args)):
            raise NotImplementedError("it waits for a number of the device")
        return self._made(self._count, func, args, kwargs)


class _Call(NamedTuple):
    """What a function of torch returned, and what must live as long as the name of its arguments."""

    result: Any
    versions: list[int]
    args: Any


class _Made:
    """Calls of torch's functions: the n-th that is equal in another way gets the same result.

    It is not computed, nor differentiated, again, and where two ways meet it is known to be equal. A tensor is another
    one after it was written to.
    """

    def __init__(self) -> None:
        self._calls: dict[Any, list[_Call]] = collections.defaultdict(list)
        # Under `torch.func.grad` a tensor counts what is written to it; being traced alone it does not.
        self._counts = torch.zeros(()).add_(0)._version > 0

    def __call__(self, count: "collections.Counter[Any]", func: Any, args: Any, kwargs: Any) -> Any:
        """The result, given how often each call was made in this way."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if not self._counts or not all(isinstance(x, _NAMED) for x in leaves):
            return func(*args, **kwargs)
        key = func, str(spec), torch.is_grad_enabled(), tuple(_name(x) for x in leaves)
        calls, n = self._calls[key], count[key]
        count[key] += 1
        if n < len(calls) and calls[n].versions == _versions(calls[n].result):  # nobody wrote to it
            return calls[n].result
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) or (type(result) is tuple and all(isinstance(x, Tensor) for x in result)):
            calls[n:] = [_Call(result, _versions(result), leaves)]
        else:
            count[key] -= 1
        return result


_OTHERS = sys.stdlib_module_names | {"numpy", "tensordict", "torch"}
_READS = (Tensor.item, Tensor.to, Tensor.cpu, Tensor.tolist)
_NAMED = (Tensor, bool, int, float, str, slice, EllipsisType, type(None), torch.dtype, torch.device)


def _name(x: Any) -> Any:
    """Of an argument."""
    return (id(x), x._version) if isinstance(x, Tensor) else (type(x), repr(x))


def _versions(result: Any) -> list[int]:
    return [cast(Tensor, x)._version for x in (result if isinstance(result, tuple) else (result,))]

"""Trees of tensors, taken apart and put together by generated code: 2 us for 20 tensors, where pytree takes 40."""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def paths(tree: Any) -> list[str]:
    """Where the tensors of a tree are, as Python source: `[0].reward`, `['position']`, ..."""
    return [pytree.keystr(path) for path, x in pytree.tree_flatten_with_path(tree)[0] if isinstance(x, Tensor)]


def reader(example: Any) -> Callable[[Any], tuple[Tensor, ...]]:
    """The tensors of any tree that is built like `example`."""
    return _code(f"lambda tree: ({''.join(f'tree{path}, ' for path in paths(example))})")


def outline(example: Any) -> Callable[[Any], tuple[Any, ...]]:
    """Of any tree that `reader(example)` reads: the lengths of its containers, and its constants with their types."""
    return _code(f"lambda tree: ({''.join(f'{part}, ' for part in _outline(example, 'tree'))})")


def writer(example: Any) -> Callable[[Sequence[Tensor]], Any]:
    """A tree like `example`, of NamedTuples, tuples, lists and dicts, of other tensors, and of the same constants."""
    constants: list[Any] = []
    source = _source(example, iter(range(len(paths(example)))), constants)
    return functools.partial(_code(f"lambda c, o: {source}"), constants)


def member(tree: Any, index: int) -> Any:
    """One member of a population: what is at `index` of the leading axis of every tensor."""
    return pytree.tree_map(lambda x: x[index], tree)


def stack(trees: Iterable[Any]) -> Any:
    """A population of such trees: their tensors along a new leading axis."""
    return pytree.tree_map(lambda *leaves: torch.stack(leaves), *trees)


def copy(given: Sequence[Tensor], to: Sequence[Tensor]) -> None:
    """Writes tensors into others of their shapes, all in one call: half a microsecond each."""
    torch._foreach_copy_([*to], [*given])  # pyright: ignore[reportPrivateImportUsage]


def contiguous(tree: Any) -> Any:
    """Tensors whose strides do not change from one step to the next, as those of views of a state may.

    In `torch.vmap` it sees one member: how members lie in memory is then as it was.
    """
    if isinstance(tree, Tensor):  # for which pytree takes as long as an operation does
        return _contiguous(tree)
    return pytree.tree_map_only(Tensor, _contiguous, tree)


def _contiguous(x: Tensor) -> Tensor:
    """Torch leaves strides of axes of size 1 as they are, `(3,)` of `zeros(1, 3)[:, 0]`: here it is `(1,)`."""
    return x if x.stride() == _dense(x.shape) else x.clone(memory_format=torch.contiguous_format)


@functools.cache
def _dense(shape: torch.Size) -> tuple[int, ...]:
    """The strides of what lies row by row in memory."""
    return tuple(math.prod(max(size, 1) for size in shape[i + 1 :]) for i in range(len(shape)))


@functools.cache
def _code(source: str) -> Callable[..., Any]:
    return eval(source)


def _outline(tree: Any, path: str) -> list[str]:
    if isinstance(tree, Tensor):
        return []
    if isinstance(tree, dict):
        children = [(value, f"{path}[{key!r}]") for key, value in tree.items()]
    elif fields := getattr(tree, "_fields", ()):
        return [part for name in fields for part in _outline(getattr(tree, name), f"{path}.{name}")]
    elif isinstance(tree, (list, tuple)):
        children = [(value, f"{path}[{i}]") for i, value in enumerate(tree)]
    else:
        return [f"{path}.__class__", path]  # 2 == 2.0 == True
    return [f"len({path})", *(part for value, at in children for part in _outline(value, at))]


def _source(tree: Any, indices: Any, constants: list[Any]) -> str:
    def parts(values: Any) -> str:
        return "".join(f"{_source(value, indices, constants)}, " for value in values)

    if isinstance(tree, Tensor):
        return f"o[{next(indices)}]"
    if isinstance(tree, dict):
        return "{" + "".join(f"{key!r}: {_source(value, indices, constants)}, " for key, value in tree.items()) + "}"
    if isinstance(tree, list):
        return f"[{parts(tree)}]"
    if type(tree) is tuple:
        return f"({parts(tree)})"
    if not isinstance(tree, tuple) and not pytree.tree_is_leaf(tree):
        raise TypeError(
            f"{type(tree).__name__} in a state, timestep or batch: use NamedTuples, tuples, lists and dicts."
        )
    constants.append(type(tree) if isinstance(tree, tuple) else tree)
    index = len(constants) - 1
    if not isinstance(tree, tuple):
        return f"c[{index}]"
    values = parts(tree)
    return f"c[{index}]({values})" if hasattr(tree, "_fields") else f"c[{index}](({values}))"  # as of x.max(-1)

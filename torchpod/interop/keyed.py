"""Draws of other people's code, by our keys: under `Keyed(keys)` torch's random functions are functions of the keys.

What draws from torch's one generator gives other numbers with other threads or ranks, cannot be resumed without the
generator's state, and does not compile into a pure program. Here every draw is one of `torchpod.random`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from torchpod import random

_functorch = cast(Any, torch)._C._functorch
_level = _functorch.maybe_current_level
"""Of the transforms of torch.func that are under way; None outside of all."""


def _draws_for_each() -> bool:
    """Whether one of them is a vmap that wants a draw of its own for each member."""
    stack = [x for x in _functorch.get_interpreter_stack() or () if x.key() == _functorch.TransformType.Vmap]
    kinds = [_functorch.CVmapInterpreterPtr(x).randomness() for x in stack]
    return _functorch.RandomnessType.Different in kinds


class Keyed(TorchFunctionMode):
    """A context in which torch draws from keys.

    Args:
      keys: `[3]`, one key for all that is drawn; or `[B, 3]`, one per row: then what is drawn has an axis of size B,
        the first one of that size, and row b depends on `keys[b]` alone.

    Raises:
      NotImplementedError: at a random function that has no counterpart here.
    """

    def __init__(self, keys: Tensor) -> None:
        super().__init__()
        self._keys, self._count = keys, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _UNKNOWN:
            raise NotImplementedError(
                f"{func.__name__} draws from torch's generator and has no keyed counterpart; draw with one of "
                f"{', '.join(sorted({f.__name__ for f in _DRAWS}))}."
            )
        draw = _DRAWS.get(func) or _MEMORY.get(func)
        return func(*args, **kwargs) if draw is None else draw(self, *args, **kwargs)

    def uniform(self, shape: Sequence[int], like: Tensor | None = None, **options: Any) -> Tensor:
        """In [0, 1), `shape`."""
        return self._drawn(random.uniform, shape, like, options)

    def normal(self, shape: Sequence[int], like: Tensor | None = None, **options: Any) -> Tensor:
        """Standard normals, `shape`."""
        return self._drawn(random.normal, shape, like, options)

    def _drawn(
        self, draw: Callable[[Tensor, int], Tensor], shape: Sequence[int], like: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        if _draws_for_each():
            raise NotImplementedError(
                "a draw within a vmap of randomness='different' would be one for all members of its ensemble; leave "
                "set_vmap_randomness out, and draw for all of them before."
            )
        keys, shape = random.fold_in(self._keys, self._count), torch.Size(shape)
        self._count += 1
        if keys.ndim == 1:
            x = draw(keys, shape.numel()).reshape(shape)
        else:
            size = keys.shape[0]
            if size not in shape:
                raise ValueError(f"a draw of shape {tuple(shape)} has no axis for the {size} environments.")
            axis = list(shape).index(size)
            rest = [*shape[:axis], *shape[axis + 1 :]]
            x = draw(keys, math.prod(rest)).reshape(size, *rest).movedim(0, axis)
        if (out := options.get("out")) is not None:
            return out.copy_(x)
        dtype = options.get("dtype") or (like.dtype if like is not None else torch.get_default_dtype())
        return x.to(dtype)


class NothingElseDraws(TorchDispatchMode):
    """A context in which an operator that draws from torch's generator is refused, wherever it is called from.

    Within `Keyed`, for one trial run: it sees what `Keyed` cannot, draws within torch's own functions (dropout).

    Raises:
      NotImplementedError: at such an operator.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise NotImplementedError(
                f"{func} draws from torch's generator where it cannot be keyed (dropout, gumbel_softmax, ...); leave "
                f"it out, or draw with one of {', '.join(sorted({f.__name__ for f in _DRAWS}))}."
            )
        return func(*args, **(kwargs or {}))


def _shape(size: tuple[Any, ...]) -> Sequence[int]:
    """Of `torch.rand(2, 3)` or `torch.rand((2, 3))`."""
    return size[0] if len(size) == 1 and not isinstance(size[0], int) else size


def _rand(own: Keyed, *size: Any, **options: Any) -> Tensor:
    return own.uniform(options.pop("size", None) or _shape(size), **options)


def _randn(own: Keyed, *size: Any, **options: Any) -> Tensor:
    return own.normal(options.pop("size", None) or _shape(size), **options)


def _rand_like(own: Keyed, x: Tensor, **options: Any) -> Tensor:
    return own.uniform(x.shape, x, **options)


def _randn_like(own: Keyed, x: Tensor, **options: Any) -> Tensor:
    return own.normal(x.shape, x, **options)


def _own(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """New memory, one for each member of a population, so that each may draw into its own in place."""

    def made(own: Keyed, *size: Any, **options: Any) -> Tensor:
        x, key = make(*size, **options), own._keys.flatten()[0]
        return x if _level() is None or x.device != key.device else torch.where(key == key, x, x)

    return made


def _normal(own: Keyed, mean: Any, std: Any = 1.0, size: Any = None, **options: Any) -> Tensor:
    tensors = [x for x in (mean, std) if isinstance(x, Tensor)]
    shape = size if size is not None else torch.broadcast_shapes(*(x.shape for x in tensors))
    options.pop("generator", None)
    return mean + std * own.normal(shape, tensors[0] if tensors else None, **options)


def _multinomial(
    own: Keyed, weights: Tensor, num_samples: int, replacement: bool = False, *, generator: None = None
) -> Tensor:
    """By Gumbel's trick: the largest of log p + Gumbel noise; without replacement, the `num_samples` largest."""
    *rows, size = weights.shape
    if replacement or num_samples == 1:
        noise = own.uniform((*rows, num_samples, size), weights)
        return (weights.log().unsqueeze(-2) + _gumbel(noise)).argmax(-1)
    return (weights.log() + _gumbel(own.uniform(weights.shape, weights))).topk(num_samples).indices


def _gumbel(uniform: Tensor) -> Tensor:
    """Of numbers with 23 bits, half a step further: log(0) is not finite."""
    return -(-(uniform + 2.0**-24).log()).log()


def _bernoulli(own: Keyed, x: Tensor, p: float | None = None, *, generator: None = None) -> Tensor:
    return (own.uniform(x.shape) < (x if p is None else p)).to(x.dtype)


def _randperm(own: Keyed, n: int, **options: Any) -> Tensor:
    return own.uniform((n,)).argsort(stable=True)


def _randint(own: Keyed, *bounds: Any, **options: Any) -> Tensor:
    size = options["size"] if "size" in options else bounds[-1]
    bounds = bounds if "size" in options else bounds[:-1]
    low, high = options.get("low", 0), options.get("high")
    if high is None:
        low, high = bounds if len(bounds) == 2 else (low, bounds[0])
    elif bounds:
        low = bounds[0]
    uniform = own.uniform(size, dtype=torch.float64)
    return (low + (uniform * (high - low)).floor()).to(options.get("dtype") or torch.int64)


def _normal_(own: Keyed, x: Tensor, mean: float = 0.0, std: float = 1.0, *, generator: None = None) -> Tensor:
    return x.copy_(mean + std * own.normal(x.shape, x))


def _uniform_(
    own: Keyed, x: Tensor, low: float = 0.0, high: float = 1.0, *, generator: None = None, **bounds: float
) -> Tensor:
    low, high = bounds.get("from", low), bounds.get("to", high)  # no parameter can be named `from`
    return x.copy_(low + (high - low) * own.uniform(x.shape, x))


def _exponential_(own: Keyed, x: Tensor, lambd: float = 1.0, *, generator: None = None) -> Tensor:
    return x.copy_(-(1 - own.uniform(x.shape, x)).log() / lambd)


def _bernoulli_(own: Keyed, x: Tensor, p: Any = 0.5, *, generator: None = None) -> Tensor:
    return x.copy_(own.uniform(x.shape) < p)


_DRAWS: dict[Any, Callable[..., Tensor]] = {
    torch.rand: _rand,
    torch.randn: _randn,
    torch.rand_like: _rand_like,
    torch.randn_like: _randn_like,
    torch.normal: _normal,
    torch.multinomial: _multinomial,
    torch.bernoulli: _bernoulli,
    torch.randperm: _randperm,
    torch.randint: _randint,
    Tensor.multinomial: _multinomial,
    Tensor.bernoulli: _bernoulli,
    Tensor.normal_: _normal_,
    Tensor.uniform_: _uniform_,
    Tensor.exponential_: _exponential_,
    Tensor.bernoulli_: _bernoulli_,
}
_MEMORY = {torch.empty: _own(torch.empty), torch.zeros: _own(torch.zeros)}
_UNKNOWN = {
    torch.poisson,
    torch.binomial,
    cast(Any, torch)._standard_gamma,
    cast(Any, torch)._sample_dirichlet,
    Tensor.random_,
    Tensor.cauchy_,
    Tensor.log_normal_,
    Tensor.geometric_,
    torch.randint_like,
}

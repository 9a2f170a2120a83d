"""A function that calls compiled functions and does nothing else, as one call of C++ from its second call on.

What CUDA graphs are on a GPU: the first call is an ordinary one, and says which program took which tensors. Calls after
it go through no line of the function.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from torchpod.kernels.cpu_calls import Call, Calls, Entry, NotRecordable, View
from torchpod.kernels.inductor import RECORDING, Signature, is_ahead
from torchpod.trees import reader, writer


class Recorded:
    """See the module. On another device than a CPU, and for other trees of arguments, the function is called.

    Args:
      fn: takes and returns trees of tensors; between calls of `Compiled` functions it may only pick tensors, make views
        of them and put trees together, the same in every call. What else it makes (a sum, a copy) is noticed, and then
        it is never replaced; what it writes into a tensor is not.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn
        self._plan: _Plan | None = None
        self._possible = True

    def __call__(self, *args: Any) -> Any:
        """The result."""
        if RECORDING.note is not None or is_ahead():  # a part of a larger recording, or nothing to record
            return self._fn(*args)
        if self._plan is not None:
            inputs = self._plan.read(args)
            return self._fn(*args) if inputs is None else self._plan.run(inputs)
        if not self._possible:
            return self._fn(*args)
        given = reader(args)(args)
        if any(x.requires_grad for x in given) or len(set(map(_place_of, given))) < len(given):
            return self._fn(*args)
        recording = _Note(given)
        RECORDING.note = recording.call
        try:
            result = self._fn(*args)
        finally:
            RECORDING.note = None
        try:
            self._plan = _Plan(args, recording, result)
        except NotRecordable:
            self._possible = False
        return result


class _Place(NamedTuple):
    """Where a tensor is in memory: two with the same are the same."""

    storage: int
    first: int
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def end(self) -> int:
        """Behind its last element."""
        return self.first + 1 + sum((n - 1) * stride for n, stride in zip(self.size, self.stride, strict=True))

    def is_dense(self) -> bool:
        """Whether all that lies between its ends is its own."""
        return self.size.numel() == self.end() - self.first


def _meeting(places: dict[int, _Place]) -> Iterator[tuple[int, int]]:
    """Pairs of those that lie in the same part of the storage that all are in."""
    before: list[tuple[int, int]] = []  # where each ends, and who it is
    for i in sorted(places, key=lambda i: places[i].first):
        before = [(end, j) for end, j in before if end > places[i].first]
        yield from ((i, j) for _, j in before)
        before.append((places[i].end(), i))


def _place_of(x: Tensor) -> _Place:
    return _Place(x.untyped_storage()._cdata, int(x.storage_offset()), x.shape, x.stride(), x.dtype)


class _Known(NamedTuple):
    """A tensor that calls took or made."""

    place: _Place
    number: int
    storage: StorageWeakRef
    """Keeps the identity of its memory, not the memory: a recording takes no more than the calls themselves."""


class _Note:
    """The calls of a function, with numbers of tensors: of its arguments, then of what was made.

    A tensor is known by its memory, and so are views.
    """

    def __init__(self, given: Sequence[Tensor]) -> None:
        self.num_given, self.num_named = len(given), 0
        self.calls: list[Call | View] = []
        self._known: dict[int, list[_Known]] = {}  # by storage
        self._numbers: dict[_Place, int] = {}
        self._possible = True
        for x in given:
            self._name(x)

    def _name(self, x: Tensor) -> None:
        """Gives a tensor its number."""
        place, storage = _place_of(x), StorageWeakRef(x.untyped_storage())
        self._known.setdefault(place.storage, []).append(_Known(place, self.num_named, storage))
        self._numbers[place] = self.num_named
        self.num_named += 1

    def number_of(self, x: Tensor) -> int:
        """That of a tensor, or of a view, which is noted.

        Raises:
          NotRecordable: if it comes from elsewhere.
        """
        place = _place_of(x)
        if (number := self._numbers.get(place)) is not None:
            return number
        for tensor in self._known.get(place.storage, []):
            base = tensor.place
            if base.is_dense() and base.dtype == x.dtype and base.first <= place.first and place.end() <= base.end():
                self.calls.append(View(tensor.number, self.num_named, x.shape, x.stride(), place.first - base.first))
                self._name(x)
                return self.num_named - 1
        raise NotRecordable("a tensor that no program made")

    def call(self, entry: Entry | None, inputs: Sequence[Tensor], outputs: Sequence[Any]) -> None:
        """A call of a program."""
        try:
            if entry is None or not all(isinstance(x, Tensor) for x in outputs):
                raise NotRecordable("this is no program for a CPU")
            taken = [self.number_of(x) for x in inputs]
            self.calls.append(Call(entry, taken, range(self.num_named, self.num_named + len(outputs))))
            for x in outputs:
                self._name(x)
        except NotRecordable:
            self._possible = False

    def results(self, tensors: Sequence[Tensor]) -> list[int]:
        """Their numbers.

        Raises:
          NotRecordable: if they, or something before, cannot be recorded.
        """
        if not self._possible:
            raise NotRecordable("a call was none that can be recorded")
        return [self.number_of(x) for x in tensors]


class _Plan(Signature):
    """The calls of a function for one input signature.

    Args:
      args: of the call that was recorded.
      recording: of it.
      result: of the function.

    Raises:
      NotRecordable: if a program is none for a CPU, or a tensor comes from elsewhere.
    """

    def __init__(self, args: tuple[Any, ...], recording: _Note, result: Any) -> None:
        super().__init__(args)
        given, self._shared = self._leaves(args), list[tuple[int, int, int]]()
        places = list(map(_place_of, given))
        by_storage = sorted(range(len(given)), key=lambda i: places[i].storage)
        for _, group in itertools.groupby(by_storage, key=lambda i: places[i].storage):
            for pair in _meeting({i: places[i] for i in group}):
                for i, j in itertools.permutations(pair):
                    if places[i].is_dense():
                        self._shared.append((i, j, given[i].data_ptr() - given[j].data_ptr()))
        results = recording.results(reader(result)(result))
        self._calls, self._write = Calls(recording.calls, recording.num_given, results), writer(result)

    def read(self, args: tuple[Any, ...]) -> list[Tensor] | None:
        """See `Signature`; arguments that do not share memory as those did are others."""
        inputs = super().read(args)
        shared = inputs is not None and all(
            inputs[i].data_ptr() - inputs[j].data_ptr() == bytes_ for i, j, bytes_ in self._shared
        )
        return inputs if shared else None

    def run(self, inputs: list[Tensor]) -> Any:
        """The result."""
        return self._write(self._calls.run(inputs))

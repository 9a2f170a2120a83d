"""A function that calls compiled functions and does nothing else, as one call of C++ from its second call on.

What CUDA graphs are on a GPU: the first call is an ordinary one, and says which program took which tensors. Calls after
it go through no line of the function.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from torchpod.cpu_calls import Call, Calls, Entry, View
from torchpod.inductor import RECORDING, Signature, is_ahead
from torchpod.trees import outline, reader, writer


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
        given = reader(args)(args)
        if not self._possible or len(set(map(_place, given))) < len(given):
            return self._fn(*args)
        recording = _Recording(given)
        RECORDING.note = recording.note
        try:
            result = self._fn(*args)
        finally:
            RECORDING.note = None
        try:
            self._plan = _Plan(args, recording, result)
        except LookupError:
            self._possible = False
        return result


class _Known(NamedTuple):
    """A tensor that calls took or made: where it is in memory, and its number."""

    place: tuple[Any, ...]
    number: int
    storage: StorageWeakRef
    """Keeps the identity of its memory, not the memory: a recording takes no more than the calls themselves."""


class _Recording:
    """The calls of a function, with numbers of tensors: of its arguments, then of what was made.

    A tensor is known by its memory, and so are views.
    """

    def __init__(self, given: Sequence[Tensor]) -> None:
        self.num_given, self.num_named = len(given), 0
        self.calls: list[Call | View] = []
        self._known: dict[int, list[_Known]] = {}  # by storage
        self._possible = True
        for x in given:
            self._name(x)

    def _name(self, x: Tensor) -> None:
        """Gives a tensor its number."""
        storage = StorageWeakRef(x.untyped_storage())
        self._known.setdefault(storage.cdata, []).append(_Known(_place(x), self.num_named, storage))
        self.num_named += 1

    def number_of(self, x: Tensor) -> int:
        """That of a tensor, or of a view, which is noted.

        Raises:
          LookupError: if it comes from elsewhere.
        """
        place, known = _place(x), self._known.get(x.untyped_storage()._cdata, [])
        for tensor in reversed(known):
            if tensor.place == place:
                return tensor.number
        first, last = _extent(place)
        for tensor in known:
            begin, end = _extent(tensor.place)
            size, _, dtype = tensor.place[1:]
            if dtype == x.dtype and begin <= first and last <= end and size.numel() == end - begin:
                self.calls.append(View(tensor.number, self.num_named, x.shape, x.stride(), first - begin))
                self._name(x)
                return self.num_named - 1
        raise LookupError("a tensor that no program made")

    def note(self, entry: Entry | None, inputs: Sequence[Tensor], outputs: Sequence[Any]) -> None:
        """A call of a program."""
        try:
            if entry is None or not all(isinstance(x, Tensor) for x in outputs):
                raise LookupError("this is no program for a CPU")
            taken = [self.number_of(x) for x in inputs]
            self.calls.append(Call(entry, taken, range(self.num_named, self.num_named + len(outputs))))
            for x in outputs:
                self._name(x)
        except LookupError:
            self._possible = False

    def results(self, tensors: Sequence[Tensor]) -> list[int]:
        """Their numbers.

        Raises:
          LookupError: if they, or something before, cannot be recorded.
        """
        if not self._possible:
            raise LookupError("a call was none that can be recorded")
        return [self.number_of(x) for x in tensors]


def _place(x: Tensor) -> tuple[Any, ...]:
    """Two tensors with the same are the same numbers in memory."""
    return (x.untyped_storage()._cdata, x.storage_offset()), x.shape, x.stride(), x.dtype


def _extent(place: tuple[Any, ...]) -> tuple[int, int]:
    """From its first number in memory to behind its last one."""
    (_, offset), size, strides, _ = place
    return offset, offset + 1 + sum((n - 1) * stride for n, stride in zip(size, strides, strict=True))


class _Plan(Signature):
    """The calls of a function for one input signature.

    Args:
      args: of the call that was recorded.
      recording: of it.
      result: of the function.

    Raises:
      LookupError: if a program is none for a CPU, or a tensor comes from elsewhere.
    """

    def __init__(self, args: tuple[Any, ...], recording: _Recording, result: Any) -> None:
        super().__init__(args)
        self._outline = outline(args)
        self._outlined = self._outline(args)
        results = recording.results(reader(result)(result))
        self._calls, self._write = Calls(recording.calls, recording.num_given, results), writer(result)

    def read(self, args: tuple[Any, ...]) -> list[Tensor] | None:
        """See `Signature`; trees that have more in them, or other constants, are others."""
        inputs = super().read(args)
        return None if inputs is None or self._outline(args) != self._outlined else inputs

    def run(self, inputs: list[Tensor]) -> Any:
        """The result."""
        return self._write(self._calls.run(inputs))

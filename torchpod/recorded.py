"""A function that calls compiled functions and does nothing else, as one call of C++ from its second call on.

What CUDA graphs are on a GPU: the first call is an ordinary one, and says which program took which tensors. Calls after
it go through no line of the function.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from torchpod.cpu_calls import Call, Calls
from torchpod.inductor import RECORDING, RecordedCall, Signature, is_ahead
from torchpod.trees import outline, reader, writer


class Recorded:
    """See the module. On another device than a CPU, and for other trees of arguments, the function is called.

    Args:
      fn: takes and returns trees of tensors; between calls of `Compiled` functions it may only pick tensors and put
        trees together, the same in every call. What else it makes (a sum, a view) is noticed, and then it is never
        replaced; what it writes into a tensor is not.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn
        self._plan: _Plan | None = None
        self._possible = True

    def __call__(self, *args: Any) -> Any:
        """The result."""
        if RECORDING.calls is not None or is_ahead():  # a part of a larger recording, or nothing to record
            return self._fn(*args)
        if self._plan is not None:
            inputs = self._plan.read(args)
            return self._fn(*args) if inputs is None else self._plan.run(inputs)
        if not self._possible or len({id(x) for x in reader(args)(args)}) < len(reader(args)(args)):
            return self._fn(*args)
        RECORDING.calls = recorded = []
        try:
            result = self._fn(*args)
        finally:
            RECORDING.calls = None
        try:
            self._plan = _Plan(args, recorded, result)
        except LookupError:
            self._possible = False
        return result


class _Plan(Signature):
    """The calls of a function for one input signature.

    Args:
      args: of the call that was recorded.
      recorded: what was called meanwhile.
      result: of the function.

    Raises:
      LookupError: if a program is none for a CPU, or a tensor comes from elsewhere.
    """

    def __init__(self, args: tuple[Any, ...], recorded: Sequence[RecordedCall], result: Any) -> None:
        super().__init__(args)
        self._outline = outline(args)
        self._outlined = self._outline(args)
        numbers = {id(x): i for i, x in enumerate(self._leaves(args))}
        num_given = num_named = len(numbers)
        calls = []
        for program, inputs, outputs in recorded:
            if program.entry is None or not all(isinstance(x, Tensor) for x in outputs):
                raise LookupError("this is no program for a CPU")
            named = range(num_named, num_named + len(outputs))
            calls.append(Call(program.entry, [numbers[id(x)] for x in inputs], named))
            numbers |= {id(x): i for x, i in zip(outputs, named, strict=True)}
            num_named += len(outputs)
        results = [numbers[id(x)] for x in reader(result)(result)]
        self._calls, self._write = Calls(calls, num_given, results), writer(result)

    def read(self, args: tuple[Any, ...]) -> list[Tensor] | None:
        """See `Signature`; trees that have more in them, or other constants, are others."""
        inputs = super().read(args)
        return None if inputs is None or self._outline(args) != self._outlined else inputs

    def run(self, inputs: list[Tensor]) -> Any:
        """The result."""
        return self._write(self._calls.run(inputs))

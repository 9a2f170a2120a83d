"""Many calls of compiled programs in one call of C++, on a CPU: see cpu_calls.cpp.

`Unroll` has the steps of an unroll: one of 64 environments takes 35 us, calling it from Python another 15, and stacking
what it returned another 20. `Recorded` (recorded.py) has the epochs of an update.
"""

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchpod.kernels import gxx
from torchpod.kernels.together import entry_of
from torchpod.trees import paths, reader, writer

_aoti = cast(Any, torch._C)._aoti
_FILE = "cpu_calls.cpp"


class NotRecordable(Exception):
    """Calls that cannot be one, so that they are made one by one; the message says why."""


class Entry:
    """Where inductor's program for a CPU begins: a function in a library.

    Args:
      compiled: what `compile_fx_inner` returned.

    Raises:
      NotRecordable: if there is no such function in it.
    """

    def __init__(self, compiled: Any) -> None:
        try:
            (cell,) = compiled.current_callable.__closure__
            module = cell.cell_contents.__self__
            self.library, function = module.__file__, entry_of(module)
        except (AttributeError, TypeError, ValueError, OSError) as error:
            raise NotRecordable(f"inductor's program has no entry point: {error}") from error
        self.address = ctypes.cast(function, ctypes.c_void_p).value
        self.constants: list[Tensor] = list(compiled.constants.values())


class Call(NamedTuple):
    """A call of a program, with numbers of tensors."""

    entry: Entry
    inputs: Sequence[int]
    outputs: Sequence[int]


class View(NamedTuple):
    """Elements of another tensor, where they are in memory."""

    base: int
    output: int
    sizes: Sequence[int]
    strides: Sequence[int]
    offset: int
    """From the first number of `base`."""


class _Call(ctypes.Structure):
    _fields_ = (
        ("program", ctypes.c_void_p),
        ("num_inputs", ctypes.c_int64),
        ("inputs", ctypes.c_void_p),
        ("num_outputs", ctypes.c_int64),
        ("outputs", ctypes.c_void_p),
        ("num_axes", ctypes.c_int64),
        ("view", ctypes.c_void_p),
    )


def _numbers(call: Call | View) -> list[int]:
    return [call.base, call.output] if isinstance(call, View) else [*call.inputs, *call.outputs]


class _Stack(ctypes.Structure):
    _fields_ = (
        ("to", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("output", "first", "pieces", "bytes", "piece_stride", "call_stride")),
    )


class Calls:
    """Calls, one after the other. The first `num_given` tensors are arguments; a tensor may get another value.

    Args:
      calls: in order.
      num_given: arguments.
      results: numbers of the tensors to return.
    """

    def __init__(self, calls: Sequence[Call | View], num_given: int, results: Sequence[int]) -> None:
        used = [i for call in calls for i in _numbers(call)]
        num_named = 1 + max([num_given - 1, *results, *used])
        constants = {id(x): x for call in calls if isinstance(call, Call) for x in call.entry.constants}
        # Constants come behind the arguments, and before what is made.
        numbers = {key: num_given + i for i, key in enumerate(constants)}
        self._constants, self._arrays = list(constants.values()), {}
        self._num_tensors = num_named + len(constants)

        def moved(names: Sequence[int]) -> list[int]:
            return [i if i < num_given else i + len(constants) for i in names]

        self._calls = (_Call * len(calls))()
        self._results = (ctypes.c_int64 * len(results))(*moved(results))
        needed = set(self._results)
        for i, call in reversed(list(enumerate(calls))):
            if isinstance(call, View):
                program, num_axes = None, len(call.sizes)
                view = self._array([call.offset, *call.sizes, *call.strides])
                inputs, outputs = moved([call.base]), moved([call.output])
            else:
                program, num_axes, view = call.entry.address, 0, None
                inputs, outputs = moved(call.inputs), moved(call.outputs)
                inputs += [numbers[id(x)] for x in call.entry.constants]
            needed -= set(outputs)
            for position, number in reversed(list(enumerate(inputs))):
                if number not in needed:  # the last to read it takes it
                    needed.add(number)
                    inputs[position] = ~number
            self._calls[i] = _Call(
                program, len(inputs), self._array(inputs), len(outputs), self._array(outputs), num_axes, view
            )
        _library()

    def _array(self, numbers: Sequence[int]) -> int:
        """The address of an array that lives as long as this object."""
        array = self._arrays.setdefault(tuple(numbers), (ctypes.c_int64 * len(numbers))(*numbers))
        return ctypes.addressof(array)

    def run(self, arguments: list[Tensor], stacks: Sequence[_Stack] = ()) -> list[Tensor]:
        """The results.

        Args:
          arguments: tensors, which stay as they are.
          stacks: where outputs of every call are to go as well.

        Raises:
          RuntimeError: what a program raised.
          BaseException: in the main thread, what the handler of a signal raises between two programs.
        """
        given = _aoti.unsafe_alloc_void_ptrs_from_tensors([*arguments, *self._constants])
        made = _library().torchpod_call(
            self._num_tensors,
            given,
            len(self._calls),
            self._calls,
            len(stacks),
            (_Stack * len(stacks))(*stacks),
            len(self._results),
            self._results,
        )
        return _aoti.alloc_tensors_by_stealing_from_void_ptrs(made)


class Unroll:
    """Calls of a program `(variables, carry, *rest) -> (carry, output)`, each with the carry of the one before.

    Args:
      entry: of the program.
      args: arguments for an example.
      result: of these.

    Raises:
      NotRecordable: if the program is no such step: a carry of another structure, tensors that are not contiguous.
    """

    def __init__(self, entry: Entry, args: tuple[Any, ...], result: tuple[Any, Any]) -> None:
        variables, carry, *_ = args
        before, after = reader(carry)(carry), reader(result[0])(result[0])
        if paths(result[0]) != paths(carry) or list(map(_layout, before)) != list(map(_layout, after)):
            raise NotRecordable("the carry that comes out is not built like the one that goes in")
        self._outputs = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
        if not all(x.is_contiguous() for x in self._outputs):
            raise NotRecordable("an output is not contiguous")
        self._entry, self._num_given, self._num_before = entry, len(paths(args)), len(paths(variables))
        self._num_carry = len(before)
        self._by_length: dict[int, Calls] = {}
        self._timestep = [i for i, path in enumerate(paths(result[0])) if path.startswith(".timestep")]
        self._write_timestep = writer(result[0].timestep)
        self._write = writer(result)

    def _calls(self, length: int) -> Calls:
        if length in self._by_length:
            return self._by_length[length]
        carry = range(self._num_before, self._num_before + self._num_carry)
        outputs = range(self._num_given, self._num_given + len(self._outputs) - self._num_carry)
        call = Call(self._entry, range(self._num_given), [*carry, *outputs])
        self._by_length[length] = Calls([call] * length, self._num_given, carry)
        return self._by_length[length]

    def run(self, inputs: list[Tensor], length: int, axis: int) -> tuple[Any, Any, Any]:
        """The carry after `length` calls, the timesteps of all carries, and the outputs, along `axis`.

        Args:
          inputs: tensors of the arguments of the first call.
          length: T.
          axis: of time.
        """
        stacks, timesteps, outputs = [], [], []
        for index in self._timestep:
            stacks.append(self._stack(index, length, axis, first=self._num_before + index))
            timesteps.append(stacks[-1][0])
        for index in range(self._num_carry, len(self._outputs)):
            stacks.append(self._stack(index, length, axis))
            outputs.append(stacks[-1][0])
        carry = self._calls(length).run(inputs, [stack for _, stack in stacks])
        carry, outputs = self._write([*carry, *outputs])
        return carry, self._write_timestep(timesteps), outputs

    def _stack(self, index: int, length: int, axis: int, first: int = -1) -> tuple[Tensor, _Stack]:
        """Room for an output of all calls, behind argument `first` if there is one."""
        example, before = self._outputs[index], int(first >= 0)
        shape = (*example.shape[:axis], length + before, *example.shape[axis:])
        stack = torch.empty(shape, dtype=example.dtype, device=example.device)
        pieces = example.shape[0] if axis else 1
        size = example.numel() * example.element_size() // max(1, pieces)
        return stack, _Stack(
            stack.data_ptr() + before * size, index, first, pieces, size, (length + before) * size, size
        )


def _layout(x: Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype]:
    return x.shape, x.stride(), x.dtype


@functools.cache
def begin() -> None:
    """Has the library compiled in the background, before anybody asks for it: runs on a CPU do."""
    gxx.begin(_FILE)


@functools.cache
def _library() -> ctypes.PyDLL:
    """Compiled once per machine. Called with Python's lock held, which programs give away themselves."""
    calls = ctypes.PyDLL(gxx.library(_FILE)._name)
    pointer, number, python = ctypes.c_void_p, ctypes.c_int64, ctypes.py_object
    calls.torchpod_call.argtypes = number, python, number, pointer, number, pointer, number, pointer
    calls.torchpod_call.restype = python
    return calls

"""Memory of tensors on a CPU that is used again: see cpu_memory.cpp.

glibc has no quick way to a block of 64-byte alignment, gives large blocks back to the system when they are freed, and
faults each of their pages in again: a quarter of the time of a PPO iteration with 4 environments, a twentieth and more
with 64.
"""

import ctypes
import functools
from typing import NamedTuple

from torchpod.kernels.gxx import library


class Memory(NamedTuple):
    """Bytes."""

    used: int
    """By tensors that are alive."""
    kept: int
    """For later tensors; `used` and `kept` together stay below 5/4 of `most_used`, and 64 MiB."""
    most_used: int
    """At any one time."""


@functools.cache
def install() -> None:
    """From now on tensors of this process get their memory here. Compiles the allocator, once per machine."""
    _library().torchpod_install()


def memory() -> Memory:
    """What is used and kept now."""
    numbers = (ctypes.c_int64 * 3)()
    _library().torchpod_memory(numbers)
    return Memory(*numbers)


@functools.cache
def _library() -> ctypes.CDLL:
    return library("cpu_memory.cpp", "-lc10")

"""Checks of constructor arguments that the environments share."""

import difflib
import inspect
from collections.abc import Iterable
from typing import Any


def at_least(minimum: int, **arguments: int) -> None:
    """Raises a ValueError that names the first argument that is no integer or below `minimum`."""
    for name, value in arguments.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise ValueError(f"{name}={value!r} is wrong; use an integer of at least {minimum}.")


def true_or_false(**arguments: bool) -> None:
    """Raises a ValueError that names the first argument that is no bool."""
    for name, value in arguments.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name}={value!r} is wrong; use True or False.")


def number(name: str, value: Any, low: float = -float("inf"), high: float = float("inf")) -> float:
    """The value as a float; a ValueError if it is no finite number from `low` to `high`."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
    if not good or abs(value) == float("inf"):
        wanted = f"a number from {low:g} to {high:g}" if abs(low) < float("inf") else "a finite number"
        raise ValueError(f"{name}={value!r} is wrong; use {wanted}.")
    return float(value)


def one_of(name: str, value: Any, known: Iterable[str]) -> None:
    """Raises a ValueError that lists the nearest of the known names, or all of them."""
    known = list(known)
    if value not in known:
        close = difflib.get_close_matches(str(value), known, 3, 0.5)
        hint = "did you mean " + " or ".join(close) + "?" if close else "known: " + ", ".join(known) + "."
        raise ValueError(f"{name}={value!r} is not known; {hint}")


def needs_nothing(make: Any, door: str, known: Iterable[str] = ()) -> None:
    """Raises a ValueError for what is no class or function that can be called without arguments.

    Args:
      make: the user's.
      door: who is to call it.
      known: arguments that it is given.
    """
    if not callable(make):
        raise ValueError(
            f"{door} makes many of what it steps, and got one {type(make).__name__}; hand over its class, or a "
            "function that makes it."
        )
    try:
        parameters = inspect.signature(make, follow_wrapped=False).parameters.values()
    except (ValueError, TypeError):  # written in C
        return
    optional = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    missing = [x.name for x in parameters if x.default is x.empty and x.kind not in optional and x.name not in known]
    if missing:
        name = getattr(make, "__name__", type(make).__name__)
        given = ", ".join(f"{x}=..." for x in missing)
        raise ValueError(
            f"{name} needs {', '.join(missing)}, and is called without arguments; hand over functools.partial({name}, "
            f"{given}), or a function that makes it."
        )

"""Marks that tests share."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def with_slow(cases: Iterable[Any], slow: Collection[Any]) -> list[Any]:
    """Parameters, tuples where there are several, of which some are left to `make test-all`."""
    marks = ((x, pytest.mark.slow if x in slow else ()) for x in cases)
    return [pytest.param(*(x if isinstance(x, tuple) else (x,)), marks=mark) for x, mark in marks]

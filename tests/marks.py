"""Marks that tests share."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def with_slow(cases: Iterable[Any], slow: Collection[Any]) -> list[Any]:
    """Parameters, of which some are left to `make test-all`."""
    return [pytest.param(x, marks=pytest.mark.slow if x in slow else ()) for x in cases]

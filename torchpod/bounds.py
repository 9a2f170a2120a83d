"""Bounds of settings, beside their defaults: `clip: float = bounded(0.2, least=0)`. config.py refuses others."""

import dataclasses
import math
from typing import Any


def bounded(default: Any, *, least: float, most: float = math.inf) -> Any:
    """A field of a dataclass of settings: a number from `least` to `most`, or several such."""
    return dataclasses.field(default=default, metadata={"bounds": (least, most)})


def bounds_of(settings: type) -> dict[str, tuple[float, float]]:
    """What the fields of a dataclass must lie between; one that only changes a default keeps its parent's bounds."""
    found = {}
    for base in reversed(settings.__mro__):
        fields = dataclasses.fields(base) if dataclasses.is_dataclass(base) else ()
        found |= {field.name: field.metadata["bounds"] for field in fields if "bounds" in field.metadata}
    return found

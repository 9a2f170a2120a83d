"""Which name was meant."""

import difflib
from collections.abc import Iterable


def nearest(name: str, names: Iterable[str]) -> str:
    """A hint: the names whose initials or letters are most like `name`, or all of them if few."""
    names = sorted(names)
    short = [n for n in names if _initials(n) == name.rpartition(".")[2]]
    close = difflib.get_close_matches(name, short, 3, 0.0) or difflib.get_close_matches(name, names, 3, 0.5)
    if close:
        return "did you mean " + " or ".join(close) + "?"
    return "known: " + ", ".join(names[:30]) + (", ..." if len(names) > 30 else ".")


def _initials(name: str) -> str:
    """Of algo.learner.learning_rate: lr."""
    return "".join(word[:1] for word in name.rpartition(".")[2].split("_"))

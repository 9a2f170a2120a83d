"""Words of messages: which name was meant, how much memory."""

import difflib
from collections.abc import Iterable


def nearest(name: str, names: Iterable[str]) -> str:
    """A hint: the names whose initials or letters are most like `name`, all of them if few, or that there is none."""
    names = sorted(names)
    if not names:
        return "there is none."
    short = [n for n in names if _initials(n) == name.rpartition(".")[2]]
    close = difflib.get_close_matches(name, short, 3, 0.0) or difflib.get_close_matches(name, names, 3, 0.5)
    if close:
        return "did you mean " + " or ".join(close) + "?"
    return "known: " + ", ".join(names[:30]) + (", ..." if len(names) > 30 else ".")


def human_bytes(num_bytes: float) -> str:
    """`1.50 GB`, and of less `12 MB` or `3 kB`."""
    if num_bytes >= 1e9:
        return f"{num_bytes / 1e9:,.2f} GB"
    return f"{num_bytes / 1e6:.0f} MB" if num_bytes >= 1e6 else f"{num_bytes / 1e3:.0f} kB"


def _initials(name: str) -> str:
    """Of algo.learner.learning_rate: lr."""
    return "".join(word[:1] for word in name.rpartition(".")[2].split("_"))

"""How much memory this process may still have: the machine has less for it if it is in a container."""

import contextlib
import math
import re
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """What this process may still have: of what the machine has left, or of what its cgroups (containers) leave it.

    Raises:
      OSError: where there is no /proc.
    """
    text = Path("/proc/meminfo").read_text()
    machine = int(re.findall(r"^MemAvailable:\s*(\d+)", text, re.MULTILINE)[0]) * 1024
    return int(min([machine, *map(_left_in, _cgroups())]))


def _cgroups() -> Iterator[Path]:
    """The memory cgroup of this process and those around it, of version 1 or 2, as far as they can be seen."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            root = _CGROUPS / "memory" if controllers else _CGROUPS
            if controllers in ("", "memory"):
                own = root / path.lstrip("/")
                yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(root))


def _left_in(cgroup: Path) -> float:
    """Bytes below the limit of a cgroup, counting files that the kernel would drop as free."""
    for limit, usage, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        with contextlib.suppress(OSError, ValueError):  # there is none, or it is "max"
            free = int((cgroup / limit).read_text()) - int((cgroup / usage).read_text())
            dropped = re.findall(rf"^{cache} (\d+)", (cgroup / "memory.stat").read_text(), re.MULTILINE)
            return free + sum(map(int, dropped))
    return math.inf

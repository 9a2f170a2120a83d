"""Memory of the host, on Linux: what this process may still have, in a container too, and what processes hold."""

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


def private_bytes(pid: int) -> int:
    """What a process and its descendants hold for themselves: memory, not mapped files. 0 if it is gone."""
    return status_bytes(pid, "RssAnon", "RssShmem") + sum(map(private_bytes, children(pid)))


def status_bytes(pid: int, *names: str) -> int:
    """The sum of these lines of /proc/PID/status, in bytes; 0 of a process that has ended.

    The peak `VmHWM` is that of the program. `getrusage` begins with the peak of the process that started it.
    """
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return sum(int(kib) for name in names for kib in re.findall(rf"^{name}:\s*(\d+)", text, re.MULTILINE)) * 1024


def children(pid: int) -> list[int]:
    """Processes that a process has started and that are still there."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            found += map(int, path.read_text().split())
    return found

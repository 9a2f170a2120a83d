"""Worker processes, each of which leads a group of what it has started."""

import contextlib
import os
from multiprocessing.process import BaseProcess


def signal_group(process: BaseProcess, number: int) -> None:
    """To a worker and to what it has started, also if it is gone itself."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if process.pid is not None:
            os.killpg(process.pid, number)
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it makes the group a moment after it begins
        if process.pid is not None and process.exitcode is None:
            os.kill(process.pid, number)

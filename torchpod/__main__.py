"""`torchpod` and `python -m torchpod`, which is what torchrun starts."""

import contextlib
import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any


def main() -> int:
    """One command; see main.py.

    Python looks for garbage among what imports make, which stays: 0.9 of the 6.3 s of a start from a full cache. Here
    it does not, nor ever again at what is there now, the little that is garbage included.
    """
    gc.disable()
    try:
        with _interruptible():
            from torchpod.main import main as run
    finally:
        gc.freeze()
        gc.enable()
    status = run()
    if any(thread.name.startswith("torchpod-actor-") for thread in threading.enumerate()):
        # It is still in its environments, and Python would unwind it there: C++ aborts the process then (XLA does).
        from torchpod.watched import end_process

        with contextlib.suppress(OSError, AttributeError):  # nobody reads, or there is none
            sys.stdout.flush()
            sys.stderr.flush()
        end_process(status)
    return status


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C ends the process: C code that imports NumPy would drop the exception, and go on with half of it."""

    def stop(*_: Any) -> None:
        with contextlib.suppress(OSError):
            os.write(2, b"torchpod: stopped\n")
        os._exit(130)

    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_default or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


if __name__ == "__main__":
    sys.exit(main())

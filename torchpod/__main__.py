"""`torchpod` and `python -m torchpod`, which is what torchrun starts."""

import contextlib
import gc
import sys
import threading


def main() -> int:
    """One command; see main.py.

    Python looks for garbage among what imports make, which stays: 0.9 of the 6.3 s of a start from a full cache. Here
    it does not, nor ever again at what is there now, the little that is garbage included.
    """
    gc.disable()
    try:
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


if __name__ == "__main__":
    sys.exit(main())

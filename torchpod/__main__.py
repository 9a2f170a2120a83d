"""`torchpod` and `python -m torchpod`, which is what torchrun starts."""

import gc
import sys


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
    return run()


if __name__ == "__main__":
    sys.exit(main())

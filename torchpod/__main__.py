"""`torchpod` and `python -m torchpod`, which is what torchrun starts."""

import gc
import sys


def main() -> int:
    """One command; see main.py.

    Python looks for garbage among what imports make, which stays: 0.9 of the 6.3 s of a start from a full cache
    (`torchpod bench anakin`, train_warm). It does not here, and never looks at what is there now again.
    """
    gc.disable()
    from torchpod.main import main as run

    gc.freeze()
    gc.enable()
    return run()


if __name__ == "__main__":
    sys.exit(main())

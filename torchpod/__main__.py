"""`python -m torchpod`, which is what torchrun starts."""

import sys

from torchpod.main import main

sys.exit(main())

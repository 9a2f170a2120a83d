"""docs/write-a-kernel.md: its Python blocks run as a reader would run them, and play by the rules written as tensors."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torchpod import random
from torchpod.agent import bind
from torchpod.compile import Compiler
from torchpod.makers import make_agent, make_env
from torchpod.config import load
from torchpod.rollout import unroll
from torchpod.testing import check_env

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "write-a-kernel.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)

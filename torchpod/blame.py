"""Whose line an error came from: that of a user or a library, for the one sentence that an error is told in."""

import linecache
import os
import sys
import traceback
from pathlib import Path
from types import CodeType
from typing import NamedTuple

import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir


class Frame(NamedTuple):
    """A line that was being run."""

    code: CodeType
    line: int

    @property
    def text(self) -> str:
        """Of the line."""
        return linecache.getline(self.code.co_filename, self.line).strip()

    @property
    def is_users(self) -> bool:
        """Whether it is in a file that was neither installed nor generated."""
        return not self.code.co_filename.startswith((sys.prefix, sys.base_prefix, cache_dir(), "<"))


def frames(error: BaseException) -> list[Frame]:
    """Those that are neither PyTorch's nor ours, the innermost last."""
    own = tuple(f"{Path(package.__file__ or '').parent}{os.sep}" for package in (torch, sys.modules["torchpod"]))
    found = [Frame(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    return [frame for frame in found if not frame.code.co_filename.startswith(own)]

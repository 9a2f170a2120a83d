"""The Python blocks of a page, as a reader runs them: files are written, and all else is one program."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest


def run_blocks(blocks: Sequence[str], page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Runs them in order, in `folder`; what they have named. A block that begins with `# NAME.py` is that file."""
    monkeypatch.chdir(folder)  # training writes its run folders here
    monkeypatch.syspath_prepend(folder)
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks:
        if found := re.match(r"# (\w+)\.py\n", block):
            monkeypatch.delitem(sys.modules, found[1], raising=False)  # of another test
            (folder / f"{found[1]}.py").write_text(block)
        else:
            exec(compile(block, str(page), "exec"), names)
    return names

"""docs/write-an-agent.md: its Python blocks run, one after the other, as a reader would run them."""

import re
from pathlib import Path

import pytest

from tests.docs.blocks import run_blocks

PAGE = Path(__file__).parents[2] / "docs" / "write-an-agent.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def test_the_blocks_run_in_order_and_the_agents_learn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    run_blocks(BLOCKS, PAGE, tmp_path, monkeypatch)
    *scores, remembered = [float(line) for line in capsys.readouterr().out.splitlines()]
    assert len(scores) == 2 and min(scores) > 100  # in both loops
    assert remembered > 0.9

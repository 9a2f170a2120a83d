"""docs/write-an-agent.md: its Python blocks run, one after the other, as a reader would run them."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "write-an-agent.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def test_the_blocks_run_in_order_and_the_agent_learns_in_both_loops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)  # training writes its run folders here
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_agent.py").write_text(BLOCKS[0])
    names: dict[str, object] = {"__name__": "__main__"}
    for block in BLOCKS[1:]:
        exec(compile(block, str(PAGE), "exec"), names)
    scores = [float(line) for line in capsys.readouterr().out.splitlines()]
    assert len(scores) == 2 and min(scores) > 100

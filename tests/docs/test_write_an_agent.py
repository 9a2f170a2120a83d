"""docs/write-an-agent.md: its Python blocks run, one after the other, as a reader would run them."""

import re
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "write-an-agent.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def test_the_blocks_run_in_order_and_the_agents_learn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)  # training writes its run folders here
    monkeypatch.syspath_prepend(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    for block in BLOCKS:
        if found := re.match(r"# (\w+)\.py\n", block):
            monkeypatch.delitem(sys.modules, found[1], raising=False)  # of another test
            (tmp_path / f"{found[1]}.py").write_text(block)
        else:
            exec(compile(block, str(PAGE), "exec"), names)
    *scores, remembered = [float(line) for line in capsys.readouterr().out.splitlines()]
    assert len(scores) == 2 and min(scores) > 100  # in both loops
    assert remembered > 0.9

"""docs/torchrl-losses.md: its Python blocks run, one after the other, as a reader would run them."""

import re
from pathlib import Path

import pytest

from torchpod.config import load

PAGE = Path(__file__).parents[2] / "docs" / "torchrl-losses.md"
TEXT = PAGE.read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


@pytest.mark.filterwarnings("ignore:.*runs uncompiled")  # with the oldest TorchRL that is supported
def test_the_blocks_run_in_order_and_the_agent_learns_in_both_loops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)  # training writes its run folders here
    (tmp_path / "my_loss.py").write_text(BLOCKS[0])
    names: dict[str, object] = {"__name__": "__main__"}
    for block in BLOCKS[1:]:
        exec(compile(block, str(PAGE), "exec"), names)
    scores = [float(line) for line in capsys.readouterr().out.splitlines()]
    assert len(scores) == 2 and min(scores) > 100


def test_the_commands_are_settings_that_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_loss.py").write_text(BLOCKS[0])
    commands = re.findall(r"^torchpod train (.*)$", TEXT, re.MULTILINE)
    assert len(commands) == 4
    for command in commands:
        load(command.split())

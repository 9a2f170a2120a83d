"""docs/gymnasium.md: its Python blocks run, one after the other, as a reader would run them."""

import re
import sys
from pathlib import Path

import pytest

from torchpod.compose import load
from torchpod.makers import make_env

PAGE = Path(__file__).parents[2] / "docs" / "gymnasium.md"
TEXT = PAGE.read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def test_the_blocks_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)  # training writes its run folders here
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_env", raising=False)  # of another test
    (tmp_path / "my_env.py").write_text(BLOCKS[0])
    names: dict[str, object] = {"__name__": "__main__"}
    for block in BLOCKS[1:]:
        exec(compile(block, str(PAGE), "exec"), names)
    score, total, cartpole, own = capsys.readouterr().out.splitlines()
    assert 5 <= float(total) <= 20  # of one episode
    assert float(score) > 12  # 10 by chance, over 100 episodes of 20 flips: 0.22 is one standard error
    assert cartpole == "(4, 4) float32 (4,)"
    assert own == "(1024,) AutoresetMode.NEXT_STEP"


def test_the_commands_are_settings_that_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_env.py").write_text(BLOCKS[0])
    commands = re.findall(r"^torchpod train (.*)$", TEXT, re.MULTILINE)
    assert len(commands) == 3
    limits = [make_env(load(command.split()).env).spec.name for command in commands]
    assert limits == ["Coin", "Coin", "CartPole-v1"]

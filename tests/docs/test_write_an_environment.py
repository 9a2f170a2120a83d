"""docs/write-an-environment.md: its Python blocks run, one after the other, as a reader would run them."""

import re
import sys
from pathlib import Path

import pytest

from torchpod.main import main
from torchpod.makers import make_env
from torchpod.testing import check_env

PAGE = Path(__file__).parents[2] / "docs" / "write-an-environment.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def test_the_page_has_its_blocks():
    assert len(BLOCKS) == 7
    assert "class MyEnv" in BLOCKS[0]
    assert len(BLOCKS[0].splitlines()) <= 35


def test_the_blocks_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)  # training writes its run folder here
    monkeypatch.syspath_prepend(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    for block in BLOCKS:
        if found := re.match(r"# (\w+)\.py\n", block):
            monkeypatch.delitem(sys.modules, found[1], raising=False)  # of another test
            (tmp_path / f"{found[1]}.py").write_text(block)
        else:
            exec(compile(block, str(PAGE), "exec"), names)
    assert "run" in names
    assert main(["check", "my_env.py:MyEnv", "my_plain.py:PlainLift"]) == 0
    check_env(make_env("my_teams.py:Tug"), compile=False)
    small = ("num_envs=8", "total_env_steps=2_000", "compile=false", "logger.console=false", "run_dir=tug")
    assert main(["train", "env=my_teams.py:Tug", "algo=ippo", "evaluation.episodes=2", *small]) == 0
    assert re.search(r"episodes: left -?\d+\.\d, right -?\d+\.\d\) after", capsys.readouterr().out)

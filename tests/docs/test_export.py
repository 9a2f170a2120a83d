"""docs/export.md: its commands and Python blocks run, in a folder with a run in it."""

import re
import shlex
from pathlib import Path

import pytest

from torchpod.compose import load
from torchpod.main import main
from torchpod.run.execute import execute

PAGE = Path(__file__).parents[2] / "docs" / "export.md"
TEXT = PAGE.read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
SMALL = ["env=cartpole", "compile=false", "logger.console=false", "num_envs=8", "total_env_steps=256"]
SMALL += ["algo.unroll_length=16", "evaluation.episodes=2", "run_dir=RUN"]


def test_the_commands_and_the_blocks_run_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    execute(load(SMALL))
    commands = re.findall(r"^torchpod (export .*)$", TEXT, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        assert main(shlex.split(command)) == 0
    assert (tmp_path / "RUN" / "policy.pt2").is_file()
    capsys.readouterr()
    for block in BLOCKS:
        exec(compile(block, str(PAGE), "exec"), {"__name__": "__main__"})
    shape, score = capsys.readouterr().out.splitlines()
    assert shape == "torch.Size([3])"
    assert float(score) > 60

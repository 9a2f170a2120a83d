"""docs/torchrl-losses.md: its Python blocks run, one after the other, as a reader would run them."""

import re
import shlex
from pathlib import Path

import pytest

from torchpod import train
from torchpod.compose import load

PAGE = Path(__file__).parents[2] / "docs" / "torchrl-losses.md"
TEXT = PAGE.read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


@pytest.mark.filterwarnings("ignore:.*runs uncompiled")  # with the oldest TorchRL that is supported
@pytest.mark.slow
def test_the_blocks_run_in_order_and_the_agent_learns_in_both_loops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)  # training writes its run folders here
    (tmp_path / "my_loss.py").write_text(BLOCKS[0])
    names: dict[str, object] = {"__name__": "__main__"}
    for block in BLOCKS[1:2]:
        exec(compile(block, str(PAGE), "exec"), names)
    scores = [float(line) for line in capsys.readouterr().out.splitlines()]
    assert len(scores) == 2 and min(scores) > 100


def test_the_commands_are_settings_that_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name, block in (("my_loss.py", BLOCKS[0]), ("my_mappo.py", BLOCKS[2])):
        (tmp_path / name).write_text(block)
    commands = re.findall(r"^torchpod train (.*)$", TEXT, re.MULTILINE)
    assert len(commands) == 7
    for command in commands:
        load(shlex.split(command))


def test_the_policies_of_many_agents_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_mappo.py").write_text(BLOCKS[2])
    overrides = ["env.grid_length=4", "compile=false", "logger.console=false", "algo.unroll_length=8"]
    run = train(algo="my_mappo.py:MyMAPPO", env="tag_gridworld", num_envs=8, total_env_steps=64, overrides=overrides)
    assert 48 <= run.summary["env_steps"] <= 64  # resets are no steps

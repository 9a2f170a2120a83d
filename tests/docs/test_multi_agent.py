"""docs/multi-agent.md: each of its commands trains, and its agent is one."""

import re
from pathlib import Path

import pytest

from torchpod.config import load
from torchpod.run import execute

PAGE = Path(__file__).parents[2] / "docs" / "multi-agent.md"
TEXT = PAGE.read_text()
COMMANDS = re.findall(r"^torchpod train (.*?)(?:  #.*)?$", TEXT, re.MULTILINE)
TINY = ("num_envs=4", "total_env_steps=1", "algo.unroll_length=8", "compile=false", "logger.console=false")


def test_there_are_commands():
    assert len(COMMANDS) == 10


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_trains(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    (tmp_path / "my_agents.py").write_text(block)
    overrides = [word.strip("'") for word in command.split()]
    run = execute(load([*overrides, *TINY, "evaluation.episodes=1", f"run_dir={tmp_path}/run"]))
    assert run.summary["env_steps"] > 0
    line = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1]
    assert all(f'"{policy}/policy_loss"' in line for policy in run.agent.optimizer_groups())
    assert '"episode_return/' in line

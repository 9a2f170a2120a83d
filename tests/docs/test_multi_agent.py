"""docs/multi-agent.md: each of its commands trains, and its agent is one."""

import re
import sys
from pathlib import Path

import pytest

from torchpod.compose import load
from torchpod.main import main
from torchpod.run.execute import execute

PAGE = Path(__file__).parents[2] / "docs" / "multi-agent.md"
TEXT = PAGE.read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
FILES = {found[1]: block for block in BLOCKS if (found := re.match(r"# (\w+\.py)\n", block))}
COMMANDS = re.findall(r"^torchpod train (.*?)(?:  #.*)?$", TEXT, re.MULTILINE)
TINY = ("num_envs=4", "total_env_steps=1", "algo.unroll_length=8", "compile=false", "logger.console=false")


def test_there_are_commands():
    assert len(COMMANDS) == 21


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_trains(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for what, package in (("env=envpool", "envpool"), ("env=pettingzoo", "pettingzoo"), ("my_game", "pettingzoo")):
        if what in command:
            pytest.importorskip(package, reason=f"the extra `{package}` is not installed", exc_type=ImportError)
    monkeypatch.chdir(tmp_path)
    for name, block in FILES.items():
        (tmp_path / name).write_text(block)
    overrides = [word.strip("'") for word in command.split()]
    if "from:" in command:  # what the page trains before
        execute(load(["algo=ippo", "env=tag_gridworld", *TINY, "evaluation.episodes=1", "run_dir=runs/first"]))
    run = execute(load([*overrides, *TINY, "evaluation.episodes=1", f"run_dir={tmp_path}/run"]))
    assert run.summary["env_steps"] > 0
    line = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1]
    assert all(f'"{policy}/policy_loss"' in line for policy in run.agent.optimizer_groups())
    assert '"episode_return/' in line


def test_an_episode_is_recorded_and_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    pytest.importorskip("PIL")
    monkeypatch.chdir(tmp_path)
    small = [*TINY, "evaluation.episodes=1", "run_dir=RUN", "env.max_episode_steps=20", "env.num_runners=12"]
    execute(load(["algo=ippo", "env=tag_continuous", *small]))
    (block,) = [block for block in BLOCKS if "tag.npz" in block]
    for command in re.findall(r"^torchpod eval (.*?)(?:  #.*)?$", TEXT, re.MULTILINE):
        capsys.readouterr()
        assert main(["eval", *command.split(), "--episodes", "1"]) == 0
        exec(compile(block, str(PAGE), "exec"), {"__name__": "__main__"})
        assert re.search(r"^\(20, 12, 2\) .* 12 runners, \d+ at the end$", capsys.readouterr().out, re.MULTILINE)
    assert (tmp_path / "tag.gif").is_file()


def test_two_learn_to_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("pettingzoo", reason="the extra `pettingzoo` is not installed")
    monkeypatch.chdir(tmp_path)  # training writes its run folder here
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_game", raising=False)
    (tmp_path / "my_game.py").write_text(FILES["my_game.py"])
    (block,) = [block for block in BLOCKS if "from my_game import" in block]
    exec(compile(block, str(PAGE), "exec"), {"__name__": "__main__"})
    assert float(capsys.readouterr().out) > 10  # 2.5 by chance

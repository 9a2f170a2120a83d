"""docs/from-cleanrl.md: its Python blocks run, and the settings and files of its tables exist."""

import dataclasses
import re
import shlex
from pathlib import Path

import pytest

from torchpod.algos.ppo import PPOConfig
from torchpod.compose import load
from torchpod.learner import LearnerConfig
from torchpod.makers import make_agent, make_env

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "from-cleanrl.md"
TEXT = PAGE.read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def test_the_blocks_run_in_order_and_the_agent_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)  # training writes its run folders here
    (tmp_path / "my_ppo.py").write_text(BLOCKS[0])
    exec(compile(BLOCKS[1], str(PAGE), "exec"), {"__name__": "__main__"})
    assert float(capsys.readouterr().out) > 60


def test_the_commands_are_settings_that_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_ppo.py").write_text(BLOCKS[0])
    commands = re.findall(r"^torchpod train (.*)$", TEXT, re.MULTILINE)
    assert len(commands) == 4
    for command in commands:
        config = load(shlex.split(command))
        make_agent(config.algo, make_env(config.env).spec)()


def test_the_settings_of_the_table_exist():
    table = TEXT[TEXT.index("| flag |") : TEXT.index("CleanRL's own settings")]
    names = {"agent": PPOConfig, "learner": LearnerConfig}
    config, found = load([]), 0
    for row in table.strip().splitlines()[2:]:
        group = ""
        for setting in re.findall(r"`([^`]+)`", row.split("|")[2]):
            path = setting.partition("=")[0]
            if match := re.fullmatch(r"algo\.(agent|learner)\.(\w+)|\.(\w+)", path):
                group = match[1] or group
                assert (match[2] or match[3]) in {f.name for f in dataclasses.fields(names[group])}, setting
            elif not path.startswith("torchpod "):
                first, *rest = path.split(".")
                value = config.experiment if first == "experiment_name" else getattr(config, first)
                assert not rest or hasattr(value, rest[0]), setting
            found += 1
    assert found == 22


def test_cleanrls_settings_are_the_defaults_but_for_the_environments():
    config = load(["algo=ppo", "env=cartpole", "num_envs=4", "algo.unroll_length=128"])
    agent, learner = PPOConfig(**config.algo.agent), config.algo.learner
    assert (agent.discount, agent.gae_lambda, agent.clip) == (0.99, 0.95, 0.2)
    assert (agent.entropy_coefficient, agent.value_coefficient) == (0.01, 0.5)
    assert agent.normalize_advantage and agent.value_clip and learner.anneal_learning_rate
    assert (learner.num_minibatches, learner.num_epochs, learner.max_grad_norm) == (4, 4, 0.5)
    assert (learner.learning_rate, config.total_env_steps) == (2.5e-4, 500_000)


def test_links_and_files_exist():
    links = re.findall(r"\]\(([^)#]+)\)", TEXT)
    files = re.findall(r"`((?:torchpod|algos|configs)/\S+)`", TEXT)
    assert len(links) >= 3 and len(files) >= 6
    assert [x for x in links if not (PAGE.parent / x).exists()] + [x for x in files if not (ROOT / x).exists()] == []

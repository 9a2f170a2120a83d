"""docs/autoscale.md: its commands run, one after the other, and its numbers are those of the code."""

import re
import shlex
from pathlib import Path

import pytest

from torchpod.commands import autoscale, knobs, probe
from torchpod.main import main

TEXT = (Path(__file__).parents[2] / "docs" / "autoscale.md").read_text()
COMMANDS = re.findall(r"^torchpod (.*)$", TEXT, re.MULTILINE)
SMALL = ["compile=false", "num_envs=8", "algo.unroll_length=8", "algo.learner.num_minibatches=1"]


@pytest.mark.slow
def test_its_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    assert [command.split()[0] for command in COMMANDS] == ["autoscale", "train", "autoscale"]
    for command in COMMANDS:
        words = shlex.split(command)
        size = [*SMALL, "--seconds", "0.05", "--max-envs", "8"]
        if words[0] == "train":
            size = ["compile=false", "algo.unroll_length=8", "total_env_steps=128", "logger.console=false"]
            size += ["evaluation.episodes=2"]
        assert main([*words, *size]) == 0
    printed = capsys.readouterr().out
    assert "fastest: num_envs=8" in printed and "largest: num_envs=8" in printed and "eval return" in printed


def test_its_numbers_are_those_of_the_code():
    assert "gain less than 5 %" in TEXT and knobs.GAIN == 1.05
    assert "0.9 of what is free" in TEXT and probe.CUDA_SHARE == 0.9
    assert "it is 0.8 of what the machine" in TEXT and probe.CPU_SHARE == 0.8
    options = {action.option_strings[0]: action for action in autoscale._parser()._actions if action.option_strings}
    assert options["--seconds"].default == 5
    named = set(re.findall(r"`(--[a-z-]+)", TEXT)) | {"--memory", "--max-envs"}
    assert named <= set(options)

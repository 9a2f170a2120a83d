"""The command as a process of its own, and files of users that end it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchpod import checkpoint
from torchpod.checkpoint import CheckpointError
from torchpod.compose import load
from torchpod.config import ConfigError
from torchpod.main import main
from torchpod.run.execute import execute
from torchpod.run.folder import read_config
from torchpod.run.judge import Judge
from torchpod.watched import HostError

SMALL = ("env=cartpole", "compile=false", "num_envs=4", "algo.unroll_length=8", "total_env_steps=64")
QUIET = ("logger.console=false", "evaluation.episodes=2")


@pytest.mark.parametrize("seconds", [0.3, 0.6, 1.2])
def test_an_interrupt_while_it_is_imported_stops_it_in_one_line(seconds, tmp_path):
    command = [sys.executable, "-m", "torchpod", "list", "algos"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    time.sleep(seconds)
    still_there = process.poll() is None
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=30)
    if still_there and process.returncode == -signal.SIGINT:
        assert "torchpod/main.py" not in error  # Python itself was not there yet
    elif still_there and process.returncode:
        assert (error, process.returncode) == ("torchpod: stopped\n", 130)


@pytest.mark.parametrize("where", ["file", "constructor", "step"])
def test_a_file_that_ends_the_process_is_an_error(where, tmp_path: Path, monkeypatch, capsys):
    lines = (Path(__file__).parent / "user_env.py").read_text()
    if where == "file":
        lines += "\nraise SystemExit(0)\n"
    elif where == "constructor":
        lines = lines.replace(
            "        self.spec = EnvSpec(", "        raise SystemExit(0)\n        self.spec = EnvSpec(", 1
        )
    else:
        lines = lines.replace("        position, count =", "        raise SystemExit(0)\n        position, count =", 1)
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(lines)
    assert main(["train", *SMALL[1:], *QUIET, "env=mine.py:MyEnv", "run_dir=run"]) == 1
    assert "SystemExit" in capsys.readouterr().err.splitlines()[-1] and not Path("run").exists()


@pytest.mark.parametrize(
    "text", [b"", b"garbage", b"[1, 2]", b"\xff\xfe\x00", b"seed: 1", b"env: {}\nalgo: {name: ppo}"]
)
def test_a_damaged_config_is_named(text, tmp_path: Path):
    (tmp_path / "config.yaml").write_bytes(text)
    with pytest.raises(CheckpointError, match=r"is no run folder: config\.yaml is not ours"):
        read_config(tmp_path)


def test_a_finished_run_with_a_damaged_summary_is_evaluated_again(tmp_path: Path):
    run = execute(load([*SMALL, *QUIET, f"run_dir={tmp_path}/run"]))
    (run.dir / "summary.json").write_text("{bad")
    assert execute(load([f"resume={run.dir}"])).summary["eval_return"] == run.summary["eval_return"]


def test_a_run_that_goes_on_is_finished_no_more(tmp_path: Path, monkeypatch):
    execute(load([*SMALL, *QUIET, f"run_dir={tmp_path}/run"]))

    def fails(*_):
        raise HostError("no way on")

    with monkeypatch.context() as broken, pytest.raises(HostError):
        broken.setattr(Judge, "evaluate", fails)
        execute(load([f"resume={tmp_path}/run", "total_env_steps=128"]))
    assert not (tmp_path / "run" / "summary.json").exists()
    assert execute(load([f"resume={tmp_path}/run"])).summary["env_steps"] > 64


def test_a_class_may_move_to_a_file_of_another_name(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parent / "user_env.py").read_text()
    Path("one.py").write_text(text)
    execute(load([*SMALL[1:], *QUIET, "env=one.py:MyEnv", "run_dir=run"]))
    Path("two.py").write_text(text)
    with pytest.raises(ConfigError, match=r"env.name=.*two.py:MyEnv cannot change: run has .*one.py:MyEnv"):
        execute(load(["resume=run", "env=two.py:MyEnv", "total_env_steps=128"]))  # the first is still there
    os.rename("one.py", "two.py")
    execute(load(["resume=run", "env=two.py:MyEnv", "total_env_steps=128"]))
    assert checkpoint.latest(Path("run")).name == f"{4:010d}"


def test_a_run_folder_is_a_folder():
    with pytest.raises(ConfigError, match=r"run_dir=/dev/null is a file; name a folder"):
        execute(load([*SMALL, *QUIET, "run_dir=/dev/null"]))

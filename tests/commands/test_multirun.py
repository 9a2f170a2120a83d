"""Runs with several values: which there are, that a failed one does not end the others, and that a signal does."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_main import ENV_FILE, SMALL
from torchpod.commands import multirun as module
from torchpod.commands.multirun import combinations, multirun
from torchpod.config import ConfigError
from torchpod.run.folder import read_config


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["seed=1", "num_envs=2"], [["seed=1", "num_envs=2"]]),
        (["num_envs=4,8", "seed=range(0,2)"], [[f"num_envs={n}", f"seed={s}"] for n in (4, 8) for s in (0, 1)]),
        (["algo=choice(ppo,a2c)"], [["algo=ppo"], ["algo=a2c"]]),
        (["env=a/my_env.py:A,my env.py:B"], [["env=a/my_env.py:A"], ["env=my env.py:B"]]),
        (
            ["+members.x=[1,2]", "algo.agent.hidden=[8],[8,8]"],
            [["+members.x=[1,2]", f"algo.agent.hidden={h}"] for h in ("[8]", "[8,8]")],
        ),
        (["run_dir=a(b)"], [["run_dir=a(b)"]]),  # which `load` refuses
    ],
)
def test_runs_are_the_product_of_several_values_as_hydra_reads_them(overrides: list[str], expected: list[list[str]]):
    assert combinations(overrides) == expected


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["seed=interval(0,1)"], r"seed=interval\(0,1\) is no list of values; write them, or choice"),
        (["seed=0,1", "num_envs=8,0"], "num_envs=0 must be at least 1"),
        (["seed=0,1", "resume=auto"], "resume is of one run, and --multirun has several; leave it out"),
        (["seed=range(3,1)"], r"seed=range\(3,1\) has no values; give some, e.g. seed=1,2"),
        (["seed=0,1", "run_dir=x"], "run_dir is of one run, and --multirun has several; leave it out"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_the_first_run(overrides, message, monkeypatch):
    monkeypatch.setattr(module, "_train", lambda run: pytest.fail("it trains"))
    with pytest.raises(ConfigError, match=message):
        multirun(overrides)


def test_under_torchrun_it_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="start it without torchrun"):
        multirun(["seed=0,1"])


def test_every_run_has_its_folder_and_one_that_fails_ends_no_other(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    env = (f"env={ENV_FILE}:MyEnv", "num_envs=8", "+env.fault=raise,nothing")
    assert multirun([*SMALL, *env, "experiment_name=mine"]) == 1
    out, error = capfd.readouterr()
    started = [line for line in out.splitlines() if line.startswith("run ") and " of " in line]
    assert [line.split(":")[0] for line in started] == ["run 1 of 2", "run 2 of 2"] and "+env.fault=raise" in started[0]
    last = error.splitlines()[-1]
    assert last.startswith("torchpod: 1 of 2 runs failed: ") and "+env.fault=raise" in last and "nothing" not in last
    (run,) = Path("runs/mine").glob("*/summary.json")
    assert read_config(run.parent).env["fault"] == "nothing"


def test_ctrl_c_ends_all_with_a_checkpoint_of_the_run_it_reached(tmp_path):
    settings = [x for x in SMALL if not x.startswith(("logger", "total"))]
    process = subprocess.Popen(
        [sys.executable, "-m", "torchpod", "train", "-m", *settings, "total_env_steps=100000000", "seed=0,1"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(3)]  # the last of an iteration
    assert lines[0].startswith("run 1 of 2: ") and lines[1].startswith("run folder runs/")
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    told, stopped = error.splitlines()
    assert told.startswith("torchpod: stopped at iteration ") and stopped == "torchpod: stopped in run 1 of 2"
    assert process.returncode == 130 and len(list((tmp_path / "runs" / "ppo_cartpole").iterdir())) == 1

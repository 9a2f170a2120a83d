"""Runs that are killed, stopped, broken, resumed and handed on."""

import csv
import errno
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

import torchpod as tp
from tests.user_env import MyEnv
from tests.zygote import Zygote, wait_until
from torchpod import checkpoint, metrics
from torchpod import random as keys
from torchpod.anakin import EVAL_STREAM
from torchpod.checkpoint import CheckpointError
from torchpod.commands.eval_run import eval_run
from torchpod.compile import Compiler
from torchpod.compose import load
from torchpod.config import ConfigError
from torchpod.envs.classic.cartpole import CartPole
from torchpod.evaluate import evaluate
from torchpod.makers import make_agent
from torchpod.replay.segments import Segments
from torchpod.run.execute import Run, execute
from torchpod.run.training import NonFiniteErrorInRun

ENV_FILE = Path(__file__).parents[1] / "user_env.py"
SMALL = (
    "compile=false",
    "logger.console=false",
    "num_envs=8",
    "algo.unroll_length=16",
    "algo.agent.hidden=[8]",
    "algo.learner.num_epochs=2",
    "algo.learner.num_minibatches=2",
    "evaluation.episodes=2",
)
CARTPOLE = (*SMALL, "env.max_episode_steps=20")
ITERATION = 8 * 16  # environment steps


def run(folder: Path, *overrides: str) -> Run:
    return execute(load([*CARTPOLE, f"run_dir={folder}", *overrides]))


def rows(run_dir: Path) -> list[dict]:
    """What metrics.jsonl says, without times."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not metrics.is_timing(k)} for line in lines]


def state(run_dir: Path) -> dict[str, torch.Tensor]:
    folder = checkpoint.latest(run_dir)
    return torch.load(folder / "state-0.pt", weights_only=True) | checkpoint.load_weights(folder)


def assert_equal_runs(one: Path, other: Path) -> None:
    assert checkpoint.latest(one).name == checkpoint.latest(other).name
    a, b = state(one), state(other)
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []
    assert rows(one) == rows(other)


def rows_written(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.parametrize(
    ("kills", "settings"),
    [
        pytest.param(4, ("checkpoint.interval_s=0",), id="anakin"),
        pytest.param(10, ("checkpoint.interval_s=0.2",), id="anakin, now and then", marks=pytest.mark.slow),
        pytest.param(2, ("checkpoint.interval_s=0", "loop=sebulba"), id="sebulba"),  # two actor threads, lag 1
    ],
)
def test_a_run_that_is_killed_again_and_again_ends_as_if_nothing_had_happened(
    kills: int, settings: tuple[str, ...], zygote: Zygote, tmp_path: Path
):
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed={seed}")
    draw = random.Random(seed)
    iterations = 8 * kills
    command = ("train", *CARTPOLE, f"total_env_steps={iterations * ITERATION}", *settings)
    status, _, error = zygote.run(*command, "run_dir=whole", cwd=tmp_path)
    assert status == 0, error
    killed, killed_at = tmp_path / "killed", []
    for moment in sorted(draw.uniform(0.0, iterations - 2.0) for _ in range(kills)):
        if checkpoint.all_of(killed) and draw.random() < 0.5:
            job = zygote.start("train", "resume=killed", cwd=tmp_path)
        else:
            job = zygote.start(*command, "run_dir=killed", "resume=auto", cwd=tmp_path)
        if draw.random() < 0.8:  # in that iteration; else somewhere between the start and the first one
            wait_until(lambda moment=moment: rows_written(killed) >= moment)
        time.sleep(draw.uniform(0.0, 0.1))
        job.kill(signal.SIGKILL)
        assert job.wait() == -signal.SIGKILL, job.err
        killed_at.append(checkpoint.all_of(killed)[-1].name if checkpoint.all_of(killed) else None)
    print(f"killed after checkpoints {killed_at}")
    status, _, error = zygote.run(*command, "run_dir=killed", "resume=auto", cwd=tmp_path)
    assert status == 0, error
    assert_equal_runs(tmp_path / "whole", killed)


def judged(run_dir: Path, iteration: int) -> list[float]:
    """The mean return of what a run of CARTPOLE had learned then, of each member, as `evaluate` finds it."""
    config = load([*CARTPOLE, f"resume={run_dir}"])
    env = CartPole(max_episode_steps=20)
    agent = make_agent(config.algo, env.spec)()
    weights = checkpoint.load_weights(run_dir / "checkpoints" / f"{iteration:010d}")
    population = len(weights["discount"]) if weights["discount"].ndim else 1
    key = keys.fold_in(keys.key(0), EVAL_STREAM)
    found = evaluate(agent, env, weights, key, num_episodes=2, compiler=Compiler(False, population))
    return found.returns.double().mean(-1).reshape(-1).tolist()


@pytest.mark.parametrize("settings", [(), ("population=2",), ("loop=sebulba",)], ids=["anakin", "members", "sebulba"])
def test_evaluations_in_training_judge_what_is_learned_then_and_change_nothing(
    settings: tuple[str, ...], tmp_path: Path
):
    own = (*settings, f"total_env_steps={7 * ITERATION}", "checkpoint.interval_s=0", "checkpoint.keep=9")
    every = f"evaluation.every={5 * ITERATION // 2}"
    run(tmp_path / "plain", *own)
    run(tmp_path / "whole", *own, every)
    execute(load([*CARTPOLE, f"run_dir={tmp_path / 'cut'}", *own, every]), until=4)
    execute(load([f"resume={tmp_path / 'cut'}"]))
    assert rows(tmp_path / "cut") == rows(tmp_path / "whole")
    table = rows(tmp_path / "whole")
    found = {row["iteration"]: row["eval_return"] for row in table if "eval_return" in row}
    assert [row["iteration"] for row in table] == [1, 2, 3, 3, 4, 5, 5, 6, 7]  # of every 2.5 iterations
    for iteration, told in found.items():
        assert (told if isinstance(told, list) else [told]) == judged(tmp_path / "whole", iteration)
    assert [row for row in table if "eval_return" not in row] == rows(tmp_path / "plain")
    every_2 = f"evaluation.every={2 * ITERATION}"
    again = execute(load([f"resume={tmp_path / 'plain'}", f"total_env_steps={8 * ITERATION}", every_2])).dir
    assert [row["iteration"] for row in rows(again) if "eval_return" in row] == [
        7,
        8,
    ]  # one was due, and is made up for


@pytest.mark.slow
@pytest.mark.parametrize("settings", [(), ("population=2",), ("loop=sebulba",)], ids=["anakin", "members", "sebulba"])
def test_compiled_evaluations_in_training_are_compiled_once(settings: tuple[str, ...], tmp_path: Path):
    own = (*CARTPOLE, *settings, "compile=true", f"total_env_steps={6 * ITERATION}", f"evaluation.every={ITERATION}")
    execute(load([*own, "loop.iterations_per_call=2", "checkpoint.interval_s=0", f"run_dir={tmp_path / 'run'}"]))
    table = [row for row in rows(tmp_path / "run") if "eval_return" in row]
    assert [row["iteration"] for row in table] == [2, 4, 6]
    for row in table[1:]:
        told = row["eval_return"] if isinstance(row["eval_return"], list) else [row["eval_return"]]
        assert told == pytest.approx(judged(tmp_path / "run", row["iteration"]))


def test_an_evaluation_in_training_has_the_returns_of_groups_and_what_the_environment_says(tmp_path: Path):
    game = ("algo=ippo", "env=tag_gridworld", "env.max_episode_steps=9", "env.grid_length=2")
    execute(load([*SMALL, *game, f"total_env_steps={ITERATION}", "evaluation.every=1", f"run_dir={tmp_path / 'run'}"]))
    _, row = rows(tmp_path / "run")
    score = json.loads((tmp_path / "run/summary.json").read_text())["eval_return"]
    assert row["eval_return"] == score["mean"] and 1 <= row["eval_length"] <= 9
    for name in ("tagger", "runner"):
        assert row[f"eval_return/{name}"] == score["groups"][name]["mean"]
    assert row["eval_tag_rate"] == score["episode"]["tag_rate"]


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["anakin", "sebulba"])
def test_a_compiled_run_that_is_killed_ends_as_if_nothing_had_happened(loop: str, zygote: Zygote, tmp_path: Path):
    command = (
        "train",
        *CARTPOLE,
        f"loop={loop}",
        "compile=true",
        f"total_env_steps={200 * ITERATION}",
        "checkpoint.interval_s=0",
    )
    status, _, error = zygote.run(*command, "run_dir=whole", cwd=tmp_path)
    assert status == 0, error
    job = zygote.start(*command, "run_dir=killed", cwd=tmp_path)
    wait_until(lambda: rows_written(tmp_path / "killed") >= 3, timeout_s=300.0)
    job.kill(signal.SIGKILL)
    assert job.wait() == -signal.SIGKILL, job.err
    assert rows_written(tmp_path / "killed") < rows_written(tmp_path / "whole")
    status, _, error = zygote.run("train", "resume=killed", cwd=tmp_path)
    assert status == 0, error
    assert_equal_runs(tmp_path / "whole", tmp_path / "killed")


def test_a_run_killed_while_it_writes_a_checkpoint_goes_on_from_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    class Killed(BaseException):
        pass

    rename = os.replace

    def killed_in_the_third(source: Path, target: Path) -> None:
        if Path(target).name == f"{3:010d}":
            raise Killed
        rename(source, target)

    settings = (f"total_env_steps={6 * ITERATION}", "checkpoint.interval_s=0", "checkpoint.keep=2")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(checkpoint.os, "replace", killed_in_the_third)
        run(tmp_path / "killed", *settings)
    left = tmp_path / "killed" / "checkpoints" / f".partial-{3:010d}"
    assert (left / "meta.json").exists()
    left.rename(left.with_name(f".partial-{4:010d}"))  # of another moment: nothing in it may be taken over
    assert checkpoint.latest(tmp_path / "killed").name == f"{2:010d}"
    run(tmp_path / "killed", *settings, "resume=auto")
    run(tmp_path / "whole", *settings)
    assert_equal_runs(tmp_path / "whole", tmp_path / "killed")
    names = sorted(path.name for path in (tmp_path / "killed" / "checkpoints").iterdir())
    assert names == [f"{5:010d}", f"{6:010d}"]  # rotated, and nothing partial


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_told_to_stop_saves_itself_within_seconds_and_can_go_on(
    number: signal.Signals, zygote: Zygote, tmp_path: Path
):
    command = ("train", *CARTPOLE, f"total_env_steps={40 * ITERATION}")
    job = zygote.start(*command, "run_dir=stopped", cwd=tmp_path)
    wait_until(lambda: rows_written(tmp_path / "stopped") >= 5)
    began = time.perf_counter()
    job.kill(number)
    assert job.wait() == 130
    seconds = time.perf_counter() - began
    print(f"saved and gone after {seconds:.1f} s")
    assert seconds < 10
    saved = checkpoint.latest(tmp_path / "stopped")
    assert job.err == f"torchpod: stopped at iteration {int(saved.name)}; go on with resume=stopped\n"
    assert not (tmp_path / "stopped" / "summary.json").exists()
    assert zygote.run("train", "resume=stopped", cwd=tmp_path)[0] == 0
    assert zygote.run(*command, "run_dir=whole", cwd=tmp_path)[0] == 0
    assert_equal_runs(tmp_path / "whole", tmp_path / "stopped")


def test_a_second_ctrl_c_does_not_wait_for_the_running_call(zygote: Zygote, tmp_path: Path):
    slow = (f"env={ENV_FILE}:MyEnv", "+env.fault=sleep", "+env.at=200")
    job = zygote.start("train", *SMALL, *slow, "run_dir=slow", "checkpoint.interval_s=0", cwd=tmp_path)
    wait_until(lambda: rows_written(tmp_path / "slow") >= 11)  # from now on a call takes five seconds
    saved = checkpoint.latest(tmp_path / "slow")
    time.sleep(1.0)
    began = time.perf_counter()
    job.kill(signal.SIGINT)
    time.sleep(0.2)
    job.kill(signal.SIGINT)
    assert job.wait() == 130
    assert time.perf_counter() - began < 2
    assert job.err == "torchpod: stopped by SIGINT without a new checkpoint\n"
    assert checkpoint.latest(tmp_path / "slow").name >= saved.name


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGINT])
def test_a_run_that_is_told_to_stop_while_it_compiles_stops_at_once(number: signal.Signals, tmp_path: Path):
    process = subprocess.Popen(
        [sys.executable, "-m", "torchpod", "train", "run_dir=compiling"],
        cwd=tmp_path,
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")},
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until((tmp_path / "compiling" / "metrics.jsonl").exists)
    time.sleep(2.0)
    assert rows_written(tmp_path / "compiling") == 0, "it has compiled already"
    began = time.perf_counter()
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    seconds = time.perf_counter() - began
    print(f"gone after {seconds:.1f} s")
    assert seconds < 10
    assert (process.returncode, error) == (130, f"torchpod: stopped by {number.name} without a new checkpoint\n")
    assert checkpoint.all_of(tmp_path / "compiling") == []


def test_a_run_that_ended_before_its_first_checkpoint_begins_again_in_its_folder(tmp_path: Path):
    settings = (f"total_env_steps={3 * ITERATION}",)
    run(tmp_path / "whole", *settings)
    run(tmp_path / "again", *settings)
    for path in checkpoint.all_of(tmp_path / "again"):
        path.rename(tmp_path / "taken away")
    with pytest.raises(ConfigError, match="already holds a run"):
        run(tmp_path / "again", *settings)
    run(tmp_path / "again", *settings, "resume=auto")
    assert_equal_runs(tmp_path / "whole", tmp_path / "again")


def test_a_resumed_run_keeps_its_own_settings_unless_they_are_given(tmp_path: Path):
    run(tmp_path / "a", f"total_env_steps={3 * ITERATION}", "checkpoint.keep=2", "loop.iterations_per_call=2")
    resumed = execute(load([f"resume={tmp_path / 'a'}", f"total_env_steps={5 * ITERATION}", "checkpoint.interval_s=0"]))
    assert resumed.summary["env_steps"] == rows(tmp_path / "a")[-1]["env_steps"]
    config = yaml.safe_load((tmp_path / "a" / "config.yaml").read_text())
    assert config["checkpoint"] == {"interval_s": 0.0, "keep": 2}
    assert (config["total_env_steps"], config["num_envs"], config["compile"]) == (5 * ITERATION, 8, False)
    assert [row["iteration"] for row in rows(tmp_path / "a")] == [2, 3, 4, 5]


def test_resuming_a_finished_run_changes_nothing_that_was_learned(tmp_path: Path):
    run(tmp_path / "a", f"total_env_steps={2 * ITERATION}")
    before, inode = rows(tmp_path / "a"), checkpoint.latest(tmp_path / "a").stat().st_ino
    summary = (tmp_path / "a" / "summary.json").read_text()
    again = execute(load([f"resume={tmp_path / 'a'}"]))
    assert rows(tmp_path / "a") == before
    assert checkpoint.latest(tmp_path / "a").stat().st_ino == inode
    assert (tmp_path / "a" / "summary.json").read_text() == summary  # with its steps per second
    assert again.summary == json.loads(summary) and again.summary["eval_return"]["episodes"] == 2
    with pytest.raises(ConfigError, match="goes on in that folder, and run_dir=.* is another; leave run_dir out"):
        execute(load([f"resume={tmp_path / 'a'}", f"run_dir={tmp_path / 'b'}"]))


def test_a_run_on_an_own_environment_goes_on_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = (Path(__file__).parents[1] / "user_env.py").read_text()
    for folder in ("one", "two", "moved"):
        (tmp_path / folder).mkdir()
    (tmp_path / "one" / "my_env.py").write_text(source)
    monkeypatch.chdir(tmp_path / "one")
    settings = [s for s in CARTPOLE if not s.startswith("env")]
    execute(load([*settings, "env=my_env.py:MyEnv", "run_dir=run", f"total_env_steps={ITERATION}"]))
    monkeypatch.chdir(tmp_path / "two")
    more = [f"resume={tmp_path / 'one' / 'run'}", f"total_env_steps={2 * ITERATION}"]
    assert execute(load(more)).summary["env_steps"] > 0
    (tmp_path / "one" / "my_env.py").rename(tmp_path / "moved" / "my_env.py")
    more[1] = f"total_env_steps={3 * ITERATION}"
    with pytest.raises(ConfigError, match=r"give env=path/to/file\.py:Class with where it is\."):
        execute(load(more))
    execute(load([*more, "env=../moved/my_env.py:MyEnv"]))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("class MyEnv(", "cannot be imported: SyntaxError: "),
        ("import nothing_of_that_name", "cannot be imported: ModuleNotFoundError: "),
        ("MyEnv = 3", "has no class MyEnv"),
        (
            "from torchpod.envs import CartPole\nclass MyEnv(CartPole):\n    def reset(self, keys):\n        oops",
            "NameError",
        ),
    ],
)
def test_an_own_environment_that_fails_is_named(source: str, message: str, tmp_path: Path):
    (tmp_path / "my_env.py").write_text(source)
    settings = [s for s in CARTPOLE if not s.startswith("env")]
    with pytest.raises(ConfigError, match=message):
        execute(load([*settings, f"env={tmp_path / 'my_env.py'}:MyEnv", f"run_dir={tmp_path / 'run'}"]))
    assert not (tmp_path / "run").exists()


def test_resume_auto_finds_the_newest_run_of_the_experiment_and_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    settings = (*CARTPOLE, f"total_env_steps={2 * ITERATION}", "seed=3", "resume=auto")
    first = execute(load(settings))
    assert (first.dir.parent, first.dir.name.endswith("-seed3")) == (Path("runs/ppo_cartpole"), True)
    other = execute(load([*settings, "experiment_name=other"]))
    assert other.dir.parent == Path("runs/other")
    assert execute(load(settings)).dir == first.dir


def test_runs_that_start_in_the_same_second_get_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    settings = (*CARTPOLE, f"total_env_steps={ITERATION}")
    assert len({execute(load(settings)).dir for _ in range(4)}) == 4


class TestNanGuard:
    def test_the_run_stops_with_the_trajectory_and_keeps_its_last_checkpoint(self, tmp_path: Path):
        env = {"name": f"{ENV_FILE}:MyEnv", "limit": 150, "fault": "bad_reward", "at": 120}  # in the 8th iteration
        overrides = [f"env={env['name']}", *(f"+env.{k}={v}" for k, v in env.items() if k != "name")]
        folder = tmp_path / "a"
        with pytest.raises(NonFiniteErrorInRun, match="gradient of iteration 8 is not finite") as error:
            execute(load([*SMALL, *overrides, f"run_dir={folder}", "checkpoint.interval_s=0"]))
        path = folder / "nan" / "iteration-8-rank-0.pt"
        assert str(path) in str(error.value)
        trajectory = torch.load(path, weights_only=True)
        reward = trajectory[".timestep.reward"]
        assert reward.shape == (17, 8)
        assert reward[8].isnan().all() and reward.isnan().sum() == 8
        assert checkpoint.latest(folder).name == f"{7:010d}"
        assert not any(x.isnan().any() for x in checkpoint.load_weights(checkpoint.latest(folder)).values())

    def test_a_full_disk_does_not_hide_what_was_wrong(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        def write(path: Path, tensors: dict[str, torch.Tensor]):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(checkpoint, "write_tensors", write)
        overrides = [f"env={ENV_FILE}:MyEnv", "+env.limit=150", "+env.fault=bad_reward", "+env.at=120"]
        with pytest.raises(NonFiniteErrorInRun) as error:
            execute(load([*SMALL, *overrides, f"run_dir={tmp_path / 'a'}"]))
        assert re.fullmatch(
            "a gradient of iteration 8 is not finite; the trajectory it came from is in no file. The environment gave "
            r"numbers that are not finite: reward.*\. .*/checkpoints/0000000007 cannot be written \(No space left on "
            r"device\); free some space, or choose another folder with run_dir=DIR\.",
            str(error.value),
        ), str(error.value)

    @pytest.mark.parametrize(
        "algo",
        [
            "ppo",
            "torchrl loss=ClipPPOLoss",
            "dqn algo.learner.num_epochs=1 algo.replay.min_size=256",
            "dqn algo.learner.num_epochs=1 algo.replay.min_size=1200",
            "ppo loop=sebulba",
            "ippo",
        ],
        ids=["ppo", "torchrl", "dqn", "dqn that fills", "sebulba", "of two agents"],
    )
    def test_a_mask_that_allows_nothing_is_named(self, tmp_path: Path, algo: str):
        """In the 8th iteration; `check_env` plays 100 steps."""
        kind, name = ("ClosingOfTwo", r"\['pair'\]") if algo == "ippo" else ("Closing", "")
        overrides = [f"env={ENV_FILE}:{kind}", "+env.limit=150", "+env.at=120", f"run_dir={tmp_path / 'a'}"]
        sentence = rf"observation{name}\['action_mask'\] must allow at least one action in every row; in step "
        message = f"nothing can be learned from iteration 8; the trajectory .* The cause .*: {sentence}"
        with pytest.raises(NonFiniteErrorInRun, match=message):
            execute(load([*SMALL, *f"algo={algo}".split(), *overrides]))
        if "1200" not in algo:
            assert checkpoint.latest(tmp_path / "a").name == f"{7:010d}"

    @pytest.mark.parametrize("algo", ["ppo", "ppo loop=sebulba", "ippo"], ids=["ppo", "sebulba", "of two agents"])
    def test_a_mask_that_allows_nothing_from_the_first_step_on_is_refused_at_the_start(self, tmp_path: Path, algo: str):
        kind, name, where, more = "Closing", "", "environment 0", ""
        if algo == "ippo":
            kind, name, where = "ClosingOfTwo", "['pair']", "environment 0, agent 1"
            more = "; leave something to agents that are out of the game too"
        with pytest.raises(ConfigError) as error:
            execute(load([*SMALL, *f"algo={algo}".split(), f"env={ENV_FILE}:{kind}", f"run_dir={tmp_path / 'a'}"]))
        assert str(error.value) == (
            f"env={ENV_FILE}:{kind} breaks the contract: observation{name}['action_mask'] must allow at least one "
            f"action in every row; in {where} it allows none{more}."
        )
        assert not (tmp_path / "a").exists()


class TestUserEnvironment:
    def test_a_class_in_a_file_is_trained_resumed_and_evaluated(self, tmp_path: Path):
        overrides = (f"env={ENV_FILE}:MyEnv", "+env.limit=7", f"total_env_steps={2 * ITERATION}")
        trained = execute(load([*SMALL, *overrides, f"run_dir={tmp_path / 'a'}"]))
        assert yaml.safe_load((trained.dir / "config.yaml").read_text())["env"] == {
            "name": f"{ENV_FILE}:MyEnv",
            **{"limit": 7, "fault": "", "at": 0, "rank": 0, "marker": ""},  # given, and defaults
        }
        assert rows(trained.dir)[-1]["episode_length"] == 7
        execute(load([f"resume={trained.dir}", f"total_env_steps={3 * ITERATION}"]))
        assert json.loads(eval_run(trained.dir, episodes=3))["episodes"] == 3

    def test_an_object_is_trained_and_resumed_from_python(self, tmp_path: Path):
        settings = {
            "algo": "ppo",
            "num_envs": 8,
            "compile": False,
            "logger": {"console": False},
            "evaluation": {"episodes": 2},
            "overrides": ["algo.unroll_length=16", "algo.agent.hidden=[8]"],
        }
        folder = tmp_path / "it's (a) folder, with=signs"
        trained = tp.train(env=MyEnv(limit=7), run_dir=folder, total_env_steps=2 * ITERATION, **settings)
        assert trained.dir == folder
        assert rows(folder)[-1]["episode_length"] == 7
        assert yaml.safe_load((folder / "config.yaml").read_text())["env"] == {"name": "object:MyEnv"}
        with pytest.raises(ConfigError, match="env=object:MyEnv was a Python object; hand it over again"):
            eval_run(folder, episodes=2)
        with pytest.raises(ConfigError, match="env=object:MyEnv was a Python object; hand it over again"):
            tp.train(resume=folder)
        resumed = tp.train(env=MyEnv(limit=7), resume=folder, total_env_steps=3 * ITERATION)
        assert [row["iteration"] for row in rows(folder)] == [1, 2, 3]
        key = torch.zeros(1, 3, dtype=torch.int64)
        _, timestep = MyEnv().init(key)
        output, _ = resumed.policy.act(timestep, resumed.agent.initial_state(1), key, explore=False)
        assert output.action.shape == (1,)

    def test_a_run_with_an_object_is_evaluated_with_one_more(self, tmp_path: Path):
        run = tp.train(env=MyEnv(), overrides=[*SMALL, "total_env_steps=256", f"run_dir={tmp_path / 'run'}"])
        with pytest.raises(
            ConfigError, match=r"over again, in Python: .* or torchpod\.commands\.eval_run\.eval_run\(RUN"
        ):
            eval_run(run.dir, episodes=2)
        told = json.loads(eval_run(run.dir, episodes=2, env=MyEnv()))
        assert told["mean"] == run.summary["eval_return"]["mean"]

    @pytest.mark.parametrize("given", ["+env.transforms=[flatten]", "env.max_episode_steps=3", "env=pendulum"])
    def test_settings_of_an_environment_are_none_of_an_object(self, given: str):
        with pytest.raises(
            ConfigError, match=r"is a setting of an environment that a run makes, and env=MyEnv is made"
        ):
            tp.train(env=MyEnv(), overrides=[given])

    def test_what_is_no_environment_is_refused(self, tmp_path: Path):
        with pytest.raises(ConfigError, match=r"env is one int, which is no environment; it must be a TensorEnv"):
            tp.train(env=3)
        made = "def nothing():\n    return None\n\n\nclass Plain:\n    def step(self, action):\n        pass\n"
        (tmp_path / "made.py").write_text(made)
        for name, came in (("nothing", "None"), ("Plain", "one Plain")):
            with pytest.raises(ConfigError, match=rf"{name} gives {came}, which is no environment; it must be a"):
                tp.train(env=f"{tmp_path / 'made.py'}:{name}")
        with pytest.raises(ConfigError, match="nothing gives None, which is no environment"):
            tp.train(env={"name": f"{tmp_path / 'made.py'}:nothing", "info_keywords": ["x"]})
        with pytest.raises(ConfigError, match="has no class nothings; did you mean nothing"):
            tp.train(env=f"{tmp_path / 'made.py'}:nothings")

    def test_one_text_is_no_list_of_overrides(self):
        with pytest.raises(ConfigError, match=r"overrides='seed=1' is one text; write a list, \['seed=1'\]\."):
            tp.train(env="cartpole", overrides="seed=1")

    def test_a_class_is_no_object(self):
        with pytest.raises(ConfigError, match=r"env=MyEnv is a class; hand over an environment, e.g. env=MyEnv\(\)\."):
            tp.train(env=MyEnv)

    def test_an_object_of_another_class_is_refused_on_resume(self, tmp_path: Path):
        run(tmp_path / "a", f"total_env_steps={ITERATION}")
        with pytest.raises(ConfigError, match="env.name=object:MyEnv cannot change: .* has cartpole"):
            tp.train(env=MyEnv(), resume=tmp_path / "a")


class TestPopulation:
    SETTINGS = ("population=2", "+members.discount=[0.9,0.99]", "algo.learner.anneal_learning_rate=false")

    def test_a_member_goes_on_as_the_run_that_it_would_have_been_alone(self, tmp_path: Path):
        population = run(tmp_path / "p", *self.SETTINGS, f"total_env_steps={2 * ITERATION}", "seed=5")
        assert set(population.summary["members"][0]) == {"mean", "iqm", "ci95", "episodes"}
        assert population.summary["best_member"] in (0, 1)
        for p, discount in ((0, 0.9), (1, 0.99)):
            member = tmp_path / "p" / "members" / str(p)
            assert len(eval_run(member, episodes=2).splitlines()) == 1
            resumed = execute(load([f"resume={member}", f"total_env_steps={4 * ITERATION}"]))
            assert resumed.summary["env_steps"] == rows(member)[-1]["env_steps"]
            alone = tmp_path / f"alone{p}"
            run(
                alone,
                f"seed={5 + p}",
                f"algo.agent.discount={discount}",
                "algo.learner.anneal_learning_rate=false",
                f"total_env_steps={4 * ITERATION}",
            )
            a, b = rows(alone), rows(member)
            assert a == b
            assert state(alone).keys() == state(member).keys()
            assert all(torch.equal(x, state(member)[name]) for name, x in state(alone).items())

    @pytest.mark.parametrize("prioritised", [False, pytest.param(True, marks=pytest.mark.slow)])
    def test_a_member_with_replay_goes_on_with_its_own(self, prioritised, tmp_path: Path):
        own = ["algo=dqn", "env=cartpole", "compile=false", "logger.console=false", "evaluation.episodes=2"]
        own += ["num_envs=8", "algo.unroll_length=4", "algo.learner.num_minibatches=2", "checkpoint.interval_s=0.2"]
        own += ["algo.replay.capacity=2000", "algo.replay.min_size=200", "algo.replay.batch_size=32"]
        own += [f"algo.replay.prioritised={prioritised}", "algo.learner.anneal_learning_rate=false", "seed=5"]
        own += ["algo.agent.exploration_fraction=0", *(["algo.replay.beta=1"] if prioritised else [])]  # no schedules
        execute(load([*own, "population=2", "total_env_steps=3200", f"run_dir={tmp_path}/p"]))
        (tmp_path / "p" / "summary.json").unlink()  # as if it had been killed in the final evaluation
        execute(load([f"resume={tmp_path}/p"]))
        for p in range(2):
            execute(load([f"resume={tmp_path}/p/members/{p}", "total_env_steps=4800"]))
            execute(load([*own, f"seed={5 + p}", "total_env_steps=4800", f"run_dir={tmp_path}/alone{p}"]))
            alone, member = state(tmp_path / f"alone{p}"), state(tmp_path / "p" / "members" / str(p))
            assert alone.keys() == member.keys()
            assert [name for name, x in alone.items() if not torch.equal(x, member[name])] == []

    def test_a_checkpoint_without_its_replay_cannot_go_on(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(Segments, "save", lambda *_: b"{}")
        own = ["algo=dqn", "env=cartpole", "compile=false", "logger.console=false", "evaluation.episodes=2"]
        own += ["num_envs=8", "algo.unroll_length=4", "algo.replay.capacity=2000", "algo.replay.min_size=200"]
        execute(load([*own, "total_env_steps=800", f"run_dir={tmp_path}/a"]))
        with pytest.raises(CheckpointError, match=r"lists no replay from iteration 0 on, .*; torchpod eval takes it\."):
            execute(load([f"resume={tmp_path}/a", "total_env_steps=1600"]))

    def test_the_folder_of_all_is_evaluated_member_by_member_and_goes_on(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ):
        run(tmp_path / "p", *self.SETTINGS, f"total_env_steps={2 * ITERATION}")
        lines = [json.loads(line) for line in eval_run(tmp_path / "p", episodes=3).splitlines()]
        assert [(line["member"], line["episodes"]) for line in lines] == [(0, 3), (1, 3)]
        execute(load([f"resume={tmp_path / 'p' / 'members' / '0'}", f"total_env_steps={5 * ITERATION}"]))
        execute(load([f"resume={tmp_path / 'p'}", f"total_env_steps={3 * ITERATION}"]))
        newest = [checkpoint.latest(tmp_path / "p" / "members" / str(p)).name for p in range(2)]
        assert newest == [f"{5:010d}", f"{3:010d}"]  # the first has gone on by itself, and is left alone
        assert len(rows(tmp_path / "p" / "members" / "1")) == 3
        before = (tmp_path / "p" / "members" / "0" / "metrics.jsonl").read_bytes()
        execute(load([f"resume={tmp_path / 'p'}", f"total_env_steps={6 * ITERATION}"]))  # also if it has less
        assert "members/0 has gone on by itself, and is left as it is." in capsys.readouterr().out
        assert (tmp_path / "p" / "members" / "0" / "metrics.jsonl").read_bytes() == before
        assert checkpoint.latest(tmp_path / "p" / "members" / "1").name == f"{6:010d}"

    def test_a_member_setting_that_does_not_exist_or_fit_is_refused(self, tmp_path: Path):
        for override, message in (
            ("+members.hidden=[1,2]", "members.hidden is a setting of the agent, and cannot differ from member to"),
            ("+members.discoutn=[1,2]", "members.discoutn is no setting; did you mean discount?"),
            ("+members.discount=[1]", "members.discount=\\[1.0\\] must be a list of population=2 numbers"),
            ("+members.discount=[a,b]", "members.discount\\[0\\]='a': expected a number"),
        ):
            with pytest.raises(ConfigError, match=message):
                run(tmp_path / "p", "population=2", override)

    def test_members_may_have_a_learning_rate_of_each_optimizer_group(self, tmp_path: Path):
        sac = ["algo=sac", "env=pendulum", "population=2", "compile=false", "logger.console=false", "num_envs=4"]
        sac += ["algo.replay.min_size=16", "algo.replay.batch_size=4", "evaluation.episodes=1", "total_env_steps=64"]
        with pytest.raises(ConfigError, match=r"members.learning_rate.policy=\[-1.0, 0.001\] must lie from 0 to inf"):
            execute(load([*sac, "+members.learning_rate.policy=[-1,1e-3]"]))
        with pytest.raises(ConfigError, match=r"group; here there are members.learning_rate.policy, members.learning_"):
            execute(load([*sac, "+members.learning_rate=[1e-3,1e-3]"]))
        execute(load([*sac, "+members.learning_rate.policy=[0,1e-2]", f"run_dir={tmp_path / 'p'}"]))
        rates = {name: x.tolist() for name, x in state(tmp_path / "p").items() if "learning_rate" in name}
        assert [x for name, x in rates.items() if "policy" in name] == [[0.0, pytest.approx(1e-2)]], rates

    def test_members_of_policies_differ_in_settings_of_one_and_in_its_learning_rate(self, tmp_path: Path):
        tag = ["algo=ippo", "env=tag_gridworld", "population=2", "num_envs=4", "algo.unroll_length=8"]
        tag += ["total_env_steps=32", "env.max_episode_steps=8", "compile=false", "logger.console=false"]
        tag += ["evaluation.episodes=1", "algo.agent.policies={runner:{train:false}}"]
        execute(load([*tag, "+members.learning_rate.tagger=[0,1e-2]", f"run_dir={tmp_path / 'p'}"]))
        rates = [x.tolist() for name, x in state(tmp_path / "p").items() if "learning_rate" in name]
        assert rates == [[0.0, pytest.approx(1e-2)]]
        policies = "members.policies.tagger.clip, members.policies.runner.clip"
        for name, message in (
            ("clip", f"members.clip is a setting of each policy; write {policies}."),
            ("policies.runner.value.bias", "members.policies.runner.value.bias is no setting; "),
            ("policies.runner.return_moments.mean", "members.policies.runner.return_moments.mean is no setting; "),
            ("learning_rate.runner", "members.learning_rate.runner is no setting; did you mean learning_rate"),
        ):
            with pytest.raises(ConfigError, match=re.escape(message)):
                execute(load([*tag, "algo.agent.normalize_reward=true", f"+members.{name}=[0.1,0.2]"]))
        both = {"learning_rate": (0.1, 0.2), "learning_rate.tagger": (0.1, 0.2)}
        with pytest.raises(
            ConfigError, match=r"members.learning_rate and members.learning_rate.tagger are one rate; l"
        ):
            execute(replace(load(tag), members=both))

    def test_python_takes_members_as_a_dict(self, tmp_path: Path):
        overrides = ["env.max_episode_steps=20", "algo.unroll_length=16", "algo.agent.hidden=[8]"]
        trained = tp.train(
            env="cartpole",
            num_envs=8,
            compile=False,
            population=2,
            members={"discount": [0.5, 0.6], "learning_rate": [1e-3, 1e-4]},
            total_env_steps=ITERATION,
            run_dir=tmp_path / "p",
            overrides=overrides,
        )
        assert trained.variables["discount"].tolist() == pytest.approx([0.5, 0.6])
        assert state(tmp_path / "p")[".learner.learning_rate['loss']"].tolist() == pytest.approx([1e-3, 1e-4])


def test_csv_says_what_metrics_jsonl_says_after_a_resume_too(tmp_path: Path):
    run(tmp_path / "a", f"total_env_steps={2 * ITERATION}", "logger.csv=true")
    execute(load([f"resume={tmp_path / 'a'}", f"total_env_steps={3 * ITERATION}"]))
    with open(tmp_path / "a" / "metrics.csv", newline="") as file:
        table = list(csv.DictReader(file))
    written = metrics.read_metrics(tmp_path / "a")
    assert len(table) == len(written) == 3
    for line, row in zip(table, written, strict=True):
        assert {k: float(v or "nan") for k, v in line.items()} == pytest.approx(row, abs=0, rel=0, nan_ok=True)


def test_tensorboard_gets_what_the_metrics_get_and_its_absence_changes_nothing(tmp_path: Path, monkeypatch):
    run(tmp_path / "a", f"total_env_steps={2 * ITERATION}", "logger.tensorboard=true")
    assert list((tmp_path / "a" / "tensorboard").glob("events*"))
    run(tmp_path / "b", f"total_env_steps={2 * ITERATION}")
    before = (tmp_path / "b" / "config.yaml").read_bytes()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    more = [f"resume={tmp_path / 'b'}", f"total_env_steps={3 * ITERATION}"]
    with pytest.raises(ConfigError, match="logger.tensorboard=true needs TensorBoard"):
        execute(load([*more, "logger.tensorboard=true"]))
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="logger.wandb=true needs W&B"):
        execute(load([*more, "logger.wandb=true"]))
    assert (tmp_path / "b" / "config.yaml").read_bytes() == before
    assert execute(load(more)).summary["env_steps"] > 0


@pytest.mark.parametrize(
    ("loop", "names"),
    [
        pytest.param("anakin", ("act", "apply", "env_step", "gradient", "rollout", "update"), marks=pytest.mark.slow),
        # Of the main thread, which is what the profiler sees; act and env_step are of the evaluation.
        pytest.param("sebulba", ("act", "apply", "env_step", "get", "gradient", "update"), marks=pytest.mark.slow),
    ],
)
def test_a_profile_shows_the_ranges_of_an_iteration(tmp_path: Path, loop: str, names: tuple[str, ...]):
    script = """
import sys
import torch
from torchpod.main import train
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
    train(num_envs=4, total_env_steps=128, compile=False, overrides=[
        "loop=" + sys.argv[1], "env.max_episode_steps=5", "algo.unroll_length=8", "logger.console=false",
        "evaluation.episodes=1", "algo.agent.hidden=[8]"])
print(sorted({e.name for e in profile.events() if e.name.startswith("torchpod/")}))
"""
    found = {}
    for on in ("0", "1"):
        result = subprocess.run(
            [sys.executable, "-c", script, loop],
            cwd=tmp_path,
            env={**os.environ, "TORCHPOD_PROFILE": on},
            capture_output=True,
            text=True,
            check=True,
        )
        found[on] = result.stdout.splitlines()[-1]
    assert found == {"0": "[]", "1": str([f"torchpod/{name}" for name in names])}


def test_other_threads_or_versions_are_said_on_resume(tmp_path: Path, capsys):
    run(tmp_path / "a", f"total_env_steps={ITERATION}")
    for threads in (1, 2):
        capsys.readouterr()
        execute(
            load([f"resume={tmp_path / 'a'}", f"total_env_steps={(threads + 1) * ITERATION}", f"threads={threads}"])
        )
        said = capsys.readouterr().out
        assert ("goes on with other threads (1 -> 2) than it was written with" in said) == (threads == 2)

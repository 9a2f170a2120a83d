"""Runs with loop=sebulba from the command line: what users of host environments do."""

import contextlib
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import gymnasium
import pytest
import torch

from tests.testing.test_check_env import SharesSimulator
from tests.zygote import wait_until
from torchpod import checkpoint, random
from torchpod.config import ConfigError, load
from torchpod.envs.classic.cartpole import CartPole
from torchpod.envs.host import Gymnasium
from torchpod.envs.transforms import RewardClip
from torchpod.main import main
from torchpod.makers import make_env
from torchpod.progress import ConsoleSink
from torchpod.run import execute
from torchpod.sebulba import Sebulba
from torchpod.sebulba import loop as sebulba_loop
from torchpod.watched import HostError, Watched, close_all

SMALL = (
    "loop=sebulba",
    "compile=false",
    "logger.console=false",
    "num_envs=4",
    "algo.unroll_length=8",
    "algo.agent.hidden=[8]",
    "algo.learner.num_minibatches=2",
    "evaluation.episodes=2",
)
STEPS = 4 * 8
ENVIRONMENT = '''
import hashlib
import subprocess
import threading
import time
from pathlib import Path

import gymnasium
import numpy as np


class Corridor(gymnasium.Env):
    """Go right."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, length: int = 5) -> None:
        self.length, self.position, self.count = length, 0, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position = 0
        return self._observe(), {}

    def step(self, action):
        self.count += 1
        self.position += int(action)
        return self._observe(), float(action), self.position >= self.length, False, {}

    def _observe(self):
        return np.array([self.position / self.length], np.float32)


class Stuck(Corridor):
    """Sleeps for a minute where it is told to, or fails there."""

    def __init__(self, where, how="sleeps"):
        super().__init__()
        self.where, self.how = where, how

    def reset(self, *, seed=None, options=None):
        self.stop("reset")
        return super().reset(seed=seed)

    def step(self, action):
        self.stop("check")
        if self.count == 150:
            self.stop("training")
        rows = Path("run/metrics.jsonl")
        judging = rows.is_file() and rows.stat().st_size > 0
        if self.count == 0 and judging:  # of an evaluation: others moved before
            self.stop("judging")
        if self.where == "acting":
            self.act(judging)
        if any(Path("run").glob("checkpoints/0*")):
            self.stop("evaluation")
        return super().step(action)

    def act(self, judging):
        """In the main thread an evaluation has no end; an actor's second unroll waits until that has begun."""
        if threading.current_thread() is threading.main_thread():
            if judging:
                Path("begun").touch()
                self.position = 0
                time.sleep(0.1)
        elif self.count > 8:
            while not Path("begun").exists():
                time.sleep(0.01)
            self.stop("acting")

    def stop(self, where):
        if where == self.where and self.how == "fails":
            raise LookupError("no way on")
        if where == self.where:
            Path("sleeps").touch()
            if self.how == "hears_nothing":
                hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # for minutes, in C code, without Python's lock
            time.sleep(60)

    def close(self):
        Path("closed").touch()


class Unpaid(Corridor):
    """Whose reward is no number in the final evaluation."""

    def __init__(self, reward):
        super().__init__()
        self.reward = float(reward)

    def step(self, action):
        observation, reward, *ends = super().step(action)
        return observation, self.reward if any(Path("run").glob("checkpoints/0*")) else reward, *ends


class ClosedError(Exception):
    """Of the file's own."""


class Guarded(Corridor):
    """Ends with an exception that only this file knows."""

    def step(self, action):
        if self.count == 120:
            raise ClosedError("the guard went home")
        return super().step(action)


class Spaceless(gymnasium.Env):
    pass


class Small(Corridor):
    observation_space = gymnasium.spaces.Box(0, 255, (12, 12, 3), np.uint8)

    def _observe(self):
        return self.observation_space.low


class Scalar(Corridor):
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (), np.float32)

    def step(self, action):
        assert np.shape(action) == ()
        return super().step(action > 0)


class Missing(Corridor):
    def __init__(self):
        raise FileNotFoundError("no assets")


class Slow(Corridor):
    """Sleeps for 40 s at every step after the first 300."""

    def step(self, action):
        if self.count > 300:
            time.sleep(40)
        return super().step(action)


class Simulated(Slow):
    """In a program of its own."""

    def __init__(self):
        super().__init__()
        self.simulator = subprocess.Popen(["sleep", "1000"])

    def close(self):
        self.simulator.kill()
        self.simulator.wait()


class Faulty(Corridor):
    """Does not come back from its step 120, raises, or shows what is no number or of another shape."""

    def __init__(self, fault):
        super().__init__()
        self.fault = fault

    def step(self, action):
        if self.count < 120:
            return super().step(action)
        Path("fault").touch()
        if self.fault == "hang":
            time.sleep(1e6)
        if self.fault == "hang_in_c":
            hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
        if self.fault == "raise":
            raise OSError("the corridor is closed")
        return np.full(2 if self.fault == "shape" else 1, np.nan, np.float32), np.nan, False, False, {}


def corridor(length: int = 3) -> gymnasium.Env:
    return Corridor(length)
'''
AGENT = '''
from pathlib import Path

from torchpod.algos.ppo import PPO, PPOConfig


class Forgetful(PPO):
    """Cannot learn any more after 120 minibatches."""

    count, error = 0, ArithmeticError

    def __init__(self, spec, config: PPOConfig):
        super().__init__(spec, config)

    def loss(self, batch, keys, target):
        Forgetful.count += 1
        if Forgetful.count > 120:
            Path("fault").touch()
            raise self.error("what was it about?")
        return super().loss(batch, keys, target)


class Mistaken(Forgetful):
    """With an error that says at the start of a run what setting is wrong."""

    error = ValueError


class Offline(Forgetful):
    error = ConnectionRefusedError


class Piped(Forgetful):
    error = BrokenPipeError
'''


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corridor.py").write_text(ENVIRONMENT)
    (tmp_path / "agent.py").write_text(AGENT)
    return tmp_path


def train(*overrides):
    return main(["train", *SMALL, *overrides])


@pytest.mark.parametrize("algo", ["ppo", "impala"])
def test_train_eval_and_resume_on_gymnasium(capsys, algo):
    learner = [] if algo == "ppo" else ["algo.learner.num_minibatches=1"]
    assert train("env=gymnasium", f"algo={algo}", *learner, f"total_env_steps={5 * STEPS}", "run_dir=run") == 0
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4, 5]
    told = {"env_steps_per_s", "learner_wait", "actor_wait", "actor_in_environment", "actor_in_inference"}
    told |= {"actor_in_transfer", "policy_age", "policy_age_max", "queue_occupancy", "inference_batches_per_s"}
    assert all(told <= row.keys() for row in rows)
    assert main(["eval", "run", "--episodes", "2"]) == 0
    capsys.readouterr()
    assert main(["train", "resume=run", f"total_env_steps={8 * STEPS}"]) == 0
    assert capsys.readouterr().out.count("its environments begin new episodes") == 1
    assert int(checkpoint.latest(Path("run")).name) == 8


def test_pools_may_share_threads_from_one_start_of_a_run_to_the_next():
    pytest.importorskip("envpool", reason="the extra `envpool` is not installed")
    env = ("env=envpool", "env.task=CartPole-v1", "env.num_threads=2", "loop.pools_per_actor=2")
    for run, first in (("a", "false"), ("b", "true")):
        assert train(*env, f"loop.pools_share_threads={first}", f"total_env_steps={3 * STEPS}", f"run_dir={run}") == 0
        other = {"false": "true", "true": "false"}[first]
        shares = f"loop.pools_share_threads={other}"
        assert main(["train", f"resume={run}", shares, f"total_env_steps={6 * STEPS}"]) == 0
    runs = [[json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()] for run in "ab"]
    for name in ("iteration", "env_steps", "loss", "grad_norm"):
        assert [row[name] for row in runs[0]] == [row[name] for row in runs[1]]
    assert [row["iteration"] for row in runs[0]] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("algo", ["td3", *(pytest.param(x, marks=pytest.mark.slow) for x in ("ddpg", "sac"))])
def test_an_action_may_be_a_number(algo):
    small = [x for x in SMALL if "minibatches" not in x]
    replay = ("algo.env_steps_per_update=8", "algo.replay.min_size=32", "algo.replay.batch_size=8", "run_dir=run")
    env = ("env=corridor.py:Scalar", f"algo={algo}", f"total_env_steps={5 * STEPS}")
    assert main(["train", *small, *env, *replay]) == 0
    last = json.loads(Path("run/metrics.jsonl").read_text().splitlines()[-1])
    assert any(name.startswith("grad_norm/") and last[name] > 0 for name in last), last


@pytest.mark.parametrize("task", ["TicTacToe-v1", "IntersectionMultiAgent-v1"])
def test_a_game_of_several_players_is_trained_resumed_and_evaluated(capsys, task):
    pytest.importorskip("envpool", reason="the extra `envpool` is not installed")
    env = ("algo=ippo", "env=envpool", f"env.task={task}", "loop.pools_per_actor=2")
    assert train(*env, f"total_env_steps={3 * STEPS}", "run_dir=run") == 0
    assert main(["train", "resume=run", f"total_env_steps={5 * STEPS}"]) == 0
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4, 5]
    capsys.readouterr()
    assert main(["eval", "run", "--episodes", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["episodes"] == 2


@pytest.mark.parametrize("env", ["corridor.py:Corridor", "corridor.py:corridor"])
def test_a_gymnasium_environment_of_ones_own_needs_no_registration(env):
    assert train(f"env={env}", "+env.length=4", f"total_env_steps={2 * STEPS}", "run_dir=run") == 0
    assert json.loads(Path("run/summary.json").read_text())["eval_return"]["episodes"] == 2


@pytest.mark.parametrize(
    ("settings", "trace", "last"),
    [
        (
            "env=corridor.py:Faulty +env.fault=raise",
            "Traceback.*corridor.py.*OSError: the corridor is closed\n",
            "torchpod: error: actor thread . failed: OSError: the corridor is closed. {saved}",
        ),
        (
            "env=corridor.py:Faulty +env.fault=shape",
            "Traceback.*ValueError: Faulty gave .*\n",
            r"torchpod: error: actor thread . failed: ValueError: .* shape \[2\], and the space says \[1\]; .* {saved}",
        ),
        (
            "env=corridor.py:Faulty +env.fault=hang loop.timeout_s=1",
            "Stack of the thread that hangs .*corridor.py.* in step\n    time.sleep.1e6.\n",
            "torchpod: error: actor thread . has waited . s for a step of its Faulty environments; .* {saved}",
        ),
        (
            "env=corridor.py:Faulty +env.fault=hang_in_c loop.timeout_s=1",
            "Stack of the thread that hangs .*corridor.py.* in step\n    hashlib.pbkdf2_hmac.*\n",
            "torchpod: error: actor thread . has waited . s for a step of its Faulty environments; .* {saved}",
        ),
        (
            "env=corridor.py:Faulty +env.fault=nan",
            "",
            "torchpod: error: a gradient of iteration .* The environment gave numbers that are not finite: reward, "
            "observation, extras.* Iteration {name}, before it, is saved in run.",
        ),
        (
            "env=corridor.py:Corridor algo=agent.py:Forgetful",
            "Traceback.*agent.py.*ArithmeticError: what was it about.\n",
            "{saved}",
        ),
        (
            "env=corridor.py:Corridor algo=agent.py:Mistaken",
            "Traceback.*agent.py.*ValueError: what was it about.\n",
            "torchpod: error: iteration .* failed: ValueError: what was it about. {saved}",
        ),
        (
            "env=corridor.py:Corridor algo=agent.py:Offline",
            "Traceback.*agent.py.*ConnectionRefusedError: what was it about.\n",
            "torchpod: error: iteration .* failed: ConnectionRefusedError: what was it about. {saved}",
        ),
        (
            "env=corridor.py:Corridor algo=agent.py:Piped",
            "Traceback.*agent.py.*BrokenPipeError: what was it about.\n",
            "torchpod: error: iteration .* failed: BrokenPipeError: what was it about. {saved}",
        ),
    ],
    ids=[
        "raises",
        "shape",
        "hangs",
        "hangs in C",
        "nan",
        "learner",
        "learner's value",
        "learner's connection",
        "learner's pipe",
    ],
)
def test_a_fault_ends_the_process_soon_with_its_traceback_and_a_checkpoint(zygote, folder, settings, trace, last):
    small = [x for x in SMALL if "hidden" not in x]
    job = zygote.start("train", *small, *settings.split(), "total_env_steps=1_000_000", "run_dir=run", cwd=folder)
    assert job.wait() == 1
    assert time.time() - Path("fault").stat().st_mtime < 10
    assert session_of(job) == []
    name = int(checkpoint.latest(Path("run")).name)
    last = last.format(name=name, saved=f"Iteration {name} is saved; go on with resume=run")
    assert re.fullmatch(f"{trace}{last}\n", job.err, re.DOTALL), job.err
    assert 7 < name < 20  # 120 steps of an environment, and the resets between its episodes
    dumped = [path.name for path in Path("run").glob("nan/*")]
    assert dumped == ([f"iteration-{name + 1}-rank-0.pt"] if "nan" in settings else [])
    goes_on_from(name)


def goes_on_from(saved):
    """The run, with another iteration."""
    assert main(["train", "resume=run", f"total_env_steps={(saved + 1) * STEPS}"]) == 0
    assert int(checkpoint.latest(Path("run")).name) == saved + 1


@pytest.mark.parametrize("reward", ["nan", "inf"])
def test_a_return_that_is_no_number_is_told_as_the_environments(reward, capsys):
    assert train("env=corridor.py:Unpaid", f"+env.reward={reward}", f"total_env_steps={3 * STEPS}", "run_dir=run") == 1
    told = r"\d+ of \d+ evaluated episodes have a return that is not finite, for the environment gave such a reward; "
    assert re.search(
        f"torchpod: error: {told}.* What was trained is saved; evaluate it with torchpod eval run\n$",
        capsys.readouterr().err,
    )
    assert not Path("run/summary.json").exists() and checkpoint.latest(Path("run")).name == "0000000003"
    assert main(["eval", "run", "--episodes", "2"]) == 1
    out = capsys.readouterr()
    assert out.out == "" and re.search(f"torchpod: error: {told}", out.err)


def test_a_full_disk_does_not_hide_what_failed(monkeypatch):
    def save(*_):
        raise OSError("run/checkpoints/0000000009 cannot be written (No space left on device).")

    monkeypatch.setattr("torchpod.run.save_state", save)
    small = [x for x in SMALL if "hidden" not in x]
    with pytest.raises(ArithmeticError, match="what was it about") as error:
        main(["train", *small, "env=corridor.py:Corridor", "algo=agent.py:Forgetful", "run_dir=run"])
    assert error.value.__notes__ == ["run/checkpoints/0000000009 cannot be written (No space left on device)."]


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("reset", "has not come back in the check of its first 100 steps"),
        ("check", "has not come back in the check of its first 100 steps"),
        ("training", "has not come back in training"),
        ("evaluation", "has not come back in the final evaluation"),
    ],
)
def test_an_environment_that_hangs_in_the_main_thread_ends_the_run(capsys, where, message):
    env = ("env=corridor.py:Stuck", f"+env.where={where}")
    settings = ("loop.timeout_s=1", "loop.num_actor_threads=0", f"total_env_steps={40 * STEPS}")
    began = time.monotonic()
    assert train(*env, *settings, "run_dir=run") == 1
    assert time.monotonic() - began < 10
    *stack, line, error = capsys.readouterr().err.splitlines()
    sentence = f"torchpod: error: Stuck {message} for 1 s; if it may take so long, raise loop.timeout_s=1."
    if where == "training":
        sentence += f" Iteration {int(checkpoint.latest(Path('run')).name)} is saved; go on with resume=run"
    if where == "evaluation":
        sentence += " What was trained is saved; evaluate it with torchpod eval run"
    assert error == sentence
    assert stack[0] == "Stack of the thread that hangs (most recent call last):"
    assert "corridor.py" in stack[-1] and line.strip() == "time.sleep(60)"


@pytest.mark.parametrize(("where", "timeout_s"), [("check", 1.0), pytest.param("reset", 15.0, marks=pytest.mark.slow)])
def test_a_worker_process_that_hangs_is_ended_and_not_waited_for(where, timeout_s):
    env, keys = make_env({"name": "corridor.py:Stuck", "where": where, "processes": True}), torch.zeros(1, 3).long()
    with pytest.raises(HostError, match="Stuck has not come back in a test"):
        if where == "check":
            env.init(keys)
            Watched(env, "a test", timeout_s).step(None, torch.zeros(1).long(), keys)
        Watched(env, "a test", timeout_s).init(keys)
    began = time.monotonic()
    close_all([env])
    assert time.monotonic() - began < 5 and multiprocessing.active_children() == []


def test_an_environment_that_fails_in_the_main_thread_is_reported_like_an_actors(capsys):
    env = ("env=corridor.py:Stuck", "+env.where=evaluation", "+env.how=fails")
    assert train(*env, f"total_env_steps={STEPS}", "run_dir=run") == 1
    *trace, message = capsys.readouterr().err.splitlines()
    assert trace[0].startswith("Traceback") and any("corridor.py" in line for line in trace)
    assert message == (
        "torchpod: error: Stuck failed in the final evaluation: LookupError: no way on. "
        "What was trained is saved; evaluate it with torchpod eval run"
    )


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("sleeps", "has not come back in its first reset for 1 s; if it may take so long, raise loop.timeout_s=1."),
        ("fails", "failed in its first reset: LookupError: no way on. TORCHPOD_TRACEBACK=1 shows where."),
    ],
)
def test_an_environment_by_name_whose_first_reset_is_not_to_be_had_is_one_sentence(capsys, monkeypatch, how, message):
    names = {"__name__": "corridor"}
    exec(ENVIRONMENT, names)
    entry = {"Stuck-v0": gymnasium.envs.registration.EnvSpec("Stuck-v0", entry_point=names["Stuck"])}
    monkeypatch.setattr(gymnasium.envs.registration, "registry", gymnasium.registry | entry)
    env = ("env=gymnasium", "env.task=Stuck-v0", "+env.where=reset", f"+env.how={how}")
    assert train(*env, "loop.timeout_s=1", "run_dir=run") == 1
    *stack, error = capsys.readouterr().err.splitlines()
    assert error == f"torchpod: error: Stuck-v0 {message}"
    assert any("in stop" in line for line in stack) == (how == "sleeps")
    assert not Path("run").exists()


@pytest.mark.filterwarnings("ignore::UserWarning")  # Gymnasium says it too
def test_exceptions_of_a_file_of_ones_own_come_back_from_its_worker_process():
    env = make_env({"name": "corridor.py:Guarded", "processes": True})
    try:
        env.init(random.split(random.key(0), 1))
        with pytest.raises(Exception, match="the guard went home") as error:
            for _ in range(200):
                env.step(None, torch.ones(1, dtype=torch.int64), torch.zeros(1, 3, dtype=torch.int64))
        assert error.type.__name__ == "ClosedError"
    finally:
        close_all([env])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["env=gymnasium", "loop=anakin"], "is not a pure tensor program; run it with loop=sebulba"),
        (["env=gymnasium", "env.task=CartPole-v7"], "env=gymnasium cannot be made"),
        (["env=gymnasium", "loop.lag=soon"], "loop.lag='soon': expected an integer or free."),
        (["env=gymnasium", "loop.refresh=never"], "loop.refresh='never': expected unroll or step."),
        (["env=gymnasium", "loop.num_actor_threads=-1"], "must be at least 0"),
        (["env=gymnasium", "loop.num_actor_threads=3"], "cannot be split by loop.num_actor_threads=3"),
        (["env=gymnasium", "loop.split=1:30"], "loop.split=1:30 shares out GPUs; add device=cuda."),
        (["env=gymnasium", "algo=a2c"], "cannot correct for loop.lag=1; use loop.lag=0"),
        (["env=gymnasium", "population=2"], "population=2 needs loop=anakin"),
        (["env=cartpole", "loop=anakin", "loop.lag=1"], "loop.lag is a setting of the other loop; add loop=sebulba"),
        (["env=gymnasium", "env.task=corridor.py:Corridor"], "in a file is env=corridor.py:Corridor, in place of env="),
        (["env=corridor.py:Spaceless"], "cannot be made with {}: AttributeError: 'Spaceless' object has no attribute"),
        (["env=corridor.py:Missing"], "cannot be made with {}: FileNotFoundError: no assets"),
        (["env=corridor.py:Corridor", "env.length=3"], "env.length is added by a plus sign; write '+env.length=3'"),
        (["env=cartpole", "algo.agent.hidden=[]"], "hidden=[], width=1 and depth=1 must be at least 1 each"),
        (
            ["env=corridor.py:Small", "algo.agent.torso=nature"],
            "images [12, 12, 3] are too small for these convolutions",
        ),
        (["env=corridor.py:Corridor", "algo.agent.torso=nature"], "those of Corridor are (1,); leave torso out"),
        (["env=cartpole", "algo.agent.clip=-1"], "algo.agent.clip=-1 must lie from 0 to inf"),
    ],
)
def test_what_cannot_work_is_said_in_one_sentence(capsys, overrides, message):
    assert train(*overrides) == 1
    error = capsys.readouterr().err
    assert error.startswith("torchpod: error: ") and error.count("\n") == 1
    assert message in error


def test_what_a_resumed_run_cannot_change_is_said(capsys):
    assert train("env=corridor.py:Corridor", f"total_env_steps={2 * STEPS}", "run_dir=run") == 0
    before = Path("run/config.yaml").read_bytes()
    for given, message in {
        "loop.lag=0": "loop.lag=0 cannot change: run has 1",
        "loop=anakin": "loop.name=anakin cannot change: run has sebulba",
        "loop.refresh=step": "loop.refresh=step cannot change: run has unroll",
        "total_env_steps=1": f"run is finished; to go on, give more than total_env_steps={2 * STEPS}",
    }.items():
        capsys.readouterr()
        main(["train", "resume=run", given])
        assert message in "".join(capsys.readouterr())
    assert Path("run/config.yaml").read_bytes() == before
    assert main(["train", "resume=run", "loop.num_actor_threads=1", f"total_env_steps={3 * STEPS}"]) == 0
    assert int(checkpoint.latest(Path("run")).name) == 3


def test_episodes_that_do_not_end_are_named_beside_their_return(capsys, monkeypatch):
    monkeypatch.setattr("torchpod.evaluate.MAX_STEPS", 30)
    assert train("env=corridor.py:Corridor", "+env.length=1000", f"total_env_steps={STEPS}", "run_dir=run") == 0
    assert ", 2 episodes, 2 of them cut at 30 steps) after " in capsys.readouterr().out
    assert main(["eval", "run", "--episodes", "3"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["unfinished_episodes"], told["unfinished_steps"]) == (3, 30)


def test_the_first_row_counts_no_compilation_as_time_of_the_actors(monkeypatch):
    def example(self, state, actors, example=Sebulba.example):
        time.sleep(1.0)
        return example(self, state, actors)

    monkeypatch.setattr(Sebulba, "example", example)
    assert train("env=corridor.py:Corridor", f"total_env_steps={STEPS}", "run_dir=run") == 0
    row = json.loads(Path("run/metrics.jsonl").read_text().splitlines()[0])
    shares = ("actor_in_environment", "actor_in_inference", "actor_in_transfer", "actor_wait")
    assert sum(row[name] for name in shares) > 0.5


@pytest.mark.parametrize(
    ("env", "advice"),
    [
        (["env=corridor.py:Corridor"], "set env.processes=true"),
        (["env=envpool", "env.task=CartPole-v1"], "raise env.num_threads"),
        (["env=envpool", "env.task=CartPole-v1", "env.num_threads=2"], "they have a thread for every core"),
        (["env=envpool", "env.task=CartPole-v1", "+env.transforms=[reward_clip]"], "raise env.num_threads"),
        (["env=cartpole"], "raise loop.num_actor_threads"),
    ],
)
def test_the_progress_line_advises_what_the_run_can_do(env, advice, monkeypatch):
    given = []

    class Sink(ConsoleSink):
        def __init__(self, *args, advice, **options):
            given.append(advice)
            super().__init__(*args, **options)

    if env[0] == "env=envpool":
        pytest.importorskip("envpool")
    monkeypatch.setattr("torchpod.progress.cores", lambda: 3)
    monkeypatch.setattr("torchpod.run.ConsoleSink", Sink)
    assert train(*env, "logger.console=true", f"total_env_steps={STEPS}", "run_dir=run") == 0
    # PPO takes no lag of 2; SMALL has minibatches, and the default epochs.
    assert given == [(advice, "raise algo.unroll_length or num_envs", "lower algo.learner.num_epochs")]


def test_a_resumed_run_starts_its_environments_once(monkeypatch):
    train("env=corridor.py:Corridor", f"total_env_steps={2 * STEPS}", "run_dir=run")
    started, start = [], sebulba_loop.start
    monkeypatch.setattr(sebulba_loop, "start", lambda *args: started.append(args) or start(*args))
    assert main(["train", "resume=run", f"total_env_steps={4 * STEPS}"]) == 0
    assert len(started) == 2  # one per actor


def test_a_resumed_run_with_other_actors_says_that_bits_may_differ(capsys):
    assert train("env=cartpole", f"total_env_steps={2 * STEPS}", "run_dir=run") == 0
    assert main(["train", "resume=run", f"total_env_steps={3 * STEPS}"]) == 0
    assert "bits may differ" not in capsys.readouterr().out
    assert main(["train", "resume=run", "loop.num_actor_threads=1", f"total_env_steps={4 * STEPS}"]) == 0
    message = "run goes on with other loop.num_actor_threads (2 -> 1) than it was written with: the bits may differ."
    assert message in capsys.readouterr().out


@pytest.fixture
def start():
    """Starts a run in a process group of its own; none outlives its test."""
    runs = []

    def begin(*overrides):
        command = [sys.executable, "-m", "torchpod", "train", *SMALL, *overrides]
        runs.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True))
        return runs[-1]

    yield begin
    for pid in [pid for run in runs for pid in session_of(run)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def session_of(process):
    """All processes of a run, its workers and their servers too."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
    return [pid for pid in pids if session(pid) == process.pid]


def session(pid):
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def wait_for_rows(num, process):
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if Path("run/metrics.jsonl").is_file() and len(Path("run/metrics.jsonl").read_text().splitlines()) >= num:
            return
        time.sleep(0.05)
    process.kill()
    raise AssertionError(f"no {num} rows: {process.communicate()}")


def group_is_empty(process):
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.slow
def test_a_run_whose_environment_is_slow_stops_within_seconds(start, number):
    process = start("env=corridor.py:Slow", "total_env_steps=1_000_000", "run_dir=run")
    wait_for_rows(36, process)
    time.sleep(2.0)  # now every thread sleeps
    began = time.monotonic()
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    assert time.monotonic() - began < 10
    saved = int(checkpoint.latest(Path("run")).name)
    assert error == f"torchpod: stopped at iteration {saved}, in the middle of the next; go on with resume=run\n"
    assert process.returncode == 130 and saved >= 36
    goes_on_from(saved)


@pytest.mark.slow
def test_what_a_slow_worker_has_started_ends_with_the_run(start):
    process = start("env=corridor.py:Simulated", "+env.processes=true", "total_env_steps=1_000_000", "run_dir=run")
    wait_for_rows(36, process)
    time.sleep(2.0)  # now every worker sleeps
    assert len(session_of(process)) > 2 * 4
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    wait_until(lambda: not any(map(alive, session_of(process))), 5)
    goes_on_from(int(checkpoint.latest(Path("run")).name))


LONG = (  # an update of 12 to 40 seconds, one call of C++
    "compile=true",
    "num_envs=1024",
    "algo.unroll_length=128",
    "algo.agent.hidden=[64,64]",
    "algo.learner.num_epochs=300",
    "algo.learner.num_minibatches=4",
    "checkpoint.interval_s=0",
    "total_env_steps=1_000_000_000",
    "run_dir=run",
)


def seconds_of_an_update():
    """About; of the first iteration."""
    return json.loads(Path("run/metrics.jsonl").read_text().splitlines()[0])["wall_s"]


@pytest.mark.parametrize("loop", ["anakin", "sebulba"])
@pytest.mark.slow
def test_a_signal_in_a_long_compiled_update_stops_the_run_within_seconds(start, loop):
    process = start("env=cartpole", *LONG, f"loop={loop}")
    wait_for_rows(1, process)
    time.sleep(2.0)  # now it updates
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=60)
    assert time.monotonic() - began < min(10.0, seconds_of_an_update() - 2.5)
    saved = int(checkpoint.latest(Path("run")).name)
    assert error == f"torchpod: stopped at iteration {saved}, in the middle of the next; go on with resume=run\n"
    assert process.returncode == 130 and saved == len(numbers_of_rows())
    assert group_is_empty(process)


@pytest.mark.slow
def test_an_environment_that_fails_in_a_long_compiled_update_ends_the_run_within_seconds(start):
    settings = ("env=corridor.py:Stuck", "+env.where=training", "+env.how=fails")
    # Its 150th step is in the third unroll, which is done while the second update goes on.
    process = start(*settings, *LONG, "algo.unroll_length=64", "num_envs=2048")
    wait_for_rows(1, process)
    began = time.monotonic()
    _, error = process.communicate(timeout=60)
    assert time.monotonic() - began < min(10.0, 0.9 * seconds_of_an_update())
    assert error.startswith("Traceback") and process.returncode == 1
    message = error.splitlines()[-1]
    assert re.search("torchpod: error: actor thread . failed: .*LookupError: no way on", message)
    assert message.endswith("go on with resume=run")


def test_a_run_that_cannot_begin_to_log_leaves_no_worker(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    env = Gymnasium("CartPole-v1", processes=True)
    with pytest.raises(ConfigError, match="tensorboard") as caught:  # whose traceback keeps what is open
        execute(load([*SMALL, "logger.tensorboard=true", "run_dir=run"]), env=env)
    assert multiprocessing.active_children() == [] and caught.tb is not None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("where", ["reset", "check"])
@pytest.mark.slow
def test_a_signal_before_the_first_iteration_stops_a_run_and_closes_its_environments(start, where, number):
    process = start("env=corridor.py:Stuck", f"+env.where={where}", "run_dir=run")
    wait_until(Path("sleeps").exists, 60)
    process.send_signal(number)
    _, error = process.communicate(timeout=10)
    assert error == f"torchpod: stopped by {number.name} without a new checkpoint\n"
    assert process.returncode == 130 and Path("closed").exists()


@pytest.mark.slow
def test_a_signal_that_an_environment_in_c_code_does_not_hear_ends_its_process(start):
    process = start("env=corridor.py:Stuck", "+env.where=reset", "+env.how=hears_nothing", "run_dir=run")
    wait_until(Path("sleeps").exists, 60)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=15)
    assert error == "torchpod: stopped before it began\n" and process.returncode == 130


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.slow
def test_a_signal_in_the_final_evaluation_says_where_is_what_was_trained(start, number):
    settings = ("env=corridor.py:Stuck", "+env.where=evaluation", f"total_env_steps={2 * STEPS}", "run_dir=run")
    process = start(*settings)
    wait_for_rows(2, process)
    time.sleep(3.0)  # now it sleeps in a step
    process.send_signal(number)
    _, error = process.communicate(timeout=10)
    assert error == ("torchpod: stopped in the final evaluation; what was trained is saved: torchpod eval run\n")
    assert process.returncode == 130 and int(checkpoint.latest(Path("run")).name) == 2


JUDGED = (f"evaluation.every={2 * STEPS}", "total_env_steps=1_000_000", "run_dir=run")


def numbers_of_rows():
    return [json.loads(line)["iteration"] for line in Path("run/metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("threads", [0, 2])
def test_an_environment_that_fails_in_an_evaluation_in_training_ends_the_run(capsys, threads):
    env = ("env=corridor.py:Stuck", "+env.where=judging", "+env.how=fails", f"loop.num_actor_threads={threads}")
    assert train(*env, *JUDGED) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    told = "torchpod: error: Stuck failed in an evaluation in training: LookupError: no way on."
    assert error == f"{told} Iteration 2 is saved; go on with resume=run"
    assert numbers_of_rows() == [1, 2]


def test_an_actor_that_fails_during_an_evaluation_in_training_ends_the_run(capsys):
    began, env = time.monotonic(), ("env=corridor.py:Stuck", "+env.where=acting", "+env.how=fails")
    assert train(*env, *JUDGED, f"evaluation.every={STEPS}") == 1
    error = capsys.readouterr().err.splitlines()[-1]
    told = r"torchpod: error: actor thread \d failed: LookupError: no way on\."
    assert re.fullmatch(f"{told} Iteration 1 is saved; go on with resume=run", error)
    assert numbers_of_rows() == [1] and time.monotonic() - began < 30


@pytest.mark.slow
def test_a_signal_in_an_evaluation_in_training_stops_the_run_within_seconds(start):
    process = start("env=corridor.py:Stuck", "+env.where=judging", *JUDGED)
    wait_until(Path("sleeps").exists, 60)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=10)
    assert error == "torchpod: stopped at iteration 2, in the middle of the next; go on with resume=run\n"
    assert process.returncode == 130 and numbers_of_rows() == [1, 2]
    assert int(checkpoint.latest(Path("run")).name) == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_to_all_processes_of_a_run_stops_it_like_any(start, number):
    process = start("env=gymnasium", "env.processes=true", "total_env_steps=1_000_000", "run_dir=run")
    wait_for_rows(3, process)
    os.killpg(process.pid, number)
    _, error = process.communicate(timeout=60)
    saved = int(checkpoint.latest(Path("run")).name)
    assert (process.returncode, error) == (130, f"torchpod: stopped at iteration {saved}; go on with resume=run\n")
    assert group_is_empty(process)
    goes_on_from(saved)


@pytest.mark.parametrize(
    ("which", "env", "name"),
    [
        pytest.param(0, ("env=gymnasium", "env.processes=true"), "CartPole-v1", marks=pytest.mark.slow),
        (-1, ("env=gymnasium", "env.processes=true"), "CartPole-v1"),
        pytest.param(-1, ("env=corridor.py:Corridor", "+env.processes=true"), "Corridor", marks=pytest.mark.slow),
    ],
    ids=["first of a pool", "last of a pool", "of a file of one's own"],
)
def test_a_worker_process_that_is_killed_ends_the_run(start, which, env, name):
    process = start(*env, "total_env_steps=1_000_000", "run_dir=run")
    wait_for_rows(3, process)
    workers = [pid for pid in session_of(process) if os.getpgid(pid) == pid and pid != process.pid]
    began = time.monotonic()
    os.kill(sorted(workers)[which], signal.SIGKILL)
    _, error = process.communicate(timeout=60)
    assert time.monotonic() - began < 10
    message = error.splitlines()[-1]
    assert error.startswith("Traceback") and process.returncode == 1
    assert f"RuntimeError: a worker process of {name} is gone" in message
    assert message.startswith("torchpod: error: actor thread ") and message.endswith("go on with resume=run")
    assert group_is_empty(process)
    assert not any(alive(pid) for pid in workers)
    goes_on_from(int(checkpoint.latest(Path("run")).name))


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_two_processes_do_not_share_a_run_folder(start, capsys):
    process = start("env=corridor.py:Corridor", "total_env_steps=1_000_000", "run_dir=run")
    wait_for_rows(1, process)
    capsys.readouterr()
    train("env=corridor.py:Corridor", f"total_env_steps={STEPS}", "run_dir=run", "resume=auto")
    assert "run is in use by another process; wait until it ends" in capsys.readouterr().err
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)


def test_an_environment_whose_copies_share_what_they_step_is_for_one_pool():
    env, settings = SharesSimulator(CartPole(max_episode_steps=7)), [*SMALL, f"total_env_steps={4 * STEPS}"]
    for shared in (env, RewardClip(env)):
        with pytest.raises(
            ConfigError, match=r"breaks the contract: Copies of an environment on the host \(copy.copy,"
        ):
            execute(load(settings), env=shared)
    assert execute(load([*settings, "loop.num_actor_threads=1"]), env=env).summary["env_steps"] > 0

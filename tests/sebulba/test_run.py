"""Runs with loop=sebulba from the command line: what users of host environments do."""

import json
from pathlib import Path

import pytest

from torchpod import checkpoint
from torchpod.main import main
from torchpod.sebulba import ActorError

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
import gymnasium
import numpy as np


class Corridor(gymnasium.Env):
    """Go right; `breaks` ends the process's patience at a step of that number."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, length: int = 5, breaks: int = 0) -> None:
        self.length, self.breaks, self.position, self.count = length, breaks, 0, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position = 0
        return self._observe(), {}

    def step(self, action):
        self.count += 1
        if self.count == self.breaks:
            raise OSError("the corridor is closed")
        self.position += int(action)
        return self._observe(), float(action), self.position >= self.length, False, {}

    def _observe(self):
        return np.array([self.position / self.length], np.float32)


def corridor(length: int = 3) -> gymnasium.Env:
    return Corridor(length)
'''


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corridor.py").write_text(ENVIRONMENT)
    return tmp_path


def train(*overrides):
    return main(["train", *SMALL, *overrides])


@pytest.mark.parametrize("algo", ["ppo", "impala"])
def test_train_eval_and_resume_on_gymnasium(capsys, algo):
    learner = [] if algo == "ppo" else ["algo.learner.num_minibatches=1"]
    assert train("env=gymnasium", f"algo={algo}", *learner, f"total_env_steps={5 * STEPS}", "run_dir=run") == 0
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4, 5]
    assert all({"policy_age", "learner_wait", "actor_wait", "queue_occupancy"} <= row.keys() for row in rows)
    assert main(["eval", "run", "--episodes", "2"]) == 0
    capsys.readouterr()
    assert main(["train", "resume=run", f"total_env_steps={8 * STEPS}"]) == 0
    assert capsys.readouterr().out.count("its environments begin new episodes") == 1
    assert int(checkpoint.latest(Path("run")).name) == 8


@pytest.mark.parametrize("env", ["corridor.py:Corridor", "corridor.py:corridor"])
def test_a_gymnasium_environment_of_ones_own_needs_no_registration(env):
    assert train(f"env={env}", "+env.length=4", f"total_env_steps={2 * STEPS}", "run_dir=run") == 0
    assert json.loads(Path("run/summary.json").read_text())["eval_return"]["episodes"] == 2


def test_a_broken_environment_leaves_a_checkpoint_and_its_traceback():
    with pytest.raises(ActorError, match="actor thread . failed: OSError: the corridor is closed") as caught:
        train("env=corridor.py:Corridor", "+env.breaks=120", f"total_env_steps={40 * STEPS}", "run_dir=run")
    assert isinstance(caught.value.__cause__, OSError)
    name = checkpoint.latest(Path("run")).name
    assert 14 < int(name) < 20  # 120 steps of an environment, and the resets between its episodes
    assert main(["train", "resume=run", f"total_env_steps={22 * STEPS}"]) == 0
    assert int(checkpoint.latest(Path("run")).name) > int(name)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["env=gymnasium", "loop=anakin"], "is not a pure tensor program; run it with loop=sebulba"),
        (["env=gymnasium", "env.task=CartPole-v7"], "env=gymnasium cannot be made"),
        (["env=gymnasium", "loop.lag=soon"], "loop.lag='soon': expected an integer or free."),
        (["env=gymnasium", "loop.refresh=never"], "loop.refresh='never': expected unroll or step."),
        (["env=gymnasium", "loop.num_actor_threads=-1"], "must be at least 0"),
        (["env=gymnasium", "loop.num_actor_threads=3"], "cannot be split by loop.num_actor_threads=3"),
        (["env=gymnasium", "algo=a2c"], "cannot correct for loop.lag=1; use loop.lag=0"),
        (["env=gymnasium", "population=2"], "population=2 needs loop=anakin"),
        (["env=cartpole", "loop=anakin", "loop.lag=1"], "loop.lag is no setting"),
    ],
)
def test_what_cannot_work_is_said_in_one_sentence(capsys, overrides, message):
    assert train(*overrides) == 1
    error = capsys.readouterr().err
    assert error.startswith("torchpod: error: ") and error.count("\n") == 1
    assert message in error

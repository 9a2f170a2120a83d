"""What `info` of a Gymnasium environment may hold, and what of it becomes a metric."""

import functools
import json
import re
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from tests.envs.host.test_gymnasium import IN_THREAD_AND_PROCESSES, ONE, UNIT, keys
from torchpod import random
from torchpod.commands.eval_run import eval_run
from torchpod.compose import load
from torchpod.config import ConfigError
from torchpod.envs.host import Gymnasium
from torchpod.envs.transforms import time_limit
from torchpod.makers import make_env
from torchpod.metrics import read_metrics
from torchpod.run.execute import execute
from torchpod.types import FIRST, LAST


class Uninformed(gymnasium.Env):
    """Tells nothing, instead of an empty dict, in `method`."""

    observation_space, action_space = UNIT, spaces.Discrete(2)

    def __init__(self, method):
        self.method = method

    def reset(self, *, seed=None, options=None):
        told: Any = None if self.method == "reset" else {}
        return ONE, told

    def step(self, action):
        told: Any = None
        return ONE, 0.0, False, False, told


@pytest.mark.parametrize("method", ["reset", "step"])
def test_an_info_that_is_none_is_named(method):
    env = Gymnasium(functools.partial(Uninformed, method))
    with pytest.raises(ValueError, match="Uninformed gave info=None; give a dict, which may be empty"):
        env.init(keys(1))
        env.step(None, torch.zeros(1, dtype=torch.int64), keys(1))


class Talkative(gymnasium.Env):
    """Tells each time something of another shape, or what cannot be sent."""

    observation_space, action_space = UNIT, spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.count = 0
        return ONE, {"seen": np.zeros(2)}

    def step(self, action):
        self.count += 1
        return ONE, 1.0, False, False, {"seen": np.zeros(2 + self.count + int(action)), "how": lambda: None}


@pytest.mark.parametrize("processes", IN_THREAD_AND_PROCESSES)
def test_an_info_may_hold_anything_for_nobody_reads_it(processes):
    env = Gymnasium(Talkative, processes=processes)
    try:
        env.init(keys(2))
        for _ in range(2):
            assert env.step(None, torch.tensor([0, 1]), keys(2))[1].reward.tolist() == [1.0, 1.0]
    finally:
        env.close()


class Goal(gymnasium.Env):
    """Succeeds if every action was 1; says so, and how far it came, when it ends after 1 + seed % 3 steps."""

    observation_space, action_space = UNIT, spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.length = self.length if seed is None else 1 + seed % 3
        self.steps = self.good = 0
        return ONE, {"is_success": None}

    def step(self, action):
        self.steps, self.good = self.steps + 1, self.good + int(action)
        over = self.steps == self.length
        info = {"is_success": self.good == self.length, "_is_success": np.array([self.good / 4]), "how": lambda: None}
        info |= {"text": "3", "much": 10**400}
        return ONE, 0.0, False, over, info if over else {"is_success": "not yet"}


@pytest.mark.parametrize("processes", IN_THREAD_AND_PROCESSES)
def test_numbers_of_the_last_info_are_told_of_the_episode(processes, seed):
    env = Gymnasium(Goal, processes=processes, info_keywords=["is_success", "_is_success"])
    generator = torch.Generator().manual_seed(seed)
    lengths = (1 + random.bits(keys(5, seed), 1)[:, 0] % 3).tolist()
    try:
        told = [env.init(keys(5, seed))[1].extras["episode"]]
        assert all((x == 0).all() and x.dtype == torch.float32 for x in told[0].values())
        taken: list[list[int]] = [[] for _ in lengths]
        ends = 0
        for _ in range(12):
            action = torch.randint(2, (5,), generator=generator)
            _, timestep = env.step(None, action, keys(5))
            episode = timestep.extras["episode"]
            assert sorted(episode) == ["_is_success", "is_success"]
            for i, kind in enumerate(timestep.step_type.tolist()):
                taken[i] = [] if kind == FIRST else [*taken[i], int(action[i])]
                over = kind == LAST
                ends += over
                assert over == (len(taken[i]) == lengths[i])
                assert episode["is_success"][i] == float(over and all(taken[i]))
                assert episode["_is_success"][i] == (sum(taken[i]) / 4 if over else 0.0)
        assert ends > 10
    finally:
        env.close()


def test_what_is_told_of_episodes_becomes_metrics_of_a_run(tmp_path):
    (tmp_path / "my_env.py").write_text(
        "import gymnasium\nimport numpy as np\n\n\nclass Walk(gymnasium.Env):\n"
        "    observation_space = gymnasium.spaces.Box(0.0, 1.0, (1,))\n"
        "    action_space = gymnasium.spaces.Discrete(2)\n\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        super().reset(seed=seed)\n        self.steps = self.right = 0\n"
        "        return np.zeros(1, np.float32), {}\n\n"
        "    def step(self, action):\n        self.steps, self.right = self.steps + 1, self.right + int(action)\n"
        "        info = {'right': self.right, 'other': [1, 2], 'odd': float('nan')}\n"
        "        return np.zeros(1, np.float32), float(action), False, self.steps == 5, info\n"
    )
    small = ["algo.unroll_length=12", "algo.learner.num_minibatches=1", "algo.agent.hidden=[4]", "compile=false"]
    run = execute(
        load(
            [f"env={tmp_path}/my_env.py:Walk", "+env.info_keywords=[right,odd]", "loop=sebulba", *small, "num_envs=4"]
            + [f"run_dir={tmp_path}/run", "total_env_steps=192", "evaluation.episodes=3", "logger.console=false"]
        )
    )
    rows = read_metrics(tmp_path / "run")
    assert len(rows) == 4 and all(row["episode_right"] == pytest.approx(row["episode_return"]) for row in rows)
    score = run.summary["eval_return"]
    assert score["episode"]["right"] == score["mean"]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(), parse_constant=pytest.fail)
    assert summary["eval_return"]["episode"]["odd"] is None
    said = json.loads(eval_run(tmp_path / "run", episodes=3), parse_constant=pytest.fail)
    assert said["episode"] == summary["eval_return"]["episode"]


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ("is_success", "info_keywords='is_success' must be a list of names in info, e.g. [is_success], and none of"),
        ([1], "info_keywords=[1] must be a list of names in info"),
        (["length"], "none of return and length, which are counted from rewards and ends."),
    ],
)
def test_keywords_that_are_no_names_are_refused(keywords, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Gymnasium(Goal, info_keywords=keywords)
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_env({"name": "gymnasium", "task": "CartPole-v1", "info_keywords": keywords})


@pytest.mark.parametrize(
    ("keyword", "message"),
    [
        (
            "success",
            "Goal has no success in the info of the last step of an episode, but is_success, _is_success, how",
        ),
        ("how", ", which info_keywords names; give a number."),
        ("text", "Goal gave info['text']='3', which info_keywords names; give a number."),
        ("much", "00, which info_keywords names; give a number."),
    ],
)
@pytest.mark.filterwarnings("ignore:.*ERROR")
@pytest.mark.parametrize("processes", IN_THREAD_AND_PROCESSES)
def test_a_keyword_that_info_lacks_is_named(keyword, message, processes):
    env = Gymnasium(Goal, processes=processes, info_keywords=[keyword])
    try:
        env.init(keys(3))
        with pytest.raises(ValueError, match=re.escape(message)):
            for _ in range(3):
                env.step(None, torch.ones(3, dtype=torch.int64), keys(3))
    finally:
        env.close()


def test_keywords_go_with_transforms_and_for_no_other_environment():
    repeated = make_env(
        {"name": "gymnasium", "task": "CartPole-v1", "transforms": [{"name": "time_limit", "max_episode_steps": 2}]}
    )
    assert "episode" not in repeated.init(keys(2))[1].extras
    env = time_limit(Gymnasium(Timed, info_keywords=["time"]), 2)
    _, timestep = env.init(keys(2))
    for _ in range(2):
        _, timestep = env.step(None, torch.zeros(2, dtype=torch.int64), keys(2))
    assert timestep.extras["episode"]["time"].tolist() == [2.0, 2.0]
    with pytest.raises(ConfigError, match="env=cartpole takes no argument info_keywords; it is no gymnasium.Env."):
        make_env({"name": "cartpole", "info_keywords": ["time"]})


class Timed(Goal):
    """Never ends by itself."""

    def step(self, action):
        self.steps += 1
        return ONE, 0.0, False, False, {"time": self.steps}

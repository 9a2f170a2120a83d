"""What `make_loop` refuses."""

from pathlib import Path

import pytest
import torch

from torchpod.compose import load
from torchpod.config import ConfigError
from torchpod.distributed import Ranks
from torchpod.makers import make_agent, make_env
from torchpod.run.loops import make_loop

AGENT = f"algo={Path(__file__).parents[1] / 'user_agent.py'}:MyAgent"
TINY = ("compile=false", "num_envs=8", "algo.unroll_length=8", "algo.learner.num_epochs=1")


def _loop(overrides: list[str]):
    config = load([*TINY, *overrides])
    env = make_env(config.env)
    return make_loop(config, env, make_agent(config.algo, env.spec), Ranks(), torch.device("cpu"))


@pytest.mark.parametrize("loop", ["anakin", "sebulba"])
@pytest.mark.parametrize("given", ["algo.replay.capacity=5000", "algo.env_steps_per_update=1"])
def test_an_agent_of_a_users_without_replay_refuses_settings_of_replay(given: str, loop: str):
    with pytest.raises(ConfigError) as error:
        _loop([AGENT, f"loop={loop}", given])
    name = given.partition("=")[0]
    assert str(error.value) == f"{name} is a setting of agents with replay, and {AGENT} has none; leave it out."


def test_an_agent_of_a_users_with_replay_takes_them(tmp_path: Path):
    (tmp_path / "mine.py").write_text("from torchpod.algos.dqn import DQN\n\n\nclass Mine(DQN):\n    pass\n")
    mine = [f"algo={tmp_path}/mine.py:Mine", "algo.replay.capacity=5000", "algo.env_steps_per_update=8"]
    loop = _loop([*mine, "algo.replay.min_size=8"])
    assert loop.replay is not None

"""What is looked at before a run begins."""

import pytest
import torch

from tests.user_agent import MyAgent, MyConfig
from torchpod.compose import load
from torchpod.env import HostEnv
from torchpod.envs import Catch
from torchpod.envs.transforms import Flatten
from torchpod.run.checks import check_users_agent, check_users_env


@pytest.mark.parametrize(("rows", "num_envs"), [(None, 4), (2, 4), (3, 6), (5, 10), (8, 8)])
def test_an_environment_of_several_rows_is_checked_whole(rows, num_envs):
    sizes = []

    class Noted(HostEnv):
        def init(self, keys):
            sizes.append(len(keys))
            return super().init(keys)

    base = Noted(Catch())
    if rows is not None:
        base.rows_each = rows
    env, config = Flatten(base), load(["algo=ppo", "loop=sebulba", "algo.unroll_length=16"])
    check_users_env(env, config, torch.device("cpu"))
    check_users_agent(MyAgent(env.spec, MyConfig()), env, config, torch.device("cpu"))
    assert set(sizes) == {num_envs}

"""Agents of TorchRL losses in both loops: in lockstep the same, and with a lag what Sebulba makes of its own."""

import copy

import pytest
import torch
from torch.utils import _pytree as pytree

from tests.algos.test_torchrl_multi_agent import Meadow
from tests.interop.rows import THERE, B, config, env_for
from torchpod.algos.torchrl import MULTI_AGENT, OFF_POLICY, torchrl_agent
from torchpod.anakin import Anakin
from torchpod.anakin import train as train_anakin
from torchpod.compile import Compiler
from torchpod.env import HostEnv
from torchpod.learner import LearnerConfig
from torchpod.replay import ReplayConfig
from torchpod.sebulba import Sebulba, SebulbaConfig, train


def last_of(reports):
    """The last state."""
    states = [pytree.tree_map(torch.clone, program.state) for _, program in reports]
    return states[-1]


@pytest.mark.parametrize("host", [pytest.param(False, marks=pytest.mark.slow), True], ids=["tensor", "host"])
@pytest.mark.parametrize("name", [*THERE, *sorted(MULTI_AGENT)])
def test_in_lockstep_sebulba_equals_anakin_to_the_bit(name, host, seed):
    env = Meadow(max_episode_steps=5) if name in MULTI_AGENT else env_for(name, max_episode_steps=5)
    settings = {
        "num_envs": B,
        "unroll_length": 4,
        "num_iterations": 6,
        "learner": LearnerConfig(num_epochs=1, num_minibatches=2, learning_rate=1e-2),
        "compiler": Compiler(enabled=False),
    }
    if name in OFF_POLICY:
        settings["replay"] = ReplayConfig(capacity=40 * B, batch_size=8, min_size=8 * B, prioritised=name != "IQLLoss")

    def make():
        return torchrl_agent(env.spec, config(name))

    anakin = Anakin(make, env, **settings)
    begin = anakin.init(seed)
    want = last_of(train_anakin(anakin, begin))
    own = HostEnv(env) if host else env
    lockstep = SebulbaConfig(num_actor_threads=1, lag=0)
    sebulba = Sebulba(make, lambda: copy.copy(own), config=lockstep, **settings)
    got = last_of(train(sebulba, sebulba.init(seed)))
    for part in ("learner", "priorities", "episode_return", "episode_length", "iteration", "env_steps"):
        both = getattr(got, part), getattr(want, part)
        pytree.tree_map(lambda x, y: torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True), *both)
    assert want.learner.num_steps >= 2 * 3
    assert any((want.learner.params[key] != x).any() for key, x in begin.learner.params.items())

"""Every tensor environment under the public conformance test: eager, vmapped, and compiled once."""

import pytest
import torch

from tests.marks import with_slow
from torchpod import random
from torchpod.compile import Compiler
from torchpod.env import HostEnv, TensorEnv
from torchpod.envs import MAKERS
from torchpod.envs.transforms import (
    ActionRepeat,
    Flatten,
    FrameStack,
    RewardClip,
    StickyAction,
    time_limit,
)
from torchpod.testing import check_env
from torchpod.trees import contiguous

TENSOR = [name for name, maker in MAKERS.items() if isinstance(maker, type) and issubclass(maker, TensorEnv)]


COMPILED = ("cartpole", "grid_world", "minatar_breakout", "pendulum", "tag_gridworld")
"""In every run of `make test`."""


@pytest.mark.parametrize(
    ("name", "compile"),
    [(name, name in COMPILED) for name in TENSOR]
    + [pytest.param(name, True, marks=pytest.mark.slow) for name in TENSOR if name not in COMPILED],
)
def test_environment_keeps_the_contract(name, compile):
    env = MAKERS[name]()
    assert env.spec.name == name
    assert env.traits.pure and env.traits.capturable and env.traits.vmappable
    check_env(env, compile=compile)


@pytest.mark.parametrize("name", with_slow(TENSOR, {*TENSOR} - {*COMPILED}))
def test_environment_keeps_the_contract_as_a_host_environment(name):
    check_env(HostEnv(MAKERS[name]()))


def chain(env):
    if env.spec.name == "covid_economy":
        with pytest.raises(
            ValueError, match="action_repeat would go on with what the action_mask of covid_economy may"
        ):
            ActionRepeat(env, 2)
    else:
        env = ActionRepeat(env, 2)
    return RewardClip(FrameStack(Flatten(StickyAction(time_limit(env, 9), 0.5)), 3), -1.0, 1.0)


@pytest.mark.parametrize("name", with_slow(TENSOR, {*TENSOR} - {*COMPILED}))
def test_environment_keeps_the_contract_in_every_transform(name):
    env = MAKERS[name]()
    alone = (StickyAction(env), FrameStack(env, 2), RewardClip(env, 0.0, 1.0), Flatten(env), time_limit(env, 9))
    for inside in (*alone, chain(env)):
        check_env(inside, num_steps=30, num_envs=4, compile=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", TENSOR)
def test_environment_keeps_the_contract_in_a_compiled_chain_of_transforms(name):
    check_env(chain(MAKERS[name]()), num_steps=30, num_envs=4)


@pytest.mark.parametrize("name", ["deep_sea", "bernoulli_bandit"])
def test_one_environment_alone_is_compiled_once(name):
    """Columns of one row have other strides as they are drawn than as a program returns them."""
    env, keys = MAKERS[name](), random.split(random.key(0), 1)

    def step(state, action, keys):
        return contiguous(env.step(state, action, keys))

    compiled, (state, timestep) = Compiler(True)(step), contiguous(env.init(keys))
    for _ in range(3):
        state, timestep = compiled(state, torch.zeros(1, dtype=torch.int64), keys)
    assert timestep.reward.shape == (1,)

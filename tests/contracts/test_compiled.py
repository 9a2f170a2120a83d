"""compile=false equals compiled for one iteration from the same carry; recompilation is refused."""

from typing import NamedTuple

import pytest
import torch
from torch.utils import _pytree as pytree

from torchpod import random
from torchpod.agent import Agent
from torchpod.algos.a2c import A2C, A2CConfig
from torchpod.algos.actor_critic import ActorCriticConfig
from torchpod.algos.impala import IMPALA, IMPALAConfig
from torchpod.algos.multi_agent import IA2C, IPPO, IA2CConfig, IPPOConfig
from torchpod.algos.ppo import PPO, PPOConfig
from torchpod.anakin import Anakin, train
from torchpod.compile import Compiler, RecompilationError
from torchpod.env import Env
from torchpod.envs.bsuite.catch import Catch
from torchpod.envs.bsuite.memory_chain import MemoryChain
from torchpod.envs.classic.cartpole import CartPole
from torchpod.envs.classic.pendulum import Pendulum
from torchpod.envs.multi_agent.covid_economy import CovidEconomy
from torchpod.envs.multi_agent.tag_continuous import TagContinuous
from torchpod.envs.multi_agent.tag_gridworld import TagGridWorld
from torchpod.learner import LearnerConfig
from torchpod.types import FIRST

B, T = 8, 16
SMALL = PPOConfig(hidden=(16, 16))


class Subject(NamedTuple):
    env: Env
    agent: type[Agent]
    config: ActorCriticConfig
    unroll_length: int = T


MLP = Subject(CartPole(max_episode_steps=9), PPO, SMALL)
OTHERS = {
    "continuous": Subject(Pendulum(max_episode_steps=9), PPO, SMALL),
    "cnn": Subject(Catch(), PPO, PPOConfig(hidden=(16,), channels=(4,))),
    "gru": Subject(MemoryChain(memory_length=3), PPO, PPOConfig(hidden=(8,), recurrent=8), unroll_length=6),
    "a2c": Subject(CartPole(max_episode_steps=9), A2C, A2CConfig(hidden=(16, 16))),
    "impala": Subject(CartPole(max_episode_steps=9), IMPALA, IMPALAConfig(hidden=(16, 16))),
    "groups": Subject(
        TagGridWorld(num_taggers=2, grid_length=4, max_episode_steps=5),
        IA2C,
        IA2CConfig(hidden=(8,), policies={"all": ["tagger", "runner"]}),
        unroll_length=8,
    ),
    "tag": Subject(
        TagContinuous(
            num_taggers=1,
            num_runners=2,
            use_full_observation=True,
            tagging_distance=0.2,
            max_episode_steps=5,
            num_acceleration_levels=2,
            num_turn_levels=2,
        ),
        IPPO,
        IPPOConfig(hidden=(8,)),
        unroll_length=8,
    ),
    "covid": Subject(
        CovidEconomy(max_episode_steps=6, cooldown=2, subsidy_interval=3), IPPO, IPPOConfig(hidden=(8,)), 8
    ),
}


def make(enabled, subject=MLP):
    return Anakin(
        lambda: subject.agent(subject.env.spec, subject.config),
        subject.env,
        num_envs=B,
        unroll_length=subject.unroll_length,
        learner=LearnerConfig(num_epochs=2, num_minibatches=2, learning_rate=1e-3, epsilon=1e-3),
        num_iterations=6,
        compiler=Compiler(enabled=enabled),
    )


@pytest.fixture(scope="module")
def compiled():
    """Compiled once for all tests of this file."""
    anakin = make(True)
    anakin.iterate(anakin.init(0))
    return anakin


def test_one_compiled_iteration_equals_eager_from_the_same_carry(seed, compiled):
    assert_compiled_equals_eager(seed, make(False), compiled)


SLOW = ("continuous", "gru", "a2c", "impala", "tag", "covid", "cnn", "groups")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in OTHERS])
def test_one_compiled_iteration_of_other_agents_equals_eager(seed, name):
    assert_compiled_equals_eager(seed, make(False, OTHERS[name]), make(True, OTHERS[name]))


def assert_compiled_equals_eager(seed, eager, compiled):
    """Integers and uniforms equal; other floats to 1e-5, and parameters to 1e-5 after 4 steps of Adam."""
    state = eager.init(seed)
    for _ in range(2):  # from the start, and from the middle of episodes
        (carry, want), (compiled_carry, got) = eager.rollout(state), compiled.rollout(state)
        first = want.timestep.step_type == FIRST
        assert first.sum() >= B
        # Pendulum: cos, sin of uniforms
        exact = 0.0 if isinstance(eager.env, CartPole | Catch | MemoryChain | TagGridWorld) else 1e-6
        began = [pytree.tree_map(lambda x, first=first: x[first], tr.timestep.observation) for tr in (got, want)]
        assert_close(*began, rtol=0, atol=exact)
        assert_close((compiled_carry, got), (carry, want), rtol=1e-4, atol=1e-5)
        (after, metrics), (compiled_after, compiled_metrics) = eager.iterate(state), compiled.iterate(state)
        assert_close(compiled_after.learner.params, after.learner.params, rtol=0, atol=1e-5)
        assert_close(compiled_after, after, rtol=1e-3, atol=1e-5)
        assert_close(compiled_metrics, metrics, rtol=1e-3, atol=1e-5)
        moved = [(a - b).abs().max() for a, b in zip(*map(leaves, (after, state)), strict=True)]
        assert max(moved) > 1e-3  # a hundred times the tolerance
        state = after


def leaves(state):
    return list(state.learner.params.values())


def assert_close(got, want, rtol, atol):
    for a, b in zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True):
        exact = not b.is_floating_point()
        torch.testing.assert_close(a, b, rtol=0 if exact else rtol, atol=0 if exact else atol, equal_nan=True)


def test_compiled_iterations_equal_each_other_to_the_bit(seed, compiled):
    state = compiled.init(seed)
    one, two = (compiled.iterate(state)[0] for _ in range(2))
    assert_close(one, two, rtol=0, atol=0)


def test_calls_of_several_compiled_iterations_equal_single_ones(seed, compiled):
    state = compiled.init(seed)
    ends = []
    for size in (1, 4):
        *_, (_, replay) = train(compiled, state, until=4, iterations_per_call=size)
        ends.append(replay.state)
    assert_close(*ends, rtol=0, atol=0)


def test_another_batch_size_raises_an_error_that_names_the_reason(seed, compiled):
    state = compiled.init(seed)
    half = random.split(random.key(seed), B // 2)
    carry = pytree.tree_map(lambda x: x[: B // 2] if x.ndim else x, state.carry)
    with pytest.raises(
        RecompilationError, match=r"(?s)step was compiled for 1 input signature.*size mismatch.*compile=false"
    ):
        compiled.rollout(state._replace(carry=carry, env_keys=half, actor_keys=half))
    compiled.rollout(state)  # and the program still works


def test_a_function_may_be_compiled_as_often_as_it_was_allowed():
    compiler = Compiler(enabled=True, max_compilations=2)
    double = compiler(lambda x: 2 * x)
    for size in (2, 3, 2, 3):
        assert torch.equal(double(torch.ones(size)), torch.full((size,), 2.0))
    with pytest.raises(RecompilationError, match="compiled for 2 input signature"):
        double(torch.ones(4))


def test_without_compilation_functions_are_left_as_they_are():
    def fn(x):
        return x

    assert Compiler(enabled=False)(fn) is fn

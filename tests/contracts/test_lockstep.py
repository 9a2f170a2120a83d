"""A host-style environment, stepped in a thread in lockstep with a learner, equals Anakin to the bit."""

import copy
import queue
import threading

import pytest
import torch
from torch.utils import _pytree as pytree

from torchpod import random
from torchpod.algos.ppo import PPO, PPOConfig
from torchpod.anakin import Anakin
from torchpod.compile import Compiler
from torchpod.env import HostEnv
from torchpod.envs.classic.cartpole import CartPole
from torchpod.learner import Learner, LearnerConfig
from torchpod.rollout import make_step, start, unroll

T, B, UPDATES = 8, 4, 4
LEARNER = LearnerConfig(num_epochs=2, num_minibatches=2, learning_rate=1e-2)


def act(agent, env, env_keys, actor_keys, parameters, trajectories):
    """An actor: parameters in, trajectories out, until it gets None."""
    step, carry = make_step(agent, env), start(agent, env, env_keys)
    while (variables := parameters.get()) is not None:
        carry, trajectory = unroll(step, variables, carry, env_keys, actor_keys, length=T)
        trajectories.put((carry, trajectory))


@pytest.mark.parametrize("recurrent", [0, 6])
def test_a_host_environment_in_a_thread_equals_anakin_to_the_bit(seed, recurrent):
    env = CartPole(max_episode_steps=7)
    config = PPOConfig(hidden=(8,), recurrent=recurrent)
    anakin = Anakin(
        lambda: PPO(env.spec, config),
        env,
        num_envs=B,
        unroll_length=T,
        learner=LEARNER,
        num_iterations=UPDATES,
        compiler=Compiler(enabled=False),
    )
    begin = state = anakin.init(seed)
    expected, losses = [], []
    for _ in range(UPDATES):
        _, trajectory = anakin.rollout(state)
        state, metrics = anakin.iterate(state)
        expected.append(trajectory)
        losses.append(metrics)

    host, agent = HostEnv(env), PPO(env.spec, config)
    learner = Learner(agent, LEARNER, num_iterations=UPDATES)
    parameters, trajectories = queue.Queue(), queue.Queue()
    args = (copy.deepcopy(agent), host, begin.env_keys, begin.actor_keys, parameters, trajectories)
    thread = threading.Thread(target=act, args=args, daemon=True)
    thread.start()
    mine, carry = begin.learner, begin.carry
    for i in range(UPDATES):
        parameters.put({k: v.clone() for k, v in (mine.params | mine.buffers).items()})
        carry, trajectory = trajectories.get(timeout=60)
        assert carry.env_state is None
        assert_equal(trajectory, expected[i])
        keys = random.at(begin.learner_keys, i * learner.counters_per_update)
        mine, metrics = learner.update(mine, trajectory, keys)
        for name, value in metrics.items():
            assert torch.equal(value, losses[i][name])
    parameters.put(None)
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert_equal(mine, state.learner)
    assert_equal(carry.timestep, state.carry.timestep)
    assert mine.num_steps == UPDATES * 4 and not torch.equal(
        mine.params["policy.weight"], begin.learner.params["policy.weight"]
    )


def test_anakin_refuses_a_host_environment():
    env = HostEnv(CartPole())
    with pytest.raises(ValueError, match="loop=sebulba"):
        Anakin(
            lambda: PPO(env.spec),
            env,
            num_envs=B,
            unroll_length=T,
            learner=LEARNER,
            num_iterations=1,
            compiler=Compiler(enabled=False),
        )


def assert_equal(a, b):
    pytree.tree_map(lambda x, y: torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True), a, b)

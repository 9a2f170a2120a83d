import secrets

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control import PendulumEnv

from torchpod import random
from torchpod.envs.classic.pendulum import Pendulum
from torchpod.types import FIRST, LAST

KEYS = random.split(random.key(0), 1000)


def test_one_step_equals_gymnasium_from_1000_random_states():
    seed = secrets.randbits(32)
    print(f"seed={seed}")
    rng = np.random.default_rng(seed)
    states = (rng.uniform(-1, 1, (1000, 2)) * [2 * np.pi, 8]).astype(np.float32)
    actions = rng.uniform(-3, 3, (1000, 1)).astype(np.float32)  # some are clamped
    env = Pendulum()
    moved, reward, terminated = env.transition(torch.from_numpy(states), torch.from_numpy(actions), KEYS)
    assert moved.dtype == reward.dtype == torch.float32
    assert not terminated.any()
    seen = env.observe(moved).numpy()
    theirs = PendulumEnv()
    theirs.reset(seed=0)
    for i in range(1000):
        theirs.state = states[i].astype(np.float64)
        observation, their_reward, _, _, _ = theirs.step(actions[i].astype(np.float64))
        np.testing.assert_allclose(moved[i].numpy(), theirs.state, rtol=0, atol=1e-5)
        np.testing.assert_allclose(seen[i], observation, rtol=0, atol=1e-5)
        np.testing.assert_allclose(reward[i].numpy(), float(their_reward), rtol=0, atol=1e-5)


def test_episodes_in_float64_equal_gymnasium_to_their_truncation():
    env, size = Pendulum(), 4
    keys, rng = KEYS[:size], np.random.default_rng(1)
    theirs = [gymnasium.make("Pendulum-v1") for _ in range(size)]
    (inner, count, was_last), _ = env.init(random.at(keys, 0))
    state = (inner.double(), count, was_last)
    for step in range(1, 404):
        actions = rng.uniform(-3, 3, (size, 1))
        before = state[0].numpy()
        state, timestep = env.step(state, torch.from_numpy(actions), random.at(keys, step))
        assert state[0].dtype == torch.float64
        starts = step % 201 == 1  # after FIRST
        for i, their in enumerate(theirs):
            inside = their.unwrapped
            assert isinstance(inside, PendulumEnv)
            if timestep.step_type[i] == FIRST:
                assert step % 201 == 0
                continue
            if starts:
                their.reset(seed=0)
                inside.state = before[i].copy()
            _, reward, terminated, truncated, _ = their.step(actions[i])
            np.testing.assert_allclose(state[0][i].numpy(), inside.state, rtol=0, atol=1e-9)
            np.testing.assert_allclose(timestep.reward[i].numpy(), float(reward), rtol=0, atol=1e-9)
            assert (timestep.step_type[i] == LAST) == truncated and not terminated
            assert timestep.discount[i] == 1
            assert truncated == (step % 201 == 200)


def test_gradient_through_three_steps_equals_finite_differences():
    env, keys = Pendulum(), KEYS[:1]
    start = torch.tensor([[0.5, -0.3]], dtype=torch.float64)

    def total_reward(actions):
        state, total = start, torch.zeros(1, dtype=torch.float64)
        for action in actions:
            state, reward, _ = env.transition(state, action[None], keys)
            total = total + reward
        return total

    torch.autograd.gradcheck(total_reward, torch.tensor([[0.3], [-1.0], [1.5]], dtype=torch.float64).requires_grad_())


def test_reset_covers_the_circle():
    theta, theta_dot = Pendulum().reset(KEYS).unbind(-1)
    assert theta.abs().max() <= np.pi and theta.abs().max() > 3.1
    assert theta_dot.abs().max() <= 1 and theta_dot.abs().max() > 0.98


@pytest.mark.parametrize("wrong", [0, 2.5])
def test_a_wrong_time_limit_is_refused(wrong):
    with pytest.raises(ValueError, match="max_episode_steps=.* use an integer of at least 1"):
        Pendulum(max_episode_steps=wrong)


def test_reset_near_upright():
    theta, theta_dot = Pendulum(max_start_angle=0.3).reset(KEYS).unbind(-1)
    assert 0.29 < theta.abs().max() <= 0.3
    assert 0.98 < theta_dot.abs().max() <= 1


@pytest.mark.parametrize("wrong", [-0.1, 4.0, "small"])
def test_a_wrong_start_angle_is_refused(wrong):
    with pytest.raises(ValueError, match="max_start_angle=.* use a number from 0 to 3.14159"):
        Pendulum(max_start_angle=wrong)

import secrets

import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control import AcrobotEnv

from tests.envs.classic.beside_gymnasium import free_run
from torchpod import random
from torchpod.envs.classic.acrobot import MAX_SPEED_1, MAX_SPEED_2, Acrobot

KEYS = random.split(random.key(0), 1000)


def test_one_step_equals_gymnasium_from_1000_random_states():
    seed = secrets.randbits(32)
    print(f"seed={seed}")
    rng = np.random.default_rng(seed)
    states = rng.uniform(-1, 1, (1000, 4)) * [np.pi, np.pi, 4 * np.pi, 9 * np.pi]
    states[:500, 2:] /= 4  # half of them are slow, as in most episodes
    actions = rng.integers(0, 3, 1000)
    env = Acrobot()
    moved, reward, terminated = env.transition(torch.from_numpy(states), torch.from_numpy(actions), KEYS)
    assert moved.dtype == torch.float64
    single = env.transition(torch.from_numpy(states).float(), torch.from_numpy(actions), KEYS)
    assert single[0].dtype == single[1].dtype == torch.float32
    seen, seen_single = env.observe(moved).numpy(), env.observe(single[0]).numpy()
    theirs = AcrobotEnv()
    theirs.reset(seed=0)
    clamped = turned = 0
    for i in range(1000):
        theirs.state = states[i]
        observation, their_reward, their_terminated, _, _ = theirs.step(int(actions[i]))
        assert theirs.state is not None
        np.testing.assert_allclose(moved[i].numpy(), theirs.state, rtol=0, atol=1e-9)
        np.testing.assert_allclose(seen[i], observation, rtol=0, atol=2e-6)  # theirs is rounded to float32
        assert (float(reward[i]), bool(terminated[i])) == (their_reward, their_terminated)
        if i < 500:  # a step of 0.2 s at high speed multiplies the errors of float32 by up to 100,000
            np.testing.assert_allclose(seen_single[i], observation, rtol=0, atol=2e-5)
        height = -np.cos(theirs.state[0]) - np.cos(theirs.state[0] + theirs.state[1])
        if i < 500 and abs(height - 1) > 1e-3:  # closer to the limit float32 may fall on the other side
            assert (float(single[1][i]), bool(single[2][i])) == (their_reward, their_terminated)
        clamped += abs(theirs.state[2]) == MAX_SPEED_1 or abs(theirs.state[3]) == MAX_SPEED_2
        turned += (abs(theirs.state[:2] - states[i, :2]) > np.pi).any()
    assert clamped > 100 and turned > 100
    assert 0.1 < terminated.float().mean() < 0.9  # both outcomes were compared


def test_an_idle_episode_in_float64_equals_gymnasium_to_its_truncation():
    assert free_run(Acrobot(), "Acrobot-v1", lambda state, step: 1, 1).lengths == [500]


def test_random_episodes_in_float64_equal_gymnasium_to_their_truncation():
    actions = np.random.default_rng(1).integers(0, 3, 10_000)
    assert free_run(Acrobot(), "Acrobot-v1", lambda state, step: int(actions[step]), 2).lengths == [500, 500]


def test_episodes_that_swing_in_float64_equal_gymnasium_to_their_termination():
    # Once both links whirl, rounding errors grow tenfold in 3 steps: compare numbers for 100.
    whirl = free_run(Acrobot(), "Acrobot-v1", lambda state, step: 2 if state[3] > 0 else 0, 8, compared_steps=100)
    lengths = whirl.lengths
    assert max(lengths) < 150 and len(set(lengths)) > 3


def test_reset_is_uniform_between_minus_and_plus_0_1():
    state = Acrobot().reset(KEYS)
    assert state.min() >= -0.1 and state.max() < 0.1
    assert abs(state.mean()) < 0.005 and abs(state.std() - 0.2 / 12**0.5) < 0.003


@pytest.mark.parametrize("wrong", [0, 2.5, "500", True])
def test_a_wrong_time_limit_is_refused(wrong):
    with pytest.raises(ValueError, match="max_episode_steps=.* use an integer of at least 1"):
        Acrobot(max_episode_steps=wrong)

import secrets

import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control import CartPoleEnv

from tests.envs.classic.beside_gymnasium import free_run
from torchpod import random
from torchpod.envs.classic.cartpole import THETA_LIMIT, X_LIMIT, CartPole

KEYS = random.split(random.key(0), 1000)


def test_one_step_equals_gymnasium_from_1000_random_states():
    seed = secrets.randbits(32)
    print(f"seed={seed}")
    rng = np.random.default_rng(seed)
    states = rng.uniform(-1, 1, (1000, 4)).astype(np.float32) * np.array([2.6, 3, 0.25, 3], np.float32)
    actions = rng.integers(0, 2, 1000)
    env = CartPole()
    moved, reward, terminated = env.transition(torch.from_numpy(states), torch.from_numpy(actions), KEYS)
    assert moved.dtype == reward.dtype == torch.float32
    theirs = CartPoleEnv()
    decided = 0
    for i in range(1000):
        theirs.reset(seed=0)
        theirs.state = states[i].astype(np.float64)
        _, their_reward, their_terminated, _, _ = theirs.step(int(actions[i]))
        assert theirs.state is not None
        np.testing.assert_allclose(moved[i].numpy(), theirs.state, rtol=0, atol=1e-5)
        assert reward[i] == their_reward
        margin = min(abs(abs(theirs.state[0]) - X_LIMIT), abs(abs(theirs.state[2]) - THETA_LIMIT))
        if margin > 1e-5:  # closer to a limit float32 may fall on the other side
            assert bool(terminated[i]) == their_terminated
            decided += 1
    assert decided > 990
    assert 0.1 < terminated.float().mean() < 0.9  # both outcomes were compared


def test_random_episodes_in_float64_equal_gymnasium_to_their_termination():
    actions = np.random.default_rng(1).integers(0, 2, 100_000)
    lengths = free_run(CartPole(), "CartPole-v1", lambda state, step: int(actions[step]), 30).lengths
    assert max(lengths) < 500  # all terminated


def test_balanced_episodes_in_float64_equal_gymnasium_to_their_truncation():
    # A rounding error grows tenfold in about 30 steps, whatever the actions: compare numbers for 150.
    def balance(s, step):
        return int(s[2] + 0.3 * s[3] + 0.02 * s[0] + 0.04 * s[1] > 0)

    episodes = free_run(CartPole(), "CartPole-v1", balance, 2, tolerance=1e-6, compared_steps=150)
    assert episodes.lengths == [500, 500]


def test_reset_is_uniform_between_minus_and_plus_0_05():
    state = CartPole().reset(KEYS)
    assert state.min() >= -0.05 and state.max() < 0.05
    assert abs(state.mean()) < 0.002 and abs(state.std() - 0.1 / 12**0.5) < 0.002


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "500", True, None])
def test_a_wrong_time_limit_is_refused(wrong):
    with pytest.raises(ValueError, match="max_episode_steps=.* use an integer of at least 1"):
        CartPole(max_episode_steps=wrong)

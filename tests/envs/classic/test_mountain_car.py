import secrets

import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control import MountainCarEnv

from tests.envs.classic.beside_gymnasium import free_run
from torchpod import random
from torchpod.envs.classic.mountain_car import GOAL, MIN_POSITION, MountainCar

KEYS = random.split(random.key(0), 1000)


def test_one_step_equals_gymnasium_from_1000_random_states():
    seed = secrets.randbits(32)
    print(f"seed={seed}")
    rng = np.random.default_rng(seed)
    states = rng.uniform([-1.2, -0.07], [0.6, 0.07], (1000, 2)).astype(np.float32)
    states[:300, 0] = rng.uniform(-1.2, -1.1, 300)  # near the wall
    states[300:600, 0] = rng.uniform(0.4, 0.6, 300)  # near the goal
    actions = rng.integers(0, 3, 1000)
    moved, reward, terminated = MountainCar().transition(torch.from_numpy(states), torch.from_numpy(actions), KEYS)
    assert moved.dtype == reward.dtype == torch.float32
    theirs = MountainCarEnv()
    decided = walls = 0
    for i in range(1000):
        theirs.reset(seed=0)
        theirs.state = states[i].astype(np.float64)
        _, their_reward, their_terminated, _, _ = theirs.step(int(actions[i]))
        position, velocity = theirs.state
        assert reward[i] == their_reward == -1
        np.testing.assert_allclose(moved[i, 0].numpy(), position, rtol=0, atol=1e-6)
        # Closer to a limit float32 may fall on the other side.
        reach = states[i, 0] + np.clip(
            states[i, 1] + 0.001 * (actions[i] - 1) - 0.0025 * np.cos(3 * float(states[i, 0])), -0.07, 0.07
        )
        if abs(reach - MIN_POSITION) > 1e-6:
            np.testing.assert_allclose(moved[i, 1].numpy(), velocity, rtol=0, atol=1e-6)
        if min(abs(position - GOAL), abs(velocity)) > 1e-6 or reach < MIN_POSITION:
            assert bool(terminated[i]) == their_terminated
            decided += 1
        walls += reach < MIN_POSITION
    assert decided > 990
    assert walls > 10
    assert 0.05 < terminated.float().mean() < 0.5  # both outcomes were compared


def test_random_episodes_in_float64_equal_gymnasium_to_their_truncation():
    actions = np.random.default_rng(1).integers(0, 3, 10_000)
    episodes = free_run(MountainCar(), "MountainCar-v0", lambda state, step: int(actions[step]), 3)
    assert episodes.lengths == [200] * 3


def test_episodes_that_swing_in_float64_equal_gymnasium_to_their_termination():
    lengths, positions = free_run(MountainCar(), "MountainCar-v0", lambda state, step: 2 if state[1] >= 0 else 0, 10)
    assert max(lengths) < 200 and len(set(lengths)) > 3
    assert positions.count(MIN_POSITION) > 0  # hits of the wall


def test_reset_is_at_rest_and_uniform_between_minus_0_6_and_minus_0_4():
    position, velocity = MountainCar().reset(KEYS).unbind(-1)
    assert (velocity == 0).all()
    assert position.min() >= -0.6 and position.max() < -0.4
    assert abs(position.mean() + 0.5) < 0.01 and abs(position.std() - 0.2 / 12**0.5) < 0.005


@pytest.mark.parametrize("wrong", [0, 2.5, "200", True])
def test_a_wrong_time_limit_is_refused(wrong):
    with pytest.raises(ValueError, match="max_episode_steps=.* use an integer of at least 1"):
        MountainCar(max_episode_steps=wrong)

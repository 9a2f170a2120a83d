import numpy as np
import pytest
import torch

from torchpod import random
from torchpod.envs.point_mass import PointMass
from torchpod.types import LAST

KEYS = random.split(random.key(0), 1000)


def test_one_step_equals_the_equations_in_numpy(seed):
    rng = np.random.default_rng(seed)
    state, action = rng.normal(size=(1000, 4)), rng.uniform(-2, 2, (1000, 2))  # half of the forces are clamped
    moved, reward, terminated = PointMass().transition(torch.from_numpy(state), torch.from_numpy(action), KEYS)
    force = np.clip(action, -1, 1)
    velocity = state[:, 2:] + 0.1 * force
    position = state[:, :2] + 0.1 * velocity
    cost = (state[:, :2] ** 2).sum(1) + 0.1 * (state[:, 2:] ** 2).sum(1) + 0.01 * (force**2).sum(1)
    np.testing.assert_allclose(moved.numpy(), np.concatenate([position, velocity], 1), rtol=0, atol=1e-12)
    np.testing.assert_allclose(reward.numpy(), -cost, rtol=0, atol=1e-12)
    assert not terminated.any()


def test_reset_covers_the_square():
    position, velocity = PointMass().reset(KEYS).chunk(2, -1)
    assert 0.98 < position.abs().max() <= 1
    assert 0.49 < velocity.abs().max() <= 0.5


def test_episodes_are_truncated_after_100_steps():
    env = PointMass()
    state, _ = env.init(KEYS[:2])
    for step in range(1, 101):
        state, timestep = env.step(state, torch.zeros(2, 2), random.at(KEYS[:2], step))
        assert ((timestep.step_type == LAST) == (step == 100)).all()
        assert (timestep.discount == 1).all()


@pytest.mark.parametrize("wrong", [0, 2.5])
def test_a_wrong_time_limit_is_refused(wrong):
    with pytest.raises(ValueError, match="max_episode_steps=.* use an integer of at least 1"):
        PointMass(max_episode_steps=wrong)

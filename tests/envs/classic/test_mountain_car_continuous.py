import secrets
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control import Continuous_MountainCarEnv, continuous_mountain_car

from tests.envs.classic.beside_gymnasium import free_run
from torchpod import random
from torchpod.envs.classic.mountain_car_continuous import GOAL, MIN_POSITION, MountainCarContinuous

KEYS = random.split(random.key(0), 1000)


def test_one_step_equals_gymnasium_from_1000_random_states():
    seed = secrets.randbits(32)
    print(f"seed={seed}")
    rng = np.random.default_rng(seed)
    states = rng.uniform([-1.2, -0.07], [0.6, 0.07], (1000, 2)).astype(np.float32)
    states[:300, 0] = rng.uniform(-1.2, -1.1, 300)  # near the wall
    states[300:600, 0] = rng.uniform(0.4, 0.6, 300)  # near the goal
    actions = rng.uniform(-2, 2, (1000, 1)).astype(np.float32)  # some are clamped
    env = MountainCarContinuous()
    moved, reward, terminated = env.transition(torch.from_numpy(states), torch.from_numpy(actions), KEYS)
    assert moved.dtype == reward.dtype == torch.float32
    theirs = Continuous_MountainCarEnv()
    decided = walls = 0
    for i in range(1000):
        theirs.reset(seed=0)
        theirs.state = states[i].astype(np.float64)
        _, their_reward, their_terminated, _, _ = theirs.step(actions[i].astype(np.float64))
        position, velocity = theirs.state
        np.testing.assert_allclose(moved[i, 0].numpy(), position, rtol=0, atol=1e-6)
        # Closer to a limit float32 may fall on the other side.
        push = 0.0015 * np.clip(float(actions[i, 0]), -1, 1)
        reach = states[i, 0] + np.clip(states[i, 1] + push - 0.0025 * np.cos(3 * float(states[i, 0])), -0.07, 0.07)
        if abs(reach - MIN_POSITION) > 1e-6:
            np.testing.assert_allclose(moved[i, 1].numpy(), velocity, rtol=0, atol=1e-6)
        if min(abs(position - GOAL), abs(velocity)) > 1e-6 or reach < MIN_POSITION:
            assert bool(terminated[i]) == their_terminated
            np.testing.assert_allclose(reward[i].numpy(), their_reward, rtol=0, atol=1e-5)
            decided += 1
        walls += reach < MIN_POSITION
    assert decided > 990
    assert walls > 10
    assert 0.05 < terminated.float().mean() < 0.5  # both outcomes were compared


def play(policy, num_episodes, tolerance):
    env, task = MountainCarContinuous(), "MountainCarContinuous-v0"
    return free_run(env, task, policy, num_episodes, tolerance=tolerance, reward_tolerance=10 * tolerance).lengths


@pytest.fixture(params=[False, True], ids=["as_it_is", "without_rounding"])
def tolerance(request, monkeypatch):
    """Of numbers beside Gymnasium, whose `step` rounds the state to float32 unless the test takes that out."""
    if not request.param:
        return 1e-3
    monkeypatch.setattr(continuous_mountain_car, "np", SimpleNamespace(array=np.array, float32=np.float64))
    return 1e-9


def test_a_random_episode_in_float64_equals_gymnasium_to_its_truncation(tolerance):
    actions = np.random.default_rng(1).uniform(-1.5, 1.5, 1000)
    assert play(lambda state, step: actions[step], 1, tolerance) == [999]


def test_episodes_that_swing_in_float64_equal_gymnasium_to_their_termination(tolerance):
    lengths = play(lambda state, step: 30 * float(state[1]) + 0.01, 6, tolerance)
    assert max(lengths) < 999 and len(set(lengths)) > 3


def test_the_gradient_does_not_know_of_the_goal():
    """Why the trait `differentiable` is False: past the goal or not, reward says to push less."""
    env = MountainCarContinuous()
    assert not env.traits.differentiable
    state = torch.tensor([[0.449, 0.05], [-0.5, 0.0]], requires_grad=True)
    action = torch.tensor([[0.7], [0.7]], requires_grad=True)
    moved, reward, terminated = env.transition(state, action, KEYS[:2])
    assert terminated.tolist() == [True, False]
    by_action, by_state = torch.autograd.grad(reward.sum(), (action, state), allow_unused=True, retain_graph=True)
    torch.testing.assert_close(by_action, -0.2 * action.detach())
    assert by_state is None or (by_state == 0).all()
    assert torch.autograd.grad(moved.sum(), action)[0].ne(0).all()  # though the car follows the action smoothly


def test_reset_is_at_rest_and_uniform_between_minus_0_6_and_minus_0_4():
    position, velocity = MountainCarContinuous().reset(KEYS).unbind(-1)
    assert (velocity == 0).all()
    assert position.min() >= -0.6 and position.max() < -0.4
    assert abs(position.mean() + 0.5) < 0.01 and abs(position.std() - 0.2 / 12**0.5) < 0.005


@pytest.mark.parametrize("wrong", [0, 2.5, "999", True])
def test_a_wrong_time_limit_is_refused(wrong):
    with pytest.raises(ValueError, match="max_episode_steps=.* use an integer of at least 1"):
        MountainCarContinuous(max_episode_steps=wrong)

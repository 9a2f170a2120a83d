import numpy as np
import pytest
import torch

from torchpod import random
from torchpod.envs.bernoulli_bandit import ARMS, BernoulliBandit
from torchpod.types import FIRST, LAST, MID


class Reference:
    """One episode; its luck is given, as uniforms in [0, 1)."""

    def __init__(self, num_arms, arms, uniforms, num_steps):
        if arms == "independent":
            self.chances = uniforms[:num_arms]
        else:
            first = uniforms[0]
            if arms != "uniform":
                worse = {"easy": 0.1, "medium": 0.25, "hard": 0.4}[arms]
                first = worse if first < 0.5 else 1 - worse
            self.chances = np.array([first, 1 - first])
        self.num_steps, self.time = num_steps, 0
        self.observation = np.array([0, *[0] * num_arms, -1])

    def step(self, action, uniform):
        self.time += 1
        reward = 1.0 if uniform < self.chances[action] else 0.0
        pulled = [float(action == arm) for arm in range(len(self.chances))]
        self.observation = np.array([reward, *pulled, 2 * self.time / self.num_steps - 1])
        return reward, self.time == self.num_steps


@pytest.mark.parametrize(("num_arms", "arms"), [(2, arms) for arms in ARMS] + [(7, "independent")])
def test_whole_episodes_equal_the_reference(num_arms, arms):
    size, num_steps, rng = 16, 10, np.random.default_rng(0)
    env = BernoulliBandit(num_arms, arms, max_episode_steps=num_steps)
    keys = random.split(random.key(1), size)
    keys_t = random.at(keys, 0)
    state, timestep = env.init(keys_t)
    games: dict[int, Reference] = {}
    rewards = []
    for step in range(1, 3 * (num_steps + 1) + 1):
        uniforms = (random.bits(keys_t, num_arms).numpy() >> 9) / 2**23
        for i in range(size):
            if timestep.step_type[i] == FIRST:
                games[i] = Reference(num_arms, arms, uniforms[i], num_steps)
                np.testing.assert_allclose(state[0].chances[i].numpy(), games[i].chances, rtol=0, atol=1e-6)
            np.testing.assert_allclose(timestep.observation[i].numpy(), games[i].observation, rtol=0, atol=1e-6)
        action, was_last = rng.integers(0, num_arms, size), timestep.step_type == LAST
        keys_t = random.at(keys, step)
        luck = (random.bits(keys_t, 1)[:, 0].numpy() >> 9) / 2**23
        state, timestep = env.step(state, torch.from_numpy(action), keys_t)
        for i in range(size):
            if was_last[i]:
                assert timestep.step_type[i] == FIRST
                continue
            reward, over = games[i].step(action[i], luck[i])
            assert timestep.reward[i] == reward
            assert timestep.step_type[i] == (LAST if over else MID)
            assert timestep.discount[i] == 1  # the time limit truncates
            rewards.append(reward)
    assert 0.3 < np.mean(rewards) < 0.7


@pytest.mark.parametrize(
    ("arms", "values"), [("easy", [0.1, 0.9]), ("medium", [0.25, 0.75]), ("hard", [0.4, 0.6]), ("uniform", None)]
)
def test_two_dependent_arms_share_one_draw(arms, values):
    first, second = BernoulliBandit(arms=arms).reset(random.split(random.key(0), 5000)).chances.unbind(-1)
    torch.testing.assert_close(first + second, torch.ones(5000))
    assert abs(first.mean() - 0.5) < 0.02
    if values is None:
        assert abs(first.std() - 1 / 12**0.5) < 0.01
    else:
        torch.testing.assert_close(first.unique(), torch.tensor(values))


def test_independent_arms_are_uniform_and_uncorrelated():
    chances = BernoulliBandit(5, "independent").reset(random.split(random.key(0), 5000)).chances
    assert (chances.mean(0) - 0.5).abs().max() < 0.02
    assert (chances.std(0) - 1 / 12**0.5).abs().max() < 0.01
    assert (torch.corrcoef(chances.T) - torch.eye(5)).abs().max() < 0.06


def test_an_arm_pays_as_often_as_its_chance_says():
    env, keys = BernoulliBandit(3, "independent"), random.split(random.key(0), 8000)
    state = env.reset(keys)._replace(chances=torch.tensor([0.1, 0.6, 1.0]).expand(8000, 3))
    for arm, chance in enumerate((0.1, 0.6, 1.0)):
        _, reward, _ = env.transition(state, torch.full((8000,), arm), random.at(keys, arm + 1))
        assert abs(reward.mean() - chance) < 0.03
    assert (reward == 1).all()


@pytest.mark.parametrize(
    ("wrong", "repair"),
    [
        ({"num_arms": 1}, "num_arms=1 .* an integer of at least 2"),
        ({"max_episode_steps": 0}, "max_episode_steps=0 .* an integer of at least 1"),
        ({"arms": "dependent"}, "arms='dependent' .* use one of independent, uniform, easy, medium, hard"),
        ({"num_arms": 3}, "num_arms=3 .* use 2, or arms='independent'"),
    ],
    ids=str,
)
def test_a_wrong_argument_is_refused(wrong, repair):
    with pytest.raises(ValueError, match=repair):
        BernoulliBandit(**wrong)

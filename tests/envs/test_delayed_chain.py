import numpy as np
import pytest
import torch

from torchpod import random
from torchpod.envs.delayed_chain import Chain, DelayedChain
from torchpod.testing import check_env
from torchpod.types import FIRST, LAST, MID

VARIANTS = {
    "short": {},
    "short_noisy": {"noisy": True},
    "long": {"high": 50},
    "long_noisy": {"high": 50, "noisy": True},
    "distraction": {"num_distractors": 20},
    "shortest": {"low": 1, "high": 2, "noisy": True, "num_distractors": 40},
}


def fair_bits(words, num):
    """The 32 bits of each word, the lowest first."""
    return np.array([(int(word) >> i) & 1 for word in words for i in range(32)])[:num]


class Reference:
    """The rules, one chain at a time."""

    def __init__(self, env, length, good):
        self.env, self.length, self.good = env, length, good

    def reset(self, bits):
        self.time, self.choice, self.bits = 0, 0, bits[1:]

    def step(self, action, bits):
        if self.time == 0:
            self.choice = action
        self.time, self.bits = self.time + 1, bits[1:]
        if self.time == self.length:
            return (1.0 if self.choice == self.good else -1.0), True
        return (2.0 * bits[0] - 1 if self.env.noisy else 0.0), False

    def observation(self):
        table = np.zeros((2, self.env.high + 1), np.float32)
        table[self.choice, self.time] = 1
        return np.concatenate([table.flatten(), self.bits.astype(np.float32)])


@pytest.mark.parametrize("variant", VARIANTS)
def test_whole_episodes_equal_the_reference(variant):
    size, env, rng = 8, DelayedChain(**VARIANTS[variant]), np.random.default_rng(0)
    keys, num = random.split(random.key(1), size), 1 + env.num_distractors
    state, timestep = env.init(random.at(keys, 0))
    chain = state[0].chain
    games = [Reference(env, int(chain.length[i]), int(chain.good[i])) for i in range(size)]
    finals, noise, episodes = [], [], np.zeros(size)
    for step in range(3 * env.high):
        words = random.bits(random.at(keys, step), (num + 31) // 32).numpy()
        if step:
            action, was_last = rng.integers(0, 2, size), timestep.step_type == LAST
            state, timestep = env.step(state, torch.from_numpy(action), random.at(keys, step))
        for i, game in enumerate(games):
            bits = fair_bits(words[i], num)
            if step == 0 or was_last[i]:
                game.reset(bits)
                assert timestep.step_type[i] == FIRST
            else:
                reward, over = game.step(int(action[i]), bits)
                assert timestep.reward[i] == reward
                assert timestep.step_type[i] == (LAST if over else MID)
                assert timestep.discount[i] == (0 if over else 1)
                (finals if over else noise).append(reward)
                episodes[i] += over
            np.testing.assert_array_equal(timestep.observation[i].numpy(), game.observation())
    assert (episodes >= 1).all() and set(finals) == {1.0, -1.0}
    assert set(noise) == ({1.0, -1.0} if env.noisy else {0.0})


@pytest.mark.parametrize("variant", VARIANTS)
def test_variant_keeps_the_contract(variant):
    check_env(DelayedChain(**VARIANTS[variant]), num_envs=4, num_steps=60, compile=False)


def test_the_distraction_keeps_the_contract_compiled():
    check_env(DelayedChain(2, 4, noisy=True, num_distractors=20), num_steps=20)


def test_lengths_good_actions_noise_and_distractors_are_uniform():
    env, keys = DelayedChain(5, 9, noisy=True, num_distractors=20), random.split(random.key(0), 10_000)
    state = env.reset(keys)
    length, good = state.chain
    assert (length.bincount()[5:] - 2000).abs().max() < 200 and length.min() == 5 and length.max() == 9
    assert abs(good.float().mean() - 0.5) < 0.02
    _, reward, _ = env.transition(state, torch.zeros(10_000, dtype=torch.int64), random.at(keys, 1))
    assert abs(reward.mean()) < 0.04
    assert (state.distractors.float().mean(0) - 0.5).abs().max() < 0.025
    drawn = torch.cat([length[:, None], good[:, None], reward[:, None], state.distractors], -1).T.numpy()
    assert np.abs(np.corrcoef(drawn) - np.eye(23)).max() < 0.06


def test_the_chain_stays_for_life_and_distractors_change_each_step():
    env, keys = DelayedChain(1, 4, num_distractors=20), random.split(random.key(0), 16)
    state, _ = env.init(keys)
    chain, distractors = state[0].chain, state[0].distractors
    for step in range(1, 30):
        state, _ = env.step(state, torch.ones(16, dtype=torch.int64), random.at(keys, step))
        assert (state[0].chain.length == chain.length).all() and (state[0].chain.good == chain.good).all()
        assert (state[0].distractors != distractors).any(-1).all()
        distractors = state[0].distractors


def test_several_environments_share_a_chain():
    env, keys = DelayedChain(num_distractors=4), random.split(random.key(0), 50)
    state, _ = env.init(keys, Chain(torch.full((50,), 7), torch.ones(50, dtype=torch.int64)))
    assert (state[0].chain.length == 7).all() and state[0].distractors.unique(dim=0).shape[0] > 5
    seeded = DelayedChain(lifetime_seed=3).reset(keys).chain
    assert (seeded.length == seeded.length[0]).all() and (seeded.good == seeded.good[0]).all()
    assert DelayedChain().reset(keys).chain.length.unique().numel() > 10


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"low": 0}, "low=0 is wrong; use an integer of at least 1"),
        ({"low": 6, "high": 5}, "low=6 is above high=5; use a low of at most 5"),
        ({"num_distractors": -1}, "num_distractors=-1 is wrong; use an integer of at least 0"),
        ({"lifetime_seed": 1.5}, "lifetime_seed=1.5 is wrong; use an integer of at least 0"),
    ],
)
def test_a_wrong_argument_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        DelayedChain(**wrong)


def test_wrong_chains_are_refused():
    env, keys, one = DelayedChain(), random.split(random.key(0), 2), torch.ones(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="chain.length must be 2 integers from 1 to 30, one per key"):
        env.init(keys, Chain(31 * one, one))
    with pytest.raises(ValueError, match="chain.good must be 2 integers from 0 to 1, one per key"):
        env.init(keys, Chain(one, one[:1]))

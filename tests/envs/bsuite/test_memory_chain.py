import numpy as np
import pytest
import torch

from torchpod import random
from torchpod.envs.bsuite.memory_chain import MemoryChain
from torchpod.types import FIRST, LAST, MID


class Reference:
    """The rules of bsuite's memory chain, one episode at a time."""

    def __init__(self, memory_length, context, query):
        self.memory_length, self.context, self.query = memory_length, context, query
        self.time = 0

    def observation(self):
        observation = np.zeros(2 + len(self.context), np.float32)
        observation[0] = 1 - self.time / self.memory_length
        if self.time == self.memory_length - 1:
            observation[1] = self.query
        if self.time == 0:
            observation[2:] = 2 * self.context - 1
        return observation

    def step(self, action):
        """What is observed is the state before the clock ticks, so the first observation comes twice."""
        observation = self.observation()
        self.time += 1
        if self.time <= self.memory_length:
            return observation, 0.0, False
        return observation, (1.0 if action == self.context[self.query] else -1.0), True


@pytest.mark.parametrize(("memory_length", "num_bits"), [(8, 1), (1, 1), (3, 4)])
def test_whole_episodes_equal_the_reference(memory_length, num_bits):
    size, env, rng = 16, MemoryChain(memory_length, num_bits), np.random.default_rng(0)
    keys = random.split(random.key(1), size)
    state, timestep = env.init(random.at(keys, 0))
    games: dict[int, Reference] = {}
    rewards, lengths = [], []
    for step in range(1, 4 * (memory_length + 2)):
        for i in range(size):
            if timestep.step_type[i] == FIRST:  # context and query are ours to draw
                inner = state[0]
                games[i] = Reference(memory_length, inner.context[i].numpy(), int(inner.query[i]))
                np.testing.assert_array_equal(timestep.observation[i].numpy(), games[i].observation())
        action, was_last = rng.integers(0, 2, size), timestep.step_type == LAST
        state, timestep = env.step(state, torch.from_numpy(action), random.at(keys, step))
        for i in range(size):
            if was_last[i]:
                assert timestep.step_type[i] == FIRST
                continue
            observation, reward, over = games[i].step(action[i])
            np.testing.assert_allclose(timestep.observation[i].numpy(), observation, atol=1e-6)
            assert timestep.reward[i] == reward
            assert timestep.step_type[i] == (LAST if over else MID)
            assert timestep.discount[i] == (0 if over else 1)
            if over:
                rewards.append(reward)
                lengths.append(games[i].time)
    assert {1.0, -1.0} == set(rewards)
    assert set(lengths) == {memory_length + 1}


def test_bits_and_queries_are_fair():
    state = MemoryChain(num_bits=3).reset(random.split(random.key(0), 6000))
    assert (state.context.float().mean(0) - 0.5).abs().max() < 0.03
    assert (state.query.bincount(minlength=3) - 2000).abs().max() < 200


def test_the_answer_cannot_be_seen_when_it_counts():
    env, keys = MemoryChain(), random.split(random.key(0), 32)
    state, timestep = env.init(keys)
    for step in range(8):
        state, timestep = env.step(state, torch.zeros(32, dtype=torch.int64), random.at(keys, step))
    assert (timestep.step_type == MID).all()
    assert state[0].context.unique().numel() == 2
    assert (timestep.observation == timestep.observation[0]).all()


@pytest.mark.parametrize("wrong", [{"memory_length": 0}, {"num_bits": 0}, {"memory_length": "8"}])
def test_a_wrong_length_is_refused(wrong):
    with pytest.raises(ValueError, match="(memory_length|num_bits)=.* use an integer of at least 1"):
        MemoryChain(**wrong)

import numpy as np
import pytest
import torch

from torchpod import random
from torchpod.envs.bsuite.deep_sea import DeepSea
from torchpod.types import FIRST, LAST, MID


def right_actions(size, mapping_seed):
    """`[size, size]`: drawn from the seed, with the number of the cell as counter."""
    keys = random.at(random.key(mapping_seed).expand(size * size, 3), torch.arange(size * size))
    return random.to_integer(random.bits(keys, 1), 2).reshape(size, size).numpy()


class Reference:
    """The rules of bsuite's deep sea, one episode at a time."""

    def __init__(self, right_actions, move_cost=0.01, deterministic=True):
        self.right_actions, self.size = right_actions, len(right_actions)
        self.move_cost, self.deterministic = move_cost, deterministic
        self.row = self.column = 0

    def step(self, action, wind=1.0, noise=0.0):
        last, reward = self.size - 1, 0.0
        right = action == self.right_actions[self.row, self.column]
        if right and self.column == last:
            reward += 1
        if not self.deterministic and self.row == last and self.column in (0, last):
            reward += noise
        if right:
            reward -= self.move_cost / self.size
            if self.deterministic or wind > 1 / self.size:
                self.column = min(self.column + 1, last)
        else:
            self.column = max(self.column - 1, 0)
        self.row += 1
        return reward, self.row == self.size

    def sea(self):
        sea = np.zeros((self.size, self.size), np.float32)
        if self.row < self.size:
            sea[self.row, self.column] = 1
        return sea


def compare(env, games, policy, num_steps, seed=1):
    """Plays beside the reference, one game per environment; returns the returns of all episodes."""
    size = len(games)
    keys = random.split(random.key(seed), size)
    state, timestep = env.init(random.at(keys, 0))
    assert (timestep.step_type == FIRST).all()
    returns, total = [], np.zeros(size)
    for step in range(1, num_steps + 1):
        sea = timestep.observation[..., 0].numpy()
        np.testing.assert_array_equal(sea, np.stack([game.sea() for game in games]))
        action = policy(step)
        was_last, keys_t = timestep.step_type == LAST, random.at(keys, step)
        words = random.bits(keys_t, 3)
        wind = random.to_uniform(words[:, 0]).numpy()
        noise = random.to_normal(words[:, 1:])[:, 0].numpy()
        state, timestep = env.step(state, torch.from_numpy(action), keys_t)
        for i, game in enumerate(games):
            if was_last[i]:
                assert timestep.step_type[i] == FIRST
                game.row = game.column = 0
                total[i] = 0
                continue
            reward, over = game.step(action[i], wind[i], noise[i])
            np.testing.assert_allclose(timestep.reward[i].numpy(), reward, rtol=0, atol=1e-6)
            assert timestep.step_type[i] == (LAST if over else MID)
            assert timestep.discount[i] == (0 if over else 1)
            total[i] += reward
            if over:
                returns.append(total[i])
    return np.array(returns)


@pytest.mark.parametrize("randomize_actions", [True, False])
@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_every_sequence_of_actions_equals_the_reference(size, randomize_actions):
    env = DeepSea(size, randomize_actions=randomize_actions, unscaled_move_cost=0.02, mapping_seed=3)
    mapping = right_actions(size, 3) if randomize_actions else np.ones((size, size), np.int64)
    sequences = np.arange(2**size)[:, None] >> np.arange(size) & 1
    games = [Reference(mapping, 0.02) for _ in sequences]
    returns = compare(env, games, lambda step: sequences[:, (step - 1) % (size + 1) % size], 2 * (size + 1))
    assert len(returns) == 2 * 2**size
    assert (returns > 0.5).sum() == 2  # one sequence finds the treasure, in each of two episodes
    np.testing.assert_allclose(returns.max(), 0.98)


@pytest.mark.parametrize("size", [1, 3, 6])
def test_windy_episodes_equal_the_reference(size):
    rng, mapping = np.random.default_rng(0), right_actions(size, 0)
    games = [Reference(mapping, deterministic=False) for _ in range(64)]
    compare(DeepSea(size, deterministic=False), games, lambda step: rng.integers(0, 2, 64), 5 * (size + 1))


def test_the_wind_stops_one_step_in_size_and_the_ends_are_noisy():
    env, keys = DeepSea(4, deterministic=False, randomize_actions=False), random.split(random.key(0), 8000)
    right = torch.ones(8000, dtype=torch.int64)
    state, reward, _ = env.transition(env.reset(keys), right, keys)
    assert abs((state.column == 0).float().mean() - 0.25) < 0.02
    assert (reward == reward[0]).all()  # who was stopped pays too
    state = state._replace(row=torch.full_like(state.row, 3), column=torch.full_like(state.column, 3))
    _, reward, terminated = env.transition(state, right, keys)
    assert terminated.all()
    assert abs(reward.mean() - 0.9975) < 0.05 and abs(reward.std() - 1) < 0.05


def mapping_of(env):
    index = torch.arange(env.size)
    return env.right_action(index[:, None].expand(-1, env.size).flatten(), index.repeat(env.size)).numpy()


def test_the_mapping_is_fair_and_depends_on_its_seed_alone():
    mapping = mapping_of(DeepSea(50))
    np.testing.assert_array_equal(mapping, right_actions(50, 0).flatten())
    assert abs(mapping.mean() - 0.5) < 0.04
    for seed in (1, 2**32, 2**64 - 1):
        other = mapping_of(DeepSea(50, mapping_seed=seed))
        np.testing.assert_array_equal(other, right_actions(50, seed).flatten())
        assert abs((mapping == other).mean() - 0.5) < 0.04
    assert (mapping_of(DeepSea(50, randomize_actions=False)) == 1).all()


@pytest.mark.parametrize(
    ("wrong", "repair"),
    [
        ({"size": 0}, "size=0 .* an integer of at least 1"),
        ({"size": 8.0}, "size=8.0 .* an integer of at least 1"),
        ({"deterministic": "yes"}, "deterministic='yes' .* True or False"),
        ({"randomize_actions": 1}, "randomize_actions=1 .* True or False"),
        ({"unscaled_move_cost": -0.01}, "unscaled_move_cost=-0.01 .* a number of at least 0"),
        ({"unscaled_move_cost": float("nan")}, "unscaled_move_cost=nan .* a number of at least 0"),
        ({"unscaled_move_cost": "0.01"}, "unscaled_move_cost='0.01' .* a number of at least 0"),
        ({"mapping_seed": -1}, "mapping_seed=-1 .* an integer of at least 0"),
        ({"mapping_seed": 2**64}, r"mapping_seed=18446744073709551616 .* an integer in \[0, 2\^64\)"),
    ],
    ids=str,
)
def test_a_wrong_argument_is_refused(wrong, repair):
    with pytest.raises(ValueError, match=repair):
        DeepSea(**wrong)

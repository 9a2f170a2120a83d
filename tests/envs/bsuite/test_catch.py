import functools

import numpy as np
import pytest
import torch

from torchpod import random
from torchpod.envs.bsuite.catch import Catch
from torchpod.nets import Encoder, make_torso
from torchpod.types import FIRST, LAST, MID


class Reference:
    """The rules of bsuite's Catch, one game at a time."""

    def __init__(self, rows, columns, ball_x):
        self.rows, self.columns = rows, columns
        self.ball_x, self.ball_y = ball_x, 0
        self.paddle_x = columns // 2

    def step(self, action):
        self.paddle_x = min(max(self.paddle_x + [-1, 0, 1][action], 0), self.columns - 1)
        self.ball_y += 1
        over = self.ball_y == self.rows - 1
        reward = 0.0 if not over else 1.0 if self.paddle_x == self.ball_x else -1.0
        return reward, over

    def board(self):
        board = np.zeros((self.rows, self.columns), np.float32)
        board[self.ball_y, self.ball_x] = 1
        board[self.rows - 1, self.paddle_x] = 1
        return board


@pytest.mark.parametrize(("rows", "columns"), [(10, 5), (3, 4), (2, 1)])
def test_whole_episodes_equal_the_reference(rows, columns):
    size, env, rng = 16, Catch(rows, columns), np.random.default_rng(0)
    keys = random.split(random.key(1), size)
    state, timestep = env.init(random.at(keys, 0))
    games: dict[int, Reference] = {}
    seen = set()
    for step in range(1, 4 * rows + 2):
        observation = timestep.observation[..., 0].numpy()
        for i in range(size):
            if timestep.step_type[i] == FIRST:  # the ball's column is ours to draw
                games[i] = Reference(rows, columns, int(observation[i, 0].argmax()))
            np.testing.assert_array_equal(observation[i], games[i].board())
        action = rng.integers(0, 3, size)
        was_last = timestep.step_type == LAST
        state, timestep = env.step(state, torch.from_numpy(action), random.at(keys, step))
        for i in range(size):
            if was_last[i]:
                assert timestep.step_type[i] == FIRST
                continue
            reward, over = games[i].step(action[i])
            assert timestep.reward[i] == reward
            assert timestep.step_type[i] == (LAST if over else MID)
            assert timestep.discount[i] == (0 if over else 1)
            seen.add(reward)
    assert seen == ({0.0, 1.0, -1.0} if columns > 1 and rows > 2 else seen)


def test_the_ball_starts_in_every_column_equally_often():
    column = Catch().reset(random.split(random.key(0), 5000)).ball_column
    assert (column.bincount(minlength=5) - 1000).abs().max() < 150


def test_the_board_is_an_image_to_the_encoder():
    env = Catch()
    _, timestep = env.init(random.split(random.key(0), 3))
    torso = functools.partial(make_torso, "small", channels=(4,), hidden=32)
    encoder = Encoder(env.spec.observation, (32,), "tanh", torso)
    assert encoder.is_image
    assert encoder(timestep.observation).shape == (3, 32)


@pytest.mark.parametrize("wrong", [{"rows": 1}, {"columns": 0}, {"rows": 2.0}])
def test_a_wrong_board_is_refused(wrong):
    with pytest.raises(ValueError, match="(rows|columns)=.* use an integer of at least"):
        Catch(**wrong)

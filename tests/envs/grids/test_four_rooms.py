import numpy as np
import pytest
import torch

from torchpod import random
from torchpod.envs.grids.four_rooms import NUM_FREE, FourRooms, is_wall
from torchpod.testing import check_env
from torchpod.types import FIRST, LAST, MID

HOUSE = """
#############
#     #     #
#     #     #
#           #
#     #     #
#     #     #
## ####     #
#     ### ###
#     #     #
#     #     #
#           #
#     #     #
#############
""".split("\n")[1:-1]
FREE = [(r, c) for r in range(13) for c in range(13) if HOUSE[r][c] == " "]
RANDOM = {"goal": None, "start": None}
MOVES = [(-1, 0), (0, 1), (1, 0), (0, -1)]


def step(cell, goal, action, words, fail_probability):
    """The rules, for one environment."""
    if np.float32((words[0] >> 9) * 2.0**-23) < fail_probability:
        others = [a % 4 for a in range(action + 1, action + 4)]
        action = others[(int(words[1]) * 3) >> 32]
    new = (cell[0] + MOVES[action][0], cell[1] + MOVES[action][1])
    cell = new if new in FREE else cell
    return cell, float(cell == goal), cell == goal


def picture(cell, goal):
    image = np.zeros((13, 13, 3), np.float32)
    image[..., 0] = [[c == "#" for c in row] for row in HOUSE]
    image[(*cell, 1)] = image[(*goal, 2)] = 1
    return image


def test_the_house_is_that_of_the_paper():
    assert [(r, c) for r in range(13) for c in range(13) if not is_wall(r, c)] == FREE
    assert len(FREE) == NUM_FREE == 104


@pytest.mark.parametrize("image", [False, True])
@pytest.mark.parametrize("fail_probability", [0.0, 1 / 3, 1.0])
def test_whole_episodes_equal_the_reference(fail_probability, image):
    size, rng = 16, np.random.default_rng(0)
    env = FourRooms(**RANDOM, fail_probability=fail_probability, image=image, max_episode_steps=60)
    keys = random.split(random.key(1), size)
    state, timestep = env.init(random.at(keys, 0))
    cells, goals = [(0, 0)] * size, [(0, 0)] * size
    found = cut = 0
    for count in range(1, 250):
        for i in range(size):
            if timestep.step_type[i] == FIRST:  # where an episode starts is ours to draw
                cells[i], goals[i] = (tuple(x[i].tolist()) for x in state[0])
            expected = picture(cells[i], goals[i]) if image else np.array([*cells[i], *goals[i]], np.float32)
            np.testing.assert_array_equal(timestep.observation[i].numpy(), expected)
        action, was_last = rng.integers(0, 4, size), timestep.step_type == LAST
        words = random.bits(random.at(keys, count), 2).numpy()
        state, timestep = env.step(state, torch.from_numpy(action), random.at(keys, count))
        for i in range(size):
            if was_last[i]:
                assert timestep.step_type[i] == FIRST
                continue
            cells[i], reward, over = step(cells[i], goals[i], int(action[i]), words[i], fail_probability)
            assert timestep.reward[i] == reward
            assert timestep.discount[i] == (0 if over else 1)
            assert timestep.step_type[i] in ((LAST,) if over else (MID, LAST))
            found += over
            cut += bool(timestep.step_type[i] == LAST) and not over
    assert found > 3 and cut > 10


def test_a_third_of_the_moves_slips_in_one_of_three_other_directions():
    env, keys = FourRooms(), random.split(random.key(0), 12_000)
    state = env.reset(keys)._replace(agent=torch.tensor([3, 3]).expand(12_000, -1))
    moved = env.transition(state, torch.full((12_000,), 1), random.at(keys, 1))[0].agent - torch.tensor([3, 3])
    for move, expected in zip(MOVES, [1 / 9, 2 / 3, 1 / 9, 1 / 9], strict=True):
        assert abs((moved == torch.tensor(move)).all(-1).float().mean() - expected) < 0.015


@pytest.mark.parametrize("given", [RANDOM, {"start": None}, {"goal": None}, {}])
def test_starts_and_goals_are_uniform_and_differ(given):
    state = FourRooms(**given).reset(random.split(random.key(0), 20_000))
    assert (state.agent != state.goal).any(-1).all()
    for name, cells, fixed in (("start", state.agent, (4, 1)), ("goal", state.goal, (8, 9))):
        drawn = {tuple(x) for x in cells.tolist()}
        if name not in given:
            assert drawn == {fixed}
            continue
        other = {(8, 9), (4, 1)} - {fixed}
        assert drawn == set(FREE) - (other if len(given) == 1 else set())
        counts = (cells[:, 0] * 13 + cells[:, 1]).bincount()
        assert (counts[counts > 0] - 20_000 / len(drawn)).abs().max() < 75


@pytest.mark.parametrize("arguments", [RANDOM, {"goal": None, "image": True}])
def test_other_arguments_keep_the_contract(arguments):
    check_env(FourRooms(**arguments, max_episode_steps=20), num_steps=50, compile=False)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"goal": [0, 0]}, r"goal=\[0, 0\] is wrong; use \[row, column\] of a free cell"),
        ({"goal": [1, 13]}, r"goal=\[1, 13\] is wrong"),
        ({"start": [1]}, r"start=\[1\] is wrong"),
        ({"start": "11"}, "start='11' is wrong"),
        ({"start": [8, 9]}, r"goal and start are both \[8, 9\]; use two different cells"),
        ({"fail_probability": 1.1}, "fail_probability=1.1 is wrong; use a number from 0 to 1"),
        ({"max_episode_steps": 0}, "max_episode_steps=0 is wrong; use an integer of at least 1"),
    ],
)
def test_a_wrong_argument_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        FourRooms(**wrong)

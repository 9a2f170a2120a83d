import dataclasses

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from torchpod import random
from torchpod.compose import load
from torchpod.envs.grids.grid_configs import CONFIGURATIONS
from torchpod.envs.grids.grid_world import GridWorld
from torchpod.makers import make_env
from torchpod.testing import check_env
from torchpod.types import FIRST, LAST, MID

BUSY = {
    "walls": ["....", ".#..", "..#.", "...."],
    "objects": [
        {"reward": [0.5, 2], "termination": 0, "respawn": [0.2, 1], "count": 2},
        {"reward": -1, "termination": [0.1, 0.9], "respawn": 0.5, "count": 2},
        {"reward": [-3, -2], "termination": 0, "respawn": 0.5},
    ],
    "num_objects": [3, 5],
    "max_episode_steps": 30,
}


def numbers(words):
    """Words as uniforms, as `random.to_uniform` makes them."""
    return ((words >> 9) * 2.0**-23).astype(np.float32)


class Reference:
    """The rules, one environment at a time, with lists and loops. Cells are (row, column)."""

    def __init__(self, env, world):
        self.env, self.world = env, world
        self.cells = [(row, column) for row in range(env.rows) for column in range(env.columns)]
        walls = world["walls"].reshape(env.rows, env.columns)
        self.free = [cell for cell in self.cells if not walls[cell]]

    def free_cell(self, word, taken):
        left = [cell for cell in self.free if cell not in taken]
        return left[(int(word) * len(left)) >> 32]

    def reset(self, words):
        number = int(self.world["num_objects"])
        self.present = [i < number for i in range(self.env.total)]
        if self.env.is_random:
            self.objects = []
            for i in range(self.env.total):
                self.objects.append(self.free_cell(words[1 + i], self.objects))
        else:
            self.objects = [self.cells[home] for home in self.world["homes"]]
        self.agent = self.free_cell(words[0], self.standing())

    def standing(self):
        return [cell for cell, here in zip(self.objects, self.present, strict=True) if here]

    def step(self, action, words):
        collects = not self.env.explicit_collect or action >= 9
        row, column = self.agent[0] + action % 9 // 3 - 1, self.agent[1] + action % 9 % 3 - 1
        if (row, column) in self.free:
            self.agent = (row, column)
        reward, terminated, collected = 0.0, False, None
        absent = [i for i in range(int(self.world["num_objects"])) if not self.present[i]]
        for i in range(self.env.total):
            if self.present[i] and self.objects[i] == self.agent and collects:
                assert collected is None
                collected, reward = i, float(self.world["reward"][i])
                terminated = bool(numbers(words[0]) < self.world["termination"][i])
        if collected is not None:
            self.present[collected] = False
        back = [i for i in absent if numbers(words[1 + i]) < self.world["respawn"][i]]
        for i in back:
            if self.env.is_random:
                self.objects[i] = self.free_cell(words[1 + self.env.total + i], [*self.standing(), self.agent])
            self.present[i] = True
        return reward, terminated, collected is not None, len(back)

    def observation(self):
        if not self.env.is_random:
            code = sum(2**i for i in range(self.env.total) if self.present[i])
            one_hot = np.zeros(len(self.cells) * 2**self.env.total, np.float32)
            one_hot[self.cells.index(self.agent) + len(self.cells) * code] = 1
            return one_hot
        kinds = [i for i, kind in enumerate(self.env.types) for _ in range(kind.count)]
        image = np.zeros((self.env.rows, self.env.columns, 2 + len(self.env.types)), np.float32)
        image[*self.agent, 0] = 1
        for kind, cell, here in zip(kinds, self.objects, self.present, strict=True):
            image[*cell, 1 + kind] += here
        for cell in self.cells:
            image[*cell, -1] = cell not in self.free
        return image


def play_beside_reference(env, size, num_steps):
    """Whole episodes; returns how often something was collected, terminated, truncated and came back."""
    keys, rng, seen = random.split(random.key(1), size), np.random.default_rng(0), np.zeros(4, int)
    state, timestep = env.init(random.at(keys, 0))
    worlds = [{k: v[i].numpy() for k, v in state[0].world._asdict().items()} for i in range(size)]
    games = [Reference(env, world) for world in worlds]
    for step in range(num_steps):
        words = random.bits(random.at(keys, step), 1 + 2 * env.total).numpy()
        if step:
            action, was_last = rng.integers(0, env.spec.action.num_values, size), timestep.step_type == LAST
            state, timestep = env.step(state, torch.from_numpy(action), random.at(keys, step))
        for i, game in enumerate(games):
            if step == 0 or was_last[i]:
                game.reset(words[i])
                assert timestep.step_type[i] == FIRST
            else:
                reward, over, collected, back = game.step(action[i], words[i])
                assert timestep.reward[i] == reward
                assert timestep.discount[i] == (0 if over else 1)
                cut = timestep.step_type[i] == LAST and not over
                assert timestep.step_type[i] in ((LAST,) if over else (MID, LAST))
                seen += [collected, over, cut, back]
            np.testing.assert_array_equal(timestep.observation[i].numpy(), game.observation())
    return seen


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_whole_episodes_of_each_configuration_equal_the_reference(configuration):
    size = 4 if configuration == "longer" else 8
    seen = play_beside_reference(GridWorld(configuration, max_episode_steps=25), size, 60)
    assert seen[2] + seen[1] >= size


@pytest.mark.parametrize("explicit_collect", [False, True])
@pytest.mark.parametrize("placement", ["tabular", "random"])
def test_whole_episodes_of_a_busy_grid_equal_the_reference(placement, explicit_collect):
    env = GridWorld(**BUSY, placement=placement, explicit_collect=explicit_collect)
    assert (play_beside_reference(env, 16, 120) > 10).all()


def test_a_random_grid_without_a_free_cell_to_spare_keeps_going():
    objects = [{"reward": 1, "termination": 0, "respawn": 1, "count": 3}]
    env = GridWorld(walls=["..", ".."], objects=objects, placement="random", max_episode_steps=20)
    assert play_beside_reference(env, 8, 50)[0] > 100


def test_objects_and_limits_are_those_of_the_paper():
    def summary(name):
        config = CONFIGURATIONS[name]
        objects = [(kind.count, kind.reward[0], kind.termination[0], kind.respawn[0]) for kind in config.objects]
        return (len(config.walls), len(config.walls[0])), objects, config.max_episode_steps, config.placement

    dense = [(2, 1, 0, 0.05), (1, -1, 0.5, 0.1), (1, -1, 0, 0.5)]
    assert summary("dense") == ((11, 11), dense, 500, "tabular")
    assert summary("sparse") == ((13, 13), [(1, 1, 1, 0), (1, -1, 1, 0)], 50, "tabular")
    assert summary("long") == ((11, 11), [(2, 1, 0, 0.01), (2, -1, 0.5, 1)], 1000, "tabular")
    assert summary("longer") == ((7, 9), [(2, 1, 0.1, 0.01), (5, -1, 0.8, 1)], 2000, "tabular")
    assert summary("long_dense") == ((11, 11), [(4, 1, 0, 0.005)], 2000, "tabular")
    assert summary("random_dense") == ((11, 11), dense, 500, "random")
    assert summary("random_long") == ((11, 11), [(2, 1, 0, 0.01), (2, -1, 0.5, 1)], 1000, "random")
    assert summary("random_small") == ((5, 7), [(2, 1, 0, 0.05), (2, -1, 0.5, 0.1)], 500, "random")
    assert summary("random_small_sparse") == ((5, 7), [(1, 1, 1, 1), (2, -1, 1, 1)], 50, "random")
    assert summary("random_very_dense") == ((11, 11), [(1, 1, 0, 1)], 2000, "random")


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_configuration_keeps_the_contract(configuration):
    env = GridWorld(configuration, explicit_collect=True)
    assert env.spec.max_episode_steps == CONFIGURATIONS[configuration].max_episode_steps
    check_env(GridWorld(configuration, max_episode_steps=12), num_envs=4, num_steps=30, compile=False)


@pytest.mark.slow
def test_a_free_configuration_keeps_the_contract_compiled():
    objects = [{"reward": [1, 2], "termination": 0.2, "respawn": 0.5, "count": 2}]
    check_env(GridWorld(walls=["..#", "..."], objects=objects, placement="random", explicit_collect=True), num_steps=30)


def test_walls_and_the_edge_block_every_move_into_them():
    env = GridWorld("long_dense")
    walls = np.array([[c == "#" for c in row] for row in env.walls])
    rows, columns = (x.repeat(9) for x in np.nonzero(~walls))
    action = np.tile(np.arange(9), len(rows) // 9)
    keys = random.split(random.key(0), len(rows))
    state = env.reset(keys)._replace(agent=torch.from_numpy(rows * 11 + columns))
    moved = env.transition(state, torch.from_numpy(action), keys)[0].agent.numpy()
    new_rows, new_columns = rows + action // 3 - 1, columns + action % 3 - 1
    padded = np.pad(walls, 1, constant_values=True)
    blocked = padded[new_rows + 1, new_columns + 1]
    assert 100 < blocked.sum() < 0.5 * len(rows)
    np.testing.assert_array_equal(moved, np.where(blocked, rows * 11 + columns, new_rows * 11 + new_columns))


def one_object(size=20_000, **changes):
    """Agents on top of the only object of a 3 x 3 grid with one wall."""
    objects = [{"reward": 1, "termination": 0.3, "respawn": 0.2}]
    env = GridWorld(walls=["...", ".#.", "..."], objects=objects, max_episode_steps=100, **changes)
    keys = random.split(random.key(3), size)
    state = env.reset(keys)
    return env, state._replace(agent=state.objects[:, 0]), keys


@pytest.mark.parametrize("placement", ["tabular", "random"])
def test_termination_and_respawn_have_their_probabilities(placement):
    env, state, keys = one_object(placement=placement)
    stay = torch.full((len(keys),), 4)
    home = state.objects.clone()
    state, reward, terminated = env.transition(state, stay, random.at(keys, 1))
    assert (reward == 1).all() and not state.present.any()  # nothing comes back in the step that took it
    assert abs(terminated.float().mean() - 0.3) < 0.015
    state, reward, terminated = env.transition(state, stay, random.at(keys, 2))
    assert (reward == 0).all() and not terminated.any()
    back = state.present[:, 0]
    assert abs(back.float().mean() - 0.2) < 0.015
    if placement == "tabular":
        assert (state.objects == home).all()  # even below the agent
        return
    cells = state.objects[back, 0]
    assert (cells != state.agent[back]).all() and (cells != 4).all()
    counts = cells.bincount(minlength=9).float()
    expected = back.sum() / 8
    assert (counts[[0, 1, 2, 3, 5, 6, 7, 8]] - expected).abs().max() < 5 * expected**0.5


def test_without_a_collecting_action_nothing_is_collected():
    env, state, keys = one_object(size=18, explicit_collect=True)
    moved, reward, _ = env.transition(state, torch.arange(18), keys)
    assert env.spec.action.num_values == 18
    collected = (torch.arange(18) >= 9) & (moved.agent == state.agent)  # a blocked move stays
    assert collected[13] and not collected.all()
    assert (reward == collected).all() and (moved.present[:, 0] == ~collected).all()


def test_homes_and_starts_are_uniform_and_distinct():
    env = GridWorld(**{**BUSY, "num_objects": None})
    state = env.reset(random.split(random.key(0), 14_000))
    assert (state.world.homes.sort(-1).values.diff() > 0).all()
    free = ~state.world.walls[0]
    for cells in (*state.world.homes.unbind(-1), state.agent):
        counts = cells.bincount(minlength=16)
        assert (counts[~free] == 0).all() and (counts[free] - 1000).abs().max() < 150
    assert not (state.objects == state.agent[:, None]).any()


def test_parameters_are_drawn_from_their_ranges_and_shared_by_a_type():
    world = GridWorld(**BUSY).draw(random.split(random.key(0), 5000))
    assert (world.num_objects.bincount()[3:] > 1500).all() and world.num_objects.max() == 5
    assert world.num_objects.min() == 3
    reward, respawn = world.reward, world.respawn
    assert (reward[:, 0] == reward[:, 1]).all() and 0.5 <= reward[:, 0].min() and reward[:, 0].max() < 2
    assert abs(reward[:, 0].mean() - 1.25) < 0.03 and abs(respawn[:, 0].mean() - 0.6) < 0.02
    assert (reward[:, 2:4] == -1).all() and ((reward[:, 4] >= -3) & (reward[:, 4] < -2)).all()
    assert abs(world.termination[:, 2].mean() - 0.5) < 0.02
    assert abs(np.corrcoef(reward[:, 0], respawn[:, 0])[0, 1]) < 0.05


def run(env, keys, num_steps, world=None):
    """States and timesteps of some steps; actions are drawn from the keys, so that a row alone does the same."""
    outputs = [env.init(random.at(keys, 0), world)]
    for step in range(1, num_steps + 1):
        action = random.to_integer(random.bits(random.fold_in(random.at(keys, step), 7), 1)[:, 0], 9)
        outputs.append(env.step(outputs[-1][0], action, random.at(keys, step)))
    return outputs


@pytest.mark.parametrize("placement", ["tabular", "random"])
def test_60000_different_worlds_run_in_one_batch(placement):
    size = 60_000
    env = GridWorld(**{**BUSY, "walls": ["..."] * 4}, placement=placement)
    keys, rng = random.split(random.key(5), size), np.random.default_rng(0)
    walls = torch.from_numpy(rng.random((size, 4, 3)) < 0.3)
    walls[:, :2] = False  # room for all
    world = env.draw(keys, walls)._replace(termination=torch.from_numpy(rng.random((size, 5), np.float32)))
    outputs = run(env, keys, 6, world)
    final = outputs[-1][0][0]
    for name, given in world._asdict().items():
        assert (getattr(final.world, name) == given).all()  # kept
    parameters = torch.cat([x.double() for x in (world.walls, world.reward, world.termination, world.homes)], -1)
    assert parameters.unique(dim=0).shape[0] == size
    assert world.num_objects.unique().tolist() == [3, 4, 5]
    for i in rng.integers(0, size, 12):
        row = slice(i, i + 1)
        alone = run(env, keys[row], 6, pytree.tree_map(lambda x, row=row: x[row], world))
        for ours, theirs in zip(pytree.tree_leaves(outputs), pytree.tree_leaves(alone), strict=True):
            assert (ours[row] == theirs).all()


def test_a_drawn_batch_is_the_same_row_by_row():
    env, keys = GridWorld(**BUSY), random.split(random.key(2), 50)
    together, alone = run(env, keys, 40), run(env, keys[17:18], 40)
    for ours, theirs in zip(pytree.tree_leaves(together), pytree.tree_leaves(alone), strict=True):
        assert (ours[17:18] == theirs).all()


def test_a_world_stays_for_life_and_random_objects_move_each_episode():
    for placement in ("tabular", "random"):
        outputs = run(GridWorld(**BUSY, placement=placement), random.split(random.key(2), 8), 100)
        first = outputs[0][0][0]
        moved = False
        for (inner, _, _), timestep in outputs[1:]:
            for ours, theirs in zip(inner.world, first.world, strict=True):
                assert (ours == theirs).all()
            reset = timestep.step_type == FIRST
            moved |= bool((inner.objects != first.objects)[reset].any())
        assert moved == (placement == "random")


def test_several_environments_share_a_lifetime():
    env = GridWorld(**BUSY)
    world = env.draw(random.split(random.key(0), 4).repeat_interleave(3, 0))
    state, _ = env.init(random.split(random.key(1), 12), world)
    homes = state[0].world.homes.reshape(4, 3, -1)
    assert (homes == homes[:, :1]).all() and (homes[0, 0] != homes[1, 0]).any()
    assert state[0].agent.unique().numel() > 1

    seeded = GridWorld(**BUSY, lifetime_seed=3).reset(random.split(random.key(1), 20))
    assert (seeded.world.homes == seeded.world.homes[0]).all() and seeded.agent.unique().numel() > 1
    other = GridWorld(**BUSY, lifetime_seed=4).reset(random.split(random.key(1), 1))
    assert (other.world.homes != seeded.world.homes[:1]).any()


def test_the_observation_decodes_to_the_state():
    for placement in ("tabular", "random"):
        env = GridWorld(**BUSY, placement=placement)
        for (inner, _, _), timestep in run(env, random.split(random.key(4), 16), 40):
            observation = timestep.observation
            if placement == "tabular":
                number = observation.argmax(-1)
                assert (observation.sum(-1) == 1).all()
                assert (number % env.cells == inner.agent).all()
                assert ((number[:, None] // env.cells >> torch.arange(env.total)) % 2 == inner.present).all()
                continue
            channels = observation.flatten(1, 2)
            assert (channels[..., 0].argmax(-1) == inner.agent).all()
            assert (channels[..., -1].bool() == inner.world.walls).all()
            assert (channels[..., 1:-1].sum((-2, -1)) == inner.present.sum(-1)).all()
            kinds = torch.tensor([1, 1, 2, 2, 3])
            found = channels[torch.arange(16)[:, None], inner.objects, kinds].bool()
            assert (found | ~inner.present).all()


def test_yaml_reaches_every_argument():
    objects = "[{reward: 1, termination: 0, respawn: [0.1, 0.5], count: 2}]"
    config = load(["env=grid_world", 'env.walls=["..#","..."]', f"env.objects={objects}", "env.placement=random"])
    env = make_env(config.env)
    assert isinstance(env, GridWorld)
    assert env.walls == ("..#", "...") and env.total == 2 and env.is_random
    assert env.types[0].respawn == (0.1, 0.5) and env.spec.observation.shape == (2, 3, 3)
    default = make_env(load(["env=grid_world"]).env)
    assert isinstance(default, GridWorld) and default.spec == GridWorld().spec


GOOD = {"reward": 1, "termination": 0, "respawn": 0}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"walls": ["###", "###"]}, "walls leaves 0 free cells, and 4 objects and the agent need 5; take away"),
        ({"walls": ["....", "####"]}, "walls leaves 4 free cells, and 4 objects and the agent need 5"),
        ({"walls": ["...", "....", "..."]}, "walls has 3 characters in row 0 and 4 in row 1; make all rows equally"),
        ({"walls": ["...", ".x."]}, "walls has 'x' in row 1; use # for a wall and . for a free cell"),
        ({"walls": []}, "walls is empty; use at least one row"),
        ({"walls": [""]}, "walls is empty; use at least one row"),
        ({"walls": "...."}, "walls='....' is wrong; use a list of strings"),
        ({"walls": [1, 2]}, "walls=.* is wrong; use a list of strings"),
        ({"configuration": "long_dens"}, "configuration='long_dens' is not known; did you mean long_dense"),
        ({"configuration": "xyz"}, "configuration='xyz' is not known; known: dense, sparse, "),
        ({"placement": "rand"}, "placement='rand' is not known; did you mean random"),
        ({"objects": []}, r"objects=\[\] is wrong; use a list of at least one"),
        ({"objects": [{"reward": 1}]}, r"objects\[0\]=.* use a dict with reward, termination, respawn"),
        ({"objects": [GOOD, {**GOOD, "colour": 1}]}, r"objects\[1\]=.* use a dict with reward"),
        (
            {"objects": [{**GOOD, "termination": 1.5}]},
            r"objects\[0\].termination=1.5 is wrong; use a number from 0 to 1",
        ),
        ({"objects": [{**GOOD, "respawn": -0.1}]}, r"objects\[0\].respawn=-0.1 is wrong; use a number from 0 to 1"),
        ({"objects": [{**GOOD, "respawn": [0, 2]}]}, r"objects\[0\].respawn=2 is wrong; use a number from 0 to 1"),
        ({"objects": [{**GOOD, "respawn": [0.5, 0.1]}]}, r"write the lower number first, \[0.1, 0.5\]"),
        ({"objects": [{**GOOD, "reward": "1"}]}, r"objects\[0\].reward='1' is wrong; use a number, or \[low, high\]"),
        ({"objects": [{**GOOD, "reward": float("nan")}]}, r"objects\[0\].reward=nan is wrong; use a finite number"),
        ({"objects": [{**GOOD, "count": 0}]}, r"objects\[0\].count=0 is wrong; use an integer of at least 1"),
        ({"objects": [{**GOOD, "count": 13}]}, "objects has 13 of them, .* use at most 12, or placement=random"),
        ({"num_objects": 5}, "num_objects=5 is wrong; use an integer from 0 to 4"),
        ({"num_objects": [3, 2]}, r"num_objects=\[3, 2\] is wrong; use an integer from 0 to 4"),
        ({"max_episode_steps": 0}, "max_episode_steps=0 is wrong; use an integer of at least 1"),
        ({"lifetime_seed": -1}, "lifetime_seed=-1 is wrong; use an integer of at least 0"),
    ],
)
def test_a_wrong_argument_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        GridWorld(**wrong)


def test_wrong_worlds_are_refused():
    env, keys = GridWorld(**BUSY), random.split(random.key(0), 3)
    world = env.draw(keys)
    with pytest.raises(ValueError, match=r"world.walls must have shape \[2, 16\] for 2 keys; it has \[3, 16\]"):
        env.init(keys[:2], world)
    with pytest.raises(ValueError, match="world.termination must lie from 0 to 1; it has 0 to 1.5"):
        env.init(keys, world._replace(termination=torch.tensor([0.0, 1.5, 1, 1, 1]).expand(3, -1)))
    with pytest.raises(ValueError, match="world.num_objects must lie from 0 to 5; it has 6 to 6"):
        env.init(keys, world._replace(num_objects=torch.full((3,), 6)))
    for homes in ([0, 0, 1, 2, 3], [0, 1, 2, 3, 5], [0, 1, 2, 3, 16]):  # twice, in a wall, outside
        with pytest.raises(ValueError, match="world.homes must name a free cell for each object, no two the same"):
            env.init(keys, world._replace(homes=torch.tensor(homes).expand(3, -1)))
    with pytest.raises(
        ValueError, match=r"walls must be bool of shape \[3, 4, 4\]; it is torch.bool of shape \[3, 16\]"
    ):
        env.draw(keys, world.walls)
    with pytest.raises(ValueError, match="walls leaves 0 free cells"):
        env.draw(keys, torch.ones(3, 4, 4, dtype=torch.bool))


def test_configurations_pass_their_own_checks():
    for config in CONFIGURATIONS.values():
        objects = [dataclasses.asdict(kind) for kind in config.objects]
        assert GridWorld(walls=config.walls, objects=objects, placement=config.placement).types == config.objects

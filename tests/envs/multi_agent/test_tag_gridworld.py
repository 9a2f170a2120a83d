"""TagGridWorld beside the rules written out for one environment, and steps worked out by hand."""

import itertools
import re

import numpy as np
import pytest
import torch

from tests.marks import with_slow
from torchpod import random
from torchpod.envs import TagGridWorld
from torchpod.envs.multi_agent.tag_gridworld import TagGridWorldState
from torchpod.testing import check_consistency
from torchpod.types import FIRST, LAST

MOVES = [(0, 0), (1, 0), (-1, 0), (0, 1), (0, -1)]


def by_group(place):
    """[B, A] -> what a state has."""
    return {"tagger": place[:, :-1].int(), "runner": place[:, -1:].int()}


class Oracle:
    """One game, agent by agent."""

    def __init__(self, env):
        self.env, self.size, self.length = env, env.num_taggers + 1, env.grid_length

    def reset(self, state):
        xs, ys = ([*place["tagger"].tolist(), *place["runner"].tolist()] for place in (state.x, state.y))
        self.places = [*zip(xs, ys, strict=True)]
        self.time = 0
        return self.observe()

    def step(self, action):
        self.time += 1
        actions = [*action["tagger"].tolist(), *action["runner"].tolist()]
        rewards = []
        for i, a in enumerate(actions):
            x, y = self.places[i][0] + MOVES[a][0], self.places[i][1] + MOVES[a][1]
            inside = 0 <= x <= self.length and 0 <= y <= self.length
            if inside:
                self.places[i] = (x, y)
            rewards.append(0.0 if inside else -self.env.wall_hit_penalty)
        tagged = self.places[-1] in self.places[:-1]
        for i in range(self.size - 1):
            rewards[i] += self.env.tag_reward_for_tagger if tagged else -self.env.step_cost_for_tagger
        rewards[-1] += -self.env.tag_penalty_for_runner if tagged else self.env.step_cost_for_tagger
        reward = {"tagger": np.array(rewards[:-1]), "runner": np.array(rewards[-1:])}
        return self.observe(), reward, tagged, self.time == self.env.max_episode_steps

    def observe(self):
        seen = [self.full(i) if self.env.use_full_observation else self.partial(i) for i in range(self.size)]
        return {"tagger": np.array(seen[:-1]), "runner": np.array(seen[-1:])}

    def full(self, i):
        xs, ys = [x / self.length for x, _ in self.places], [y / self.length for _, y in self.places]
        types, own = [0] * (self.size - 1) + [1], [int(j == i) for j in range(self.size)]
        return [*xs, *ys, *types, *own, self.time / self.env.max_episode_steps]

    def partial(self, i):
        (x, y), runner = self.places[i], self.size - 1
        other = runner
        if i == runner:
            distances = [(x - a) ** 2 + (y - b) ** 2 for a, b in self.places[:-1]]
            other = distances.index(min(distances))
        place = [c / self.length for c in (x, y, *self.places[other])]
        return [*place, int(i == runner), self.time / self.env.max_episode_steps]


CASES = [*itertools.product(["center", "scattered", "uniform"], [True, False], [False, True])]


@pytest.mark.parametrize(
    ("start", "full", "compile"), with_slow(CASES, [x for x in CASES if x[2] and x != ("uniform", False, True)])
)
def test_the_rules_are_those_written_out(start, full, compile, seed):
    env = TagGridWorld(grid_length=5, start=start, use_full_observation=full, max_episode_steps=40)
    report = check_consistency(
        env, Oracle(env), num_envs=12, num_steps=90, seed=seed, rtol=0, atol=1e-6, compile=compile
    )
    assert report.num_episodes >= 20


def test_more_agents_and_other_numbers(seed):
    env = TagGridWorld(
        9,
        20,
        start="uniform",
        wall_hit_penalty=0.3,
        tag_reward_for_tagger=3.0,
        tag_penalty_for_runner=2.0,
        step_cost_for_tagger=0.5,
        use_full_observation=False,
    )
    assert check_consistency(env, Oracle(env), seed=seed, rtol=0, atol=1e-6).num_episodes > 8


def play(x, y, actions, **arguments):
    """One step of four taggers and a runner from given places."""
    env = TagGridWorld(4, 4, tag_penalty_for_runner=2.0, max_episode_steps=10, **arguments)
    keys, (x, y, actions) = random.key(0)[None], (torch.tensor([v]) for v in (x, y, actions))
    start = TagGridWorldState(by_group(x), by_group(y), torch.zeros(1, dtype=torch.int32))
    state, _ = env.begin(start, keys)
    (state, _, _), timestep = env.step(state, {"tagger": actions[:, :4], "runner": actions[:, 4:]}, keys)
    return state, timestep, torch.cat([timestep.reward["tagger"], timestep.reward["runner"]], -1)[0]


def test_the_first_golden_step():
    _, timestep, reward = play([0, 0, 0, 0, 1], [0, 0, 0, 0, 1], [2, 0, 3, 4, 2])
    torch.testing.assert_close(reward, torch.tensor([9.9, 10.0, 10.0, 9.9, -2.0]))
    assert timestep.step_type.item() == LAST and timestep.discount["tagger"].sum() == 0


def test_the_second_golden_step():
    state, timestep, reward = play([1, 3, 3, 1, 0], [1, 1, 3, 3, 1], [1, 3, 2, 4, 1])
    torch.testing.assert_close(reward, torch.tensor([-0.01, -0.01, -0.01, -0.01, 0.01]))
    assert state.x["tagger"].tolist() == [[2, 3, 2, 1]] and state.y["tagger"].tolist() == [[1, 2, 3, 2]]
    assert state.x["runner"].item() == state.y["runner"].item() == 1
    assert timestep.step_type.item() != LAST


def test_who_swaps_cells_is_not_tagged():
    state, timestep, reward = play([1, 4, 4, 4, 2], [2, 0, 0, 0, 2], [1, 0, 0, 0, 2])
    assert state.x["tagger"][0, 0] == 2 and state.x["runner"].item() == 1
    torch.testing.assert_close(reward, torch.tensor([-0.01, -0.01, -0.01, -0.01, 0.01]))
    assert timestep.step_type.item() != LAST


def test_of_equally_near_taggers_the_runner_sees_the_first():
    _, timestep, _ = play([4, 4, 0, 2, 2], [4, 2, 2, 4, 2], [0, 0, 0, 0, 0], use_full_observation=False)
    assert timestep.observation["runner"][0, 0].tolist() == pytest.approx([0.5, 0.5, 1.0, 0.5, 1.0, 0.1])


def test_time_up_truncates_and_a_tag_in_the_last_step_terminates():
    env, keys = TagGridWorld(1, 4, max_episode_steps=3), random.split(random.key(0), 2)
    stay, still = {"tagger": torch.zeros(2, 1).long(), "runner": torch.zeros(2, 1).long()}, torch.tensor([[0], [1]])
    x, y = torch.tensor([[2, 0], [1, 0]]), torch.zeros(2, 2)
    place = TagGridWorldState(by_group(x), by_group(y), torch.zeros(2).int())
    state, _ = env.begin(place, keys)
    for last in (False, False, True):
        action = stay | ({"runner": still} if last else {})
        state, timestep = env.step(state, action, keys)
        assert (timestep.step_type == LAST).tolist() == [last] * 2
    assert timestep.discount["tagger"].tolist() == [[1.0], [0.0]]
    assert timestep.observation["tagger"][:, 0, -1].tolist() == [1.0, 1.0]


def test_starts_are_what_their_names_say(seed):
    keys = random.split(random.key(seed), 500)
    center, scattered, uniform = (
        TagGridWorld(4, 6, start=start).reset(keys) for start in ("center", "scattered", "uniform")
    )
    assert (center.x["tagger"] == 3).all() and (center.y["tagger"] == 3).all()
    for state in (center, scattered):
        assert (state.x["runner"] == 0).all() and (state.y["runner"] == 0).all()
    for place, values in ((scattered.x, range(1, 6)), (uniform.x, range(7)), (uniform.y, range(7))):
        assert place["tagger"].unique().tolist() == list(values)
        assert (place["tagger"][:, 0] != place["tagger"][:, 1]).any()
    for place in (uniform.x, uniform.y):
        assert place["runner"].unique().tolist() == list(range(7))
    state, timestep = (env := TagGridWorld(4, 2, start="uniform")).init(keys)
    zero = {"tagger": torch.zeros(500, 4).long(), "runner": torch.zeros(500, 1).long()}
    before = state[0]
    for i in range(1, 103):
        state, timestep = env.step(state, zero, random.at(keys, i))
        if (timestep.step_type == FIRST).all():
            break
    assert (state[0].x["tagger"] != before.x["tagger"]).any()  # another episode, another start


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_taggers": 0}, "num_taggers=0 is wrong; use an integer of at least 1."),
        ({"grid_length": 1}, "grid_length=1 is wrong; use an integer of at least 2."),
        ({"grid_length": 32768}, "grid_length=32768 must be at most 32767."),
        ({"max_episode_steps": 0}, "max_episode_steps=0 is wrong; use an integer of at least 1."),
        ({"start": "centre"}, "start='centre' is not known; did you mean center or scattered?"),
        ({"use_full_observation": 1}, "use_full_observation=1 is wrong; use True or False."),
        ({"wall_hit_penalty": float("nan")}, "wall_hit_penalty=nan is wrong; use a finite number."),
    ],
)
def test_a_wrong_argument_is_refused(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        TagGridWorld(**arguments)

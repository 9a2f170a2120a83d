"""TagContinuous beside the rules written out for one environment, and what its rules say in words."""

import itertools
import math
import re
import weakref

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tests.marks import with_slow
from torchpod import random
from torchpod.envs import TagContinuous
from torchpod.testing import check_consistency
from torchpod.types import LAST

F = np.float32


class Oracle:
    """One game, agent by agent and step by step by the rules; what is kept is float32."""

    def __init__(self, **arguments):
        self.__dict__.update(
            {"num_taggers": 2, "num_runners": 6, "grid_length": 4.0, "max_speed": 1.0, "max_episode_steps": 60}
            | {"skill_level_tagger": 1.0, "skill_level_runner": 1.0, "edge_hit_penalty": 0.0, "tagging_distance": 0.05}
            | {"max_acceleration": 0.1, "min_acceleration": -0.1, "num_acceleration_levels": 4}
            | {"max_turn": 2.356, "min_turn": -2.356, "num_turn_levels": 5}
            | {"use_full_observation": False, "num_other_agents_observed": 3}
            | {"tag_reward_for_tagger": 10.0, "tag_penalty_for_runner": -10.0, "end_of_game_reward_for_runner": 1.0}
            | {"step_penalty_for_tagger": 0.0, "step_reward_for_runner": 0.0, "runner_exits_game_after_tagged": True}
            | arguments
        )
        self.arguments = dict(vars(self))
        self.size = self.num_taggers + self.num_runners
        self.types = [1] * self.num_taggers + [0] * self.num_runners

    def tensors(self):
        return TagContinuous(**self.arguments)

    def reset(self, state):
        self.x, self.y, self.heading, self.speed, self.acceleration = (list(map(F, f)) for f in state[:5])
        self.alive, self.time = [True] * self.size, 0
        assert all(0 <= c <= self.grid_length for c in (*self.x, *self.y)) and not any(self.speed + self.acceleration)
        return self.observe()

    def level(self, name, index, num):
        if index == 0:
            return F(0)
        return F(np.linspace(getattr(self, f"min_{name}"), getattr(self, f"max_{name}"), num)[index - 1])

    def step(self, action):
        length = self.grid_length
        actions = [*action["tagger"].tolist(), *action["runner"].tolist()]
        self.time += 1
        rewards = [0.0] * self.size
        for i, (faster, turn) in enumerate(actions):
            top = F(self.max_speed * (self.skill_level_tagger if self.types[i] else self.skill_level_runner))
            a = F(self.acceleration[i] + self.level("acceleration", faster, self.num_acceleration_levels))
            heading = np.mod(F(self.heading[i] + self.level("turn", turn, self.num_turn_levels)), F(2 * math.pi))
            v = min(max(F(self.speed[i] + a), F(0)), top)
            if not self.alive[i]:
                heading, v = F(0), F(0)
            self.acceleration[i] = a if 0 < v < top else F(0)
            x = F(float(self.x[i]) + float(v) * math.cos(float(heading)))
            y = F(float(self.y[i]) + float(v) * math.sin(float(heading)))
            hit = not (0 <= x <= length and 0 <= y <= length)
            self.x[i], self.y[i] = (min(max(c, F(0)), F(length)) for c in (x, y))
            self.heading[i], self.speed[i] = heading, v
            if self.alive[i]:
                bonus = self.step_penalty_for_tagger if self.types[i] else self.step_reward_for_runner
                rewards[i] = hit * self.edge_hit_penalty + bonus
        observation = self.observe()
        for i in range(self.num_taggers, self.size):
            if not self.alive[i]:
                continue
            distances = [self.distance(i, j) for j in range(self.num_taggers)]
            nearest = distances.index(min(distances))
            if distances[nearest] < F(self.tagging_distance * length):
                rewards[i] += self.tag_penalty_for_runner
                rewards[nearest] += self.tag_reward_for_tagger
                self.alive[i] = not self.runner_exits_game_after_tagged
        left = self.alive[self.num_taggers :]
        if self.time == self.max_episode_steps:
            for i in range(self.num_taggers, self.size):
                rewards[i] += self.end_of_game_reward_for_runner if self.alive[i] else 0.0
        discount = np.array(self.alive) * float(any(left))  # nobody left: terminated
        told = {"alive": self.split(self.alive), "discount": self.split(discount)}
        return observation, self.split(rewards), not any(left), self.time == self.max_episode_steps, told

    def distance(self, i, j):
        dx, dy = self.x[j] - self.x[i], self.y[j] - self.y[i]
        return np.sqrt(dx * dx + dy * dy)

    def split(self, rows):
        rows = np.array(rows, dtype=np.float64)
        return {"tagger": rows[: self.num_taggers], "runner": rows[self.num_taggers :]}

    def features(self, i, j):
        side, fast = self.grid_length * math.sqrt(2), self.max_speed + 1e-10
        return [
            (float(self.x[j]) - float(self.x[i])) / side,
            (float(self.y[j]) - float(self.y[i])) / side,
            (float(self.speed[j]) - float(self.speed[i])) / fast,
            (float(self.acceleration[j]) - float(self.acceleration[i])) / fast,
            (float(self.heading[j]) - float(self.heading[i])) / (2 * math.pi),
        ]

    def observe(self):
        return self.split([self.full(i) if self.use_full_observation else self.partial(i) for i in range(self.size)])

    def full(self, i):
        others = [j for j in range(self.size) if j != i]
        seen = [[*(f * self.alive[i] for f in self.features(i, j)), self.types[j], self.alive[j]] for j in others]
        return [*np.array(seen, dtype=np.float64).T.ravel(), self.alive[i] * self.time / self.max_episode_steps]

    def partial(self, i):
        num = self.num_other_agents_observed
        if not self.alive[i]:
            return [0.0] * (7 * num + 1)
        others = [j for j in range(self.size) if j != i and self.alive[j]]
        others = sorted(others, key=lambda j: (self.distance(i, j), j))[:num]
        seen = [[*self.features(i, j), self.types[j], 1.0] for j in others] + [[0.0] * 7] * (num - len(others))
        return [*np.array(seen).T.ravel(), self.time / self.max_episode_steps]


CASES = {
    "full": {"use_full_observation": True},
    "partial": {},
    "stays": {"runner_exits_game_after_tagged": False},
    "full_stays": {"runner_exits_game_after_tagged": False, "use_full_observation": True},
    "edges": {"edge_hit_penalty": -0.5, "step_penalty_for_tagger": -0.1, "step_reward_for_runner": 0.2},
    "skills": {"skill_level_tagger": 0.5, "skill_level_runner": 2.0, "max_speed": 0.3, "max_acceleration": 0.3},
    "few": {"num_taggers": 1, "num_runners": 2, "num_other_agents_observed": 2, "grid_length": 1.0},
    "blocks": {"num_taggers": 5, "num_runners": 40, "num_other_agents_observed": 2, "grid_length": 8.0},
}


@pytest.mark.parametrize(
    ("case", "compile"),
    with_slow(itertools.product(CASES, [False, True]), [(case, True) for case in CASES if case != "few"]),
)
def test_the_rules_are_those_written_out(case, compile, seed):
    """Observations to 1e-6 and rewards, small numbers of at most 10 each, to as much."""
    oracle = Oracle(**CASES[case])
    report = check_consistency(
        oracle.tensors(), oracle, num_envs=6, num_steps=125, seed=seed, rtol=1e-7, atol=1e-6, compile=compile
    )
    assert report.num_episodes >= 6


@pytest.mark.slow
@pytest.mark.parametrize("compile", [False, True])
def test_the_default_game_is_that_written_out(compile, seed):
    """110 agents of which each sees the ten nearest, for more than 500 steps."""
    defaults = {"num_taggers": 10, "num_runners": 100, "grid_length": 20.0, "max_episode_steps": 500}
    defaults |= {"num_acceleration_levels": 20, "num_turn_levels": 20, "num_other_agents_observed": 10}
    oracle = Oracle(tagging_distance=0.02, **defaults)
    how = {"num_envs": 1, "num_steps": 502, "compile": compile}
    check_consistency(TagContinuous(), oracle, seed=seed, rtol=1e-7, atol=1e-6, **how)


def place(env, xy, **others):
    """The state with agents at given places, standing still."""
    size = env.num_agents
    state = env.reset(random.key(0)[None])
    x, y = torch.tensor(xy).T[:, None]
    rows = {name: torch.tensor([values]) for name, values in others.items()}
    assert x.shape == (1, size)
    return state._replace(x=x, y=y, heading=torch.zeros(1, size), **rows)


def act(env, state, actions=None, keys=None):
    keys = random.key(0)[None] if keys is None else keys
    chosen = torch.zeros(1, env.num_agents, 2).long() if actions is None else torch.tensor([actions])
    action = {"tagger": chosen[:, : env.num_taggers], "runner": chosen[:, env.num_taggers :]}
    return env.step(state, action, keys)


def game(**arguments):
    return TagContinuous(
        **({"num_taggers": 2, "num_runners": 3, "grid_length": 10.0, "use_full_observation": True} | arguments)
    )


def test_a_tagger_is_paid_for_each_runner_that_it_is_nearest_to():
    env = game(tagging_distance=0.1)
    state, _ = env.begin(place(env, [(5.0, 5.0), (9.0, 9.0), (5.5, 5.0), (5.0, 5.9), (6.0, 5.0)]), random.key(0)[None])
    state, timestep = act(env, state)
    assert timestep.reward["tagger"].tolist() == [[20.0, 0.0]]
    assert timestep.reward["runner"].tolist() == [[-10.0, -10.0, 0.0]]  # at exactly the distance: no tag
    assert timestep.extras["alive"]["runner"].tolist() == [[False, False, True]]
    assert timestep.discount["runner"].tolist() == [[0.0, 0.0, 1.0]] and (timestep.discount["tagger"] == 1).all()
    # In this step they are still seen in the game, in the next they are not, and see nothing themselves.
    assert timestep.observation["tagger"][0, 0, -5:-1].tolist() == [1.0, 1.0, 1.0, 1.0]
    state, timestep = act(env, state)
    assert timestep.observation["tagger"][0, 0, -5:-1].tolist() == [1.0, 0.0, 0.0, 1.0]
    assert timestep.observation["runner"][0, 0, :20].tolist() == [0.0] * 20
    assert timestep.reward["runner"].tolist() == [[0.0, 0.0, 0.0]]


def test_of_equally_near_taggers_the_first_is_paid():
    env = game(num_runners=1, tagging_distance=0.2)
    state, _ = env.begin(place(env, [(4.0, 5.0), (6.0, 5.0), (5.0, 5.0)]), random.key(0)[None])
    _, timestep = act(env, state)
    assert timestep.reward["tagger"].tolist() == [[10.0, 0.0]]
    assert timestep.step_type.tolist() == [LAST] and (timestep.discount["tagger"] == 0).all()  # nobody left: terminated


def test_the_reward_at_the_end_is_for_those_that_are_still_in_the_game():
    env = game(max_episode_steps=1, tagging_distance=0.1)
    state, _ = env.begin(place(env, [(5.0, 5.0), (9.0, 9.0), (5.5, 5.0), (1.0, 1.0), (1.0, 2.0)]), random.key(0)[None])
    _, timestep = act(env, state)
    assert timestep.reward["runner"].tolist() == [[-10.0, 1.0, 1.0]]
    assert timestep.step_type.tolist() == [LAST]  # truncated: the value of those goes on
    assert timestep.discount["runner"].tolist() == [[0.0, 1.0, 1.0]] and (timestep.discount["tagger"] == 1).all()


def test_acceleration_adds_up_until_the_speed_is_at_its_limit():
    env = game(max_acceleration=0.1, min_acceleration=-0.1, num_acceleration_levels=2, skill_level_tagger=0.5)
    state, _ = env.begin(place(env, [(1.0, 1.0)] * 2 + [(9.0, 9.0)] * 3), random.key(0)[None])
    faster = [[2, 0]] + [[0, 0]] * 4
    speeds, xs = [], []
    for action in (faster, None, faster, faster, faster):
        state, _ = act(env, state, action)
        speeds.append(round(state[0].speed[0, 0].item(), 5))
        xs.append(round(state[0].x[0, 0].item(), 5))
    # accelerations 0.1, 0.1, 0.2, and then, at the limit, 0 + 0.1 and 0 + 0.1
    assert speeds == [0.1, 0.2, 0.4, 0.5, 0.5] and xs == [1.1, 1.3, 1.7, 2.2, 2.7]
    assert state[0].acceleration[0].tolist() == [0.0] * 5 and state[0].speed[0, 1:].tolist() == [0.0] * 4


def test_starts_differ_between_environments_and_episodes(seed):
    env = TagContinuous(max_episode_steps=1)
    keys = random.split(random.key(seed), 64)
    state, _ = env.init(random.at(keys, 0))
    first = state[0]
    action = {g: torch.zeros(64, n, 2).long() for g, n in {"tagger": 10, "runner": 100}.items()}
    for i in range(1, 3):
        state, _ = env.step(state, action, random.at(keys, i))
    for s in (first, state[0]):
        assert len(s.x[:, 0].unique()) >= 62 and 0 <= s.x.min() < 0.1 and 19.9 < s.y.max() < 20
        assert s.heading.unique().tolist() == pytest.approx([0, math.pi / 2, math.pi, 3 * math.pi / 2])
        assert abs(np.corrcoef(s.x.flatten(), s.heading.flatten())[0, 1]) < 0.07
    assert (first.x != state[0].x).float().mean() > 0.99


class Live(TorchDispatchMode):
    """Adds up the bytes of all tensors that are made and still there."""

    def __init__(self):
        super().__init__()
        self.bytes, self.most, self.known = 0, 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            storage = leaf.untyped_storage() if isinstance(leaf, torch.Tensor) else None
            if storage is not None and storage.data_ptr() not in self.known:
                self.known.add(storage.data_ptr())
                self.bytes += storage.nbytes()
                weakref.finalize(storage, self.free, storage.data_ptr(), storage.nbytes())
        self.most = max(self.most, self.bytes)
        return result

    def free(self, pointer, num_bytes):
        self.known.remove(pointer)
        self.bytes -= num_bytes


def test_a_thousand_agents_observe_in_the_memory_that_is_promised():
    """Without a compiler, for then every tensor is there: docs/multi-agent.md."""
    with torch.no_grad(), Live() as live:
        _, timestep = TagContinuous(100, 900).init(random.split(random.key(0), 2))
    seen = sum(x.nbytes for x in timestep.observation.values())
    assert 2 * 284_000 == seen < live.most <= 2 * 1_000_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_taggers": 0}, "num_taggers=0 is wrong; use an integer of at least 1."),
        ({"num_runners": 2.0}, "num_runners=2.0 is wrong; use an integer of at least 1."),
        ({"grid_length": 0}, "grid_length=0 is wrong; use a number above 0."),
        ({"skill_level_runner": -1.0}, "skill_level_runner=-1.0 is wrong; use a number above 0."),
        (
            {"edge_hit_penalty": 0.5},
            "edge_hit_penalty=0.5 is wrong; it is added to the reward: use 0 or a number below",
        ),
        ({"min_turn": 3.0}, "min_turn=3 is above max_turn=2.356; exchange them."),
        ({"num_turn_levels": 0}, "num_turn_levels=0 is wrong; use an integer of at least 1."),
        ({"num_other_agents_observed": 0}, "num_other_agents_observed=0 is wrong; use an integer of at least 1."),
        (
            {"num_taggers": 2, "num_runners": 3},
            "num_other_agents_observed=10 is more than the 4 others that 2 taggers and 3 runners have; use at most 4, "
            "or use_full_observation=True.",
        ),
        ({"tagging_distance": 2.0}, "tagging_distance=2.0 is wrong; use a number from 0 to"),
        ({"runner_exits_game_after_tagged": None}, "runner_exits_game_after_tagged=None is wrong; use True or False."),
    ],
)
def test_a_wrong_argument_is_refused(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        TagContinuous(**arguments)


def test_with_the_full_observation_the_number_of_the_nearest_does_not_matter():
    assert TagContinuous(1, 1, use_full_observation=True).spec.observation["tagger"].shape == (8,)

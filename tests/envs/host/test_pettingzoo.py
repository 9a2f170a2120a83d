"""PettingZoo behind the contract: groups, who is still there, and how episodes end."""

import copy
import re
import sys
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch.utils import _pytree as pytree

from torchpod import random
from torchpod.actions import random_action
from torchpod.algos.multi_agent import IA2C, IPPO, MAPPO, IA2CConfig, IPPOConfig, MAPPOConfig
from torchpod.compile import Compiler
from torchpod.compose import load
from torchpod.config import ConfigError
from torchpod.env import HostEnv
from torchpod.envs.host import Gymnasium, PettingZoo
from torchpod.envs.multi_agent.tag_continuous import TagContinuous
from torchpod.envs.multi_agent.tag_gridworld import TagGridWorld
from torchpod.envs.transforms import action_repeat, time_limit
from torchpod.learner import LearnerConfig
from torchpod.makers import make_env
from torchpod.run.execute import execute
from torchpod.sebulba import Sebulba, SebulbaConfig, train
from torchpod.specs import Array, Box, Discrete, MultiDiscrete
from torchpod.testing import check_env
from torchpod.types import FIRST, LAST, MID

pettingzoo = pytest.importorskip("pettingzoo", reason="the extra `pettingzoo` is not installed")
pytest.importorskip("mpe2", reason="the package mpe2 is not installed")

TASKS = {
    "mpe2.simple_world_comm_v3": {"leadadversary": 1, "adversary": 3, "agent": 2},
    "mpe2.simple_speaker_listener_v4": {"speaker": 1, "listener": 1},
    "mpe2.simple_spread_v3": {"agent": 3},
    "pettingzoo.butterfly.knights_archers_zombies_v11": {"archer": 2, "knight": 2},  # who may die
    "classic/rps-v2": {"player": 2},  # observes an integer
    "sisl/pursuit-v5": {"pursuer": 8},
}


class Leaving(pettingzoo.ParallelEnv):
    """Action 1 terminates an agent, 2 truncates it; all are truncated at step 4. Agent i observes 10 i + step + 1."""

    metadata, render_mode = {"name": "leaving"}, None
    possible_agents = ["wolf_0", "wolf_1", "sheep_0"]
    seen: Any = spaces.Box(0, 99, (1,), np.float64)
    acts = spaces.Discrete(3)

    def observation_space(self, agent):
        return self.seen

    def action_space(self, agent):
        return self.acts

    def reset(self, seed=None, options=None):
        self.agents, self.count = list(self.possible_agents), 0
        return self.observed(self.agents), {}

    def step(self, actions):
        assert set(actions) == set(self.agents)
        self.count += 1
        told = self.agents
        terminated = {a: bool(actions[a] == 1) for a in told}
        truncated = {a: bool(actions[a] == 2) or self.count == 4 for a in told}
        self.agents = [a for a in told if not (terminated[a] or truncated[a])]
        reward = {a: float(self.count) for a in told}
        return self.observed(told), reward, terminated, truncated, {a: {} for a in told}

    def observed(self, agents) -> Any:
        return {a: np.array([10.0 * self.possible_agents.index(a) + self.count + 1]) for a in agents}


class Careless(Leaving):
    """Goes on telling of those who left, rewards them, and forgets why they did."""

    def step(self, actions):
        observation, reward, terminated, truncated, infos = super().step(actions)
        everybody = self.possible_agents
        terminated, truncated = dict.fromkeys(everybody, False) | terminated, dict.fromkeys(everybody, True) | truncated
        return self.observed(everybody), dict.fromkeys(everybody, 1.0) | reward, terminated, truncated, infos


class Coming(Leaving):
    """The sheep comes in step 2."""

    def reset(self, seed=None, options=None):
        super().reset()
        self.agents = self.possible_agents[:2]
        return self.observed(self.agents), {}

    def step(self, actions):
        _, reward, terminated, truncated, infos = super().step(actions)
        self.agents = [*self.agents, "sheep_0"] if self.count == 2 else self.agents
        return self.observed(self.possible_agents), reward, terminated, truncated, infos


def keys(num, seed=0):
    return random.split(random.key(seed), num)


def actions(wolf, sheep):
    return {"wolf": torch.tensor([wolf]), "sheep": torch.tensor([sheep])}


def play(env, chosen):
    """Timesteps of one environment from `init` on."""
    timesteps = [env.init(keys(1))[1]]
    return timesteps + [env.step(None, actions(*x), keys(1))[1] for x in chosen]


def columns(timesteps):
    """Of the three agents, one row per step."""

    def rows(pick):
        return [torch.cat([pick(t)["wolf"][0], pick(t)["sheep"][0]]).flatten().tolist() for t in timesteps]

    return (
        [t.step_type.item() for t in timesteps],
        rows(lambda t: t.reward),
        rows(lambda t: t.discount),
        rows(lambda t: t.extras["alive"]),
        rows(lambda t: t.observation),
    )


@pytest.mark.parametrize("task", TASKS)
def test_environments_of_all_kinds_keep_the_contract(task):
    env = PettingZoo(task)
    assert env.spec.groups == TASKS[task]
    check_env(env, num_envs=3, num_steps=60)
    env.close()


@pytest.mark.parametrize("make", [Leaving, Careless])
def test_who_leaves_is_out_of_the_game_and_the_episode_ends_with_the_last(make):
    """The sheep is terminated at step 1, a wolf is truncated at step 2, the other one terminated at step 3."""
    seen = play(PettingZoo(make), [([0, 0], [1]), ([2, 0], [0]), ([0, 1], [0]), ([0, 0], [0]), ([0, 0], [0])])
    step_type, reward, discount, alive, observation = columns(seen)
    assert step_type == [FIRST, MID, MID, LAST, FIRST, MID]
    assert reward == [[0, 0, 0], [1, 1, 1], [2, 2, 0], [0, 3, 0], [0, 0, 0], [1, 1, 1]]
    assert discount == [[1, 1, 1], [1, 1, 0], [0, 1, 0], [0, 0, 0], [1, 1, 1], [1, 1, 1]]
    assert alive == [[1, 1, 1], [1, 1, 0], [0, 1, 0], [0, 0, 0], [1, 1, 1], [1, 1, 1]]
    assert observation == [[1, 11, 21], [2, 12, 22], [3, 13, 0], [0, 14, 0], [1, 11, 21], [2, 12, 22]]
    assert [t.extras["game_over"].item() for t in seen] == [False, False, False, True, False, False]


def test_truncation_is_apart_from_termination():
    """At step 4 all who are left are truncated; one of them is terminated as well, which wins."""
    seen = play(PettingZoo(Leaving), [([0, 0], [1]), ([0, 0], [0]), ([0, 0], [0]), ([1, 0], [0]), ([0, 0], [0])])
    step_type, reward, discount, alive, observation = columns(seen)
    assert step_type == [FIRST, MID, MID, MID, LAST, FIRST]
    assert discount[3:5] == alive[3:5] == [[1, 1, 0], [0, 1, 0]]
    assert reward[4] == [4, 4, 0] and observation[4] == [5, 15, 0]


def test_keys_decide_the_episodes(seed):
    def first(key_seed):
        return PettingZoo("mpe2.simple_spread_v3").init(keys(3, key_seed))[1].observation["agent"]

    assert torch.equal(first(seed), first(seed))
    assert not torch.equal(first(seed), first(seed + 1))
    assert len({tuple(row) for row in first(seed)[:, 0].tolist()}) == 3


class Mixed(Leaving):
    """`unit_0` and `unit_2` are alike, `unit_1` acts otherwise; 7 and 8 are numbers."""

    possible_agents = ["unit_0", "unit_1", "unit_2", 7, 8]
    other = spaces.Discrete(4)

    def action_space(self, agent):
        return self.other if agent == "unit_1" else self.acts


def test_groups_are_of_agents_with_equal_names_that_are_alike():
    env = PettingZoo(Mixed)
    assert env.spec.groups == {"unit": 2, "unit_1": 1, "agent": 2}
    assert env.spec.action == {"unit": Discrete(3), "unit_1": Discrete(4), "agent": Discrete(3)}


def test_groups_may_be_given():
    env = PettingZoo(Leaving, groups={"pair": ["sheep_0", "wolf_1"], "alone": ["wolf_0"]})
    assert env.spec.groups == {"pair": 2, "alone": 1}
    assert env.init(keys(1))[1].observation["pair"].tolist() == [[[21.0], [11.0]]]


@pytest.mark.parametrize(
    ("make", "groups", "sentence"),
    [
        (Leaving, {"a": ["wolf_0", "wolf"]}, "group a has agents ['wolf'], and leaving has the agents wolf_0, wolf_1"),
        (Leaving, {"a": []}, "group a has agents none, and leaving has the agents wolf_0, wolf_1, sheep_0; name some"),
        (Leaving, {"a": ["wolf_0", "wolf_1"]}, "sheep_0 of leaving is in groups []; put every agent into exactly one"),
        (Leaving, {"a": ["wolf_0"] * 2, "b": ["wolf_1", "sheep_0"]}, "wolf_0 of leaving is in groups ['a']; put every"),
        (Mixed, {"a": ["unit_0", "unit_1"]}, "group a has unit_0 with Discrete(3) and unit_1 with Discrete(4); give"),
    ],
)
def test_wrong_groups_are_refused(make, groups, sentence):
    with pytest.raises(ValueError) as error:
        PettingZoo(make, groups=groups)
    assert str(error.value).startswith(sentence)


class Told(Leaving):
    """Takes what is in the space of an agent alone, and remembers it."""

    kinds = {
        "counts_0": spaces.Discrete(3, start=5),
        "several_0": spaces.MultiDiscrete([2, 3], start=[0, 1]),
        "steers_0": spaces.Box(np.array([-1, 0], np.float32), np.array([1, 2], np.float32)),
        "joint_0": spaces.Box(np.array([0, -1]), np.array([1, 1]), dtype=np.int32),
    }
    possible_agents = list(kinds)
    told = {}

    def action_space(self, agent):
        return self.kinds[agent]

    def step(self, actions):
        assert all(self.kinds[a].contains(x) for a, x in actions.items())
        self.told.update({a: np.asarray(x).tolist() for a, x in actions.items()})
        return super().step(dict.fromkeys(actions, 0))


def test_actions_reach_their_agents():
    env = PettingZoo(Told)
    assert list(env.spec.action.values()) == [
        Discrete(3),
        MultiDiscrete((2, 3)),
        Box((2,), -1.0, 1.0),
        Discrete(6),
    ]
    env.init(keys(1))
    chosen = {"counts": [[2]], "several": [[[1, 2]]], "steers": [[[0.5, 9.0]]], "joint": [[5]]}
    env.step(None, {group: torch.tensor(x) for group, x in chosen.items()}, keys(1))
    assert Told.told == {"counts_0": 7, "several_0": [1, 3], "steers_0": [0.5, 2.0], "joint_0": [1, 1]}


class Trading(Leaving):
    """Observes and acts in pairs; the second half of an action becomes the reward."""

    seen = spaces.Tuple([spaces.Discrete(100), spaces.Box(0, 99, (1,), np.float64)])
    acts: Any = spaces.Tuple([spaces.Discrete(3), spaces.Discrete(4, start=-1)])

    def step(self, actions):
        assert all(self.acts.contains(x) for x in actions.values())
        observation, _, terminated, truncated, infos = super().step({a: x[0] for a, x in actions.items()})
        return observation, {a: float(x[1]) for a, x in actions.items()}, terminated, truncated, infos

    def observed(self, agents):
        return {a: (int(x[0]), x) for a, x in super().observed(agents).items()}


def test_tuples_are_dicts_that_are_observed_and_several_choices():
    env = PettingZoo(Trading)
    assert env.spec.observation["wolf"] == {"0": Discrete(100), "1": Array((1,))}
    assert env.spec.action["wolf"] == MultiDiscrete((3, 4))
    env.init(keys(1))
    choices = {"wolf": torch.tensor([[[1, 0], [0, 3]]]), "sheep": torch.tensor([[[0, 2]]])}  # the first wolf leaves
    for alive in (1, 0):
        _, timestep = env.step(None, choices, keys(1))
        assert timestep.observation["wolf"]["0"].tolist() == ([[2, 12]] if alive else [[0, 13]])
        assert timestep.observation["wolf"]["1"].tolist() == ([[[2.0], [12.0]]] if alive else [[[0.0], [13.0]]])
        assert timestep.reward["wolf"].tolist() == [[-1.0 * alive, 2.0]] and timestep.reward["sheep"].item() == 1.0
    check_env(env)


class Masked(Leaving):
    """Allows action 0 alone, and nothing to those who leave."""

    seen: Any = spaces.Dict({"action_mask": spaces.Box(0, 1, (3,), np.int8), "x": spaces.Box(0, 99, (1,), np.float64)})

    def observed(self, agents) -> Any:
        return {a: {"action_mask": self.mask(a), "x": x} for a, x in super().observed(agents).items()}

    def mask(self, agent):
        return np.array([agent in self.agents, 0, 0], np.int8)


class Stuck(Masked):
    """Forbids the sheep everything from step 2 on."""

    def mask(self, agent):
        return super().mask(agent) * (agent != "sheep_0" or self.count < 2)


class Choosing(Masked):
    """Makes two choices, and allows who leaves the first one alone."""

    seen = spaces.Dict({"action_mask": spaces.Box(0, 1, (5,), np.int8), "x": spaces.Box(0, 99, (1,), np.float64)})
    acts: Any = spaces.MultiDiscrete([2, 3])

    def step(self, actions):
        return super().step({a: x[0] for a, x in actions.items()})

    def mask(self, agent):
        return np.array([1, 1, 0, 0, agent in self.agents], np.int8)


class StuckInOne(Choosing):
    def mask(self, agent):
        return super().mask(agent) * np.array([1, 1, 1, 1, agent != "wolf_1"], np.int8)


def masks_of(group, seen):
    return [t.observation[group]["action_mask"][0].int().tolist() for t in seen]


def test_masks_become_bool_and_leave_something_to_choose():
    env = PettingZoo(Masked)
    assert env.spec.observation["wolf"] == {"action_mask": Array((3,), torch.bool), "x": Array((1,))}
    check_env(env)
    seen = play(env, [([0, 0], [1]), ([0, 0], [0]), ([0, 0], [0]), ([0, 0], [0])])
    assert [t.step_type.item() for t in seen] == [FIRST, MID, MID, MID, LAST]
    assert masks_of("wolf", seen) == [[[1, 0, 0]] * 2] * 4 + [[[1, 1, 1]] * 2]
    assert masks_of("sheep", seen) == [[[1, 0, 0]]] + [[[1, 1, 1]]] * 4
    assert seen[2].observation["sheep"]["x"].tolist() == [[[0.0]]]


def test_masks_of_several_choices_leave_something_in_each():
    env = PettingZoo(Choosing)
    check_env(env)
    seen = play(env, [([[0, 2], [0, 2]], [[1, 2]]), ([[0, 2], [0, 2]], [[0, 0]])])
    assert masks_of("wolf", seen) == [[[1, 1, 0, 0, 1]] * 2] * 3
    assert masks_of("sheep", seen) == [[[1, 1, 0, 0, 1]], [[1, 1, 1, 1, 1]], [[1, 1, 1, 1, 1]]]


def test_a_mask_that_leaves_nothing_to_who_must_act_is_refused():
    env = PettingZoo(Stuck)
    play(env, [([0, 0], [1]), ([0, 0], [0]), ([0, 0], [0])])  # it had left
    told = "leaving gave sheep_0 an action_mask that allows nothing in choice 0, in environment 0; allow everybody some"
    with pytest.raises(ValueError, match=re.escape(told)):
        play(env, [([0, 0], [0]), ([0, 0], [0])])
    with pytest.raises(
        ValueError, match="gave wolf_1 an action_mask that allows nothing in choice 1, in environment 0"
    ):
        PettingZoo(StuckInOne).init(keys(2))


def test_who_waits_for_its_turn_may_do_what_it_likes():
    classic = pytest.importorskip("pettingzoo.classic.tictactoe_v3", reason="the rules of a game are not installed")
    env = PettingZoo(lambda: pettingzoo.utils.turn_based_aec_to_parallel(classic.env()))
    check_env(env, num_steps=30)
    seen = [env.init(keys(1))[1], env.step(None, {"player": torch.tensor([[4, 0]])}, keys(1))[1]]
    limited = time_limit(env, 3)
    seen.append(limited.init(keys(1))[1])
    free = [1, 1, 1, 1, 0, 1, 1, 1, 1]
    assert masks_of("player", seen) == [[[1] * 9] * 2, [[1] * 9, free], [[1] * 9] * 2]


class Seeing(Leaving):
    """Of 3 agents each sees an image with channels first, or a plane."""

    seen = spaces.Box(0, 255, (3, 10, 12), np.uint8)

    def observed(self, agents):
        size = int(np.prod(self.seen.shape))
        return {a: (np.arange(size) % 200 + len(a)).astype(np.uint8).reshape(self.seen.shape) for a in agents}


class SeeingPlanes(Seeing):
    seen = spaces.Box(0, 255, (10, 12), np.uint8)


def test_images_have_their_channels_last():
    env = PettingZoo(Seeing)
    assert env.spec.observation["wolf"] == Array((10, 12, 3), torch.uint8)
    expected = Seeing().reset()[0]["wolf_1"].transpose(1, 2, 0)
    assert np.array_equal(env.init(keys(2))[1].observation["wolf"][1, 1], expected)
    check_env(env)
    planes = PettingZoo(SeeingPlanes)
    assert planes.spec.observation["wolf"] == Array((10, 12), torch.uint8)
    assert np.array_equal(planes.init(keys(2))[1].observation["wolf"][1, 1], SeeingPlanes().reset()[0]["wolf_1"])


def test_time_limits_truncate_and_repeats_add_up():
    limited = time_limit(PettingZoo(Leaving), 2)
    assert limited.spec.max_episode_steps == 2
    check_env(limited)
    step_type, _, discount, *_ = columns(play(limited, [([0, 0], [1]), ([1, 0], [0]), ([0, 0], [0])]))
    assert step_type == [FIRST, MID, LAST, FIRST] and discount[2] == [0, 1, 0]
    both = action_repeat(limited, 3)
    assert both.spec.max_episode_steps == 1
    assert columns(play(both, [([0, 0], [0])]))[1][1] == [1 + 2, 1 + 2, 1 + 2]


def test_time_limits_end_the_episode_for_who_just_came():
    chosen = [([0, 0], [0])] * 3
    step_type, _, _, alive, _ = columns(play(PettingZoo(Coming), chosen))
    assert step_type == [FIRST, MID, MID, MID] and alive[1:3] == [[1, 1, 0], [1, 1, 1]]
    step_type, _, discount, alive, _ = columns(play(time_limit(PettingZoo(Coming), 2), chosen))
    assert step_type == [FIRST, MID, LAST, FIRST]
    assert alive[2] == discount[2] == [1, 1, 0]


@pytest.mark.parametrize("make", [Leaving, Careless])
def test_repeats_add_up_until_an_agent_leaves(make):
    repeated = action_repeat(PettingZoo(make), 3)
    step_type, reward, discount, _, observation = columns(play(repeated, [([0, 0], [1]), ([0, 0], [0])]))
    assert step_type == [FIRST, MID, LAST]
    assert reward == [[0, 0, 0], [1 + 2 + 3, 1 + 2 + 3, 1], [4, 4, 0]]
    assert discount[1:] == [[1, 1, 0], [1, 1, 0]]
    assert observation[1:] == [[4, 14, 22], [5, 15, 0]]
    step_type, reward, discount, _, observation = columns(play(action_repeat(PettingZoo(make), 4), [([0, 0], [1])]))
    assert step_type[1] == LAST and reward[1] == [1 + 2 + 3 + 4, 1 + 2 + 3 + 4, 1]
    assert discount[1] == [1, 1, 0] and observation[1] == [5, 15, 22]


def test_who_comes_is_seen_when_actions_are_repeated():
    """They are no longer repeated then: the sheep is to act as well."""
    seen = play(action_repeat(PettingZoo(Coming), 3), [([0, 0], [0]), ([0, 0], [0])])
    _, reward, _, alive, observation = columns(seen)
    assert reward[1:] == [[1 + 2, 1 + 2, 0], [3 + 4, 3 + 4, 3 + 4]]
    assert alive[1] == [1, 1, 1] and observation[1:] == [[3, 13, 23], [5, 15, 25]]


class Ordered(Leaving):
    """Remembers in which order agents acted."""

    possible_agents = [f"wolf_{i}" for i in range(8)]
    order = []

    def step(self, actions):
        self.order.append(list(actions))
        return super().step(actions)


def test_agents_act_in_their_order_when_actions_are_repeated():
    env = action_repeat(PettingZoo(Ordered), 2)
    env.init(keys(1))
    env.step(None, {"wolf": torch.zeros(1, 8, dtype=torch.int64)}, keys(1))
    assert Ordered.order == [Ordered.possible_agents] * 2


class Short(Leaving):
    """Forgets what it sees from its second step on."""

    def observed(self, agents):
        return {a: np.zeros(1 if self.count < 2 else 2) for a in agents}


class Nobody(Leaving):
    possible_agents = []


class WrongMask(Masked):
    acts = spaces.Discrete(4)


class Silent(Leaving):
    """Says nothing of the sheep in its second step."""

    def observed(self, agents):
        return {a: x for a, x in super().observed(agents).items() if a != "sheep_0" or self.count < 2}


def turns():
    """For agents that take turns."""
    return pettingzoo.utils.parallel_to_aec(Leaving())


@pytest.mark.parametrize(
    ("task", "options", "sentence"),
    [
        ("pettingzoo.sisl.nothing", {}, "PettingZoo cannot make pettingzoo.sisl.nothing with {}: ModuleNotFoundE"),
        ("mpe2.simple_spread_v3", {"n": 2}, "PettingZoo cannot make mpe2.simple_spread_v3 with {'n': 2}: TypeError: "),
        ("sisl/pursuit-v1", {}, "PettingZoo cannot make sisl/pursuit-v1 with {}: VersionNotFound: Env"),
        ("pettingzoo.mpe.simple_spread_v3", {}, "PettingZoo cannot make pettingzoo.mpe.simple_spread_v3 with {}: I"),
        (Leaving, {"n": 2}, "['n'] are options of an id or a module; give them to "),
        (Nobody, {}, "leaving has no possible_agents; list everybody there may ever be."),
        (
            WrongMask,
            {},
            "leaving: observation_space of wolf: action_mask is [3], and the action Discrete(num_values=4, ",
        ),
        (turns, {}, "turns gives an AECEnv, whose agents take turns; use a pettingzoo.ParallelEnv."),
        (dict, {}, "dict gives a dict; use a pettingzoo.ParallelEnv."),
    ],
)
def test_what_cannot_be_made_is_refused(task, options, sentence):
    with pytest.raises(ValueError) as error:
        PettingZoo(task, **options)
    assert str(error.value).startswith(sentence)


def test_an_observation_of_another_shape_than_its_space_is_named():
    env = PettingZoo(Short)
    env.init(keys(2))
    nothing = {"wolf": torch.zeros(2, 2, dtype=torch.int64), "sheep": torch.zeros(2, 1, dtype=torch.int64)}
    env.step(None, nothing, keys(2))
    message = "leaving gave wolf_0 an observation of shape [2], and the space says [1]; make them agree."
    with pytest.raises(ValueError, match=re.escape(message)):
        env.step(None, nothing, keys(2))


@pytest.mark.parametrize(
    ("reward", "told"),
    [(np.array([1.0]), "a reward of shape [1]"), ("much", "the reward 'much'")],
    ids=["array", "text"],
)
def test_a_reward_that_is_no_number_is_named(reward, told):
    class Generous(Leaving):
        def step(self, actions) -> Any:
            observation, _, *ends = super().step(actions)
            return observation, dict.fromkeys(actions, reward), *ends

    env = PettingZoo(Generous)
    env.init(keys(2))
    nothing = {"wolf": torch.zeros(2, 2, dtype=torch.int64), "sheep": torch.zeros(2, 1, dtype=torch.int64)}
    with pytest.raises(ValueError, match=rf"leaving gave \w+ {re.escape(told)}; give a number\."):
        env.step(None, nothing, keys(2))


def test_somebody_without_an_observation_is_named():
    with pytest.raises(
        ValueError, match="leaving gave sheep_0 no observation; give everybody one who is in its agents."
    ):
        play(PettingZoo(Silent), [([0, 0], [0]), ([0, 0], [0])])


class Stingy(Leaving):
    def step(self, actions):
        observation, reward, terminated, truncated, info = super().step(actions)
        return observation, {a: x for a, x in reward.items() if a != "sheep_0"}, terminated, truncated, info


def test_somebody_without_a_reward_is_named():
    with pytest.raises(ValueError, match="leaving gave sheep_0 no reward; give everybody one who is in its agents."):
        play(PettingZoo(Stingy), [([0, 0], [0]), ([0, 0], [0])])


class Old(Leaving):
    def reset(self, seed=None, options=None) -> Any:
        return super().reset()[0]


class OfGym(Leaving):
    def step(self, actions) -> Any:
        observation, reward, terminated, _, infos = super().step(actions)
        return observation, reward, terminated, infos


class Cooperative(Leaving):
    def step(self, actions) -> Any:
        observation, _, *rest = super().step(actions)
        return observation, 1.0, *rest


class EndingAtOnce(Leaving):
    def step(self, actions) -> Any:
        observation, reward, _, *rest = super().step(actions)
        return observation, reward, False, *rest


@pytest.mark.parametrize(
    "wrap",
    [lambda env: env, lambda env: time_limit(env, 9), lambda env: action_repeat(env, 2)],
    ids=["plain", "limited", "repeated"],
)
@pytest.mark.parametrize(
    ("make", "told"),
    [
        (Old, "reset() must return observations, infos, and that of leaving returned a dict; return all of them, each"),
        (
            OfGym,
            "step() must return observations, rewards, terminations, truncations, infos, and that of leaving returned",
        ),
        (Cooperative, "step() of leaving gave rewards as a float; give a dict with an entry for each agent."),
        (EndingAtOnce, "step() of leaving gave terminations as a bool; give a dict with an entry for each agent."),
    ],
)
def test_a_game_that_returns_something_else_is_told_what_to_return(make, told, wrap):
    with pytest.raises(ValueError, match=re.escape(told)):
        play(wrap(PettingZoo(make)), [([0, 0], [0])])


class Visited(Coming):
    """The sheep is not among those who may come."""

    possible_agents = ["wolf_0", "wolf_1"]

    def step(self, actions) -> Any:
        observation, *rest = super().step(actions)
        return observation | {"sheep_0": np.zeros(1)}, *rest


def test_somebody_who_is_not_possible_is_refused():
    env, nothing = PettingZoo(Visited), {"wolf": torch.zeros(1, 2, dtype=torch.int64)}
    env.init(keys(1))
    env.step(None, nothing, keys(1))
    told = "leaving has sheep_0 in its agents, and not in its possible_agents; list everybody there may ever be."
    with pytest.raises(ValueError, match=told):
        env.step(None, nothing, keys(1))


def test_one_and_the_same_environment_is_stepped_once():
    shared = Leaving()
    env = PettingZoo(lambda: shared)
    with pytest.raises(ValueError, match="makes leaving returned one and the same Leaving again; return a new one"):
        env.init(random.split(random.key(0), 2))


def test_a_missing_pettingzoo_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "pettingzoo", None)
    with pytest.raises(ImportError, match=r"needs the package pettingzoo: pip install 'torchpod-rl\[pettingzoo\]'"):
        PettingZoo("mpe2.simple_spread_v3")


FILE = """
import gymnasium
from pettingzoo.utils import parallel_to_aec
from mpe2 import simple_spread_v3


def make(max_cycles=25):
    return simple_spread_v3.parallel_env(N=2, max_cycles=max_cycles)


def in_turns():
    return parallel_to_aec(make())


def alone():
    return gymnasium.make("CartPole-v1")
"""


def test_an_environment_in_a_file_of_ones_own_is_the_same_in_processes(tmp_path, seed):
    (tmp_path / "my_env.py").write_text(FILE)
    own = {"name": f"{tmp_path}/my_env.py:make", "max_cycles": 3}
    own["groups"] = {"right": ["agent_1"], "left": ["agent_0"]}
    envs = [make_env(own | {"processes": x}) for x in (False, True)]
    assert all(isinstance(env, PettingZoo) and env.spec.groups == {"right": 1, "left": 1} for env in envs)
    try:
        timesteps = [env.init(keys(2, seed))[1] for env in envs]
        for step in range(8):
            assert [list(t.observation) for t in timesteps] == [["right", "left"]] * 2
            pytree.tree_map(lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=0), *timesteps)
            action = random_action(envs[0].spec, timesteps[0].observation, random.at(keys(2, seed), step))
            timesteps = [env.step(None, action, keys(2))[1] for env in envs]
    finally:
        for env in envs:
            env.close()


def test_what_is_no_parallel_environment_is_told_apart(tmp_path):
    (tmp_path / "my_env.py").write_text(FILE)
    assert isinstance(make_env(f"{tmp_path}/my_env.py:alone"), Gymnasium)
    for name, options, sentence in (
        ("alone", {"groups": {}}, "takes no argument groups; it is no pettingzoo.ParallelEnv."),
        ("in_turns", {}, "gives an AECEnv, whose agents take turns; use a pettingzoo.ParallelEnv."),
    ):
        with pytest.raises(ConfigError, match=re.escape(sentence)):
            make_env({"name": f"{tmp_path}/my_env.py:{name}", **options})


def test_a_single_one_is_refused():
    with pytest.raises(
        ConfigError, match="env=Leaving is one pettingzoo.ParallelEnv, and a run needs many: hand over "
    ):
        execute(load(["algo=ippo", "loop=sebulba"]), env=Leaving())


class Parallel(pettingzoo.ParallelEnv):
    """A tensor environment of one row as a ParallelEnv, with the key that its seed says."""

    def __init__(self, env):
        self.env = env
        self.possible_agents = [f"{group}_{i}" for group, n in env.spec.groups.items() for i in range(n)]
        self.seen = {g: spaces.Box(-np.inf, np.inf, x.shape) for g, x in env.spec.observation.items()}
        acts = env.spec.action
        self.acts = {
            g: spaces.Discrete(x.num_values) if isinstance(x, Discrete) else spaces.MultiDiscrete(x.nvec)
            for g, x in acts.items()
        }

    def observation_space(self, agent):
        return self.seen[agent.rpartition("_")[0]]

    def action_space(self, agent):
        return self.acts[agent.rpartition("_")[0]]

    def reset(self, seed=None, options=None):
        if seed is not None:
            self.key, self.count = random.key(seed)[None], 0
            self.state, timestep = self.env.init(random.at(self.key, 0))
        else:
            timestep = self._step({})
        self.agents = list(self.possible_agents)
        return self._of(timestep.observation), {}

    def step(self, actions):
        timestep = self._step(actions)
        discount, is_last = self._of(timestep.discount), timestep.step_type.item() == LAST
        terminated = {a: discount[a] == 0 for a in self.agents}
        truncated = {a: is_last and discount[a] == 1 for a in self.agents}
        told = self._of(timestep.observation), self._of(timestep.reward), terminated, truncated, {}
        self.agents = [a for a in self.agents if not (terminated[a] or truncated[a])]
        return told

    def _step(self, actions):
        self.count += 1
        empty = {g: np.zeros(space.shape, np.int64) for g, space in self.acts.items()}
        action = {
            g: torch.from_numpy(np.stack([actions.get(f"{g}_{i}", empty[g]) for i in range(n)])[None])
            for g, n in self.env.spec.groups.items()
        }
        self.state, timestep = self.env.step(self.state, action, random.at(self.key, self.count))
        return timestep

    def _of(self, tree):
        return {f"{g}_{i}": row for g, x in tree.items() for i, row in enumerate(x[0].numpy())}


@pytest.mark.parametrize(
    "make",
    [
        lambda: TagGridWorld(num_taggers=2, grid_length=4, start="uniform", max_episode_steps=9),
        lambda: TagContinuous(3, 3, tagging_distance=0.3, num_other_agents_observed=2, max_episode_steps=30),
    ],
    ids=["discrete", "continuous"],
)
def test_a_tensor_environment_behind_pettingzoo_is_the_same(make, seed):
    tensor, env = make(), PettingZoo(lambda: Parallel(make()))
    num, chosen = 4, keys(4, seed + 1)
    own = torch.stack([random.key(x) for x in random.bits(keys(num, seed), 1)[:, 0].tolist()])
    state, expected = tensor.init(random.at(own, 0))
    _, found = env.init(keys(num, seed))
    left = 0
    for step in range(60):
        assert torch.equal(found.step_type, expected.step_type)
        for name in ("observation", "reward", "discount"):
            a, b = getattr(found, name), getattr(expected, name)
            pytree.tree_map(lambda x, y: torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5), a, b)
        ongoing = expected.step_type != LAST
        for group, alive in expected.extras.get("alive", {}).items():
            assert torch.equal(found.extras["alive"][group][ongoing], alive[ongoing])
            left += int((~alive).sum())
        action = random_action(tensor.spec, expected.observation, random.at(chosen, step))
        state, expected = tensor.step(state, action, random.at(own, step + 1))
        _, found = env.step(None, action, keys(num))
    assert left > 0 or "alive" not in expected.extras


AGENTS = {
    "ippo": lambda spec: IPPO(spec, IPPOConfig(hidden=(8,))),
    "mappo": lambda spec: MAPPO(spec, MAPPOConfig(hidden=(8,))),
    "ia2c": lambda spec: IA2C(spec, IA2CConfig(hidden=(8,))),
}


def trained(env, agent, seed, config):
    """Parameters after three iterations of Sebulba, and the steps of each."""
    epochs = {"num_epochs": 1, "num_minibatches": 1} if agent == "ia2c" else {"num_epochs": 2, "num_minibatches": 2}
    sebulba = Sebulba(
        lambda: AGENTS[agent](env.spec),
        lambda: copy.copy(env),
        num_envs=4,
        unroll_length=8,
        learner=LearnerConfig(learning_rate=1e-2, **epochs),
        num_iterations=3,
        compiler=Compiler(enabled=False),
        config=config,
    )
    state = start = sebulba.init(seed)
    steps = []
    for report, program in train(sebulba, start):
        state = program.state
        steps.append(report.env_steps)
    assert len(steps) == 3
    return start.learner.params, state.learner.params


@pytest.mark.parametrize("agent", AGENTS)
def test_many_agents_learn_the_same_behind_pettingzoo_to_the_bit(agent, seed):
    tag = TagGridWorld(num_taggers=2, grid_length=3, max_episode_steps=7)
    lockstep = SebulbaConfig(num_actor_threads=1, lag=0)
    before, expected = trained(HostEnv(tag), agent, seed, lockstep)
    _, found = trained(PettingZoo(lambda: Parallel(tag)), agent, seed, lockstep)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert any(not torch.equal(before[name], expected[name]) for name in expected)


@pytest.mark.parametrize("agent", AGENTS)
def test_many_agents_learn_where_some_leave_with_threads_and_pools(agent, seed):
    config = SebulbaConfig(num_actor_threads=2, pools_per_actor=2, lag=0)
    first, last = trained(PettingZoo(Leaving), agent, seed, config)
    again = trained(PettingZoo(Leaving), agent, seed, config)[1]
    assert all(torch.equal(last[name], again[name]) and last[name].isfinite().all() for name in last)
    assert any(not torch.equal(first[name], last[name]) for name in last)

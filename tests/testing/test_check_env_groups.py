"""check_env with groups of agents: what it asks of each group, of masks, and of agents that leave the game."""

import dataclasses
import re

import pytest
import torch
from torch import Tensor

from tests.testing.squads import Altered, Squad
from tests.testing.test_check_env import Broken, extras
from torchpod.env import HostEnv
from torchpod.specs import Box, Discrete, EnvSpec, MultiDiscrete, Traits
from torchpod.testing import ContractError, check_env
from torchpod.types import LAST, MID


def broken_squad(change):
    class BrokenSquad(Squad):
        def observe(self, state):
            return change(super().observe(state))

    return BrokenSquad()


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda o: {"tank": o["tank"]}, "observation must be a dict with one entry per group, ['scouts', 'tank']"),
        (
            lambda o: {**o, "scouts": {**o["scouts"], "place": o["scouts"]["place"][:, 0]}},
            "observation['scouts']['place'] must be a torch.float32 tensor of shape [8, 3, 2]",
        ),
        (
            lambda o: {**o, "scouts": {**o["scouts"], "action_mask": o["scouts"]["action_mask"].int()}},
            "observation['scouts']['action_mask'] must be a torch.bool tensor",
        ),
        (
            lambda o: {**o, "scouts": {**o["scouts"], "action_mask": o["scouts"]["action_mask"] & False}},
            "observation['scouts']['action_mask'] must allow at least one action in every row",
        ),
    ],
)
def test_a_broken_group_is_named(change, rule):
    with pytest.raises(ContractError, match=re.escape(rule)):
        check_env(broken_squad(change), compile=False)


class Pairs(Squad):
    """Every scout makes two choices of two values each; `mask` says which."""

    def __init__(self, mask, scouts):
        super().__init__()
        self.mask = torch.tensor(mask, dtype=torch.bool)
        self.spec = dataclasses.replace(self.spec, action={**self.spec.action, "scouts": scouts})

    def transition(self, state, action, keys):
        return super().transition(state, {**action, "scouts": action["scouts"].sum(-1)}, keys)

    def observe(self, state):
        observation = super().observe(state)
        mask = self.mask.to(state.device).expand(*state.shape[:2], -1)
        return {**observation, "scouts": {**observation["scouts"], "action_mask": mask}}


@pytest.mark.parametrize(
    ("mask", "action", "rule"),
    [
        (
            [1, 1, 0, 0],
            MultiDiscrete((2, 2)),
            "must allow at least one action of choice 1 in every row; in environment 0, agent 0 it allows none",
        ),
        (
            [0, 0, 1, 1],
            MultiDiscrete((2, 2)),
            "must allow at least one action of choice 0 in every row; in environment 0, agent 0 it allows none",
        ),
        ([1, 1, 0, 1], Box((2,)), "needs a Discrete or MultiDiscrete action; the spec has Box"),
    ],
)
def test_a_mask_of_several_choices_allows_something_in_each(mask, action, rule):
    check_env(Pairs([1, 1, 0, 1], MultiDiscrete((2, 2))), compile=False)
    with pytest.raises(ContractError, match=re.escape(f"observation['scouts']['action_mask'] {rule}")):
        check_env(Pairs(mask, action), compile=False)


class Leaving(Altered, Squad):
    """A scout who has come beyond `reach` is not in the game; `change` alters timesteps."""

    def __init__(self, change=lambda t: t, reach=3.0):
        super().__init__()
        self.change, self.reach = change, reach

    def extras(self, state):
        return {"alive": {"scouts": state[..., 0] < self.reach, "tank": torch.ones_like(state[:, :1, 0]).bool()}}


def alive(change):
    return lambda t: extras(t, alive={g: change(x) for g, x in t.extras["alive"].items()})


BROKEN_ALIVE = {
    "['scouts'] must be a torch.bool tensor of shape [8, 3]; it is torch.float32": alive(Tensor.float),
    "['scouts'] must be a torch.bool tensor of shape [8, 3]; it is torch.bool of shape [8, 1]": alive(
        lambda x: x[:, :1]
    ),
    " must be a dict with one entry per group, ['scouts', 'tank']": lambda t: extras(
        t, alive={"scouts": t.extras["alive"]["scouts"]}
    ),
    "['scouts'] is False, but at FIRST: that agent's part ended; it is not 0 for": lambda t: t._replace(
        discount={g: torch.ones_like(d) for g, d in t.discount.items()}
    ),
}


@pytest.mark.parametrize("rule", BROKEN_ALIVE)
def test_what_is_wrong_with_who_is_alive_is_named(rule):
    with pytest.raises(ContractError, match=re.escape(f"extras['alive']{rule}")):
        check_env(Leaving(BROKEN_ALIVE[rule]), compile=False)


def test_alive_needs_groups():
    with pytest.raises(ContractError, match=re.escape("extras['alive'] is of groups of agents, and spec.groups is No")):
        check_env(Broken(lambda t: extras(t, alive=t.reward == 0)), compile=False)


@pytest.mark.parametrize("reach", [3.0, 0.5, -9.0], ids=["all", "some", "none"])
def test_agents_may_leave_or_not_be_there_at_the_start(reach):
    for env in (Leaving(reach=reach), HostEnv(Leaving(reach=reach))):
        check_env(env, compile=False)


def test_truncation_before_the_limit_is_named_when_an_agent_has_left():
    class Cut(Leaving):
        def step(self, state, action, keys):
            (inner, count, _), timestep = super().step(state, action, keys)
            left = (timestep.step_type == MID) & ~timestep.extras["alive"]["scouts"].all(1)
            step_type = timestep.step_type.masked_fill(left, LAST)
            return (inner, count, step_type == LAST), timestep._replace(step_type=step_type)

    with pytest.raises(
        ContractError, match=r"^LAST with a discount above 0 means truncation, .*max_episode_steps=6 st"
    ):
        check_env(Cut(), compile=False)
    env = Cut()
    env.spec = dataclasses.replace(env.spec, truncates_early=True)
    check_env(env, compile=False)


def test_rewards_of_groups_need_every_group():
    class OneReward(Squad):
        def step(self, state, action, keys):
            state, timestep = super().step(state, action, keys)
            return state, timestep._replace(reward={"scouts": timestep.reward["scouts"]})

    with pytest.raises(ContractError, match="reward must be a dict with one entry per group"):
        check_env(OneReward(), compile=False)


def test_specs_of_groups_need_every_group():
    env = Squad()
    env.spec = EnvSpec("squad", env.spec.observation, Discrete(4), 6, groups={"scouts": 3, "tank": 1})
    with pytest.raises(ContractError, match="spec.action must be a dict with one entry per group"):
        check_env(env, compile=False)


def test_random_actions_obey_the_mask():
    class Strict(Squad):
        def transition(self, state, action, keys):
            assert not (action["scouts"] == 2).any()
            assert action["tank"].abs().max() <= 1
            return super().transition(state, action, keys)

    env = Strict()
    env.traits = Traits(vmappable=False)
    check_env(env, compile=False)

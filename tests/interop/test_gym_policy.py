"""A policy in a loop over Gymnasium environments acts as it does behind torchpod's own adapter."""

import re
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from torchpod import random
from torchpod.agent import bind, variables_of
from torchpod.algos.multi_agent import IPPO, IPPOConfig
from torchpod.algos.ppo import PPO, PPOConfig
from torchpod.envs import Gymnasium, TagGridWorld
from torchpod.interop.gym_policy import GymnasiumPolicy
from torchpod.types import LAST


class Walk(gymnasium.Env):
    """Observations of its space at random; ends now and then."""

    observation_space = spaces.Box(-3.0, 3.0, (4,), np.float32)
    action_space = spaces.Discrete(3, start=-1)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.over = False
        return self.look(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.over = bool(self.np_random.random() < 0.1)
        return self.look(), float(self.np_random.random()), self.over, False, {}

    def look(self) -> Any:
        return self.np_random.uniform(-3.0, 3.0, 4).astype(np.float32)


class Reach(Walk):
    action_space = spaces.Box(np.array([-1.0, 0.0]), np.array([2.0, 0.5]), dtype=np.float64)


class Pairs(Walk):
    """An image of bytes with its channels first, an index, a mask; of two choices the second begins at 5."""

    observation_space = spaces.Dict(
        {
            "image": spaces.Box(0, 255, (2, 5, 5), np.uint8),
            "more": spaces.Discrete(3, start=2),
            "action_mask": spaces.MultiBinary(5),
        }
    )
    action_space = spaces.Tuple([spaces.Discrete(3), spaces.Discrete(2, start=5)])

    def look(self) -> Any:
        mask = np.ones(5, np.int8)
        mask[self.np_random.integers(3)] = 0
        mask *= not self.over  # where nobody acts it may be closed
        return {
            "image": self.np_random.integers(0, 255, (2, 5, 5), dtype=np.uint8),
            "more": int(self.np_random.integers(2, 5)),
            "action_mask": mask,
        }


class Grid(Walk):
    action_space = spaces.MultiDiscrete([[2, 3], [4, 5]])


class Short(Walk):
    """What is observed is a list, and actions have other integers than usual."""

    observation_space = spaces.Tuple([spaces.Box(-3.0, 3.0, (4,), np.float32), spaces.Discrete(3)])
    action_space = spaces.Discrete(3, dtype=np.int32)

    def look(self) -> Any:
        return [super().look(), int(self.np_random.integers(3))]


class Shorts(Short):
    action_space = spaces.Tuple([spaces.Discrete(3, dtype=np.int16), spaces.Discrete(2, start=5)])


def made(env, seed, **settings):
    """An agent for it, and variables with which it decides."""
    torch.manual_seed(seed)
    agent = PPO(Gymnasium(env).spec, PPOConfig(hidden=(16,), **settings))
    params, buffers = variables_of(agent)
    return agent, {name: x + (x.ndim > 1) * torch.randn_like(x) for name, x in params.items()} | buffers


CASES = [
    (Short, {}),
    (Shorts, {}),
    (Walk, {}),
    (Reach, {}),
    (Pairs, {}),
    (Grid, {}),
    (Walk, {"recurrent": 8, "cell": "lstm"}),
]


@pytest.mark.parametrize(("env", "settings"), CASES)
def test_a_vector_environment_gets_the_actions_that_an_evaluation_takes(env, settings, seed):
    agent, variables = made(env, seed, **settings)
    keys = random.split(random.key(seed), 3)
    ours = Gymnasium(env)
    _, timestep = ours.init(keys)
    state = agent.initial_state(3)
    theirs = SyncVectorEnv([env] * 3, autoreset_mode=AutoresetMode.NEXT_STEP)
    observation, _ = theirs.reset(seed=random.bits(keys, 1)[:, 0].tolist())
    policy, seen, ends = GymnasiumPolicy(agent, variables, theirs), set(), 0
    first, ended = np.ones(3, bool), np.zeros(3, bool)
    for i in range(40):
        output, state = bind(agent, variables).act(timestep, state, random.at(keys, i), explore=False)
        action = policy(observation, first)
        torch.testing.assert_close(ours._to_native(output.action), action, rtol=1e-5, atol=1e-5)
        seen |= {tuple(np.ravel(row)) for row in (zip(*action, strict=True) if isinstance(action, tuple) else action)}
        _, timestep = ours.step(None, output.action, keys)
        observation, reward, terminated, truncated, _ = theirs.step(action)
        first, ended, ends = ended, terminated | truncated, ends + int(terminated.sum())
        assert (timestep.step_type == LAST).tolist() == ended.tolist()
    assert len(seen) > 1 and ends > 0


@pytest.mark.parametrize(("env", "settings"), CASES)
def test_a_single_environment_gets_that_of_one_row(env, settings, seed):
    agent, variables = made(env, seed, **settings)
    one, vector = env(), SyncVectorEnv([env])
    policy, policies = (GymnasiumPolicy(agent, variables, x) for x in (one, vector))
    (observation, _), (rows, _) = one.reset(seed=seed), vector.reset(seed=[seed])
    for i in range(20):
        first = i % 7 == 0
        action, actions = policy(observation, first), policies(rows, np.array([first]))
        assert one.action_space.contains(action)
        row = tuple(x[0] for x in actions) if isinstance(actions, tuple) else actions[0]
        np.testing.assert_array_equal(np.asarray(action), np.asarray(row))
        observation, _, terminated, *_ = one.step(action)
        rows, *_ = vector.step(actions)
        if terminated:
            break


def test_episodes_of_a_memory_begin_where_it_is_told(seed):
    agent, variables = made(Walk, seed, recurrent=8)
    policy, observations = (
        GymnasiumPolicy(agent, variables, Walk()),
        [Walk.observation_space.sample() for _ in range(9)],
    )
    states = []
    for first in (True, True, False):
        for observation in observations:
            policy(observation, first)
            first = False
        states.append(policy._state)
    assert torch.equal(states[0], states[1]) and not torch.equal(states[0], states[2])


@pytest.mark.parametrize(
    ("env", "observation", "first", "message"),
    [
        (
            Walk,
            np.zeros(3, np.float32),
            None,
            "the policy was given an observation of shape [3], and the space says [4]; g",
        ),
        (
            Pairs,
            {"image": np.zeros((2, 5, 5), np.uint8)},
            None,
            "the policy was given an observation without 'action_ma",
        ),
        (
            gymnasium.make("Acrobot-v1"),
            np.zeros(6, np.float32),
            None,
            "the policy cannot use 'observation' of shape [6]",
        ),
        (gymnasium.make("CartPole-v1"), np.full(4, 2.0, np.float32), None, "the policy takes the action "),
    ],
)
def test_what_does_not_fit_is_told(env, observation, first, message):
    agent, variables = made(Pairs if env is Pairs else Walk, 0)
    if "takes the action" in message:  # the third of three, where two are
        variables = {name: torch.zeros_like(x) for name, x in variables.items()}
        variables["policy.bias"] = torch.tensor([0.0, 0.0, 1.0])
    policy = GymnasiumPolicy(agent, variables, env() if isinstance(env, type) else env)
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        policy(observation, first)


@pytest.mark.parametrize(
    ("num_envs", "first", "message"),
    [
        (None, None, "give first True or False, not None."),
        (None, np.zeros(1, bool), "give first True or False, not bool of shape [1]."),
        (None, 1, "give first True or False, not 1."),
        (2, True, "give first bools of shape [2], not True."),
        (2, np.zeros(2), "give first bools of shape [2], not float64 of shape [2]."),
    ],
)
def test_a_policy_with_a_memory_wants_to_know_where_episodes_begin(num_envs, first, message):
    agent, variables = made(Walk, 0, recurrent=8)
    env = Walk() if num_envs is None else SyncVectorEnv([Walk] * num_envs)
    observation, _ = env.reset(seed=0)
    with pytest.raises(ValueError, match=re.escape(message)):
        GymnasiumPolicy(agent, variables, env)(observation, first)


def test_variables_and_agents_that_are_others_are_refused():
    agent, variables = made(Walk, 0)
    with pytest.raises(ValueError, match="of a population give those of one member"):
        GymnasiumPolicy(agent, {name: x[None] for name, x in variables.items()}, Walk())
    many = IPPO(TagGridWorld().spec, IPPOConfig())
    with pytest.raises(
        ValueError, match="IPPO is of many agents, and a Gymnasium environment has one; use `torchpod ex"
    ):
        GymnasiumPolicy(many, {}, Walk())


class SeesReward(PPO):
    def act(self, timestep, state, keys, explore=True):
        output, state = super().act(timestep, state, keys, explore)
        return output._replace(action=(output.action + (timestep.reward > 0)) % 3), state


def test_an_agent_that_acts_on_rewards_is_refused():
    agent = SeesReward(Gymnasium(Walk).spec, PPOConfig())
    policy = GymnasiumPolicy(agent, {n: x for table in variables_of(agent) for n, x in table.items()}, Walk())
    with pytest.raises(ValueError, match="the greedy action of SeesReward depends on more"):
        policy(Walk.observation_space.sample())

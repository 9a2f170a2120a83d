"""Gymnasium behind the contract: what it reports is what the loops learn from, episode ends above all."""

import copy
import functools
import re
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch.utils import _pytree as pytree

from torchpod import random
from torchpod.actions import random_action
from torchpod.agent import variables_of
from torchpod.algos.ppo import PPO, PPOConfig
from torchpod.envs.host import Gymnasium, PettingZoo, TorchRL
from torchpod.envs.host.spaces import action_of, spec_of
from torchpod.rollout import make_step, start, unroll
from torchpod.specs import Array, Box, Discrete, MultiDiscrete
from torchpod.testing import check_env
from torchpod.types import FIRST, LAST, MID


class Countdown(gymnasium.Env):
    """Counts actions; terminates at 2, is truncated after 3 steps; the observation of an episode starts at 10."""

    observation_space = spaces.Dict({"count": spaces.Box(0, 99, (1,), np.float64), "flag": spaces.MultiBinary(2)})
    action_space = spaces.Discrete(2, start=5)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.total, self.steps = 0, 0
        return self._observation(), {}

    def step(self, action):
        assert action in (5, 6)
        self.total, self.steps = self.total + int(action) - 5, self.steps + 1
        return self._observation(), float(self.steps), self.total >= 2, self.steps >= 3, {}

    def _observation(self):
        return {"count": np.array([10.0 + self.total]), "flag": np.array([1, 0], np.int8)}


class Bets(gymnasium.Env):
    """Two bets per step, on what is seen; the first one decides when it terminates, else it is truncated after 4."""

    observation_space = spaces.Tuple([spaces.Discrete(3), spaces.Box(0.0, 1.0, (2,), np.float32)])
    action_space: spaces.Space = spaces.Tuple([spaces.Discrete(2), spaces.Discrete(3, start=-1)])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self._observation(), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.steps += 1
        return self._observation(), float(10 * action[0] + action[1]), bool(action[0]), self.steps >= 4, {}

    def _observation(self) -> Any:
        return int(self.np_random.integers(3)), self.np_random.random(2, np.float32)


def keys(num, seed=0):
    return random.split(random.key(seed), num)


IN_THREAD_AND_PROCESSES = [False, pytest.param(True, marks=pytest.mark.slow)]
"""Processes take seconds to start; a case that always runs is the test below of mistakes in them."""


@pytest.mark.parametrize("task", ["CartPole-v1", "Pendulum-v1", "Acrobot-v1", "FrozenLake-v1", "Blackjack-v1", Bets])
def test_environments_keep_the_contract(task):
    check_env(Gymnasium(task), num_envs=3)


@pytest.mark.filterwarnings("ignore:.*ERROR")  # Gymnasium tells what a worker raised as a warning, too
def test_an_environment_in_processes_is_the_same_and_its_mistakes_have_the_same_name(seed):
    class Own(Bets):  # a class of this function: sent to the workers as it is
        observation_space = spaces.Dict({"seen": Bets.observation_space, "flags": spaces.MultiBinary(2)})
        count = 0

        def _observation(self):
            self.count += 1
            flags = np.ones(2 if self.count < 32 else 1, np.int8)  # NumPy would write one number into both places
            return {"seen": super()._observation(), "flags": flags}

    envs, truncated = [Gymnasium(Own), Gymnasium(Own, processes=True)], 0
    try:
        timesteps = [env.init(keys(2, seed))[1] for env in envs]
        for step in range(30):
            pytree.tree_map(lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=0), *timesteps)
            action = random.bits(random.at(keys(2, seed), step), 2) % torch.tensor([2, 3])
            action[1, 0] = 0  # never terminates
            timesteps = [env.step(None, action, keys(2))[1] for env in envs]
            truncated += int(timesteps[1].step_type[1] == LAST and timesteps[1].discount[1] == 1)
        assert set(timesteps[1].extras) == {"raw_reward", "game_over"} and truncated == 6
        for env in envs:
            with pytest.raises(
                ValueError, match=r"^Own gave an observation of shape \[1\], and the space says \[2\]; make"
            ):
                env.step(None, torch.zeros(2, 2, dtype=torch.int64), keys(2))
    finally:
        for env in envs:
            env.close()


@pytest.mark.slow
def test_environments_in_processes_keep_the_contract():
    check_env(Gymnasium(Bets, processes=True), num_envs=2, compile=False)


def test_episodes_end_as_the_environment_says():
    """Two environments: the first terminates at its second step, the second is truncated at its third."""
    env = Gymnasium(Countdown)
    assert env.spec.observation == {"count": Array((1,)), "flag": Array((2,))}
    assert env.spec.action == Discrete(2)
    _, t = env.init(keys(2))
    seen = [t]
    for _ in range(4):
        _, t = env.step(None, torch.tensor([1, 0]), keys(2))
        seen.append(t)

    def column(pick):
        return torch.stack([pick(t) for t in seen]).T.tolist()

    assert column(lambda t: t.step_type) == [[FIRST, MID, LAST, FIRST, MID], [FIRST, MID, MID, LAST, FIRST]]
    assert column(lambda t: t.reward) == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 0]]
    assert column(lambda t: t.discount) == [[1, 1, 0, 1, 1], [1, 1, 1, 1, 1]]
    assert column(lambda t: t.observation["count"][:, 0]) == [[10, 11, 12, 10, 11], [10, 10, 10, 10, 10]]


def test_keys_decide_the_episodes(seed):
    def first(key_seed):
        return Gymnasium("CartPole-v1").init(keys(3, key_seed))[1].observation

    assert torch.equal(first(seed), first(seed))
    assert not torch.equal(first(seed), first(seed + 1))
    assert len({tuple(row) for row in first(seed).tolist()}) == 3


def test_bounds_of_actions_are_those_of_the_space():
    assert Gymnasium("Pendulum-v1").spec.action == Box((1,), -2.0, 2.0)


def test_a_discrete_observation_that_starts_elsewhere_is_a_number():
    assert spec_of(spaces.Discrete(3, start=-1), "observation") == Array(())
    assert spec_of(spaces.Discrete(3, start=2), "observation") == Discrete(5)
    assert spec_of(spaces.Discrete(3, start=20_000), "observation") == Array(())
    assert spec_of(spaces.Discrete(3), "observation") == Discrete(3)


@pytest.mark.parametrize("task", ["CartPole-v1", Bets])
def test_unroll_steps_it_like_any_environment(task):
    env = Gymnasium(task)
    agent = PPO(env.spec, PPOConfig(hidden=(8,)))
    params, buffers = variables_of(agent)
    carry = start(agent, env, keys(4))
    carry, trajectory = unroll(make_step(agent, env), params | buffers, carry, keys(4), keys(4, 1), length=60)
    leaves = pytree.tree_leaves(trajectory.timestep.observation)
    assert [x.shape for x in leaves] == ([(61, 4, 4)] if task != Bets else [(61, 4), (61, 4, 2)])
    assert (trajectory.timestep.step_type == LAST).sum() >= 4
    assert torch.isfinite(agent.prepare(trajectory, keys(4)).steps["advantage"]).all()


class Pair(Countdown):
    observation_space = spaces.Tuple([spaces.Discrete(2), spaces.MultiDiscrete([2, 3])])


class Long(Countdown):
    action_space = spaces.Box(-(2**63), 2**63 - 1, (1,), np.int64)


class Nothing(Countdown):
    action_space = spaces.Box(-1.0, 1.0, (0,), np.float32)


class Two(Countdown):
    action_space = spaces.MultiBinary(2)


class Mixed(Countdown):
    action_space = spaces.Tuple([spaces.Discrete(2), spaces.Box(0, 1)])


class Unseen(Countdown):
    observation_space = None


class Forgetful(Countdown):
    @property
    def observation_space(self):
        return self.forgotten


def test_a_space_that_fails_says_why_itself():
    with pytest.raises(AttributeError, match="'Forgetful' object has no attribute 'forgotten'"):
        Gymnasium(Forgetful)


class Still(gymnasium.Env):
    observation_space = spaces.Discrete(2)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (Unseen, "Unseen has no observation_space; set self.observation_space in its __init__, of gymnasium.spaces."),
        (Still, "Still has no action_space; set self.action_space in its __init__, of gymnasium.spaces."),
        (Pair, "Pair: observation_space[1] is MultiDiscrete([2 3]); use Box, Discrete, MultiBinary, or Dict and Tuple"),
        (Long, "Long: action_space is Box(-9223372036854775808, 9223372036854775807, (1,), int64), an integer of more"),
        (Nothing, "Nothing: action_space is Box([], [], (0,), float32), of no numbers; give it some."),
        (Two, "Two: action_space is MultiBinary(2); use Box, Discrete, MultiDiscrete, or a Tuple of Discrete."),
        (
            Mixed,
            "Mixed: action_space is Tuple(Discrete(2), Box(0.0, 1.0, (1,), float32)); use Box, Discrete, MultiDisc",
        ),
    ],
)
def test_a_space_that_no_agent_reads_is_refused(make, sentence):
    with pytest.raises(ValueError) as error:
        Gymnasium(make)
    assert str(error.value).startswith(sentence)


class Many(Countdown):
    action_space = spaces.Box(-1, 8, (5,), np.int64)


def test_more_than_10000_joint_actions_are_choices_apart():
    env = Gymnasium(Many)
    assert env.spec.action == MultiDiscrete((10,) * 5)
    assert env._to_native(torch.tensor([[0, 1, 2, 8, 9]])).tolist() == [[-1, 0, 1, 7, 8]]


class Short(Countdown):
    """Forgets one flag, from its second step on."""

    def _observation(self):
        return {"count": np.array([10.0]), "flag": np.zeros(2 - (self.steps > 1), np.int8)}


def test_an_observation_of_another_shape_than_its_space_is_named():
    env = Gymnasium(Short)
    env.init(keys(2))
    env.step(None, torch.zeros(2, dtype=torch.int64), keys(2))
    message = "Short gave an observation of shape [1], and the space says [2]; make them agree."
    with pytest.raises(ValueError, match=re.escape(message)):
        env.step(None, torch.zeros(2, dtype=torch.int64), keys(2))


class Old(gymnasium.Env):
    """As environments of Gym were: its step has one flag; a reset returns the observation alone, if `alone` is set."""

    action_space = spaces.Discrete(2)

    def __init__(self, size=3, alone=False):
        self.observation_space, self.alone = spaces.Box(-1.0, 1.0, (size,), np.float32), alone

    def reset(self, *, seed=None, options=None) -> Any:
        observation = self.observation_space.low
        return observation if self.alone else (observation, {})

    def step(self, action) -> Any:
        return self.observation_space.low, 0.0, False, {}


@pytest.mark.filterwarnings("ignore:.*ERROR")
@pytest.mark.parametrize("processes", IN_THREAD_AND_PROCESSES)
@pytest.mark.parametrize("arguments", [(), (3, True), (2, True)])
def test_an_environment_of_gym_before_0_26_is_told_what_to_return(arguments, processes):
    env = Gymnasium(functools.partial(Old, *arguments), processes=processes)
    wanted = "observation, reward, terminated, truncated, info, and that of Old returned 4 values; return all 5"
    message = "reset() must return observation, info, and that of Old returned a ndarray; return all 2"
    try:
        with pytest.raises(ValueError, match=re.escape(message if arguments else f"step() must return {wanted}")):
            env.init(keys(2))
            env.step(None, torch.zeros(2, dtype=torch.int64), keys(2))
    finally:
        env.close()


def test_one_that_a_wrapper_unpacks_is_told_too():
    with pytest.raises(ValueError, match=r"step\(\) must return observation, reward, terminated, truncated, info, and"):
        env = Gymnasium(Old).limited(5)
        env.init(keys(2))
        env.step(None, torch.zeros(2, dtype=torch.int64), keys(2))


class Wrong(gymnasium.Env):
    """From the third step on it gives what its space has not."""

    action_space = spaces.Discrete(2)

    def __init__(self, space, good, bad, reward=0.0, ends=(False, False)):
        self.observation_space, self.good, self.bad, self.reward, self.count = space, good, bad, reward, 0
        self.ends = ends

    def reset(self, *, seed=None, options=None):
        return self.good, {}

    def step(self, action):
        self.count += 1
        return self.bad if self.count > 2 else self.good, self.reward, *self.ends, {}


UNIT, PAIR = spaces.Box(0.0, 1.0, (1,)), spaces.Dict({"a": spaces.Box(0.0, 1.0, (1,)), "b": spaces.Discrete(2)})
ONE = np.ones(1, np.float32)


@pytest.mark.parametrize("processes", IN_THREAD_AND_PROCESSES)
@pytest.mark.filterwarnings("ignore:.*ERROR")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((UNIT, ONE, None), r"Wrong gave an observation that is None, and the space says \[1\]; make them agree"),
        ((spaces.Box(0, 9, (1,), np.uint8), ONE.astype(np.uint8), ONE), "of float32, and the space says uint8"),
        ((PAIR, {"a": ONE, "b": 1}, {"a": ONE}), "Wrong gave an observation without 'b', which its space has"),
        ((PAIR, {"a": ONE, "b": 1}, {"a": np.ones(2), "b": 1}), r"of shape \[2\], and the space says \[1\]"),
        ((spaces.Tuple([UNIT]), (ONE,), ()), "Wrong gave an observation without 0, which its space has"),
        ((spaces.Discrete(5), 4, 5), "an observation is 5, and its space is 0 to 4; make them agree"),
        ((UNIT, ONE, ONE, np.ones(2)), r"Wrong gave a reward of shape \[2\]; give a number"),
        ((UNIT, ONE, ONE, None), "Wrong gave the reward None; give a number"),
        ((UNIT, ONE, ONE, 0.0, (None, False)), "Wrong gave terminated=None; give True or False"),
        ((UNIT, ONE, ONE, 0.0, (np.False_, 0.5)), "Wrong gave truncated=0.5; give True or False"),
    ],
    ids=["none", "type", "entry", "shape", "tuple", "range", "reward", "no reward", "terminated", "truncated"],
)
def test_what_does_not_fit_its_space_is_named(arguments, message, processes):
    env = Gymnasium(functools.partial(Wrong, *arguments), processes=processes)
    try:
        with pytest.raises(ValueError, match=message):
            env.init(keys(2))
            for _ in range(3):
                env.step(None, torch.zeros(2, dtype=torch.int64), keys(2))
    finally:
        env.close()


def test_a_class_that_needs_an_argument_is_told_to_be_given_it():
    message = (
        r"Wrong needs space, good, bad, and is called without arguments; hand over functools.partial\(Wrong, space="
    )
    for make in (Gymnasium, PettingZoo, TorchRL):
        with pytest.raises(ValueError, match=message):
            make(Wrong)
    Gymnasium(functools.wraps(Wrong)(lambda *args: Countdown()))  # which says that it is called as Wrong is
    with pytest.raises(
        ValueError, match="PettingZoo makes many of what it steps, and got one int; hand over its class"
    ):
        PettingZoo(3)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize(("low", "high"), [(-1, 1), (-np.inf, np.inf), ([-1, 0], [1, 3])])
def test_actions_have_the_type_of_their_space(dtype, low, high):
    bounds = (np.broadcast_to(np.asarray(x, dtype), (2,)) for x in (low, high))
    space = spaces.Box(*bounds, dtype=dtype)
    _, to_native = action_of(space, "action_space")
    native = to_native(np.random.default_rng(0).normal(size=(64, 2)).astype(np.float32))
    assert native.dtype == dtype and all(space.contains(x) for x in native)


class Masked(gymnasium.Env):
    """Allows the choices `count` and, in an episode's last observation, nothing."""

    def __init__(self, dtype=np.int8, stuck=99, action_space=None):
        mask = spaces.Box(0, 1, (5,), dtype)
        self.observation_space = spaces.Dict({"x": UNIT, "action_mask": mask})
        self.action_space, self.dtype, self.stuck = action_space or spaces.MultiDiscrete([2, 3]), dtype, stuck

    def seen(self):
        mask = np.zeros(5, self.dtype)
        if self.count not in (4, self.stuck):
            mask[[self.count % 2, 2 + self.count % 3]] = 1
        return {"x": ONE, "action_mask": mask}

    def reset(self, *, seed=None, options=None):
        self.count = 0
        return self.seen(), {}

    def step(self, action):
        assert list(action) == [self.count % 2, self.count % 3]
        self.count += 1
        return self.seen(), 1.0, self.count == 4, False, {}


@pytest.mark.parametrize("dtype", [np.int8, np.float32, bool])
@pytest.mark.parametrize("processes", IN_THREAD_AND_PROCESSES)
def test_a_mask_is_one_of_bools_and_kept_to(dtype, processes):
    env = Gymnasium(functools.partial(Masked, dtype), processes=processes)
    assert env.spec.observation["action_mask"] == Array((5,), torch.bool)
    try:
        _, timestep = env.init(keys(3))
        for t in range(1, 12):
            action = random_action(env.spec, timestep.observation, keys(3))
            _, timestep = env.step(None, action, keys(3))
            assert timestep.observation["action_mask"].all() == (t % 5 == 4)  # the last, after which nobody acts
    finally:
        env.close()


def test_masks_that_allow_nothing_or_do_not_fit_are_refused():
    env = Gymnasium(functools.partial(Masked, stuck=1))
    _, timestep = env.init(keys(2))
    with pytest.raises(ValueError, match="an action_mask that allows nothing in choice 0, in environment 0; allow"):
        env.step(None, random_action(env.spec, timestep.observation, keys(2)), keys(2))
    with pytest.raises(ValueError, match=r"action_mask is \[5\], and the action .*; give one entry per value"):
        Gymnasium(functools.partial(Masked, action_space=spaces.Discrete(4)))


class Told(gymnasium.Env):
    """Rewards with what it is told, as one number; takes what is in its space alone."""

    observation_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, action_space):
        self.action_space = action_space

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action)
        return self.reset()[0], float(np.ravel(action) @ [100, 10, 1][: np.size(action)]), False, False, {}


def test_several_integers_become_one_number():
    env = Gymnasium(lambda: Told(spaces.Box(np.array([0, -1, 5]), np.array([1, 1, 6]), dtype=np.int32)))
    assert env.spec.action == Discrete(2 * 3 * 2)
    env.init(keys(12))
    _, timestep = env.step(None, torch.arange(12), keys(12))
    assert timestep.reward.tolist() == [a + b + c for a in (0, 100) for b in (-10, 0, 10) for c in (5, 6)]


@pytest.mark.parametrize(
    "space",
    [
        spaces.MultiDiscrete([2, 3, 2], start=[0, -1, 5], dtype=np.int32),
        spaces.MultiDiscrete([[2], [3], [2]], start=[[0], [-1], [5]]),
        spaces.Tuple([spaces.Discrete(2), spaces.Discrete(3, start=-1), spaces.Discrete(2, start=5)]),
    ],
    ids=["MultiDiscrete", "in rows", "Tuple"],
)
def test_several_choices_stay_several(space):
    env = Gymnasium(lambda: Told(space))
    assert env.spec.action == MultiDiscrete((2, 3, 2))
    env.init(keys(12))
    action = torch.cartesian_prod(*map(torch.arange, (2, 3, 2)))
    _, timestep = env.step(None, action, keys(12))
    assert timestep.reward.tolist() == [a + b + c for a in (0, 100) for b in (-10, 0, 10) for c in (5, 6)]


def test_actions_whose_bounds_differ_are_scaled():
    low, high = np.array([-1.0, 0.0], np.float32), np.array([1.0, 2.0], np.float32)
    env = Gymnasium(lambda: Told(spaces.Box(low, high)))
    assert env.spec.action == Box((2,), -1.0, 1.0)
    env.init(keys(2))
    _, timestep = env.step(None, torch.tensor([[0.5, 0.5], [-3.0, 1.0]]), keys(2))
    assert timestep.reward.tolist() == [50.0 + 15.0, -100.0 + 20.0]


class Strict(gymnasium.Env):
    """Takes no action out of its bounds; shows an image with channels first."""

    observation_space = spaces.Box(0, 255, (4, 10, 12), np.uint8)
    action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        return np.arange(480, dtype=np.uint8).reshape(4, 10, 12), {}

    def step(self, action):
        assert self.action_space.contains(action)
        return self.reset()[0], float(action.sum()), False, False, {}


def test_actions_are_clipped_and_images_have_their_channels_last():
    env = Gymnasium(Strict)
    assert env.spec.observation == Array((10, 12, 4), torch.uint8)
    _, first = env.init(keys(2))
    _, timestep = env.step(None, torch.tensor([[3.0, -0.5], [-7.0, -9.0]]), keys(2))
    assert timestep.reward.tolist() == [0.5, -2.0]
    expected = torch.from_numpy(Strict().reset()[0]).movedim(0, -1).expand(2, -1, -1, -1)
    assert torch.equal(first.observation, expected) and torch.equal(timestep.observation, expected)
    env.close()


class Online(Countdown):
    """Asks a server that is not there."""

    def step(self, action):
        raise ConnectionRefusedError("no server at port 7")


def test_a_connection_that_an_environment_lost_is_no_worker_process():
    env = Gymnasium(Online)
    env.init(random.split(random.key(0), 2))
    with pytest.raises(ConnectionRefusedError, match="no server at port 7"):
        env.step(None, torch.zeros(2, dtype=torch.int64), random.split(random.key(1), 2))


def test_one_environment_is_none_to_make_many_of():
    with pytest.raises(ValueError, match="Gymnasium makes many of what it steps, and got one Countdown; hand over its"):
        Gymnasium(Countdown())  # pyright: ignore[reportArgumentType]


def test_one_and_the_same_environment_is_stepped_once():
    shared = Countdown()
    one = Gymnasium(lambda: shared)
    again = "The function that makes <lambda> returned one and the same Countdown again; return a new one from every"
    with pytest.raises(ValueError, match=again):
        one.init(keys(2))
    one.init(keys(1))
    one.init(keys(1))  # which closes what was there
    other = copy.copy(one)
    other._envs = None  # as before anything was begun
    with pytest.raises(ValueError, match=again):
        other.init(keys(1))
    one.close()
    other.init(keys(1))
    other.close()


def test_what_gymnasium_misses_is_told_with_what_brings_it(monkeypatch):
    def make(task, **options):
        raise ModuleNotFoundError("No module named 'imageio'", name="imageio")

    monkeypatch.setattr(gymnasium, "make", make)
    told = r"No module named 'imageio', which Ant-v5 needs: pip install 'gymnasium\[mujoco\]'\."
    with pytest.raises(ImportError, match=told):
        Gymnasium("Ant-v5")
    with pytest.raises(ModuleNotFoundError, match="^No module named 'imageio'$"):
        Gymnasium(lambda: make(""))


def test_sentences_name_what_is_inside_wrappers_and_how_to_give_arguments():
    env = Gymnasium(functools.partial(gymnasium.wrappers.TimeLimit, Countdown(), 5))
    assert env.spec.name == "Countdown"
    told = r"give them to Countdown yourself: Gymnasium\(functools.partial\(Countdown, radius=0.5\)\)\."
    with pytest.raises(ValueError, match=told):
        Gymnasium(Countdown, radius=0.5)

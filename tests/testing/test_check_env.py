"""check_env passes what keeps the contract, and names the rule that each broken environment breaks."""

import dataclasses
import functools
import inspect
import re
import warnings
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tests.testing.squads import Altered, Squad
from torchpod import random
from torchpod.compose import load
from torchpod.config import ConfigError
from torchpod.env import HostEnv, TensorEnv
from torchpod.envs.transforms import RewardClip
from torchpod.run.checks import check_users_env
from torchpod.specs import HOST, Box, Discrete, EnvSpec, Traits
from torchpod.testing import ContractError, check_env, probes
from torchpod.types import FIRST, LAST, MID


class Walk(TensorEnv):
    """Right or left from a random place; terminates at 1 and is truncated after 5 steps."""

    traits = Traits(differentiable=True)

    def __init__(self):
        self.spec = EnvSpec("walk", {"place": Box((1,), -9.0, 9.0)}, Box((1,), -1.0, 1.0), 5)

    def reset(self, keys) -> Any:
        return random.uniform(keys, 1, -1.0, 1.0)

    def transition(self, state, action, keys):
        state = state + action
        return state, state[:, 0] ** 2, state[:, 0] >= 1

    def observe(self, state):
        return {"place": state}


def second_line(cls):
    """Of its transition, where the faulty ones have their fault."""
    text = inspect.getsource(cls.transition).splitlines()[1].strip()
    return f"test_check_env.py, line {cls.transition.__code__.co_firstlineno + 1}: `{text}`"


class Broken(Altered, Walk):
    """A walk whose timesteps are altered by `change`."""

    def __init__(self, change):
        super().__init__()
        self.change = change


def extras(timestep, **changes):
    return timestep._replace(extras={**timestep.extras, **changes})


def at(where, /, **changes):
    """Sets fields where a timestep has this step type."""

    def change(t):
        rows = t.step_type == where
        return t._replace(**{k: getattr(t, k).masked_fill(rows, v) for k, v in changes.items()})

    return change


def only_sometimes(timestep):
    return extras(timestep, bonus=timestep.reward) if (timestep.step_type == LAST).any() else timestep


BROKEN_TIMESTEPS = {
    "step_type must be a torch.int32 tensor": lambda t: t._replace(step_type=t.step_type.long()),
    "step_type must be FIRST, MID or LAST": at(MID, step_type=7),
    "reward must be a torch.float32 tensor of shape [8]; it is torch.float64": lambda t: t._replace(
        reward=t.reward.double()
    ),
    "discount must be a torch.float32 tensor of shape [8]": lambda t: t._replace(discount=t.discount[:, None]),
    "reward must be finite": at(MID, reward=float("nan")),
    "discount must be in [0, 1]": at(MID, discount=1.1),
    "observation must be a dict with the keys of its spec, ['place']": lambda t: t._replace(
        observation=t.observation["place"]
    ),
    "observation['place'] must be a torch.float32 tensor of shape [8, 1]": lambda t: t._replace(
        observation={"place": t.observation["place"][:, 0]}
    ),
    "observation['place'] must lie within [-9.0, 9.0]": lambda t: t._replace(
        observation={"place": t.observation["place"] + 20}
    ),
    "observation['place'] must be finite": lambda t: t._replace(observation={"place": t.observation["place"] / 0}),
    "extras must be a dict that holds at least raw_reward and game_over": lambda t: t._replace(extras={}),
    "extras['raw_reward'] must be a torch.float32 tensor": lambda t: extras(t, raw_reward=t.step_type),
    "extras['raw_reward'] must be 0 at FIRST": lambda t: extras(t, raw_reward=t.reward + 1),
    "extras['game_over'] must be a torch.bool tensor": lambda t: extras(t, game_over=t.step_type),
    "extras['game_over'] may be True only at LAST": lambda t: extras(t, game_over=t.step_type > FIRST),
    "extras['speed'] must be a tensor with the B axis first": lambda t: extras(t, speed=torch.zeros(())),
    "The timestep must have the same names and structure at every step": only_sometimes,
    "init() must return FIRST for every environment": at(FIRST, step_type=MID),
    "reward must be 0 at FIRST": at(FIRST, reward=1.0),
    "discount must be 1 at FIRST": at(FIRST, discount=0.5),
    "step() must return LAST where the discount is 0": at(MID, discount=0.0),
    "LAST with a discount above 0 means truncation, which comes only after spec.max_episode_steps=5": at(
        LAST, discount=1.0
    ),
}


@pytest.mark.parametrize("rule", BROKEN_TIMESTEPS)
def test_a_broken_timestep_is_named(rule):
    with pytest.raises(ContractError, match=re.escape(rule)):
        check_env(Broken(BROKEN_TIMESTEPS[rule]), compile=False)


class NoAutoReset(Walk):
    def step(self, state, action, keys):
        inner, count, was_last = state
        return super().step((inner, count, torch.zeros_like(was_last)), action, keys)


class ResetsAtOnce(Walk):
    def step(self, state, action, keys):
        state, timestep = super().step(state, action, keys)
        first = torch.where(timestep.step_type == MID, FIRST, timestep.step_type)
        return state, timestep._replace(step_type=first, reward=timestep.reward * 0)


class NeverTruncates(Walk):
    def step(self, state, action, keys):
        inner, count, was_last = state
        return super().step((inner, torch.zeros_like(count), was_last), action, keys)


class Untimed(Walk):
    def __init__(self):
        super().__init__()
        self.spec = EnvSpec("walk", self.spec.observation, self.spec.action)

    def step(self, state, action, keys):
        state, timestep = super().step(state, action, keys)
        return state, timestep._replace(discount=torch.ones_like(timestep.discount))


class WritesState(Walk):
    def reset(self, keys):
        return {"place": (super().reset(keys),)}

    def transition(self, state, action, keys):
        place, reward, terminated = super().transition(state["place"][0].add_(0.1), action, keys)
        return {"place": (place,)}, reward, terminated

    def observe(self, state):
        return {"place": state["place"][0]}


class ObserveWritesState(Walk):
    def observe(self, state):
        return {"place": state.mul_(0.5)}


class WritesStateAtTheEnd(Walk):
    def transition(self, state, action, keys):
        state[state > 0.9] = 0.9
        return super().transition(state, action, keys)


class StateBecomes(Walk):
    """What `first` makes of a place is the state that reset returns, what `then` makes that of transition."""

    first = then = staticmethod(lambda place: place)

    @classmethod
    def of(cls, first, then):
        return type("StateBecomes", (cls,), {"first": staticmethod(first), "then": staticmethod(then)})

    def reset(self, keys):
        return self.first(super().reset(keys))

    def transition(self, state, action, keys):
        place, reward, terminated = super().transition(self.observe(state)["place"], action, keys)
        return self.then(place), reward, terminated

    def observe(self, state):
        return {"place": pytree.tree_leaves(state)[0].float()[:, :1]}


class Place(NamedTuple):
    x: Tensor


OTHER_STATES = [
    (
        (lambda s: s, lambda s: {"x": s}),
        "transition() must return a state like reset()'s, torch.float32 [8, 1]; it returned {'x': torch.float32 [8, 1]",
    ),
    (
        (lambda s: {"x": s}, lambda s: {"x": s, "y": (s,)}),
        "{'x': torch.float32 [8, 1]}; it returned {'x': torch.float32 [8, 1], 'y': (torch.float32 [8, 1])}.",
    ),
    ((lambda s: (s, s), lambda s: (s,)), "(torch.float32 [8, 1], torch.float32 [8, 1]); it returned (torch.float32 [8"),
    ((lambda s: (s,), lambda s: [s]), "(torch.float32 [8, 1]); it returned [torch.float32 [8, 1]]."),
    ((Place, lambda s: (s,)), "Place(.x: torch.float32 [8, 1]); it returned (torch.float32 [8, 1])."),
    ((lambda s: s.repeat(1, 2), lambda s: s.repeat(1, 3)), "torch.float32 [8, 2]; it returned torch.float32 [8, 3]."),
    ((Tensor.int, lambda s: s), "torch.int32 [8, 1]; it returned torch.float32 [8, 1]."),
    ((lambda s: {"x": s}, lambda s: {"x": None}), "{'x': torch.float32 [8, 1]}; it returned {'x': NoneType}."),
]


class RestartsOtherwise(Walk):
    def restart(self, state, keys):
        return ()


class ReusesBuffer(HostEnv):
    """As some host environments do: the observation is always the same memory."""

    def init(self, keys):
        state, timestep = super().init(keys)
        self.buffer = timestep.observation["place"].clone()
        return state, timestep._replace(observation={"place": self.buffer})

    def step(self, state, action, keys):
        state, timestep = super().step(state, action, keys)
        self.buffer.copy_(timestep.observation["place"])
        return state, timestep._replace(observation={"place": self.buffer})


class ReusesBuffers(HostEnv):
    """Two, in turn: what it returned last is never written into."""

    def init(self, keys):
        state, timestep = super().init(keys)
        self.buffers = [timestep.observation["place"].clone() for _ in range(2)]
        return state, timestep._replace(observation={"place": self.buffers[0]})

    def step(self, state, action, keys):
        state, timestep = super().step(state, action, keys)
        self.buffers.reverse()
        self.buffers[0].copy_(timestep.observation["place"])
        return state, timestep._replace(observation={"place": self.buffers[0]})


class WritesAction(HostEnv):
    """Brings actions to the units of a simulator where they are."""

    def step(self, state, action, keys):
        return super().step(state, action.mul_(0.5), keys)


class GlobalGenerator(Walk):
    def transition(self, state, action, keys):
        return super().transition(state + 0.01 * torch.rand_like(state), action, keys)


class RandomInit(Walk):
    def reset(self, keys):
        return torch.rand(keys.shape[0], 1)


class Counts(Walk):
    calls = 0

    def transition(self, state, action, keys):
        self.calls += 1
        return super().transition(state + 0.001 * self.calls, action, keys)


class CountsInSilence(Walk):
    calls = 0

    def transition(self, state, action, keys):
        self.calls += 1
        return super().transition(state, action, keys)


class KeepsHistory(Walk):
    def __init__(self):
        super().__init__()
        self.history = []

    def transition(self, state, action, keys):
        self.history.append(state)
        return super().transition(state, action, keys)


class NumbersItself(Walk):
    def __init__(self):
        super().__init__()
        self.count = torch.zeros(())

    def transition(self, state, action, keys):
        self.count.add_(1)
        return super().transition(state, action, keys)


class TwoResults(Walk):
    def transition(self, state, action, keys):  # pyright: ignore[reportIncompatibleMethodOverride]  # that is the point
        return super().transition(state, action, keys)[:2]


class NumberAsReward(Walk):
    def transition(self, state, action, keys):
        state, _, terminated = super().transition(state, action, keys)
        return state, 1.0, terminated


class NumbersAsTermination(Walk):
    def transition(self, state, action, keys):
        state, reward, terminated = super().transition(state, action, keys)
        return state, reward, terminated.float()


class MixesRows(Walk):
    def transition(self, state, action, keys):
        state, reward, terminated = super().transition(state, action, keys)
        return state, reward - reward.mean(), terminated


class KnowsItsRow(Walk):
    def reset(self, keys):
        return super().reset(keys) + 0.01 * torch.arange(keys.shape[0])[:, None]


class ResetTakesAction(Walk):
    def step(self, state, action, keys):
        was_last = state[2]
        state, timestep = super().step(state, action, keys)
        place = timestep.observation["place"] + was_last[:, None] * 0.1 * action
        return state, timestep._replace(observation={"place": place})


class NotDifferentiable(Walk):
    def transition(self, state, action, keys):
        return super().transition(state.detach(), action.detach(), keys)


class InfiniteGradient(Walk):
    def transition(self, state, action, keys):
        moved, reward, terminated = super().transition(state, action, keys)
        return moved, reward + (action[:, 0] * 0).sqrt(), terminated


class NotVmappable(Walk):
    def transition(self, state, action, keys):
        state.nonzero()
        return super().transition(state, action, keys)


class UsesNumPy(Walk):
    traits = Traits()

    def transition(self, state, action, keys):
        moved = torch.from_numpy(np.clip(state.numpy(), -1, 1))
        return super().transition(moved, action, keys)


def differentiable(cls):
    env = cls()
    env.traits = Traits(differentiable=True)
    return env


class TakesOneNumber(Walk):
    def transition(self, state, action, keys):
        return super().transition(state + state.item(), action, keys)


class TakesAFloat(Walk):
    def transition(self, state, action, keys):
        return super().transition(state + float(state), action, keys)


class Branches(Walk):
    def transition(self, state, action, keys):
        if bool((state > 1000).any()):
            state = state * 0
        return super().transition(state, action, keys)


class BranchesOnMany(Walk):
    def transition(self, state, action, keys):
        if state > 1000:
            state = state * 0
        return super().transition(state, action, keys)


class TakesANumber(Walk):
    def transition(self, state, action, keys):
        return super().transition(state + 0 * state.sum().item(), action, keys)


class NotCapturable(Walk):
    traits = Traits(vmappable=False)

    def transition(self, state, action, keys):
        if state.sum().item() > 1000:
            state = state * 0
        return super().transition(state, action, keys)


class RaisesTraced(Walk):
    """A step that works by itself and vmapped, and not where it is compiled."""

    def transition(self, state, action, keys):
        if torch.compiler.is_compiling():
            raise LookupError("no way on")
        return super().transition(state, action, keys)


class StateWithoutBatch(Walk):
    def init(self, keys):
        state, timestep = super().init(keys)
        return (*state[:2], torch.zeros(())), timestep


class StateGrows(Walk):
    def step(self, state, action, keys):
        (inner, count, was_last), timestep = super().step(state, action, keys)
        return (inner.double(), count, was_last), timestep


class SharesSimulator(HostEnv):
    """A simulator that is made too early: copies of the environment step one and the same."""

    def __init__(self, env):
        super().__init__(env)
        self.simulator = {}

    def init(self, keys):
        self.simulator["state"], timestep = self._env.init(keys)
        return None, timestep

    def step(self, state, action, keys):
        self.simulator["state"], timestep = self._env.step(self.simulator["state"], action, keys)
        return None, timestep


class IgnoresKeys(HostEnv):
    """Draws from a generator of the process."""

    def init(self, keys):
        return super().init(random.split(random.key(int(torch.randint(2**31, ()))), keys.shape[0]))


class CopiesSimulator(SharesSimulator):
    def __copy__(self):
        return CopiesSimulator(self._env)


class HostWithState(HostEnv):
    def init(self, keys):  # pyright: ignore[reportIncompatibleMethodOverride]  # that is the point
        _, timestep = super().init(keys)
        return keys, timestep


class ReturnsTimestepAlone(Walk):
    def step(self, state, action, keys):  # pyright: ignore[reportIncompatibleMethodOverride]  # that is the point
        return super().step(state, action, keys)[1]


class NoTraits(Walk):
    traits = None


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (NoAutoReset, "step() must return FIRST after LAST."),
        (ResetsAtOnce, "step() must return FIRST only after LAST."),
        (NeverTruncates, "step() must return LAST after spec.max_episode_steps=5 steps, with discount 1"),
        (Untimed, "LAST with a discount above 0 means truncation, which comes only after spec.max_episode_steps=None"),
        (
            WritesState,
            "step() must not modify its arguments; transition() changed state['place'][0]: make a new tensor, x = ",
        ),
        (ObserveWritesState, "step() must not modify its arguments; observe() changed state:"),
        (WritesStateAtTheEnd, "step() must not modify its arguments; it changed state[0]:"),
        *((StateBecomes.of(*case), rule) for case, rule in OTHER_STATES),
        (RestartsOtherwise, "restart() must return a state like reset()'s, torch.float32 [8, 1]; it returned ()."),
        (
            lambda: differentiable(UsesNumPy),
            f"UsesNumPy.transition hands a tensor's memory to NumPy, or the like ({second_line(UsesNumPy)})",
        ),
        (lambda: RewardClip(UsesNumPy()), "UsesNumPy.transition hands a tensor's memory to NumPy"),
        (
            lambda: RewardClip(StateBecomes.of(lambda s: s, lambda s: {"x": s})()),
            "transition() must return a state like reset()'s, torch.float32 [8, 1]; it returned {'x': torch.float32 [8",
        ),
        (lambda: ReusesBuffer(Walk()), "step() must return new tensors; it wrote into timestep.observation['place']"),
        (
            lambda: ReusesBuffers(Walk()),
            "step() must return new tensors; it wrote into timestep.observation['place'] of step 0, which it had",
        ),
        (lambda: WritesAction(Walk()), "step() must not modify its arguments; it changed action:"),
        (GlobalGenerator, "step() must be a function of state, action and keys; two equal calls differ in"),
        (RandomInit, "init() must be a function of its keys; two equal calls differ in"),
        (Counts, "step() must be a function of state, action and keys; two equal calls differ in"),
        (CountsInSilence, "step() must keep nothing on self, but in the state; it wrote self.calls."),
        (KeepsHistory, "step() must keep nothing on self, but in the state; it wrote self.history."),
        (NumbersItself, "step() must keep nothing on self, but in the state; it wrote self.count."),
        (TwoResults, "transition() must return (state, reward, terminated); it returned 2 values."),
        (NumberAsReward, "reward must be a torch.float32 tensor of shape [8]; it is a float."),
        (NumbersAsTermination, "terminated must be a torch.bool tensor of shape [8]; it is torch.float32"),
        (MixesRows, "step(): rows must be independent: permuting and leaving out environments changed"),
        (KnowsItsRow, "init(): rows must be independent: permuting and leaving out environments changed"),
        (ResetTakesAction, "step() must ignore the action after LAST; it changed"),
        (NotDifferentiable, "The trait `differentiable` promises gradients from reward and observation to state"),
        (InfiniteGradient, "state and action; they are not finite."),
        (NotVmappable, "The trait `vmappable` promises that torch.vmap(env.step) works; it raised"),
        (NotVmappable, f"({second_line(NotVmappable)})."),
        (
            UsesNumPy,
            f"UsesNumPy.transition hands a tensor's memory to NumPy, or the like ({second_line(UsesNumPy)}); use "
            "torch's operators in place of NumPy's",
        ),
        (
            TakesOneNumber,
            f"TakesOneNumber.transition takes a number out of a tensor ({second_line(TakesOneNumber)}); keep it",
        ),
        (
            TakesAFloat,
            f"TakesAFloat.transition takes a number out of a tensor ({second_line(TakesAFloat)}); keep it a tensor",
        ),
        (Branches, f"Branches.transition branches on a tensor ({second_line(Branches)}); use torch.where."),
        (
            BranchesOnMany,
            f"BranchesOnMany.transition branches on a tensor ({second_line(BranchesOnMany)}); use torch.wh",
        ),
        (
            TakesANumber,
            f"TakesANumber.transition takes a number out of a tensor ({second_line(TakesANumber)}); keep it",
        ),
        (StateWithoutBatch, "state[2] must be a tensor with the B axis first"),
        (StateGrows, "state[0] must keep its shape and dtype"),
        (lambda: SharesSimulator(Walk()), "must not share what their steps change, and one gave other timesteps["),
        (lambda: HostWithState(Walk()), "An environment without the trait `pure` must return None as state."),
        (ReturnsTimestepAlone, "step() must return (state, TimeStep)."),
        (NoTraits, "env.traits must be of Traits; it is None."),
    ],
)
def test_a_broken_environment_is_named(make, rule):
    with pytest.raises(ContractError, match=re.escape(rule)):
        check_env(make(), compile=False)


class Casts(StateBecomes):
    """Its next state is narrower than its first, and a row of either makes a row of the first."""

    first, then = staticmethod(Tensor.double), staticmethod(lambda place: place)


def test_a_state_may_be_what_the_choice_between_two_makes_like_the_first():
    check_env(Casts(), compile=False)


def test_a_run_does_not_start_with_a_state_that_changes(tmp_path):
    config = load([f"run_dir={tmp_path / 'run'}"])
    told = (
        r"^env=cartpole breaks the contract: transition\(\) must return a state like reset\(\)'s, torch\.\S+ \[4, 1\];"
    )
    with pytest.raises(ConfigError, match=told):
        check_users_env(StateBecomes.of(lambda s: s, lambda s: {"x": s})(), config, torch.device("cpu"))


class View(Walk):
    """Its first state is a part of a block of words, in every second place of memory."""

    def reset(self, keys):
        return (random.uniform(keys, 2) - 0.5)[:, :1]


def test_states_may_be_views():
    check_env(View())


def test_copies_that_nobody_steps_side_by_side_may_share():
    check_env(SharesSimulator(Walk()), copies=False)
    check_env(CopiesSimulator(Walk()))


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (NotCapturable, f"NotCapturable.transition branches on a tensor ({second_line(NotCapturable)}); use torch.w"),
        (RaisesTraced, "The trait `capturable` promises that the compiled step works; it raised LookupError: no way"),
    ],
)
def test_an_environment_that_does_not_compile_is_named(make, rule):
    with pytest.raises(ContractError, match=re.escape(rule)):
        check_env(make())


def test_environments_that_keep_the_contract_pass():
    check_env(Walk())
    check_env(Squad())
    for env in (Walk(), Squad()):
        host = HostEnv(env)
        assert host.traits == HOST
        check_env(host)


@pytest.mark.parametrize("name", probes.LADDER)
def test_probes_keep_the_contract(name):
    check_env(probes.LADDER[name](), compile=False)


class OutOfBounds(Walk):
    """Leaves by a rule of its own, before the limit, and its value goes on."""

    def __init__(self):
        super().__init__()
        self.spec = dataclasses.replace(self.spec, truncates_early=True)

    def step(self, state, action, keys):
        state, timestep = super().step(state, action, keys)
        return state, timestep._replace(discount=torch.ones_like(timestep.discount))


def test_an_environment_may_truncate_by_its_own_rules_if_it_says_so():
    check_env(OutOfBounds())


@pytest.mark.parametrize("method", ["reset", "transition", "observe"])
def test_a_method_that_is_missing_is_named(method):
    env = type("Unfinished", (Walk,), {method: getattr(TensorEnv, method)})()
    with pytest.raises(NotImplementedError, match=rf"^Unfinished must define {method}\(self, "):
        check_env(env)


class Hasty(Walk):
    def transition(self, state, action):  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().transition(state, action, None)


def test_a_method_that_takes_other_arguments_is_named():
    rule = "transition() must take state, action, keys; that of Hasty is transition(state, action)."
    with pytest.raises(ContractError, match=re.escape(rule)):
        check_env(Hasty())


@pytest.mark.parametrize(("name", "meant"), [("truncate", "truncated"), ("extra", "extras"), ("restarts", "restart")])
def test_a_method_that_nobody_calls_is_told_by_a_warning_if_its_name_is_nearly_one_that_is_called(name, meant):
    def method(self, state, keys=None):
        return state

    near = type("Near", (Walk,), {name: method, "restful": method})
    with pytest.warns(UserWarning) as warned:
        check_env(near(), compile=False)
    (told,) = warned
    assert str(told.message) == f"torchpod does not call Near.{name}; did you mean {meant}?"
    assert told.filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(type("Far", (Walk,), {"truncating": method, "rest": method, f"_{name}": method})(), compile=False)


def scaled(method):
    @functools.wraps(method)
    def called(self, state):
        return method(self, state, 1.0)

    return called


class Decorated(Walk):
    @scaled
    def observe(self, state, scale):  # pyright: ignore[reportIncompatibleMethodOverride]
        return {"place": scale * state}


def test_a_decorator_may_give_a_method_more_arguments():
    check_env(Decorated(), compile=False)


def test_what_is_no_method_is_named():
    with pytest.raises(ContractError, match=r"^observe of Constant must be a method, observe\(self, state\)\.$"):
        check_env(type("Constant", (Walk,), {"observe": 3})())


@pytest.mark.parametrize("limit", [0, -1])
def test_specs_that_no_environment_can_have_are_refused(limit):
    with pytest.raises(
        ValueError, match=f"max_episode_steps={limit} of walk must be an integer of at least 1, or None"
    ):
        EnvSpec("walk", Box((1,)), Discrete(2), limit)
    with pytest.raises(ValueError, match=f"at least one value, not num_values={limit}"):
        Discrete(limit)


def test_one_environment_is_too_few():
    with pytest.raises(ValueError, match="num_envs=1 is too small"):
        check_env(Walk(), num_envs=1)


def test_a_host_environment_that_does_not_repeat_is_told_by_a_warning():
    told = r"gave other timesteps\[0\]\.observation.* played again with the same keys and actions: runs in it do"
    with pytest.warns(UserWarning, match=told):
        check_env(IgnoresKeys(Squad()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(IgnoresKeys(Squad()), copies=False)
        check_env(HostEnv(Squad()))

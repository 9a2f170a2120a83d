"""`check_consistency`: what agrees passes, and the first difference is named, whichever it is."""

import re
from typing import Any, cast

import numpy as np
import pytest
import torch

from torchpod import random
from torchpod.config import ConfigError
from torchpod.env import HostEnv, TensorEnv
from torchpod.envs import FourRooms
from torchpod.envs.grids.four_rooms import is_wall
from torchpod.main import main
from torchpod.specs import Array, Discrete, EnvSpec, MultiDiscrete
from torchpod.testing import ConsistencyError, ContractError, check_consistency
from torchpod.testing.consistency import FailedError

MOVES = [(-1, 0), (0, 1), (1, 0), (0, -1)]


class Lift(TensorEnv):
    """Goes up by the action; terminates at the tenth floor."""

    def __init__(self, top=10):
        self.top = top
        self.spec = EnvSpec("lift", {"floor": Array((1,)), "top": Array(())}, Discrete(3), max_episode_steps=12)

    def reset(self, keys):
        return random.to_integer(random.bits(keys, 1)[:, 0], 4)

    def transition(self, state, action, keys):
        state = state + action
        return state, state.float(), state >= self.top

    def observe(self, state):
        return {"floor": state[:, None].float(), "top": torch.full_like(state, self.top).float()}


class PlainLift:
    """The same; `fault` says from which step on something is wrong."""

    def __init__(self, top=10, wrong="", fault=3):
        self.top, self.wrong, self.fault = top, wrong, fault

    def seen(self):
        bad = self.wrong == "observation" and self.count >= self.fault
        return {"floor": [self.floor + 0.5 * bad], "top": self.top}

    def reset(self, state):
        assert state.dtype == np.int64 and state.shape == ()
        self.floor, self.count = int(state) + (self.wrong == "start"), 0
        return self.seen()

    def step(self, action):
        self.floor, self.count = self.floor + int(action), self.count + 1
        bad = self.count == self.fault
        ended = self.floor >= self.top or (self.wrong == "end" and bad)
        cut = self.count == (11 if self.wrong == "limit" else 12)
        return self.seen(), self.floor - 0.25 * (self.wrong == "reward" and bad), ended, cut


class PlainRooms:
    """FourRooms, whose floor slips: the reference draws the same words from the key."""

    def reset(self, state):
        self.agent, self.goal = state.agent.tolist(), state.goal.tolist()
        return np.array(self.agent + self.goal)

    def step(self, action, key):
        words = random.bits(key, 2)
        if random.to_uniform(words[0]) < 1 / 3:
            action = (action + 1 + int(random.to_integer(words[1], 3))) % 4
        there = [c + d for c, d in zip(self.agent, MOVES[action], strict=True)]
        self.agent = self.agent if is_wall(*there) else there
        found = self.agent == self.goal
        return np.array(self.agent + self.goal), float(found), found, False


class Pair(TensorEnv):
    """Two groups, each agent with a counter of its own; one with more than 4 leaves, if `leaves`."""

    def __init__(self, leaves=False):
        self.leaves = leaves
        action = MultiDiscrete((2, 3))
        groups = {"a": 3, "b": 1}
        self.spec = EnvSpec("pair", dict.fromkeys(groups, Array((2,))), dict.fromkeys(groups, action), 5, groups=groups)

    def reset(self, keys):
        return random.uniform(keys, 4)

    def transition(self, state, action, keys):
        gain = torch.cat([action["a"].sum(-1), action["b"].sum(-1)], -1)
        return state + gain, {"a": gain[:, :3].float(), "b": gain[:, 3:].float()}, gain.sum(-1) > 99

    def observe(self, state):
        seen = torch.stack([state, -state], -1)
        return {"a": seen[:, :3], "b": seen[:, 3:]}

    def extras(self, state):
        return {"alive": {"a": state[:, :3] <= 4, "b": state[:, 3:] <= 4}} if self.leaves else {}


class PlainPair:
    """The same; the third agent's second feature is wrong if its counter is above 4. `tell` is what it returns more."""

    def __init__(self, wrong=False, tell=None):
        self.wrong, self.tell = wrong, tell

    def reset(self, state):
        self.sums = state.astype(np.float64)
        return self.seen() if self.tell is None else (self.seen(), self.told())

    def told(self):
        return {name: {"a": f(self.sums[:3]), "b": f(self.sums[3:])} for name, f in (self.tell or {}).items()}

    def seen(self):
        seen = np.stack([self.sums, -self.sums], -1)
        if self.wrong and self.sums[2] > 4:
            seen[2, 1] += 1
        return {"a": seen[:3], "b": seen[3:]}

    def step(self, action):
        gain = np.concatenate([action["a"], action["b"]]).sum(-1)
        assert gain.shape == (4,)
        self.sums += gain
        self.count = getattr(self, "count", 0) + 1
        cut = self.count % 5 == 0
        result = self.seen(), {"a": gain[:3], "b": gain[3:]}, False, cut
        return result if self.tell is None else (*result, self.told())


@pytest.mark.parametrize(("compile", "capture"), [(False, False), (False, True), (True, False)])
def test_what_agrees_passes_and_is_counted(compile, capture, seed):
    how = {"seed": seed, "compile": compile, "capture": capture}
    report = check_consistency(Lift(), PlainLift(), num_envs=4, num_steps=60, **how)
    assert report.largest == 0 and 16 <= report.num_episodes <= 60 and report.num_steps < 240 - 12
    check_consistency(Pair(), PlainPair(), **how)


def test_random_numbers_within_a_step_come_from_the_key(seed):
    assert check_consistency(FourRooms(), PlainRooms(), num_steps=200, seed=seed).num_steps > 1500


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("start", r"lift at step 0 of an episode (step 0 in all), environment 0, feature 0: observation['floor'] is "),
        (
            "observation",
            r"lift at step 3 of an episode (step 3 in all), environment 0, feature 0: observation['floor']",
        ),
        ("reward", r"lift at step 3 of an episode (step 3 in all), environment 0: reward is "),
        (
            "end",
            r"lift at step 3 of an episode (step 3 in all), environment 0: terminated is False, the reference says",
        ),
        ("limit", r"lift at step 11 of an episode (step 11 in all), environment 0: truncated is False, the reference"),
    ],
)
def test_the_first_difference_is_named(wrong, message, seed):
    with pytest.raises(ConsistencyError, match=re.escape(message)):
        check_consistency(Lift(top=99), PlainLift(99, wrong), seed=seed)


def test_agent_and_feature_are_named(seed):
    with pytest.raises(
        ConsistencyError, match=r"agent 2, feature 1: observation\['a'\] is -[\d.]+, the reference says"
    ):
        check_consistency(Pair(), PlainPair(wrong=True), seed=seed)


def here(sums):
    return sums <= 4


@pytest.mark.parametrize("tell", [{"alive": here}, {"discount": here}, {"discount": here, "alive": here}])
def test_who_leaves_and_what_discounts_are_is_compared(tell, seed):
    check_consistency(Pair(leaves=True), PlainPair(tell=tell), seed=seed)
    wrong = {name: lambda sums: sums > -1 for name in tell}
    with pytest.raises(ConsistencyError, match=r"agent \d: (alive|discount)\['[ab]'\] is 0, the reference says 1"):
        check_consistency(Pair(leaves=True), PlainPair(tell=wrong), seed=seed)


def test_who_is_not_there_at_the_start_has_discount_1_there(seed):
    def late(sums):
        return sums > 2

    class Late(Pair):
        def extras(self, state):
            return {"alive": {"a": late(state[:, :3]), "b": late(state[:, 3:])}}

    check_consistency(Late(), PlainPair(tell={"alive": late}), seed=seed)


def test_discounts_are_one_until_the_end_unless_the_reference_says_otherwise(seed):
    with pytest.raises(ConsistencyError, match=r"discount\['[ab]'\] is 0, .*; where agents leave, .* one value more\."):
        check_consistency(Pair(leaves=True), PlainPair(), seed=seed)

    class Fades(Lift):
        def step(self, state, action, keys):
            state, timestep = super().step(state, action, keys)
            return state, timestep._replace(discount=timestep.discount * (timestep.observation["floor"][:, 0] != 5))

    with pytest.raises(ConsistencyError, match="environment 0: discount is 0, the reference says 1"):
        check_consistency(Fades(), PlainLift(), num_envs=1, num_steps=1000, seed=seed)
    with pytest.raises(ConsistencyError, match=r"nothing came, the reference has alive\['a'\], alive\['b'\]\."):
        check_consistency(Pair(), PlainPair(tell={"alive": here}), seed=seed)
    with pytest.raises(ValueError, match="use a dict of alive and discount alone"):
        check_consistency(Pair(), PlainPair(tell={"discounts": here}), seed=seed)


def test_tolerances_say_what_a_difference_is(seed):
    with pytest.raises(ConsistencyError, match=r"rtol=1e-05, atol=0.4; 1 of 1 differ"):
        check_consistency(Lift(99), PlainLift(99, "observation"), atol=0.4, seed=seed)
    report = check_consistency(Lift(99), PlainLift(99, "observation"), atol=0.6, seed=seed)
    assert report.largest == 0.5


def test_what_cannot_be_compared_is_refused():
    class Short:
        reset = PlainLift(10).reset

        def step(self, action):
            return action, 0.0, False

    class Flat(PlainLift):
        def reset(self, state):
            return super().reset(state)["floor"]

    with pytest.raises(ValueError, match="must return"):
        check_consistency(Lift(), Short())
    with pytest.raises(ConsistencyError, match=r"observation\['top'\] came, the reference has observation\."):
        check_consistency(Lift(), Flat())
    with pytest.raises(ValueError, match="capture on a GPU is of compiled steps, .* add compile"):
        check_consistency(Lift(), PlainLift(), capture=True, device="cuda")
    with pytest.raises(ValueError, match="lift is stepped on the host"):
        check_consistency(HostEnv(Lift()), PlainLift())
    with pytest.raises(ValueError, match="num_envs=0 and num_steps=5 must be at least 1"):
        check_consistency(Lift(), PlainLift(), num_envs=0, num_steps=5)


class Branching(Lift):
    """Reads a tensor where Python decides."""

    def transition(self, state, action, keys):
        if state > self.top:
            state = state * 0
        return super().transition(state, action, keys)


@pytest.mark.parametrize("compile", [False, True])
def test_code_that_branches_on_a_tensor_is_named_with_its_line(compile, seed):
    with pytest.raises(ContractError, match=r"Branching\.transition branches on a tensor \(test_consistency\.py, line"):
        check_consistency(Branching(), PlainLift(), compile=compile, seed=seed)


class Untidy(PlainLift):
    def __init__(self, what):
        super().__init__()
        self.what = what

    def step(self, action):
        seen, reward, ended, cut = super().step(action)
        return {"floor": self.what, "top": self.top} if self.count > 1 else seen, reward, ended, cut


@pytest.mark.parametrize("what", [[[1.0], [1.0, 2.0]], ["up"]], ids=["ragged", "text"])
def test_what_are_no_numbers_is_named_with_its_place(what):
    told = (
        r"lift at step 2 of an episode \(step 2 in all\), environment 0: observation\['floor'\] of the reference is \["
    )
    with pytest.raises(ConsistencyError, match=told):
        check_consistency(Lift(), Untidy(what), compile=False)


def test_what_is_no_environment_and_no_reference_is_told():
    with pytest.raises(ValueError, match="env=5 has no spec; hand over a tensor environment, made"):
        check_consistency(cast(Any, 5), PlainLift())
    wanted = "hand over an object with the methods reset"
    with pytest.raises(ValueError, match=f"the reference is the class PlainLift; {wanted}"):
        check_consistency(Lift(), PlainLift)
    with pytest.raises(ValueError, match=f"the reference is a dict; {wanted}"):
        check_consistency(Lift(), {})


def test_the_command_line_compares_two_classes(capsys):
    file = __file__
    assert main(["check", f"{file}:Lift", f"{file}:PlainLift", "top=7", "--num-envs", "3", "--steps", "20"]) == 0
    assert "Lift does what " in capsys.readouterr().out
    assert main(["check", f"{file}:Lift", "tests_of_nobody:Plain"]) == 1
    assert "reference=tests_of_nobody:Plain is not known" in capsys.readouterr().err
    assert main(["check", f"{file}:Lift", "nowhere.py:Plain"]) == 1
    assert "there is no file nowhere.py; give PATH.py:Plain with where it is now" in capsys.readouterr().err
    assert main(["check", "four_rooms", f"{file}:PlainRooms", "--steps", "30"]) == 0
    assert main(["check", f"{file}:Lift", "torch:Plain"]) == 1
    assert "reference=torch:Plain cannot be imported: module 'torch' has no attribute" in capsys.readouterr().err
    assert main(["check", f"{file}:Lift", f"{file}:PlainLift", "top"]) == 1
    assert "top is no NAME=VALUE; use e.g. top=5." in capsys.readouterr().err
    assert main(["check", f"{file}:Lift", "--steps", "20", f"{file}:PlainLift", "--seed", "1", "top=7"]) == 0
    assert main(["check", f"{file}:Lift", f"{file}:PlainLift", "tops=7"]) == 1
    assert "Lift takes no argument tops; did you mean top?" in capsys.readouterr().err
    assert main(["check", f"{file}:Lift", f"{file}:PlainLift", "--device", "cpu", "--capture"]) == 0
    assert main(["check", f"{file}:Lift", f"{file}:PlainLift", "--device", "meat"]) == 1
    assert "torchpod check: --device meat is not known; use cpu, cuda or cuda:INDEX." in capsys.readouterr().err
    assert main(["check", "four_rooms", "four_rooms"]) == 1
    assert "reference=four_rooms names no class; give one as file.py:Class or mod" in capsys.readouterr().err


class FailingLift(Lift):
    """Raises where it is told to."""

    def __init__(self, where="step"):
        super().__init__()
        self.where = where
        if where == "constructor":
            raise KeyError("k")

    def reset(self, keys):
        if self.where == "reset":
            raise KeyError("k")
        return super().reset(keys)

    def transition(self, state, action, keys):
        if self.where == "step":
            raise KeyError("k")
        return super().transition(state, action, keys)


class FailingPlainLift(PlainLift):
    """Likewise."""

    def __init__(self, where="step"):
        super().__init__()
        self.where = where
        if where == "constructor":
            raise KeyError("k")

    def __deepcopy__(self, memo):
        if self.where == "copy":
            raise KeyError("k")
        return FailingPlainLift(self.where)

    def reset(self, state):
        if self.where == "reset":
            raise KeyError("k")
        return super().reset(state)

    def step(self, action):
        if self.where == "step":
            raise KeyError("k")
        return super().step(action)


class OtherLift(Lift):
    """For the other constructors."""

    def __init__(self, where=""):
        super().__init__()


@pytest.mark.parametrize(
    ("env", "reference", "where", "told"),
    [
        ("OtherLift", "FailingPlainLift", "constructor", "cannot be made with {'where': 'constructor'}"),
        ("OtherLift", "FailingPlainLift", "copy", "fails when it is copied"),
        ("OtherLift", "FailingPlainLift", "reset", "fails in reset() at step 0, environment 0"),
        ("OtherLift", "FailingPlainLift", "step", "fails at step 1 of an episode (step 1 in all), environment 0"),
        ("FailingLift", "FailingPlainLift", "constructor", "cannot be made with {'where': 'constructor'}"),
        ("FailingLift", "FailingPlainLift", "reset", "fails in reset()"),
        ("FailingLift", "FailingPlainLift", "step", "fails at step 1"),
    ],
)
def test_what_a_class_raises_is_one_sentence_and_the_class_named(env, reference, where, told, capsys, monkeypatch):
    who = f"env={__file__}:{env}" if env == "FailingLift" else f"reference={__file__}:{reference}"
    words = ["check", f"{__file__}:{env}", f"{__file__}:{reference}", f"where={where}"]
    assert main(words) == 1
    assert (
        capsys.readouterr().err == f"torchpod: error: {who} {told}: KeyError: 'k'. TORCHPOD_TRACEBACK=1 shows where.\n"
    )
    monkeypatch.setenv("TORCHPOD_TRACEBACK", "1")
    with pytest.raises(ConfigError):
        main(words)


def test_from_python_the_exception_of_a_class_is_the_cause():
    with pytest.raises(FailedError, match=r"^the reference fails at step 1 .*: KeyError: 'k'\.$") as raised:
        check_consistency(Lift(), FailingPlainLift())
    assert isinstance(raised.value.__cause__, KeyError)


class TiltedLift(PlainLift):
    """Sees another floor at the first step."""

    def step(self, action):
        observation, reward, terminated, truncated = super().step(action)
        return {**observation, "floor": [x + 1 for x in observation["floor"]]}, reward, terminated, truncated


class TiltedPair(PlainPair):
    """Whose third agent has a wrong feature."""

    def __init__(self):
        super().__init__(wrong=True)


def test_the_command_line_names_the_first_difference_and_returns_1(capsys):
    file = __file__
    assert main(["check", f"{file}:Lift", f"{file}:TiltedLift"]) == 1
    out, error = capsys.readouterr()
    assert out == "" and error.startswith(
        "torchpod: error: lift at step 1 of an episode (step 1 in all), environment 0"
    )
    assert "observation['floor'] is " in error and error.count("\n") == 1
    assert main(["check", f"{file}:Pair", f"{file}:TiltedPair"]) == 1
    assert "agent 2, feature 1: observation['a'] is " in capsys.readouterr().err

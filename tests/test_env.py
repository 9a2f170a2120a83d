"""What `make_timestep` makes of who is alive; what environments do with it is in tests/envs and tests/contracts."""

import dataclasses

import pytest
import torch

from torchpod import random
from torchpod.env import TensorEnv, make_timestep
from torchpod.envs.host.timesteps import grouped_timestep
from torchpod.specs import Array, Discrete, EnvSpec
from torchpod.testing import check_env
from torchpod.testing.contract import ContractError
from torchpod.types import FIRST, LAST, MID


def test_alive_needs_the_groups_of_the_reward():
    never, alive = torch.zeros(4, dtype=torch.bool), torch.ones(4, 2, dtype=torch.bool)
    reward = {"cat": torch.zeros(4, 1), "sheep": torch.zeros(4, 2)}
    told = r"groups of the reward, \['cat', 'sheep'\], and it has \['sheep'\]; give each group a bool tensor \[B, N\]"
    with pytest.raises(ValueError, match=told):
        make_timestep(
            torch.zeros(4, 1),
            reward,
            reset=never,
            terminated=never,
            truncated=never,
            extras={"alive": {"sheep": alive}},
        )


def test_who_is_not_there_at_the_start_has_discount_0_only_after_it_as_on_the_host():
    reset, terminated, truncated = torch.eye(4, dtype=torch.bool)[:3]  # and the last goes on
    alive = torch.tensor([[False, True]] * 4)
    timestep = make_timestep(
        torch.zeros(4, 1),
        {"sheep": torch.zeros(4, 2)},
        reset=reset,
        terminated=terminated,
        truncated=truncated,
        extras={"alive": {"sheep": alive}},
    )
    assert timestep.discount["sheep"].tolist() == [[1, 1], [0, 0], [0, 1], [0, 1]]
    ends = (x.numpy() for x in (terminated, truncated))
    twin, _ = grouped_timestep(
        None, reset.numpy(), {"sheep": torch.zeros(4, 2).numpy()}, *ends, {"sheep": alive.numpy()}
    )
    assert torch.equal(twin.discount["sheep"], timestep.discount["sheep"])


class Drift(TensorEnv):
    """Drifts by random whole numbers: ends above 3, is cut below -3, and after 6 steps."""

    spec = EnvSpec("drift", Array((1,)), Discrete(2), 6, truncates_early=True)

    def reset(self, keys):
        return random.to_integer(random.bits(keys, 1)[:, 0], 5).int() - 2

    def transition(self, state, action, keys):
        state = state + random.to_integer(random.bits(keys, 1)[:, 0], 7).int() - 3
        return state, state.float(), state > 3

    def observe(self, state):
        return state[:, None].float()

    def truncated(self, state):
        return (state < -3) | (state > 5)  # what terminated above 5 as well stays terminated


def test_a_rule_of_its_own_cuts_an_episode_whose_value_goes_on(seed):
    env, keys = Drift(), random.split(random.key(seed), 64)
    state, timestep = env.init(keys)
    before, count = timestep, torch.zeros(64, dtype=torch.int64)
    seen = {"cut": 0, "terminated": 0, "both": 0, "late": 0}
    for i in range(1, 40):
        state, timestep = env.step(state, torch.zeros(64, dtype=torch.int64), random.at(keys, i))
        place, first = timestep.observation[:, 0], before.step_type == LAST
        count = torch.where(first, 0, count + 1)
        for row in range(64):
            ended = not first[row] and place[row] > 3
            cut = not first[row] and (place[row] < -3 or place[row] > 5 or count[row] == 6)
            kind = FIRST if first[row] else LAST if ended or cut else MID
            assert timestep.step_type[row] == kind and timestep.discount[row] == float(not ended)
            assert timestep.extras["game_over"][row] == (kind == LAST)
            seen["cut"] += bool(cut and not ended)
            seen["terminated"] += bool(ended)
            seen["both"] += bool(ended and place[row] > 5)
            seen["late"] += bool(count[row] == 6 and not first[row])
        before = timestep
    assert all(seen.values()), seen
    check_env(env)


@pytest.mark.parametrize(
    ("rule", "early", "message"),
    [
        (
            lambda self, state: (state < -3)[:, None],
            True,
            "truncated\\(\\) must be a torch.bool tensor of shape .8.;",
        ),
        (lambda self, state: (state < -3).float(), True, "truncated\\(\\) must"),
        (lambda self, state: state < -3, False, "rules of its own has spec.truncates_early=True"),
    ],
)
def test_a_rule_that_cannot_be_is_refused(rule, early, message):
    spec = dataclasses.replace(Drift.spec, truncates_early=early)
    env = type("Other", (Drift,), {"truncated": rule, "spec": spec})()
    with pytest.raises(ContractError, match=message):
        check_env(env, compile=False)


def test_a_rule_that_is_promised_and_not_written_is_missed():
    env = type("Other", (Drift,), {"truncated": TensorEnv.truncated})()
    with pytest.raises(ContractError, match=r"truncates_early=True needs truncated\(state\), which says where an"):
        check_env(env, compile=False)


@pytest.mark.parametrize("name", ["return", "length"])
def test_what_is_counted_is_no_metric_of_an_environment(name):
    env = type("Other", (Drift,), {"extras": lambda self, state: {"episode": {name: state.float()}}})()
    with pytest.raises(ContractError, match=rf"extras\['episode'\]\['{name}'\] must have another name"):
        check_env(env, compile=False)

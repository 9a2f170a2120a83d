"""Tensor environments as TorchRL environments: TorchRL's own check, its collector, and torchpod's transitions."""

import math
import warnings

import pytest
import torch
from torchrl.envs import StepCounter, TransformedEnv, check_env_specs

from torchpod import random
from torchpod.env import HostEnv, TensorEnv, where
from torchpod.envs import MAKERS, CartPole, Catch, Pendulum
from torchpod.interop.env_base import to_torchrl
from torchpod.specs import Array, Discrete, EnvSpec, MultiDiscrete
from torchpod.types import LAST

TENSOR = {name: m for name, m in MAKERS.items() if isinstance(m, type) and issubclass(m, TensorEnv)}
GROUPS = [name for name, maker in TENSOR.items() if maker().spec.groups is not None]


class Ladder(TensorEnv):
    """Climbs from a floor that is kept; action 1 ends the episode, three steps cut it. `[floor, height, episode]`."""

    spec = EnvSpec("ladder", {"place": Array((3,)), "up": Array((1,), torch.bool)}, Discrete(2), 3)

    def reset(self, keys):
        return torch.cat([random.uniform(keys, 1), torch.zeros(keys.shape[0], 2, device=keys.device)], -1)

    def restart(self, state, keys):
        return state * torch.tensor([1.0, 0.0, 1.0]) + torch.tensor([0.0, 0.0, 1.0])

    def transition(self, state, action, keys):
        return state + torch.tensor([0.0, 1.0, 0.0]), 1.0 + action, action == 1

    def observe(self, state):
        return {"place": state, "up": state[:, 1:2] > 0}


@pytest.mark.parametrize("name", [name for name in TENSOR if name not in GROUPS])
def test_torchrls_check_passes(name):
    check_env_specs(to_torchrl(TENSOR[name](), 3))


@pytest.mark.parametrize("name", GROUPS)
def test_a_game_of_several_agents_is_refused_in_one_sentence(name):
    with pytest.raises(ValueError, match="has groups of agents, which to_torchrl cannot name; use one agent"):
        to_torchrl(TENSOR[name](), 3)


def test_a_dict_of_actions_is_refused_in_one_sentence():
    class Parts(Ladder):
        spec = EnvSpec("parts", Ladder.spec.observation, {"a": Discrete(2), "b": Discrete(3)}, 3)

    with pytest.raises(ValueError, match=r"parts has a dict of actions, \['a', 'b'\], and to_torchrl takes one Box"):
        to_torchrl(Parts(), 3)


class Two(Ladder):
    spec = EnvSpec("two", Ladder.spec.observation, MultiDiscrete((4, 2)), 3)

    def transition(self, state, action, keys):
        return super().transition(state, action[:, 1], keys)


def test_torchrls_check_passes_with_actions_of_several_integers():
    check_env_specs(to_torchrl(Two(), 2))


def test_torchrls_check_passes_with_nested_observations():
    check_env_specs(to_torchrl(Ladder(), 2))


@pytest.mark.parametrize("make", [CartPole, Catch, Pendulum, Ladder])
def test_a_rollout_has_torchpods_transitions(make, seed):
    """The same calls by hand: torchpod's own step, and its keys at the numbers that TorchRL's calls have."""
    rows, length, env = 3, 60, make()
    theirs = to_torchrl(env, rows, seed=seed)
    rollout = theirs.rollout(length, break_when_any_done=False)
    keys = random.split(random.key(seed), rows)
    state, timestep = env.init(random.at(keys, 0))
    count, ends = 0, 0
    for t in range(length):
        row = rollout[:, t]
        torch.testing.assert_close(_plain(row["observation"]), timestep.observation, rtol=0, atol=0)
        count += 1
        state, timestep = env.step(state, row["action"], random.at(keys, count))
        last, end = timestep.step_type == LAST, timestep.discount == 0
        torch.testing.assert_close(_plain(row["next", "observation"]), timestep.observation, rtol=0, atol=0)
        for name, expected in {
            "reward": timestep.reward,
            "done": last,
            "terminated": end,
            "truncated": last & ~end,
        }.items():
            assert torch.equal(row["next", name][:, 0], expected), (name, t)
        ends += int(last.sum())
        if last.any() and t + 1 < length:  # a reset is a call too; only rows that are done take part
            count += 1
            reset, first = env.step(state, row["action"], random.at(keys, count))
            state, timestep = where(last, (reset, first), (state, timestep))
    assert ends > 0 or make is Pendulum


def _plain(observation):
    return observation if isinstance(observation, torch.Tensor) else observation.to_dict()


def test_a_collector_collects_whole_episodes():
    with warnings.catch_warnings():  # its import warns of a class of its own
        warnings.simplefilter("ignore", DeprecationWarning)
        from torchrl import collectors
    Collector = getattr(collectors, "Collector", None) or collectors.SyncDataCollector  # in TorchRL 0.13
    collector = Collector(to_torchrl(Catch(), 4), None, frames_per_batch=80, total_frames=160)
    batches = [batch.clone() for batch in collector]
    collector.shutdown()
    assert [batch.shape for batch in batches] == [(4, 20)] * 2
    done = torch.cat([batch["next", "done"][..., 0] for batch in batches], 1)
    assert done.nonzero()[:, 1].reshape(4, -1).tolist() == [[8, 17, 26, 35]] * 4  # nine steps each, and no row between
    assert set(torch.cat([b["next", "reward"] for b in batches], 1)[done].flatten().tolist()) <= {-1.0, 1.0}


def test_what_outlives_an_episode_is_kept_and_a_cut_in_the_middle_begins_anew():
    env = to_torchrl(Ladder(), 3)
    start = env.reset()
    floor = start["observation", "place"][:, 0]
    after = env.step(start.set("action", torch.tensor([1, 0, 0])))["next"]
    assert after["done"][:, 0].tolist() == [True, False, False]
    again = env.reset(after.select("observation", "done").set("_reset", torch.tensor([[True], [False], [True]])))
    place = again["observation", "place"]
    assert place[:, 1].tolist() == [0, 1, 0] and place[:, 2].tolist() == [1, 0, 0]
    assert (place[:, 0] == floor).tolist() == [True, True, False]
    assert not again["done"].any()
    later = env.step(again.set("action", torch.zeros(3, dtype=torch.int64)))["next", "observation", "place"]
    assert torch.equal(later, place + torch.tensor([0.0, 1.0, 0.0]))  # the state is what was seen


def test_rows_that_are_done_wait_until_all_are():
    env = to_torchrl(Ladder(), 2)
    actions = iter([[1, 0], [0, 0], [0, 0]])
    rollout = env.rollout(9, lambda td: td.set("action", torch.tensor(next(actions))), break_when_all_done=True)
    assert rollout["next", "done"][..., 0].tolist() == [[True, True, True], [False, False, True]]
    assert rollout["next", "reward"][..., 0].tolist() == [[2, 2, 2], [1, 1, 1]]  # repeated by TorchRL
    assert rollout["next", "observation", "place"][..., 1].tolist() == [[1, 1, 1], [1, 2, 3]]
    assert rollout["next", "terminated"][..., 0].tolist() == [[True, True, True], [False, False, False]]


def test_rows_that_are_not_to_step_stay_where_they_are():
    env = to_torchrl(Ladder(), 2)
    start = env.reset().set("action", torch.tensor([0, 0]))
    after = env.step(start.set("_step", torch.tensor([True, False])))["next"]
    assert after["observation", "place"][:, 1].tolist() == [1, 0] and after["reward"][:, 0].tolist() == [1, 0]
    assert env.step(start.exclude("next", "_step"))["next", "observation", "place"][:, 1].tolist() == [2, 1]


def test_seeds_repeat_and_transforms_and_compilation_change_nothing():
    plain, other = to_torchrl(Catch(), 2, seed=5), to_torchrl(Catch(), 2, seed=6, compile=True)
    other.set_seed(5)

    def policy(td):
        return td.set("action", torch.tensor([0, 1]))

    expected = plain.rollout(20, policy, break_when_any_done=False)
    actual = TransformedEnv(other, StepCounter()).rollout(20, policy, break_when_any_done=False)
    assert torch.equal(expected["observation"], actual["observation"])
    assert actual["next", "step_count"].max() == 9
    plain.set_seed(7)
    assert not torch.equal(plain.rollout(20, policy, break_when_any_done=False)["observation"], expected["observation"])


def test_what_was_returned_may_be_written_to():
    env = to_torchrl(Ladder(), 1)
    first = env.reset()
    first["observation", "place"].fill_(9.0)
    assert env.step(first.set("action", torch.tensor([0])))["next", "observation", "place"][0, 1] == 1


def test_wrong_things_are_named():
    with pytest.raises(ValueError, match="num_envs=0 must be at least 1"):
        to_torchrl(CartPole(), 0)
    with pytest.raises(ValueError, match="cartpole is stepped on the host"):
        to_torchrl(HostEnv(CartPole()), 2)
    env = to_torchrl(CartPole(), 2)
    with pytest.raises(RuntimeError, match=r"cartpole: call reset\(\) before step"):
        env.step(env.fake_tensordict().exclude("next").set("action", torch.tensor([0, 1])))
    start = env.reset()
    with pytest.raises(ValueError, match=r"actions of shape \[2\], and these are \[2, 1\]"):
        env.step(start.set("action", torch.tensor([[0], [1]])))


@pytest.mark.parametrize(
    ("make", "key", "action", "told"),
    [
        (CartPole, "act", [0, 1], r"cartpole takes 'action' of shape \[2\], and step\(\) got \['act', 'done', 'observ"),
        (CartPole, "action", [0, 5], "cartpole takes integers from 0 to 1 as 'action', and these are from 0 to 5"),
        (CartPole, "action", [-1, 1], "integers from 0 to 1 as 'action', and these are from -1 to 1"),
        (
            CartPole,
            "action",
            [0.0, 1.0],
            "'action' of torch.int64, and this is torch.float32; let the policy write torch.int64",
        ),
        (Pendulum, "action", [[0.0], [math.nan]], r"finite numbers as 'action', and that of environment 1 is \[nan\]"),
        (Two, "action", [[3, 0], [0, 2]], r"two takes integers from 0 to \[3, 1\] as 'action'"),
    ],
)
def test_what_a_policy_writes_wrongly_is_named(make, key, action, told):
    env = to_torchrl(make(), 2)
    with pytest.raises(ValueError, match=told):
        env.rollout(3, lambda td: td.set(key, torch.tensor(action)))


def test_actions_may_have_another_dtype_and_lie_outside_the_bounds_of_an_environment_that_clips():
    rewards = []
    for action in (torch.tensor([[2.0], [-2.0]]), torch.tensor([[100.0], [-3.0]], dtype=torch.float64)):
        env = to_torchrl(Pendulum(), 2)
        rewards.append(env.step(env.reset().set("action", action))["next", "reward"])
    assert torch.equal(*rewards)
    env = to_torchrl(CartPole(), 2)
    env.step(env.reset().set("action", torch.tensor([0, 1], dtype=torch.int32)))

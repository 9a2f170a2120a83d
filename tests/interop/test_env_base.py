"""Tensor environments as TorchRL environments: TorchRL's own check, its collector, and torchpod's transitions."""

import math
import pickle
import warnings

import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.envs import RewardSum, StepCounter, TransformedEnv, check_env_specs

from torchpod import random
from torchpod.env import HostEnv, TensorEnv, where
from torchpod.envs import MAKERS, CartPole, Catch, Pendulum
from torchpod.envs.multi_agent.tag_gridworld import TagGridWorld
from torchpod.interop.env_base import to_torchrl
from torchpod.specs import Array, Box, Discrete, EnvSpec, MultiDiscrete
from torchpod.types import LAST

TENSOR = {name: m for name, m in MAKERS.items() if isinstance(m, type) and issubclass(m, TensorEnv)}


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


@pytest.mark.parametrize("name", TENSOR)
def test_torchrls_check_passes(name):
    check_env_specs(to_torchrl(TENSOR[name](), 3))


def test_a_dict_of_actions_is_refused_in_one_sentence():
    class Parts(Ladder):
        spec = EnvSpec("parts", Ladder.spec.observation, {"a": Discrete(2), "b": Discrete(3)}, 3)

    with pytest.raises(ValueError, match=r"parts has a dict of actions, \['a', 'b'\], and to_torchrl takes one Box"):
        to_torchrl(Parts(), 3)

    class Team(Ladder):
        spec = EnvSpec("team", {"us": Array((1,))}, {"us": Parts.spec.action}, 3, groups={"us": 2})

    with pytest.raises(ValueError, match=r"team has a dict of actions of us, \['a', 'b'\], and to_torchrl takes one"):
        to_torchrl(Team(), 3)


class Team(TensorEnv):
    """Two climbers and a guide; a climber who takes action 1 is out of the game, which ends when both are."""

    spec = EnvSpec(
        "team",
        {"climber": Array((1,)), "guide": {"seen": Array((2,))}},
        {"climber": Discrete(2), "guide": Box((1,), -1.0, 1.0)},
        4,
        groups={"climber": 2, "guide": 1},
    )

    def reset(self, keys):
        return torch.zeros(keys.shape[0], 2), torch.zeros(keys.shape[0], 2, dtype=torch.bool)

    def transition(self, state, action, keys):
        height, out = state
        reward = {"climber": height.clone(), "guide": action["guide"][..., 0]}
        return (height + 1 * ~out, out | (action["climber"] == 1)), reward, (out | (action["climber"] == 1)).all(-1)

    def observe(self, state):
        return {"climber": state[0][..., None], "guide": {"seen": state[0][:, None]}}

    def extras(self, state):
        return {"alive": {"climber": ~state[1], "guide": torch.ones_like(state[1][:, :1])}}


def test_agents_of_groups_have_keys_and_ends_of_their_own():
    env = to_torchrl(Team(), 2)
    check_env_specs(env)
    assert env.group_map == {"climber": ["climber_0", "climber_1"], "guide": ["guide_0"]}
    td = env.reset()
    assert td["climber"].batch_size == (2, 2) and td["guide", "observation", "seen"].shape == (2, 1, 2)
    seen, actions = [], [[[0, 1], [0, 0]], [[0, 0], [0, 0]], [[1, 0], [0, 0]], [[0, 0], [0, 0]]]
    for climbers in actions:
        td["climber", "action"], td["guide", "action"] = torch.tensor(climbers), torch.full((2, 1, 1), 0.5)
        td, following = env.step_and_maybe_reset(td)
        seen.append(td["next"])
        td = following
    mine, theirs = (torch.stack([x[i] for x in seen]) for i in (0, 1))
    assert mine["climber", "mask"].tolist() == [[True, False], [True, False], [False, False], [True, True]]
    assert mine["climber", "terminated"][..., 0].tolist() == (~mine["climber", "mask"]).tolist()
    assert mine["terminated"][:, 0].tolist() == [False, False, True, False]  # and begins anew after it
    assert mine["climber", "observation"][..., 0].tolist() == [[1, 1], [2, 1], [3, 1], [1, 1]]
    assert mine["climber", "reward"][..., 0].tolist() == [[0, 0], [1, 1], [2, 1], [0, 0]]
    assert mine["guide", "reward"][:, 0, 0].tolist() == [0.5] * 4
    assert mine["guide", "done"][:, 0, 0].tolist() == mine["done"][:, 0].tolist()
    assert theirs["truncated"][:, 0].tolist() == [False, False, False, True] and not theirs["terminated"].any()
    assert theirs["climber", "truncated"][-1, :, 0].all() and not theirs["climber", "terminated"].any()
    assert (td["climber", "observation"] == torch.tensor([1.0, 0.0])[:, None, None]).all()  # who was cut begins anew


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("climber", torch.zeros(2, dtype=torch.int64), r"takes \('climber', 'action'\) of shape \[2, 2\], and this is"),
        ("climber", torch.full((2, 2), 2), r"integers from 0 to 1 as \('climber', 'action'\), and these are from 2"),
        ("guide", torch.full((2, 1, 1), math.nan), r"finite numbers as \('guide', 'action'\)"),
        ("guide", None, r"takes \('guide', 'action'\) of shape \[2, 1, 1\], and step\(\) got .*let the policy write"),
    ],
)
def test_wrong_actions_of_an_agent_are_refused_with_their_key(key, value, told):
    env = to_torchrl(Team(), 2)
    td = env.reset()
    td["climber", "action"], td["guide", "action"] = torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2, 1, 1)
    if value is None:
        del td[key, "action"]
    else:
        td[key].batch_size = [2]
        td[key, "action"] = value
    with pytest.raises(ValueError, match=f"team .*{told}"):
        env.step(td)


@pytest.mark.filterwarnings("ignore:TensorDict.to_module:FutureWarning")  # of MultiAgentMLP in the oldest TorchRL
def test_a_rollout_of_torchrl_plays_games_of_tag(seed):
    """With a policy of TorchRL's for several agents, and its sums of rewards."""
    from torchrl.modules import MultiAgentMLP

    env = to_torchrl(TagGridWorld(num_taggers=3, grid_length=4, max_episode_steps=5), 4, seed=seed)
    keys = [(group, "reward") for group in env.group_map]
    env = TransformedEnv(env, RewardSum(in_keys=keys, out_keys=[(g, "episode_reward") for g in env.group_map]))
    check_env_specs(env)
    nets = []
    for group, names in env.group_map.items():
        net = MultiAgentMLP(17, 5, len(names), centralized=False, share_params=True, depth=1, num_cells=8)
        module = TensorDictModule(net, [(group, "observation")], [(group, "logits")])
        nets += [module, TensorDictModule(lambda x: x.argmax(-1), [(group, "logits")], [(group, "action")])]
    rollout = env.rollout(12, TensorDictSequential(*nets), break_when_any_done=False)
    assert rollout["tagger", "episode_reward"].shape == (4, 12, 3, 1)
    total, expected = torch.zeros(4, 3, 1), []
    for t in range(12):
        total = total + rollout["next", "tagger", "reward"][:, t]
        expected.append(total)
        total = total.masked_fill(rollout["next", "done"][:, t, None], 0.0)
    torch.testing.assert_close(rollout["next", "tagger", "episode_reward"], torch.stack(expected, 1))
    assert rollout["next", "done"].sum() >= 8


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


def test_one_that_goes_to_another_process_goes_on_there():
    env = to_torchrl(CartPole(), num_envs=4, seed=3)
    env.rollout(5, break_when_any_done=False)
    there = pickle.loads(pickle.dumps(env))
    torch.manual_seed(0)
    expected = env.rollout(5, break_when_any_done=False)
    torch.manual_seed(0)
    assert (there.rollout(5, break_when_any_done=False) == expected).all()


def test_one_that_is_sent_to_another_device_goes_on_there():
    env = to_torchrl(CartPole(), num_envs=3)
    env.reset()
    moved = TransformedEnv(env, StepCounter()).to("meta")  # where nothing is computed
    td = env.rand_action(env.fake_tensordict().exclude("next"))
    for found in (env._step(td), env._reset()):
        assert {x.device.type for x in found.values()} == {"meta"} == {moved.device.type}
    assert env._first_action.device.type == env._was_last.device.type == "meta"


def test_what_was_returned_may_be_written_to():
    env = to_torchrl(Ladder(), 1)
    first = env.reset()
    first["observation", "place"].fill_(9.0)
    assert env.step(first.set("action", torch.tensor([0])))["next", "observation", "place"][0, 1] == 1


def test_wrong_things_are_named():
    with pytest.raises(ValueError, match="num_envs=0 must be at least 1"):
        to_torchrl(CartPole(), 0)
    with pytest.raises(
        ValueError, match=r"takes an environment such as torchpod.envs.CartPole\(\), and got 'cartpole'"
    ):
        to_torchrl("cartpole", 2)
    with pytest.raises(ValueError, match="and got the class CartPole"):
        to_torchrl(CartPole, 2)
    with pytest.raises(ValueError, match="cartpole is stepped on the host"):
        to_torchrl(HostEnv(CartPole()), 2)
    env = to_torchrl(CartPole(), 2)
    with pytest.raises(RuntimeError, match=r"cartpole: call reset\(\) before step"):
        env.step(env.fake_tensordict().exclude("next").set("action", torch.tensor([0, 1])))
    start = env.reset()
    with pytest.raises(ValueError, match=r"of shape \[2\], and this is \[2, 1\]"):
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

"""Policies of many agents: each learns what its agent would learn alone from the rows of its own agents."""

import dataclasses
import re

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from torchpod import random
from torchpod.agent import variables_of
from torchpod.algos.multi_agent import IA2C, IPPO, MAPPO, IA2CConfig, IPPOConfig, MAPPOConfig
from torchpod.algos.ppo import PPO, PPOConfig
from torchpod.anakin import Anakin
from torchpod.compile import Compiler
from torchpod.compose import load
from torchpod.env import TensorEnv
from torchpod.envs import TagContinuous, TagGridWorld
from torchpod.envs.classic.cartpole import CartPole
from torchpod.learner import Learner, LearnerConfig
from torchpod.makers import make_agent, make_env
from torchpod.nets.nets import STATE
from torchpod.rollout import make_step, start, unroll
from torchpod.specs import Array, Box, Discrete, EnvSpec, MultiDiscrete
from torchpod.testing import check_agent, check_env
from torchpod.types import LAST, ActorOutput, TimeStep, Trajectory

CONFIGS = {IPPO: IPPOConfig, MAPPO: MAPPOConfig, IA2C: IA2CConfig}
AGENTS = [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("c", 0), ("c", 1)]
"""By number: their group, and their place in it."""
T, B = 12, 5


class Arena(TensorEnv):
    """Three agents with masks of which some fall out; one with two choices at once; and two more like the first."""

    numbers_of_c = 1
    spec = EnvSpec(
        "arena",
        observation={
            "a": {"x": Array((3,)), "action_mask": Array((4,), torch.bool)},
            "b": Array((2,)),
            "c": {"x": Array((3,)), "action_mask": Array((4,), torch.bool)},
        },
        action={"a": Discrete(4), "b": MultiDiscrete((2, 3)), "c": Discrete(4)},
        max_episode_steps=7,
        groups={"a": 3, "b": 1, "c": 2},
    )

    def reset(self, keys):
        return {"x": random.uniform(keys, 17), "alive": torch.ones(*keys.shape[:-1], 3, dtype=torch.bool)}

    def transition(self, state, action, keys):
        x = random.uniform(keys, 17)
        reward = {
            "a": state["x"][:, :3] * action["a"] * state["alive"],
            "b": action["b"].float().sum(-1) - state["x"][:, 4:5],
            "c": state["x"][:, 5:7] - action["c"].float().reshape(-1, 2, self.numbers_of_c).sum(-1),
        }
        return {"x": x, "alive": state["alive"] & (x[:, 14:] > 0.2)}, reward, x[:, 0] > 0.9

    def observe(self, state):
        x = state["x"]
        a, c = x[:, :9].unflatten(1, (3, 3)), x[:, 9:15].unflatten(1, (2, 3))
        return {"a": self._masked(a), "b": x[:, None, :2], "c": self._masked(c)}

    def extras(self, state):
        n = state["x"].shape[0]
        others = {g: torch.ones(n, k, dtype=torch.bool, device=state["x"].device) for g, k in (("b", 1), ("c", 2))}
        return {"alive": {"a": state["alive"]} | others}

    def _masked(self, x):
        return {"x": x, "action_mask": torch.arange(4, device=x.device) != (x[..., :1] * 4).long()}


class Pushed(Arena):
    """The last two act in a box."""

    numbers_of_c = 2
    spec = dataclasses.replace(
        Arena.spec,
        observation=Arena.spec.observation | {"c": {"x": Array((3,))}},
        action=Arena.spec.action | {"c": Box((2,), -1.0, 3.0)},
    )

    def observe(self, state):
        observation = super().observe(state)
        return observation | {"c": {"x": observation["c"]["x"]}}


ARENA, PUSHED = Arena(), Pushed()


def make(cls, seed, spec=Arena.spec, **config):
    torch.manual_seed(seed)
    agent = cls(spec, CONFIGS[cls](**{"hidden": (6,), "channels": ()} | config))
    with torch.no_grad():
        for x in agent.parameters():
            x.add_(0.3 * torch.randn_like(x))
    return agent


def rollout(agent, seed, env=ARENA):
    keys = random.split(random.key(seed), B)
    params, buffers = variables_of(agent)
    with torch.no_grad():
        step, carry = make_step(agent, env), start(agent, env, keys)
        return unroll(step, params | buffers, carry, keys, random.split(random.key(seed + 1), B), length=T)[1]


def learned(agent, trajectory, seed):
    """The parameters after an update with one minibatch."""
    settings = LearnerConfig(num_epochs=2, num_minibatches=1, learning_rate=0.1, max_grad_norm=1e9, epsilon=0.1)
    learner = Learner(agent, settings, num_iterations=9)
    state, metrics = learner.update(learner.init(*variables_of(agent)), trajectory, random.split(random.key(seed), B))
    return state, metrics


@pytest.mark.parametrize("env", [ARENA, PUSHED], ids=["arena", "pushed"])
def test_the_arena_keeps_the_contract(env):
    check_env(env, compile=False)


@pytest.mark.parametrize("cls", CONFIGS)
@pytest.mark.parametrize(
    ("env", "policies"), [(ARENA, None), (ARENA, {"one": [4, "a"], "two": ["b"], "three": [5]}), (PUSHED, None)]
)
def test_every_agent_keeps_the_contract(cls, env, policies):
    check_agent(make(cls, 0, spec=env.spec, policies=policies), env, compile=False)


@pytest.mark.parametrize("recurrent", [0, 3])
@pytest.mark.parametrize(
    ("env", "policies"),
    [
        (ARENA, None),
        (ARENA, {"one": [4, 1, 0], "two": [3], "three": [5, 2]}),
        (ARENA, {"all": ["c", "a"], "b": ["b"]}),
        (PUSHED, {"one": [5], "a": ["a"], "two": [3], "three": [4]}),
        (PUSHED, None),
    ],
    ids=["groups", "mixed", "shared", "boxes", "box"],
)
def test_an_agent_acts_as_its_policy_says_and_by_its_own_key(seed, env, policies, recurrent):
    """Row by row, and agent by agent."""
    agent = make(IPPO, seed, spec=env.spec, policies=policies, recurrent=recurrent)
    keys = random.split(random.key(seed), B)
    _, timestep = env.init(keys)
    state = pytree.tree_map(lambda x: torch.rand_like(x), agent.initial_state(B))
    timestep = timestep._replace(step_type=timestep.step_type + 1)
    out, after = agent.act(timestep, state, keys)
    seen = set()
    for name, own in (policies or {g: [g] for g in ("a", "b", "c")}).items():
        numbers = [i for a in own for i, (g, _) in enumerate(AGENTS) if a in (i, g)]
        policy, ordered = agent.policies[name], sorted(numbers, key=lambda i: AGENTS[i][0])
        for place, i in enumerate(ordered):
            group, k = AGENTS[i]
            observation = pytree.tree_map(lambda x, k=k: x[:, k], timestep.observation[group])
            rows = TimeStep(
                timestep.step_type, timestep.reward[group][:, k], timestep.discount[group][:, k], observation, {}
            )
            memory = state[name][:, place] if recurrent else ()
            expected, memory = policy.act(rows, memory, random.fold_in(keys, i))
            torch.testing.assert_close(out.action[group][:, k], expected.action)  # whole numbers are equal
            torch.testing.assert_close(out.extras[name]["state_value"][:, place], expected.extras["state_value"])
            if recurrent:
                torch.testing.assert_close(after[name][:, place], memory)
            seen.add(i)
    assert seen == set(range(6))


def alone(trajectory, name, numbers):
    """What a policy's agents saw and did, as a trajectory of an environment with one agent; and who was alive."""
    t, rows, alive = trajectory.timestep, [], []
    for place, i in enumerate(numbers):
        group, k = AGENTS[i]

        def one(tree, group=group, k=k):
            return pytree.tree_map(lambda x: x[:, :, k], tree[group])

        out = pytree.tree_map(lambda x, place=place: x[:, :, place], trajectory.output.extras[name])
        timestep = TimeStep(t.step_type, one(t.reward), one(t.discount), one(t.observation), {})
        rows.append(Trajectory(timestep, ActorOutput(one(trajectory.output.action), out), (), ()))
        alive.append(t.extras["alive"][group][:-1, :, k])
    whole = pytree.tree_map(lambda *x: torch.cat(x, 1), *rows)
    return whole, torch.cat(alive, 1)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(
    ("env", "policies"),
    [
        (ARENA, {"one": [0, 1, 4], "two": [3], "three": [2, 5]}),
        (PUSHED, {"one": [0, 1, 2], "two": [3], "three": [4, 5]}),
    ],
    ids=["arena", "pushed"],
)
def test_each_policy_takes_the_step_that_its_agent_takes_alone(seed, env, policies, normalize):
    """With the rows of its agents alone; those of an agent that is out of the game are none."""
    config = {"normalize_advantage": normalize, "entropy_coefficient": 0.1}
    agent = make(IPPO, seed, spec=env.spec, policies=policies, **config)
    trajectory = rollout(agent, seed, env)
    state, metrics = learned(agent, trajectory, seed)
    for name, numbers in policies.items():
        rows, alive = alone(trajectory, name, numbers)
        single = agent.policies[name]
        assert isinstance(single, PPO)
        prepare = single.prepare

        def masked(trajectory, keys, prepare=prepare, alive=alive):
            batch = prepare(trajectory, keys)
            return batch._replace(steps=batch.steps | {"weight": batch.steps["weight"] * alive})

        single.prepare = masked
        keys = random.split(random.key(seed), alive.shape[1])
        settings = LearnerConfig(num_epochs=2, num_minibatches=1, learning_rate=0.1, max_grad_norm=1e9, epsilon=0.1)
        learner = Learner(single, settings, num_iterations=9)
        expected, told = learner.update(learner.init(*variables_of(single)), rows, keys)
        single.prepare = prepare
        for key, x in expected.params.items():
            torch.testing.assert_close(state.params[f"policies.{name}.{key}"], x, rtol=1e-4, atol=1e-5)
        for key in ("entropy", "value_loss"):
            torch.testing.assert_close(metrics[f"{name}/{key}"], told[key], rtol=1e-4, atol=1e-5)
        before = dict(single.named_parameters())
        assert all((expected.params[key] - before[key]).any() for key in before)


def test_each_policy_is_asked_for_its_loss_once_in_an_update(seed, monkeypatch):
    asked, loss = [], PPO.loss
    monkeypatch.setattr(PPO, "loss", lambda self, *args: [asked.append(self), loss(self, *args)][1])
    agent = make(IPPO, seed, policies={"one": [0, 1], "two": [3], "three": [2], "four": [4], "five": [5]})
    learned(agent, rollout(agent, seed), seed)
    assert len(asked) == 2 * 5 and len(set(asked)) == 5  # two epochs


def test_who_is_out_of_the_game_teaches_nothing_and_has_no_value_after_it(seed):
    agent = make(IPPO, seed)
    trajectory = rollout(agent, seed)
    alive, t = trajectory.timestep.extras["alive"]["a"], trajectory.timestep
    assert not alive.all()
    batch = agent.prepare(trajectory, random.split(random.key(seed), B))
    real = t.step_type[:-1] != LAST
    assert torch.equal(batch.steps["a/weight"], (alive[:-1] & real[..., None]).float())
    assert torch.equal(batch.steps["c/weight"], real[..., None].float().expand(-1, -1, 2))
    falls = alive[:-1] & ~alive[1:] & real[..., None]
    assert falls.any()
    value = trajectory.output.extras["a"]["state_value"]
    torch.testing.assert_close(batch.steps["a/advantage"][falls], (t.reward["a"][1:] - value)[falls])
    state, _ = learned(agent, trajectory, seed)
    noise = torch.where(alive[..., None], t.observation["a"]["x"], torch.rand_like(t.observation["a"]["x"]))
    observation = t.observation | {"a": t.observation["a"] | {"x": noise}}
    reward = t.reward | {"a": torch.where(torch.cat([alive[:1], alive[:-1]]), t.reward["a"], 99.0)}
    other, _ = learned(agent, trajectory._replace(timestep=t._replace(observation=observation, reward=reward)), seed)
    for name, x in state.params.items():
        torch.testing.assert_close(other.params[name], x, msg=name)


def test_a_policy_that_is_not_trained_stays_as_it_is(seed):
    agent = make(IPPO, seed, policies={"a": {"train": False}, "b": {"entropy_coefficient": 0.7}})
    names = variables_of(agent)[0]
    assert names and not any(name.startswith("policies.a.") for name in names)
    assert list(agent.optimizer_groups()) == ["b", "c"]
    own = [agent.policies[name].entropy_coefficient.item() for name in "abc"]
    np.testing.assert_allclose(own, [0.01, 0.7, 0.01])
    before = variables_of(agent)[1]
    trajectory = rollout(agent, seed)
    state, metrics = learned(agent, trajectory, seed)
    assert all(torch.equal(x, state.buffers[name]) for name, x in before.items())
    told = {name.removeprefix("a/") for name in metrics if name.startswith("a/")}
    assert "policies.a.policy.weight" in before
    assert told == {"reward_mean", "reward_min", "reward_max", "explained_variance"}  # it has no loss
    t = trajectory.timestep
    counts = t.extras["alive"]["a"][:-1] & (t.step_type[:-1] != LAST)[..., None]
    assert not counts.all()
    reward = t.reward["a"][1:][counts].double()
    for name, x in (("mean", reward.mean()), ("min", reward.min()), ("max", reward.max())):
        torch.testing.assert_close(metrics[f"a/reward_{name}"].double(), x)
    assert metrics["a/explained_variance"].isnan()


def test_running_statistics_are_of_who_is_in_the_game(seed):
    policies = {"one": [0, 1, 4], "two": [3], "three": [2, 5]}
    agent = make(IPPO, seed, policies=policies, normalize_observation=True, normalize_reward=True)
    trajectory = rollout(agent, seed)
    state, _ = learned(agent, trajectory, seed)
    for name, numbers in policies.items():
        rows, alive = alone(trajectory, name, numbers)
        assert name == "two" or not alive.all()
        seen, place = rows.timestep.observation, "observation"
        if isinstance(seen, dict):
            seen, place = seen["x"], "x"
        learned_from = alive & (rows.timestep.step_type[:-1] != LAST)
        later = rows.output.extras["discounted_return"] * 0.99 + rows.timestep.reward[1:]
        expected = {f"normalizer.moments.{place}": seen[:-1][alive], "return_moments": later[learned_from]}
        for module, x in expected.items():
            found = [state.buffers[f"policies.{name}.{module}.{k}"] for k in ("total", "mean", "variance")]
            x = x.double()
            for a, b in zip(found, (torch.tensor(len(x)).double(), x.mean(0), x.var(0, correction=0)), strict=True):
                torch.testing.assert_close(a, b)


def test_what_an_agent_gets_as_it_leaves_counts_among_the_returns(seed):
    """Of runners it is all there is: with other rewards 0, they would be divided by next to nothing."""
    env = TagContinuous(
        num_taggers=3, num_runners=4, num_other_agents_observed=2, tagging_distance=0.3, grid_length=5.0
    )
    agent = make(IPPO, seed, spec=env.spec, normalize_reward=True)
    trajectory = rollout(agent, seed, env)
    tags = (trajectory.timestep.reward["runner"][1:] == -10.0).sum()
    assert tags > 0
    state, _ = learned(agent, trajectory, seed)
    total, mean = (state.buffers[f"policies.runner.return_moments.{k}"] for k in ("total", "mean"))
    torch.testing.assert_close(mean * total, -10.0 * tags.double())


def test_the_first_step_of_a_policy_whose_agents_come_late_is_as_long_as_its_learning_rate(seed):
    """As Adam's first step is, also after a hundred steps of the other policies."""
    agent = make(IPPO, seed)
    trajectory = rollout(agent, seed)
    rate = 0.01
    settings = LearnerConfig(1, 1, learning_rate=rate, anneal_learning_rate=False, max_grad_norm=1e9, epsilon=1e-12)
    learner = Learner(agent, settings, num_iterations=9)
    keys = random.split(random.key(seed), B)
    begin = learner.init(*variables_of(agent))
    late = begin._replace(num_steps=begin.num_steps + 100, taken=begin.taken | {"b": begin.num_steps + 100})
    steps = {}
    for name, state in {"at once": begin, "late": late}.items():
        after, _ = learner.update(state, trajectory, keys)
        steps[name] = {k: after.params[k] - x for k, x in state.params.items()}
    for name, step in steps["late"].items():
        same = torch.equal(step, steps["at once"][name])
        assert same == (not name.startswith("policies.b.")), name  # 1 - beta^101 divides by more than that of one step
    longest = max(float(x.abs().max()) for name, x in steps["late"].items() if name.startswith("policies.a."))
    assert longest == pytest.approx(rate, rel=1e-3)


def test_a_policy_that_nobody_in_a_minibatch_follows_stays_as_it_is(seed):
    """Its optimizer, too, although it has moments; and what it tells is of the minibatches in which it learns."""
    agent = make(IPPO, seed)
    trajectory = rollout(agent, seed)
    settings = LearnerConfig(num_epochs=1, num_minibatches=3, learning_rate=0.1, anneal_learning_rate=False)
    learner = Learner(agent, settings, num_iterations=9)
    keys = random.split(random.key(seed), B)
    state, whole = learner.update(learner.init(*variables_of(agent)), trajectory, keys)
    alive, t = trajectory.timestep.extras["alive"], trajectory.timestep
    gone = {"alive": alive | {"a": torch.zeros_like(alive["a"])}}
    after, none = learner.update(state, trajectory._replace(timestep=t._replace(extras=t.extras | gone)), keys)
    for name, x in state.params.items():
        assert torch.equal(x, after.params[name]) == name.startswith("policies.a."), name
    for moments in ("mu", "nu"):
        same = {group: torch.equal(x, getattr(after, moments)[group]) for group, x in getattr(state, moments).items()}
        assert same == {"a": True, "b": False, "c": False}
    of_a = {name for name in none if name.startswith("a/") or name.endswith("/a")}
    assert {"a/entropy", "a/value_loss", "loss/a", "grad_norm/a"} < of_a and all(none[name].isnan() for name in of_a)
    assert all(whole[name].isfinite() for name in of_a) and all(none[x].isfinite() for x in none.keys() - of_a)
    assert {name: int(n) for name, n in after.taken.items()} == {"a": 3, "b": 6, "c": 6} and after.num_steps == 6
    # In the first step alone somebody follows it: of T minibatches, with a row of each environment, it is in few.
    first = torch.zeros_like(alive["a"])
    first[0] = alive["a"][0]
    rare = trajectory._replace(timestep=t._replace(extras=t.extras | {"alive": alive | {"a": first}}))
    still = dataclasses.replace(settings, num_minibatches=T, learning_rate=0.0)
    _, told = Learner(agent, still, num_iterations=9).update(state, rare, keys)
    entropies = []
    counted = Learner(agent, still, num_iterations=9)
    apply = counted._apply_one

    def recorded(state, flat):
        new, metrics = apply(state, flat)
        entropies.append(metrics[counted._metric_names.index("a/entropy")])
        return new, metrics

    counted._apply = recorded
    counted.update(state, rare, keys)
    found = torch.stack(entropies)
    assert 0 < found.isnan().sum() < T == len(found)
    torch.testing.assert_close(told["a/entropy"], found[~found.isnan()].mean())


def test_statistics_begin_with_the_first_who_follows_a_policy(seed):
    """PettingZoo's agents may come late."""
    agent = make(IPPO, seed, normalize_observation=True, normalize_reward=True)
    trajectory = rollout(agent, seed)
    alive, t = trajectory.timestep.extras["alive"], trajectory.timestep
    gone = t.extras | {"alive": alive | {"a": torch.zeros_like(alive["a"])}}
    before, _ = learned(agent, trajectory._replace(timestep=t._replace(extras=gone)), seed)
    own = [f"policies.a.{x}" for x in ("return_moments", "normalizer.moments.x")]
    for name in own:
        assert before.buffers[f"{name}.total"] == 0 and not before.buffers[f"{name}.mean"].any()
        assert (before.buffers[f"{name}.variance"] == 1).all()
    agent.load_state_dict(before.params | before.buffers)
    after, fresh = (
        learned(agent, trajectory, seed)[0],
        make(IPPO, seed, normalize_observation=True, normalize_reward=True),
    )
    expected, _ = learned(fresh, trajectory, seed)
    for name in (f"{x}.{field}" for x in own for field in ("total", "mean", "variance")):
        torch.testing.assert_close(after.buffers[name], expected.buffers[name])
    assert after.healthy


@pytest.mark.parametrize("names", [("played", "z", "c"), ("buffer", "policy", "share")])
def test_a_policy_may_have_any_name(seed, names):
    """Also one that the learner uses for columns of its own."""
    first, second, third = names
    agent = make(IPPO, seed, policies={first: ["a"], second: ["b"], third: ["c"]})
    trajectory = rollout(agent, seed)
    alive, t = trajectory.timestep.extras["alive"], trajectory.timestep
    gone = t.extras | {"alive": alive | {"a": torch.zeros_like(alive["a"])}}
    state, metrics = learned(agent, trajectory._replace(timestep=t._replace(extras=gone)), seed)
    assert {name: bool(x.any()) for name, x in state.mu.items()} == {first: False, second: True, third: True}
    assert all(f"{name}/entropy" in metrics for name in names)


def test_values_of_mappo_see_choices_as_a_one_among_zeros(seed):
    spec = EnvSpec(
        "rooms",
        {"a": Discrete(4), "b": {"at": Discrete(3), "image": Array((2,), torch.uint8)}},
        {"a": Discrete(2), "b": Discrete(2)},
        groups={"a": 2, "b": 1},
    )
    agent = make(MAPPO, seed, spec=spec)
    at, other = torch.randint(4, (5, 2)), {"at": torch.randint(3, (5, 1)), "image": torch.full((5, 1, 2), 51).byte()}
    zero = {"a": torch.zeros(5, 2), "b": torch.zeros(5, 1)}
    timestep = TimeStep(torch.ones(5, dtype=torch.int64), zero, zero, {"a": at, "b": other}, {})
    state = agent._rows(timestep, agent._members["a"], 0).observation[STATE]
    eye = torch.nn.functional.one_hot
    expected = torch.cat([eye(at, 4).flatten(1), eye(other["at"][:, 0], 3), torch.full((5, 2), 0.2)], 1)
    torch.testing.assert_close(state.unflatten(0, (5, 2))[:, 0], expected.float())


def test_values_of_mappo_see_everybody_and_its_policies_do_not(seed):
    agent, keys = make(MAPPO, seed), random.split(random.key(seed), B)
    _, timestep = ARENA.init(keys)
    said = [agent.act(timestep, agent.initial_state(B), keys)[0]]
    other = timestep.observation | {"b": timestep.observation["b"] + 1}
    said.append(agent.act(timestep._replace(observation=other), agent.initial_state(B), keys)[0])
    for name in "ac":
        assert torch.equal(said[0].action[name], said[1].action[name])
        first, second = (out.extras[name] for out in said)
        assert torch.equal(first["action_log_prob"], second["action_log_prob"])
        assert (first["state_value"] != second["state_value"]).all()
    assert agent.policies["a"].value_encoder.net[0].in_features == 3 + 3 * 3 + 2 + 2 * 3
    alone = make(IPPO, seed)
    values = [
        alone.act(timestep._replace(observation=x), alone.initial_state(B), keys)[0].extras["a"]["state_value"]
        for x in (timestep.observation, other)
    ]
    assert torch.equal(*values)


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        (
            {"one": [0, 1, 2, 3, 4]},
            r"agents \[5\] have no policy in \['one'\]; arena has agents 0 to 5 in groups a \(3\)",
        ),
        ({"one": ["a", "b", "c"], "two": [5]}, "agent 5 of arena has policies one and two; give it one of them"),
        ({"one": ["a", "a"], "two": ["b", "c"]}, "agent 0 of arena has policies one and one"),
        ({"one": [6]}, r"policy one has agents \[6\], and arena has agents 0 to 5"),
        ({"one": ["d"]}, r"policy one has agents \['d'\], and arena has agents"),
        ({"one": []}, r"policy one has agents \[\], and arena has agents"),
        ({"one": {"train": True}}, "policy one has agents None, and arena has agents"),
        ({"one": 0.5}, r"policy one has agents \[0.5\], and arena has agents"),
        ({"one": {"agents": 2.5}}, r"policy one has agents \[2.5\], and arena has agents"),
        ({"one": [True, 0]}, r"policy one has agents \[True, 0\], and arena has agents"),
        ({"one": {"agents": {"a": 1}}}, r"policy one has agents \[\{'a': 1\}\], and arena has agents"),
        ({"one": [["a"]]}, r"policy one has agents \[\['a'\]\], and arena has agents"),
        ({"loss": ["a", "b", "c"]}, "policy 'loss' must have a name .* and not one like train, loss or done"),
        ({"next": ["a", "b", "c"]}, "policy 'next' must have a name .* and not one like train, loss or done"),
        ({"grad_norm": ["a", "b", "c"]}, "policy 'grad_norm' must have a name"),
        (
            {"one": ["a", "b"], "c": ["c"]},
            "policy one has agents of a and of b, which do not observe or act alike in ar",
        ),
        ({"a": {"clipp": 1}}, "policies.a.clipp is no setting; known: activation, agents, "),
        (
            {"a": {"learning_rate": 1e-3}, "b": {"train": False}},
            r"policies.a.learning_rate is the learner's; write algo.learner.learning_rate=\{a: ..., c: ...\}, with a",
        ),
        (dict.fromkeys("abc", {"train": False}), r"policies \['a', 'b', 'c'\] are all train: false; IPPO has nothing"),
        (
            {"a": {"reuse_forward": True}},
            "policy a asks for reuse_forward, which policies of many agents cannot have; tu",
        ),
        (
            {"train": ["a"], "c": ["b", "c"]},
            "policy 'train' must have a name of letters, digits and underscores, and not",
        ),
        ({1: ["a"], "c": ["b", "c"]}, "policy 1 must have a name of letters"),
        ({"one": [0.5]}, r"policy one has agents \[0.5\], and arena has agents 0 to 5"),
        ({"a/b": ["a"], "c": ["b", "c"]}, "policy 'a/b' must have a name of letters"),
        ({"a": {"recurrent": 3}}, r"of the policies \['a', 'b', 'c'\] some are recurrent; let all of them be, or none"),
    ],
)
def test_policies_that_cannot_work_are_refused(policies, message):
    with pytest.raises(ValueError, match=message):
        make(IPPO, 0, policies=policies)


@pytest.mark.parametrize("group", ["left/team", "train", "loss"])
def test_a_group_whose_name_no_policy_can_have_needs_one_of_another(group):
    spec = EnvSpec("game", {group: Array((2,))}, {group: Discrete(2)}, groups={group: 2})
    with pytest.raises(
        ValueError, match=rf"not one like train, loss or done; give the .*: policies={{NAME: \[{group}\]}}\."
    ):
        make(IPPO, 0, spec=spec)
    assert make(IPPO, 0, spec=spec, policies={"name": [group]}).policy_groups == ("name",)


@pytest.mark.parametrize("cls", [IPPO, MAPPO])
def test_observations_of_two_levels_are_refused_with_what_to_do(cls):
    inner = {"a": {"b": Array((1,)), "c": Array((1,))}}
    spec = EnvSpec(
        "game", {"x": Array((2,)), "y": inner}, {"x": Discrete(2), "y": Discrete(2)}, groups={"x": 1, "y": 1}
    )
    with pytest.raises(ValueError, match=r"observation\['a'\] has entries of its own.*transforms=\[flatten\]"):
        make(cls, 0, spec=spec)


def test_policies_are_for_many_agents_and_need_their_own_values():
    with pytest.raises(ValueError, match="of agents, and cartpole has one agent; use algo=ppo"):
        make(IPPO, 0, spec=CartPole().spec)
    for config in ({"shared": True}, {"recurrent": 4}):
        with pytest.raises(ValueError, match="values of a of arena see what its policy does not, and need an encoder"):
            make(MAPPO, 0, **config)
    assert {f.name for f in dataclasses.fields(IPPOConfig)} - {"policies"} == {
        f.name for f in dataclasses.fields(PPOConfig)
    }


def a2c_loss(reward, discount, last, value, bootstrap, logits, action, weight, *, entropy_coefficient):
    """`mean(-log pi A) + mean((R - V)^2) - c_e mean H` of an unroll `[T, B, N]`, in plain NumPy.

    R is the discounted sum of rewards up to the end of the episode or unroll, and from there on V of the state behind.
    Of actions `[T, B, N, H]` there are H choices, each with its logits.
    """
    length, total = len(reward), np.zeros_like(reward)
    behind = bootstrap
    for t in reversed(range(length)):
        # where the time limit ends an episode, V of its last state stands for what would have followed
        behind = np.where(last[t][:, None], value[t + 1] if t + 1 < length else bootstrap, behind)
        total[t] = behind = reward[t] + 0.98 * discount[t] * behind
    log_prob, entropy = np.zeros_like(reward), np.zeros_like(reward)
    for h, x in enumerate(logits):
        p = np.exp(x - x.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        log_prob += np.log(np.take_along_axis(p, action[..., h, None], -1)[..., 0])
        entropy -= (p * np.log(np.where(p > 0, p, 1.0))).sum(-1)
    rows = -log_prob * (total - value) + (total - value) ** 2 - entropy_coefficient * entropy
    return (rows * weight).sum() / weight.sum()


@pytest.mark.parametrize(
    ("task", "num_envs", "batch", "hidden", "clip", "rates"),
    [
        ("tag_gridworld", 2000, 200_000, [32, 32], 3.0, 1e-3),
        ("tag_continuous", 100, 25_000, [256, 256], 0.5, {"runner": 5e-3, "tagger": 1e-3}),
        ("covid_economy", 60, 5_400, [256, 256], 0.5, 1e-4),
    ],
)
def test_experiments_have_the_numbers_of_warpdrives_files(task, num_envs, batch, hidden, clip, rates):
    config = load([f"experiment=ia2c_{task}"])
    agent, learner = config.algo.agent, config.algo.learner
    assert config.num_envs == num_envs and config.num_envs * config.algo.unroll_length == batch
    assert (list(agent["hidden"]), agent["activation"], agent["shared"]) == (hidden, "relu", True)
    assert (agent["discount"], agent["gae_lambda"], agent["normalize_advantage"]) == (0.98, 1.0, False)
    assert (agent["value_coefficient"] / 2, agent["entropy_coefficient"]) == (1.0, 0.05)  # our value loss has a 1/2
    assert (learner.num_epochs, learner.num_minibatches, learner.max_grad_norm) == (1, 1, clip)
    assert (learner.learning_rate, learner.anneal_learning_rate, learner.epsilon) == (rates, False, 1e-8)
    env = make_env(config.env)
    if task == "tag_continuous":
        assert env.spec.groups == {"tagger": 10, "runner": 100} and env.spec.max_episode_steps == 500
    if task == "covid_economy":
        points = ((0.0, 0.5), (5e7, 0.05))
        assert learner.schedules == {"policies.planner.entropy_coefficient": points}


@pytest.mark.parametrize(
    ("experiment", "overrides", "policies"),
    [
        ("ia2c_tag_gridworld", ("env.grid_length=6",), {"everybody": (["tagger", "runner"], 0.05)}),
        (
            "ia2c_tag_continuous",
            ("env.num_taggers=3", "env.num_runners=5", "env.num_other_agents_observed=4", "env.tagging_distance=0.2"),
            {"tagger": (["tagger"], 0.05), "runner": (["runner"], 0.05)},
        ),
        ("ia2c_covid_economy", (), {"governor": (["governor"], 0.05), "planner": (["planner"], 0.5)}),
    ],
)
def test_the_loss_with_warpdrives_settings_is_the_one_that_their_files_state(seed, experiment, overrides, policies):
    config = load([f"experiment={experiment}", "env.max_episode_steps=5", "algo.unroll_length=9", *overrides])
    env = make_env(config.env)
    anakin = Anakin(
        make_agent(config.algo, env.spec),
        env,
        num_envs=3,
        unroll_length=9,
        learner=config.algo.learner,
        num_iterations=9,
        compiler=Compiler(False),
    )
    state = anakin.init(seed)
    _, trajectory = anakin.rollout(state)
    _, metrics = anakin.learner.update(state.learner, trajectory, state.learner_keys)
    agent = make_agent(config.algo, env.spec)()
    agent.load_state_dict(state.learner.params | state.learner.buffers)
    t, expected = trajectory.timestep, {}
    for name, (groups, coefficient) in policies.items():

        def numbers(tree, groups=groups):
            return np.concatenate([tree[g].detach().numpy() for g in groups], 2)

        observation = [t.observation[g] for g in groups]
        observation = pytree.tree_map(lambda *x: torch.cat(x, 2), *observation)
        with torch.no_grad():
            logits, value = agent.policies[name]._sequence(observation, torch.zeros(()), ())
        weight = np.broadcast_to((t.step_type[:-1] != LAST).numpy()[..., None], value[:-1].shape)
        if "alive" in t.extras:
            weight = weight * numbers(t.extras["alive"])[:-1]
        action = numbers(trajectory.output.action)
        choices = env.spec.action[groups[0]]
        sizes = choices.nvec if isinstance(choices, MultiDiscrete) else (choices.num_values,)
        expected[name] = a2c_loss(
            numbers(t.reward)[1:].astype(np.float64),
            numbers(t.discount)[1:],
            (t.step_type[1:] == LAST).numpy(),
            value[:-1].numpy(),
            value[-1].numpy(),
            [x.double().numpy() for x in logits[:-1].split(sizes, -1)],
            action.reshape(*value[:-1].shape, len(sizes)),
            weight,
            entropy_coefficient=coefficient,
        )
    assert (t.step_type == LAST).any()
    for name, loss in expected.items():
        np.testing.assert_allclose(metrics[f"loss/{name}"], loss, rtol=2e-4)


SAID = {
    "nothing of a policy": (
        lambda extras: {"runner": extras["runner"]},
        "Own needs extras['tagger'], a dict of what policy tagger says, and act returned only ['runner']; let act",
    ),
    "no log-prob": (
        lambda extras: extras | {"tagger": {"state_value": extras["tagger"]["state_value"]}},
        "PPO needs extras['action_log_prob'] of shape [T, B], here [5, 16], and act returned only ['state_value']; let",
    ),
    "one number for all agents": (
        lambda extras: extras | {"tagger": {k: x.sum(1) for k, x in extras["tagger"].items()}},
        "Own needs extras['tagger']['action_log_prob'] of shape [T, B, N, ...], here [5, 4, 4], and it has shape "
        "[5, 4]; let act give each agent of policy tagger its own, [B, N, ...].",
    ),
}


@pytest.mark.parametrize("what", SAID)
def test_what_an_act_of_ones_own_does_not_say_of_agents_is_named(what):
    said, told = SAID[what]

    class Own(IPPO):
        def act(self, *args, **kwargs):
            output, state = super().act(*args, **kwargs)
            return output._replace(extras=said(output.extras)), state

    env = TagGridWorld()
    with pytest.raises(ValueError, match=re.escape(told)):
        check_agent(Own(env.spec, IPPOConfig(hidden=(4,))), env, num_envs=4, unroll_length=5, quick=True)

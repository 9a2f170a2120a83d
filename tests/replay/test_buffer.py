"""The replay buffer against Python lists that keep all there ever was."""

import contextlib
import ctypes
import gc
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch.utils import _pytree as pytree

from torchpod import random
from torchpod.agent import Agent
from torchpod.compile import Compiler
from torchpod.env import TensorEnv
from torchpod.replay import Priorities, ReplayBuffer, ReplayConfig, memory, sum_tree
from torchpod.rollout import make_step, start, unroll
from torchpod.specs import Array, Discrete, EnvSpec
from torchpod.types import FIRST, LAST, MID, ActorOutput

B, T = 3, 4
"""Environments, and steps per iteration."""
EVENLY, PRIORITISED = False, True


class Short(TensorEnv):
    """Random observations and rewards; episodes of one to six steps that terminate or are truncated."""

    spec = EnvSpec("short", {"x": Array((2,)), "n": Array(())}, Discrete(3), max_episode_steps=6)

    def reset(self, keys):
        return random.normal(keys, 4)

    def transition(self, state, action, keys):
        new = random.normal(keys, 4)
        return new, state[:, 0] + action, new[:, 3] > 0.7

    def observe(self, state):
        return {"x": state[:, :2], "n": state[:, 2].contiguous()}


class Player(Agent):
    """Plays at random. Its memory counts steps, so that every state is another."""

    def initial_state(self, batch_size):
        return {"h": torch.zeros(batch_size, 2)}

    def act(self, timestep, state, keys, explore=True):
        words = random.bits(keys, 1)[:, 0]
        h = state["h"] + torch.tensor([1.0, 0.0]) + timestep.observation["x"] * torch.tensor([0.0, 1.0])
        extras = {"log_prob": random.to_uniform(words)}
        return ActorOutput(random.to_integer(words, 3), extras), {"h": h}


def rollouts(seed, num, num_envs=B, length=T):
    """Trajectories of so many iterations, which follow upon each other."""
    agent, env = Player(), Short()
    env_keys, actor_keys = (random.split(random.key(seed + i), num_envs) for i in range(2))
    carry, step = start(agent, env, env_keys), make_step(agent, env)
    for _ in range(num):
        carry, trajectory = unroll(step, {}, carry, env_keys, actor_keys, length=length)
        yield trajectory


class Reference:
    """Everything that was ever seen, by time; and what may be sampled."""

    def __init__(self, ring):
        self.ring, self.timesteps, self.outputs, self.states = ring, [], [], []

    def insert(self, trajectory):
        for t in range(T):
            self.timesteps.append(pytree.tree_map(lambda x, t=t: x[t], trajectory.timestep))
            self.outputs.append(pytree.tree_map(lambda x, t=t: x[t], trajectory.output))
        self.states.append(trajectory.actor_state)

    def starts(self):
        """All (t, b) where windows may begin: complete, among the newest steps, and for rows at no reset."""
        now, r = len(self.timesteps), self.ring
        times = [t for t in range(max(0, now - r.window), now) if t + r.length <= now - 1]
        if r.sequences:
            return {(t, b) for t in times if t % T == 0 for b in range(B)}
        return {(t, b) for t in times for b in range(B) if self.timesteps[t].step_type[b] != LAST}

    def leaf(self, t, b):
        unit = T if self.ring.sequences else 1
        return t % self.ring.num_slots // unit * B + b

    def starts_by_leaf(self):
        by_leaf = {self.leaf(t, b): (t, b) for t, b in self.starts()}
        assert len(by_leaf) == len(self.starts())  # no two in one place
        return by_leaf

    def assert_windows(self, sample, starts):
        """The windows of a sample are those that begin at `starts`."""
        trajectory = sample.trajectory
        for k, (t, b) in enumerate(starts):
            for i in range(self.ring.length + 1):
                want = self.timesteps[t + i]._replace(extras={})
                assert_same(pytree.tree_map(lambda x, b=b: x[b], want), at(trajectory.timestep, i, k))
                if i < self.ring.length:
                    want = pytree.tree_map(lambda x, b=b: x[b], self.outputs[t + i])
                    assert_same(want, at(trajectory.output, i, k))
            if self.ring.sequences:
                want = pytree.tree_map(lambda x, t=t, b=b: x[b], self.states[t // T]), ()
            else:
                want = (), ()
            got = pytree.tree_map(lambda x, k=k: x[k], trajectory.actor_state), trajectory.last_actor_state
            assert_same(want, got)
        assert trajectory.timestep.step_type.shape == (self.ring.length + 1, len(starts))
        assert trajectory.output.action.shape == (self.ring.length, len(starts))


def at(tree, i, k):
    return pytree.tree_map(lambda x: x[i, k], tree)


def assert_same(want, got):
    wanted, spec = pytree.tree_flatten(want)
    found, other = pytree.tree_flatten(got)
    assert spec == other
    for a, b in zip(wanted, found, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def make(prioritised=EVENLY, length=1, sequences=False, capacity=60, slack=2, **config):
    config = ReplayConfig(**({"capacity": capacity, "min_size": 1, "prioritised": prioritised} | config))
    size = {"num_envs": B, "unroll_length": T, "length": length, "slack": slack}
    return ReplayBuffer(config, sequences=sequences, **size)


def draw(ring, priorities, iteration, num, key, beta=0.4):
    return ring.sample(ring.storage, priorities, torch.tensor(iteration), torch.tensor(beta), num, key)


KINDS = [
    pytest.param(prioritised, length, sequences, id=f"{name}-{length}-{'sequences' if sequences else 'rows'}")
    for prioritised, name in ((EVENLY, "evenly"), (PRIORITISED, "prioritised"))
    for length, sequences in ((1, False), (3, False), (3, True), (T, True), (6, True))
]


@pytest.mark.parametrize(("prioritised", "length", "sequences"), KINDS)
def test_what_is_sampled_is_what_was_seen(seed, prioritised, length, sequences):
    """At every iteration, several times around the ring."""
    ring = make(prioritised, length, sequences)
    assert ring.window == 20 and ring.num_slots == 28
    reference, priorities = Reference(ring), ring.priorities("cpu")
    rng = np.random.default_rng(seed)
    seen = set()
    for i, trajectory in enumerate(rollouts(seed, 25)):
        ring.insert(trajectory, torch.tensor(i), priorities)
        reference.insert(trajectory)
        if i < ring.fill_iterations:
            continue
        sample = draw(ring, priorities, i, 20, random.at(random.key(seed), i))
        by_leaf = reference.starts_by_leaf()
        starts = [by_leaf[leaf] for leaf in sample.leaf.tolist()]  # KeyError: of what may not be sampled
        reference.assert_windows(sample, starts)
        seen |= set(starts)
        if isinstance(priorities, Priorities):
            ring.write_back(priorities, sample.leaf, torch.from_numpy(rng.exponential(size=20)))
        else:
            assert (sample.weight == 1).all()
    assert len(seen) > 100 * B * (0.7 / T if sequences else 0.4)
    assert 25 * T > 3 * ring.num_slots


@pytest.mark.parametrize(("length", "sequences"), [(1, False), (3, False), (T, True), (6, True)])
def test_every_start_is_as_likely_as_any_other(seed, length, sequences):
    """But for rows where four draws were resets: then it is the step after the last, and only then the newest."""
    ring = make(EVENLY, length, sequences)
    reference = Reference(ring)
    for i, trajectory in enumerate(rollouts(seed, 13)):
        ring.insert(trajectory, torch.tensor(i), ())
        reference.insert(trajectory)
        if i not in (ring.fill_iterations, 12):  # almost empty, and full
            continue
        starts, newest = reference.starts(), (i + 1) * T - 1 - length
        num = 300 * len(starts)
        leaves = draw(ring, (), i, num, random.at(random.key(seed), i)).leaf.numpy()
        share = dict.fromkeys((reference.leaf(*s) for s in starts), 1.0)
        after_reset = set()
        if not sequences:
            drawn = [(t, b) for t in range(max(0, (i + 1) * T - ring.window), newest) for b in range(B)]
            resets = [s for s in drawn if s not in starts]
            r = len(resets) / len(drawn)
            share = {reference.leaf(*s): (1 + r + r**2 + r**3) * (s[0] < newest) for s in starts}
            after_reset = {reference.leaf(t + 1, b) for t, b in resets}
            for leaf in after_reset:
                share[leaf] += r**3
            assert i != 12 or r < 0.4
        count = np.bincount(leaves, minlength=ring.num_slots * B)
        some = [leaf for leaf, x in share.items() if x > 0]
        expected = np.array([share[leaf] for leaf in some])
        assert count[some].sum() == num
        if len(some) > 1:
            assert chisquare(count[some], expected / expected.sum() * num).pvalue > 1e-6
        even = [reference.leaf(t, b) for t, b in starts if sequences or t < newest]
        even = [leaf for leaf in even if leaf not in after_reset]
        assert chisquare(count[even]).pvalue > 1e-6 or len(even) == 1


@pytest.mark.parametrize(("length", "sequences"), [(1, False), (3, False), (T, True)])
@pytest.mark.parametrize(("alpha", "beta"), [(0.6, 0.4), (1.0, 1.0), (0.0, 0.7)])
def test_probabilities_are_priorities_to_the_power_alpha_and_weights_make_up_for_them(
    seed, length, sequences, alpha, beta
):
    ring = make(PRIORITISED, length, sequences, alpha=alpha)
    reference, priorities = Reference(ring), ring.priorities("cpu")
    for i, trajectory in enumerate(rollouts(seed, 13)):
        ring.insert(trajectory, torch.tensor(i), priorities)
        reference.insert(trajectory)
    leaves = np.array(sorted(reference.starts_by_leaf()))
    rng = np.random.default_rng(seed)
    priority = rng.exponential(size=len(leaves)) + 0.05
    ring.write_back(priorities, torch.from_numpy(leaves), torch.from_numpy(priority))
    num = 400 * len(leaves)
    sample = draw(ring, priorities, 12, num, random.key(seed), beta)
    mass = (priority + 1e-6) ** alpha
    count = np.bincount(sample.leaf.numpy(), minlength=ring.num_slots * B)
    assert count[leaves].sum() == num
    assert chisquare(count[leaves], mass / mass.sum() * num).pvalue > 1e-6
    # Drawn from strata, each leaf comes up as often as it should to within 2.
    assert (abs(count[leaves] - mass / mass.sum() * num) < 2).all()
    drawn = mass[np.searchsorted(leaves, sample.leaf.numpy())]
    np.testing.assert_allclose(sample.weight.numpy(), (drawn / mass.sum() * ring.window * B) ** -beta, rtol=1e-4)


def test_of_a_million_rows_those_of_little_priority_come_up_as_often_as_they_should(seed):
    """Half of them have a 64th of the mean: heights in float32 reach only some of these, again and again."""
    num, draws = 2**20, 8
    ring = make(PRIORITISED, capacity=num)
    priorities = ring.priorities("cpu")
    ring.insert(next(rollouts(seed, 1)), torch.tensor(0), priorities)
    assert isinstance(priorities, Priorities)
    leaf = torch.arange(num)
    ring.write_back(priorities, leaf, (torch.where(leaf % 2 == 0, 1.0, 127.0) / 64) ** (1 / 0.6))
    some = torch.zeros(num, dtype=torch.bool)
    for i in range(draws):
        some[draw(ring, priorities, 0, num, random.at(random.key(seed), i)).leaf] = True
    total = sum_tree.total(priorities.tree)
    found, share = some[::2].sum() / (num / 2), num * priorities.tree[0][0] / total
    assert share == pytest.approx(1 / 64, rel=1e-3)
    assert found.item() == pytest.approx(1 - (1 - share.item()) ** draws, rel=0.02)


def expected_leaves(reference, ring, priorities_of):
    """What the leaves of the tree should be, by hand: those of starts, and 0 of all else."""
    leaves = np.zeros(ring.num_slots // (T if ring.sequences else 1) * B)
    for leaf, start_ in reference.starts_by_leaf().items():
        leaves[leaf] = priorities_of[start_]
    return leaves


SHORT = [(5, False, 24), (1, False, 12), (9, False, 36)]
"""Windows of replay in which what is complete at last is too old already."""


@pytest.mark.parametrize(
    ("length", "sequences", "capacity"), [(1, False, 60), (3, False, 60), (T, True, 60), (6, True, 60), *SHORT]
)
def test_at_all_times_the_leaves_are_those_of_what_may_be_sampled(seed, length, sequences, capacity):
    """New ones begin with the largest priority so far; resets, old and incomplete windows have none."""
    ring = make(PRIORITISED, length, sequences, capacity)
    reference, priorities = Reference(ring), ring.priorities("cpu")
    assert isinstance(priorities, Priorities)
    rng, masses, largest = np.random.default_rng(seed), {}, 1.0
    for i, trajectory in enumerate(rollouts(seed, 25)):
        ring.insert(trajectory, torch.tensor(i), priorities)
        reference.insert(trajectory)
        for start_ in reference.starts():
            masses.setdefault(start_, largest)
        found = priorities.tree[0].numpy()
        want = expected_leaves(reference, ring, masses)
        np.testing.assert_allclose(found[: len(want)], want, rtol=1e-5)
        assert (found[len(want) :] == 0).all()
        if not want.any():
            continue
        sample = draw(ring, priorities, i, 8, random.at(random.key(seed), i))
        priority = rng.exponential(size=8) * 2
        ring.write_back(priorities, sample.leaf, torch.from_numpy(priority).float())
        by_leaf = reference.starts_by_leaf()
        new = {}
        for leaf, x in zip(sample.leaf.tolist(), (priority + 1e-6) ** 0.6, strict=True):
            new[by_leaf[leaf]] = max(x, new.get(by_leaf[leaf], 0.0))
            largest = max(largest, x)
        masses |= new
    assert largest > 1.5
    assert priorities.largest.item() == pytest.approx(largest, rel=1e-5)


def test_priorities_that_are_not_finite_become_the_largest(seed):
    ring = make(PRIORITISED)
    priorities = ring.priorities("cpu")
    for i, trajectory in enumerate(rollouts(seed, 3)):
        ring.insert(trajectory, torch.tensor(i), priorities)
    leaf = draw(ring, priorities, 2, 40, random.key(seed)).leaf.unique()[:4]
    ring.write_back(priorities, leaf, torch.tensor([9.0, float("nan"), float("inf"), 2.0]))
    want = torch.tensor([(9 + 1e-6) ** 0.6, 1.0, 1.0, (2 + 1e-6) ** 0.6])  # the largest before was 1
    torch.testing.assert_close(priorities.tree[0][leaf], want)
    torch.testing.assert_close(priorities.largest, want[0])


@pytest.mark.parametrize("prioritised", [EVENLY, PRIORITISED])
@pytest.mark.parametrize("sequences", [False, True])
def test_inserting_the_same_twice_changes_nothing(seed, prioritised, sequences):
    ring = make(prioritised, 3, sequences)
    priorities, once = ring.priorities("cpu"), None
    for i, trajectory in enumerate(rollouts(seed, 20)):
        ring.insert(trajectory, torch.tensor(i), priorities)
        once = pytree.tree_map(torch.clone, (ring.storage, priorities))
        ring.insert(trajectory, torch.tensor(i), priorities)
        assert_same(once, (ring.storage, priorities))
        if isinstance(priorities, Priorities) and i >= ring.fill_iterations:
            sample = draw(ring, priorities, i, 8, random.at(random.key(seed), i))
            ring.write_back(priorities, sample.leaf, torch.rand(8))


@pytest.mark.parametrize("prioritised", [EVENLY, PRIORITISED])
@pytest.mark.parametrize("sequences", [False, True])
def test_a_call_that_is_given_up_can_be_made_again(seed, prioritised, sequences):
    """What could be sampled before `slack` more iterations were stored is still there after them."""
    slack = 3
    ring = make(prioritised, 3, sequences, slack=slack)
    reference, priorities = Reference(ring), ring.priorities("cpu")
    all_ = list(rollouts(seed, 40))
    for i in range(30):
        ring.insert(all_[i], torch.tensor(i), priorities)
        reference.insert(all_[i])
        if i < 10 or i % 4:
            continue
        before, key = pytree.tree_map(torch.clone, priorities), random.at(random.key(seed), i)
        sample = draw(ring, before, i, 200, key)
        for j in range(i + 1, i + 1 + slack):
            ring.insert(all_[j], torch.tensor(j), priorities)
        again = draw(ring, before, i, 200, key)
        assert_same(sample, again)
        by_leaf = reference.starts_by_leaf()
        reference.assert_windows(again, [by_leaf[leaf] for leaf in again.leaf.tolist()])
        priorities = before


def test_one_iteration_more_than_the_slack_would_overwrite_it(seed):
    """So that the test before this one can fail."""
    ring = make(slack=3)
    all_ = list(rollouts(seed, 20))
    for i in range(11):
        ring.insert(all_[i], torch.tensor(i), ())
    key = random.key(seed)
    sample = draw(ring, (), 10, 2000, key)
    for j in range(11, 15):
        ring.insert(all_[j], torch.tensor(j), ())
    again = draw(ring, (), 10, 2000, key)
    assert not torch.equal(sample.trajectory.timestep.observation["x"], again.trajectory.timestep.observation["x"])


@pytest.mark.parametrize(
    ("length", "sequences", "min_size", "iterations"),
    [(1, False, 1, 1), (3, False, 1, 2), (T, True, 1, 3), (1, False, 12, 1), (1, False, 13, 2), (3, False, 60, 5)],
)
def test_the_first_sample_is_made_as_soon_as_there_is_enough(seed, length, sequences, min_size, iterations):
    ring = make(EVENLY, length, sequences, min_size=min_size)
    assert ring.fill_iterations == iterations - 1  # and the next one samples
    reference = Reference(ring)
    for i, trajectory in enumerate(rollouts(seed, iterations)):
        ring.insert(trajectory, torch.tensor(i), ())
        reference.insert(trajectory)
    by_leaf = reference.starts_by_leaf()
    sample = draw(ring, (), iterations - 1, 50, random.key(seed))
    reference.assert_windows(sample, [by_leaf[leaf] for leaf in sample.leaf.tolist()])


def test_a_row_never_begins_at_a_reset_however_short_the_episodes(seed):
    """Every second step is a reset: of four candidates all are one in 16, and the step after them is taken."""

    ring = make(EVENLY, 1, capacity=120)
    reference = Reference(ring)
    for i, trajectory in enumerate(rollouts(seed, 30)):
        t = trajectory.timestep
        time = torch.arange(i * T, i * T + T + 1)[:, None] + torch.arange(B)
        step_type = torch.where(time % 2 == 0, FIRST, LAST).to(torch.int32)
        trajectory = trajectory._replace(timestep=t._replace(step_type=step_type))
        ring.insert(trajectory, torch.tensor(i), ())
        reference.insert(trajectory)
    by_leaf = reference.starts_by_leaf()
    sample = draw(ring, (), 29, 3000, random.key(seed))
    reference.assert_windows(sample, [by_leaf[leaf] for leaf in sample.leaf.tolist()])
    assert (sample.trajectory.timestep.step_type[0] == FIRST).all()


@pytest.mark.parametrize(("prioritised", "length", "sequences"), KINDS)
def test_a_population_is_as_many_single_buffers(seed, prioritised, length, sequences):
    config = ReplayConfig(capacity=60, min_size=1, prioritised=prioritised)
    size = {"num_envs": B, "unroll_length": T, "length": length, "sequences": sequences, "slack": 2}
    both, single = ReplayBuffer(config, population=2, **size), [ReplayBuffer(config, **size) for _ in range(2)]
    own = [ring.priorities("cpu") for ring in single]
    shared = pytree.tree_map(lambda *x: torch.stack(x), *own)
    rng = np.random.default_rng(seed)
    for i, trajectories in enumerate(zip(rollouts(seed, 15), rollouts(seed + 9, 15), strict=True)):
        both.insert(pytree.tree_map(lambda *x: torch.stack(x), *trajectories), torch.tensor([i, i]), shared)
        for ring, trajectory, priorities in zip(single, trajectories, own, strict=True):
            ring.insert(trajectory, torch.tensor(i), priorities)
        if i < both.fill_iterations:
            continue
        keys, beta = random.split(random.at(random.key(seed), i), 2), torch.tensor([0.4, 0.8])
        sampled = torch.vmap(lambda storage, p, i, beta, key: both.sample(storage, p, i, beta, 20, key))(
            both.storage, shared, torch.tensor([i, i]), beta, keys
        )
        new = torch.from_numpy(rng.exponential(size=(2, 20))).float()
        for p in range(2):
            alone = draw(single[p], own[p], i, 20, keys[p], beta[p].item())
            assert_same(alone._replace(weight=()), pytree.tree_map(lambda x, p=p: x[p], sampled._replace(weight=())))
            torch.testing.assert_close(sampled.weight[p], alone.weight, rtol=1e-6, atol=0)
            if prioritised:
                single[p].write_back(own[p], alone.leaf, new[p])
        if prioritised:
            both.write_back(shared, sampled.leaf, new)
            assert_same(pytree.tree_map(lambda *x: torch.stack(x), *own), shared)


@pytest.mark.parametrize(
    ("prioritised", "length", "sequences"),
    [pytest.param(EVENLY, 3, False, marks=pytest.mark.slow), (PRIORITISED, T, True)],
)
def test_a_compiled_sample_is_the_eager_one(seed, prioritised, length, sequences):
    ring = make(prioritised, length, sequences)
    priorities = ring.priorities("cpu")

    def sample(storage, priorities, iteration, beta, key):
        return ring.sample(storage, priorities, iteration, beta, 30, key)

    compiled = Compiler(True)(sample)
    for i, trajectory in enumerate(rollouts(seed, 15)):
        ring.insert(trajectory, torch.tensor(i), priorities)
        if i < ring.fill_iterations:
            continue
        args = ring.storage, priorities, torch.tensor(i), torch.tensor(0.4), random.at(random.key(seed), i)
        want, got = sample(*args), compiled(*args)
        assert_same(want._replace(weight=()), got._replace(weight=()))
        torch.testing.assert_close(got.weight, want.weight, rtol=1e-6, atol=0)
        if isinstance(priorities, Priorities):
            ring.write_back(priorities, got.leaf, random.uniform(random.key(seed + i), 30))


def test_a_capacity_in_which_nothing_fits_is_refused():
    message = (
        "algo.replay.capacity=12 is 4 step(s) of each of 3 environments, and what is sampled takes 6; use at least "
        "algo.replay.capacity=18."
    )
    with pytest.raises(ValueError, match=re.escape(message[: message.index("algo.replay.capacity=18")])):
        make(length=4, capacity=12)
    make(length=4, capacity=18)


def test_a_sequence_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"algo\.replay\.capacity=24 .* takes 10; use at least 30"):
        make(length=T, sequences=True, capacity=24)
    make(length=T, sequences=True, capacity=30)


def test_a_first_update_that_never_comes_is_refused():
    with pytest.raises(
        ValueError, match=r"algo\.replay\.min_size=61 is never reached with algo\.replay\.capacity=60; lower"
    ):
        make(min_size=61)


def test_a_capacity_that_does_not_fit_into_memory_is_refused_and_one_that_does_is_named(seed, monkeypatch):
    ring = make(capacity=600)
    trajectory = next(rollouts(seed, 1))
    ring.insert(trajectory, torch.tensor(0), ())
    # x, n, reward, discount, step_type, action, log_prob
    assert ring.nbytes == ring.num_slots * B * (8 + 4 + 4 + 4 + 4 + 8 + 4)
    monkeypatch.setattr(memory, "_free_on_host", lambda: 1.1 * ring.nbytes)  # a tenth is left to the others
    with pytest.raises(ValueError, match=r"algo\.replay\.capacity=600 takes .*, 36 bytes per step") as error:
        make(capacity=600).insert(trajectory, torch.tensor(0), ())
    found = re.search(r"use at most algo\.replay\.capacity=(\d+)\.", str(error.value))
    assert found is not None
    make(capacity=int(found[1])).insert(trajectory, torch.tensor(0), ())  # the advice is good
    monkeypatch.setattr(memory, "_free_on_host", lambda: 1.12 * ring.nbytes)
    make(capacity=600).insert(trajectory, torch.tensor(0), ())


def test_where_no_capacity_would_do_other_ways_are_named(seed, monkeypatch, tmp_path):
    trajectory = next(rollouts(seed, 1))
    monkeypatch.setattr(memory, "_free_on_host", lambda: 5000)  # of which the unrolls around the window take 1296
    with pytest.raises(ValueError, match=r"left; use at most algo\.replay\.capacity=89\."):
        make(capacity=600, min_size=89).insert(trajectory, torch.tensor(0), ())
    other = r"left; use algo\.replay\.folder=DIR, or fewer num_envs, or a shorter algo\.unroll_length\."
    with pytest.raises(ValueError, match=other):
        make(capacity=600, min_size=90).insert(trajectory, torch.tensor(0), ())
    monkeypatch.setattr(memory.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    with pytest.raises(ValueError, match=r"left; use fewer num_envs, or a shorter algo\.unroll_length\."):
        make(capacity=600, folder=str(tmp_path)).insert(trajectory, torch.tensor(0), ())


def test_files_are_for_what_is_on_a_cpu_and_for_disks_that_have_room(seed, tmp_path, monkeypatch):
    ring, trajectory = make(folder=str(tmp_path)), next(rollouts(seed, 1))
    on_gpu = trajectory._replace(output=trajectory.output._replace(action=trajectory.output.action.to("meta")))
    on_gpu = on_gpu._replace(timestep=on_gpu.timestep._replace(step_type=on_gpu.timestep.step_type.to("meta")))
    with pytest.raises(ValueError, match=r"algo\.replay\.folder=.* is for device=cpu"):
        ring.insert(on_gpu, torch.tensor(0), ())
    monkeypatch.setattr(memory.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    with pytest.raises(ValueError, match=rf"36 bytes per step, and {tmp_path} has 1 kB left"):
        ring.insert(trajectory, torch.tensor(0), ())


@pytest.fixture
def gpu(monkeypatch):
    """What CUDA is asked for, and what it looks at: host memory that is pinned is a tensor of the GPU."""
    calls, pinned = [], {}

    def register(pointer, size, flags):
        pinned[pointer] = size
        return 0

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=pinned.pop)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronize"))

    def look(seen, device):
        assert device.type == "cuda"
        given = seen.__cuda_array_interface__
        (pointer, read_only), (size,) = given["data"], given["shape"]
        assert pinned[pointer] == size and not read_only and given["typestr"] == "|u1"
        array = np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(ctypes.c_uint8)), (size,))
        bytes_ = torch.from_numpy(array)
        bytes_.seen = seen  # as torch keeps it
        calls.append(bytes_)
        return bytes_

    monkeypatch.setattr(memory.torch, "as_tensor", look)
    return SimpleNamespace(calls=calls, pinned=pinned)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.float32, torch.int64])
def test_beside_a_gpu_the_hosts_memory_is_pinned_as_long_as_somebody_looks_at_it(gpu, dtype):
    ring = memory.zeros((3, 5), dtype, torch.device("cuda"), host=True, folder=None)
    assert ring.shape == (3, 5) and ring.dtype == dtype and not ring.any()
    assert gpu.pinned == {ring.data_ptr(): 15 * dtype.itemsize}
    ring[1] = 1
    behind = gpu.calls[0].seen.memory
    assert behind.data_ptr() == ring.data_ptr() and behind[1].all() and not behind[0].any()
    del ring, behind, gpu.calls[0]
    gc.collect()
    assert not gpu.pinned and gpu.calls == ["synchronize"]


def test_memory_that_cannot_be_pinned_is_refused(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda.cudart(), "cudaHostRegister", lambda *args: 2)
    with pytest.raises(ValueError, match=r"algo\.replay\.host=true: CUDA cannot pin 0 kB .* \(error 2\); lower"):
        memory.zeros((3, 5), torch.float32, torch.device("cuda"), host=True, folder=None)


def test_of_the_host_its_memory_is_counted_and_on_a_cpu_nothing_is_pinned(gpu, monkeypatch):
    monkeypatch.setattr(memory, "_free_on_host", lambda: 77)
    assert memory.free_bytes(torch.device("cuda"), host=True, folder=None) == (77, "cpu")
    assert memory.free_bytes(torch.device("cpu"), host=False, folder=None) == (77, "cpu")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "7")  # the ranks of a host share it
    assert memory.free_bytes(torch.device("cpu"), host=False, folder=None) == (11, "cpu")
    free, _ = memory.free_bytes(torch.device("cpu"), host=False, folder="/")
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert memory.free_bytes(torch.device("cpu"), host=False, folder="/")[0] == pytest.approx(7 * free, rel=0.01)
    assert memory.zeros((2,), torch.float32, torch.device("cpu"), host=True, folder=None).tolist() == [0, 0]
    assert memory.zeros((0,), torch.float32, torch.device("meta"), host=False, folder=None).numel() == 0
    assert not gpu.pinned and not gpu.calls


def test_ranks_share_the_capacity():
    config = ReplayConfig(capacity=240, min_size=240)
    size = {"num_envs": B, "unroll_length": T, "length": 1, "sequences": False}
    one, of_four = ReplayBuffer(config, **size), ReplayBuffer(config, num_ranks=4, **size)
    assert one.window == 80 and of_four.window == 20
    assert one.fill_iterations == 19 and of_four.fill_iterations == 4


def test_rows_may_begin_in_the_middle_of_an_episode(seed):
    ring = make(length=3)
    for i, trajectory in enumerate(rollouts(seed, 10)):
        ring.insert(trajectory, torch.tensor(i), ())
    kinds = draw(ring, (), 9, 500, random.key(seed)).trajectory.timestep.step_type
    assert {FIRST, MID} == set(kinds[0].tolist()) and LAST in kinds[1:].unique()

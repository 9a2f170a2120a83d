"""Rewards and explained variance of each policy, against NumPy, over ranks and populations."""

import math

import numpy as np
import pytest
import torch

from tests.test_learner import experience, make_ppo
from torchpod import random
from torchpod.agent import bind
from torchpod.distributed import Ranks
from torchpod.measures import measure, metrics_of, of_all, prefixes
from torchpod.types import LAST, Batch

NAMES = ("reward_mean", "reward_min", "reward_max", "explained_variance")


def batch(rng, size=6, names=("", "b/")):
    """Rows with weights, of which some are 0, in columns of other sizes per policy."""
    steps, report = {"weight": torch.ones(9, size)}, {}
    for i, name in enumerate(names):
        shape = (9, size) if name == "" else (9, size, 1 + i)
        steps[f"{name}weight"] = torch.tensor(rng.integers(0, 3, shape)).float() / 2
        for k, column in enumerate(("reward", "value", "value_target")):
            report[name + column] = torch.tensor(100 * k + rng.normal(size=shape)).float()
    return Batch(steps, (), report)


def expected(b, name):
    """By definition."""
    weight, reward, value, target = (
        x.double().numpy().ravel()
        for x in (b.steps[f"{name}weight"], *(b.report[name + c] for c in ("reward", "value", "value_target")))
    )

    def mean(x):
        return (weight * x).sum() / weight.sum()

    def variance(x):
        return mean((x - mean(x)) ** 2)

    seen = reward[weight > 0]
    return mean(reward), seen.min(), seen.max(), 1 - variance(target - value) / variance(target)


def check(metrics, b):
    for name in prefixes(b):
        found = [metrics[name + column].item() for column in NAMES]
        np.testing.assert_allclose(found, expected(b, name), rtol=1e-6)


def test_each_policy_has_the_moments_of_its_own_rows(seed):
    b = batch(np.random.default_rng(seed))
    assert prefixes(b) == ("", "b/")
    check(metrics_of(prefixes(b), *measure(b)), b)


def test_members_of_a_population_are_measured_apart(seed):
    members = [batch(np.random.default_rng(seed + i)) for i in range(3)]
    names = prefixes(members[0])
    found = metrics_of(names, *(torch.stack(x) for x in zip(*map(measure, members), strict=True)))
    for i, member in enumerate(members):
        check({name: x[i] for name, x in found.items()}, member)


class Recorded(Ranks):
    """A rank that hears of others what they say."""

    others = 0.0

    def sum(self, x):
        return x + self.others


def test_ranks_measure_the_rows_of_all(seed):
    whole = batch(np.random.default_rng(seed), size=6)
    halves = [
        Batch(*({k: x[:, rows] for k, x in part.items()} if part else part for part in whole))
        for rows in (slice(0, 4), slice(4, 6))
    ]
    said = []

    class Listening(Ranks):
        def sum(self, x):
            said.append(x)
            return x

    for rank, half in enumerate(halves):
        of_all(Listening(rank, 2), *measure(half))
    Recorded.others = said[1]
    check(metrics_of(prefixes(whole), *of_all(Recorded(0, 2), *measure(halves[0]))), whole)


def test_rows_that_do_not_count_and_targets_that_are_alike_are_not_numbers():
    b = batch(np.random.default_rng(0), names=("",))
    alike = Batch(b.steps, (), b.report | {"value_target": torch.full((9, 6), 0.1)})
    found = metrics_of(("",), *measure(alike))
    assert math.isnan(found["explained_variance"]) and math.isfinite(found["reward_mean"])
    nobody = Batch({"weight": torch.zeros(9, 6)}, (), b.report)
    found = metrics_of(("",), *measure(nobody))
    assert all(math.isnan(x) for x in found.values())


def test_a_policy_that_is_not_trained_tells_its_rewards_alone(seed):
    b = batch(np.random.default_rng(seed))
    report = b.report | {"c/reward": b.report["b/reward"] - 1.0, "c/weight": b.steps["b/weight"]}
    whole = b._replace(report=report)
    assert prefixes(whole) == ("", "b/", "c/")
    found = metrics_of(prefixes(whole), *measure(whole))
    check({name: x for name, x in found.items() if not name.startswith("c/")}, b)
    for name in NAMES[:3]:
        torch.testing.assert_close(found[f"c/{name}"], found[f"b/{name}"] - 1.0)
    assert math.isnan(found["c/explained_variance"])


@pytest.mark.parametrize("error", [0.0, 0.5])
def test_noise_of_half_the_spread_of_targets_leaves_three_quarters_explained(error):
    target = torch.randn(50, 400, generator=torch.Generator().manual_seed(0))
    value = target + error * torch.randn(50, 400, generator=torch.Generator().manual_seed(1))
    report = {"reward": target, "value": value + 7.0, "value_target": target}  # an offset is no variance
    b = Batch({"weight": torch.ones(50, 400)}, (), report)
    assert metrics_of(("",), *measure(b))["explained_variance"].item() == pytest.approx(1 - error**2, abs=0.02)


def test_an_update_tells_of_the_rows_that_are_no_resets(seed):
    learner, state = make_ppo(seed)
    trajectory = experience(seed, 16, 8)
    _, metrics = learner.update(state, trajectory, random.split(random.key(seed), 8))
    counts = trajectory.timestep.step_type[:-1] != LAST
    reward = trajectory.timestep.reward[1:][counts]
    for name, x in zip(NAMES, (reward.mean(), reward.min(), reward.max()), strict=False):
        torch.testing.assert_close(metrics[name].float(), x)
    batch = bind(learner.agent, state.params | state.buffers).prepare(trajectory, random.split(random.key(seed), 8))
    value, target = (batch.report[name][counts].double().numpy() for name in ("value", "value_target"))
    explained = 1 - (target - value).var() / target.var()
    assert metrics["explained_variance"].item() == pytest.approx(explained, rel=1e-4, abs=1e-4)

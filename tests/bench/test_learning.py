"""Suite learning: means over many seeds, the ratio of what both sides gained, and how sure that is."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from torchpod import random
from torchpod.actions import random_action
from torchpod.bench import harness, learning
from torchpod.bench.anakin import Case
from torchpod.bench.anakin_worker import WORK
from torchpod.bench.harness import RowMaker
from torchpod.types import FIRST, LAST


def run_suite(tmp_path, *workers, **knobs):
    path = tmp_path / "out.json"
    status = learning.main(str(path), workers=workers, **{"seeds": {Case(64): 4}, **knobs})
    return status, json.loads(path.read_text())


def row_of(ours, peer):
    row = RowMaker().alone("ppo_cartpole/64", 0.0, "return", ours)
    return dataclasses.replace(row, peer={"name": "jax", "value": 0.0, "repeats": list(peer)})


def test_equal_returns_pass_and_every_seed_is_trained_once(tmp_path, fake):
    status, result = run_suite(tmp_path, fake("torchpod", 1.0), fake("jax", 2.0))
    (row,) = result["rows"]
    assert status == 0 and result["failures"] == []
    assert (row["name"], row["unit"], row["value"], row["peer"]["value"]) == ("ppo_cartpole/64", "return", 100.0, 100.0)
    assert row["ratio"] == 1.0 and row["interval"] == [1.0, 1.0] and "4 seeds each" in row["note"]


def test_a_side_that_fails_or_learns_nothing_is_told(tmp_path, fake, monkeypatch):
    status, result = run_suite(tmp_path, fake("torchpod", 1.0, missing="gone"), fake("jax", 2.0))
    assert status == 1 and "torchpod: gone" in result["failures"][0]
    assert run_suite(tmp_path, fake("torchpod", 1.0), fake("jax", 2.0, missing="gone"))[0] == 0  # a row says so
    monkeypatch.setitem(harness.LEARNED, "cartpole", 101.0)  # both fakes have 100
    status, result = run_suite(tmp_path, fake("torchpod", 1.0), fake("jax", 2.0))
    assert status == 1 and len(result["failures"]) == 2
    assert run_suite(tmp_path, fake("torchpod", 1.0), fake("jax", 2.0), quick=True)[0] == 0
    unended = [{"framework": "jax", "episode_return": x} for x in (1.0, None)]
    assert "jax ended no episode" in str(learning.ended(unended))  # pyright: ignore[reportArgumentType]


def test_gains_are_compared_by_means_and_an_interval_that_holds_the_true_ratio_nineteen_times_of_twenty():
    rng, held = np.random.default_rng(), 0
    for _ in range(100):
        row = learning.compared(row_of(rng.normal(24, 5, 40), rng.normal(25, 5, 40)), 5.0)
        assert row.interval and row.peer and row.value and row.ratio
        low, high = row.interval
        assert low < row.ratio < high and row.ratio == pytest.approx((row.value - 5) / (row.peer["value"] - 5))
        held += low < 19 / 20 < high
    assert held > 79  # fewer have a chance of 4e-6, even if 93 of 100 hold it
    loses = learning.compared(row_of([-160.0, -150.0], [-170.0, -190.0]), -1200.0)
    assert loses.ratio == pytest.approx(1045 / 1020)


def test_what_differs_or_might_differ_fails():
    near, far = [99.0, 100.0, 101.0] * 9, [70.0, 71.0, 72.0] * 9
    assert learning.unequal(learning.compared(row_of(near, near), 20.0)) == []
    (sentence,) = learning.unequal(learning.compared(row_of(far, near), 20.0))
    assert "ppo_cartpole/64: torchpod gains 0.64 [0.6" in sentence and "between 0.85 and 1.15" in sentence
    few = learning.compared(row_of([60.0, 140.0], [60.0, 140.0]), 20.0)
    assert few.ratio == 1.0 and len(learning.unequal(few)) == 1  # two seeds say nothing


@pytest.mark.parametrize("name", harness.RANDOM)
def test_a_random_policy_gets_what_is_said(name):
    env, size = WORK[name]().env, 512
    env_keys, actor_keys = (random.split(random.key(seed), size) for seed in torch.randint(2**31, (2,)).tolist())
    state, timestep = env.init(env_keys)
    running, ends = torch.zeros(size), []
    for t in range(1, 420):
        count = torch.full((size,), t)
        action = random_action(env.spec, timestep.observation, random.at(actor_keys, count))
        state, timestep = env.step(state, action, random.at(env_keys, count))
        running = torch.where(timestep.step_type == FIRST, 0.0, running + timestep.reward)
        ends.append(running[timestep.step_type == LAST])
    assert torch.cat(ends).mean() == pytest.approx(harness.RANDOM[name], rel=0.05)

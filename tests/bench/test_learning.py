"""Suite learning: means over many seeds, the ratio of what both sides gained, and how sure that is."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from torchpod import random
from torchpod.actions import random_action
from torchpod.bench import compare, harness, learning, processes, report
from torchpod.bench.anakin import Case
from torchpod.bench.anakin_worker import WORK
from torchpod.bench.compare import Row, RowMaker
from torchpod.types import FIRST, LAST


def run_suite(tmp_path, *workers, **knobs):
    path = tmp_path / "out.json"
    status = learning.main(str(path), workers=workers, **{"seeds": {Case(64): 4}, **knobs})
    return status, json.loads(path.read_text())


def row_of(ours, peer):
    row = RowMaker().alone("ppo_cartpole/64", 0.0, "return", ours)
    return dataclasses.replace(row, peer={"name": "jax", "value": 0.0, "repeats": list(peer)})


def test_returns_of_all_seeds_are_compared(tmp_path, fake, monkeypatch):
    seeds, run_worker = {"torchpod": [], "jax": []}, processes.run_worker
    gains = {"torchpod": 1.0, "jax": 1.0}

    def trained(worker, arguments, **knobs):
        seeds[worker.name].append(seed := int(arguments[arguments.index("--seed") + 1]))
        return run_worker(worker, arguments, **knobs) | {"episode_return": 22.2 + gains[worker.name] * (300 + seed)}

    monkeypatch.setattr(processes, "run_worker", trained)
    workers = fake("torchpod", 1.0), fake("jax", 2.0)
    status, result = run_suite(tmp_path, *workers)
    (row,) = result["rows"]
    assert status == 0 and result["failures"] == [] and seeds == {"torchpod": [0, 1, 2, 3], "jax": [0, 1, 2, 3]}
    assert (row["name"], row["unit"]) == ("ppo_cartpole/64", "return") and "4 seeds each" in row["note"]
    assert row["value"] == pytest.approx(22.2 + 301.5) == row["peer"]["value"]
    low, high = row["interval"]
    assert row["ratio"] == 1.0 and 0.98 < low < 0.999 and 1.001 < high < 1.02
    gains["torchpod"] = 0.7
    status, result = run_suite(tmp_path, *workers)
    assert status == 1 and result["rows"][0]["ratio"] == pytest.approx(0.7)
    name, told = result["failures"][0]
    assert name == "ppo_cartpole/64" and told.startswith("torchpod gains 0.70 [0.6")


def test_a_side_that_fails_or_learns_nothing_is_told(tmp_path, fake, monkeypatch):
    status, result = run_suite(tmp_path, fake("torchpod", 1.0, missing="gone"), fake("jax", 2.0))
    assert status == 1 and "torchpod: gone" in result["failures"][0][1]
    assert run_suite(tmp_path, fake("torchpod", 1.0), fake("jax", 2.0, missing="gone"))[0] == 0  # a row says so
    monkeypatch.setitem(compare.LEARNED, "cartpole", 101.0)  # both fakes have 100
    status, result = run_suite(tmp_path, fake("torchpod", 1.0), fake("jax", 2.0))
    assert status == 1 and len(result["failures"]) == 2
    assert run_suite(tmp_path, fake("torchpod", 1.0), fake("jax", 2.0), quick=True)[0] == 0
    unended = [{"framework": "jax", "episode_return": x} for x in (1.0, None)]
    assert "jax ended no episode" in str(learning.ended(unended))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("size", [8, 40])
def test_an_interval_holds_the_true_ratio_nineteen_times_of_twenty_and_is_no_wider_than_it_must(seed, size):
    rng, held, widths, runs = np.random.default_rng(seed), 0, [], 200
    for _ in range(runs):
        row = learning.compared(row_of(rng.normal(24, 5, size), rng.normal(25, 5, size)), 5.0)
        assert row.interval and row.peer and row.value and row.ratio
        low, high = row.interval
        assert low < row.ratio < high and row.ratio == pytest.approx((row.value - 5) / (row.peer["value"] - 5))
        held += low < 19 / 20 < high
        widths.append(high - low)
    assert held > 0.87 * runs  # fewer have a chance of 2e-6
    error = 5 / 20 * (1 + (19 / 20) ** 2) ** 0.5 / size**0.5
    assert 3.3 * error < np.mean(widths) < (5.5 if size == 8 else 4.4) * error  # 3.9 of a normal distribution


def test_stored_rows_follow_from_their_returns():
    documents = [x for x in report.load(harness.RESULTS) if x["suite"] == "learning"]
    rows = [Row(**row) for document in documents for row in document["rows"] if row["ratio"] is not None]
    for row in rows:
        now = learning.compared(row, compare.RANDOM[row.name.removeprefix("ppo_").partition("/")[0]])
        assert (now.value, now.peer, now.ratio, now.note) == (row.value, row.peer, row.ratio, row.note)
        assert now.interval == pytest.approx(row.interval, abs=1e-9)
    assert rows


def test_what_loses_less_gains_more():
    loses = learning.compared(row_of([-160.0, -150.0], [-170.0, -190.0]), -1200.0)
    assert loses.ratio == pytest.approx(1045 / 1020)


def test_what_differs_or_might_differ_fails():
    near, far = [99.0, 100.0, 101.0] * 9, [70.0, 71.0, 72.0] * 9
    assert learning.unequal(learning.compared(row_of(near, near), 20.0)) == []
    ((name, sentence),) = learning.unequal(learning.compared(row_of(far, near), 20.0))
    assert name == "ppo_cartpole/64" and "torchpod gains 0.64 [0.6" in sentence and "between 0.8 and 1.2" in sentence
    few = learning.compared(row_of([60.0, 140.0], [60.0, 140.0]), 20.0)
    assert few.ratio == 1.0 and len(learning.unequal(few)) == 1  # two seeds say nothing


@pytest.mark.parametrize("name", compare.RANDOM)
def test_a_random_policy_gets_what_is_said(name, seed):
    env, size = WORK[name]().env, 512
    env_keys, actor_keys = (random.split(random.fold_in(random.key(seed), i), size) for i in range(2))
    state, timestep = env.init(env_keys)
    running, ends = torch.zeros(size), []
    for t in range(1, 420):
        count = torch.full((size,), t)
        action = random_action(env.spec, timestep.observation, random.at(actor_keys, count))
        state, timestep = env.step(state, action, random.at(env_keys, count))
        running = torch.where(timestep.step_type == FIRST, 0.0, running + timestep.reward)
        ends.append(running[timestep.step_type == LAST])
    returns, said = torch.cat(ends), compare.RANDOM[name]
    error = 5 * float(returns.std()) / len(returns) ** 0.5 + 0.01 * abs(said)  # of the mean, and of what is said
    assert error < 0.2 * abs(said) and returns.mean() == pytest.approx(said, abs=error)

"""Suite envs: the worker counts transitions, and rows are judged by targets and figures."""

import json
import sys

import pytest
import torch

from torchpod import bench, random
from torchpod.bench import envs, envs_worker, harness, processes, targets
from torchpod.bench.envs import CASES, Case
from torchpod.bench.targets import Target
from torchpod.envs import MAKERS, CartPole
from torchpod.types import FIRST

FAKE = """
import argparse, json
parser = argparse.ArgumentParser()
for name in ("env", "arguments"):
    parser.add_argument(f"--{name}")
for name in ("num-envs", "steps", "repeats", "seed"):
    parser.add_argument(f"--{name}", type=int)
parser.add_argument("--peer", nargs=2)
a = parser.parse_args()
print(json.dumps({
    "framework": "fake", "mode": "env_only", "num_envs": a.num_envs, "unroll_length": a.steps, "epochs": 0,
    "minibatches": 0, "batch_rows": a.steps * a.num_envs, "param_count": 0, "dtype": "float32", "iterations": 1,
    "total_iterations": 1, "compile_s": 0.0, "env_steps": [RATE], "wall_s": [1.0], "cpu_s": [1.0],
    "episode_return": None, "episodes": 0,
    "threads": {}, "versions": {},
}))
"""


def run(tmp_path, monkeypatch, case, ours=200.0, peer=100.0, target=None, **settings):
    monkeypatch.setattr(harness, "calibrate", lambda core: {targets.PRODUCT: targets.GFLOPS})
    monkeypatch.setitem(targets.TARGETS, "envs", {"x/2048": target or Target()})
    workers = []
    for name, rate in (("torchpod", ours), ("gymnax", peer)):
        path = tmp_path / f"{name}.py"
        path.write_text(FAKE.replace("RATE", str(rate)))
        workers.append(processes.Worker(name, (sys.executable, str(path))))
    out = tmp_path / "out.json"
    status = envs.main(str(out), cases=[case], alone=(), rounds=2, workers=tuple(workers), **settings)
    return status, json.loads(out.read_text())


def test_a_ratio_is_a_row(tmp_path, monkeypatch):
    status, document = run(tmp_path, monkeypatch, Case("x", "X-v0", 1), target=Target(ratio=2.0, stated=100.0))
    (row,) = document["rows"]
    assert (status, row["name"], row["ratio"], document["failures"]) == (0, "x/2048", 2.0, [])


def test_a_target_that_is_missed_and_a_slow_peer_fail(tmp_path, monkeypatch, capsys):
    target = Target(ratio=2.5, stated=1000.0)
    status, document = run(tmp_path, monkeypatch, Case("x", "X-v0", 1), target=target)
    assert (status, document["failures"]) == (1, [])  # the rows say so
    told = capsys.readouterr().err
    assert "x/2048: 2.00 x, the target is >= 2.5 x." in told and "x/2048: gymnax did 100 env steps/s, below 900" in told
    assert run(tmp_path, monkeypatch, Case("x", "X-v0", 1), target=target, quick=True)[0] == 0


def test_one_row_alone(tmp_path, monkeypatch):
    _, document = run(tmp_path, monkeypatch, Case("x", "X-v0", 1), only="x")
    assert (document["only"], len(document["rows"])) == ("x", 1)
    with pytest.raises(ValueError, match="--only 'y' is nothing of envs"):
        run(tmp_path, monkeypatch, Case("x", "X-v0", 1), only="y")
    with pytest.raises(
        ValueError,
        match="lowered, multiagent, population, replay and sebulba; reuse is run whole",
    ):
        bench.main(["reuse", "--only", "x"])


def test_environments_without_a_peer_are_measured_alone(tmp_path, monkeypatch):
    status, document = run(tmp_path, monkeypatch, Case("grid_world", "", 1))
    (row,) = document["rows"]
    assert status == 0 and row["value"] == 200.0 and row["peer"] is None
    assert row["note"] == "gymnax has no such environment"


def test_the_worker_counts_transitions_and_no_resets():
    m = envs_worker.measure("cartpole", {"max_episode_steps": 9}, num_envs=4, steps=20, repeats=2)
    env, keys = CartPole(max_episode_steps=9), [random.split(random.fold_in(random.key(0), i), 4) for i in range(2)]
    state, _ = env.init(random.at(keys[0], 0))
    moved = []
    for step in range(1, 1 + 1 + 3 * 20):  # one compiles, a call warms up
        action = random.to_integer(random.bits(random.at(keys[1], step), 1)[:, 0], 2)
        state, timestep = env.step(state, action, random.at(keys[0], step))
        moved.append(int((timestep.step_type != FIRST).sum()))
    assert m["env_steps"] == [sum(moved[21:41]), sum(moved[41:61])]
    assert m["episode_return"] == 1.0


def test_every_environment_has_a_row():
    names = [case.name for case in CASES] + [case.name for case in envs.ALONE]
    tensor = [name for name in MAKERS if name not in ("brax", "envpool", "gymnasium", "pettingzoo")]
    assert sorted(names) == sorted(tensor)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_arguments_are_those_of_the_environment(case):
    assert isinstance(MAKERS[case.name](**case.arguments).spec.name, str)
    assert torch.get_num_threads() == 1

"""Suite losses: rows beside TorchRL, equal work, and targets that fail the suite when they are missed."""

import json
import sys

import pytest

from tests.marks import with_slow
from torchpod.bench import harness, losses, losses_worker, processes
from torchpod.bench.losses import CASES, Case
from torchpod.bench.targets import TARGETS

FAKE = """
import json, sys
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
rows, repeats = int(options["--rows"]), int(options["--repeats"])
print(json.dumps({
    "framework": "NAME", "mode": "update", "num_envs": 16, "unroll_length": rows // 16, "epochs": 1, "minibatches": 1,
    "batch_rows": rows, "param_count": PARAMS, "dtype": "float32", "iterations": 1, "total_iterations": 0,
    "compile_s": 1.0, "env_steps": [RATE] * repeats, "wall_s": [1.0] * repeats, "cpu_s": [1.0] * repeats,
    "episode_return": None, "episodes": 0,
    "threads": {}, "versions": {},
}))
"""


def run(tmp_path, monkeypatch, case, ours=(500.0, 10), theirs=(100.0, 10)):
    monkeypatch.setattr(harness, "calibrate", lambda core: {"2048x64x64": 50.0})
    workers = []
    for name, (rate, params) in (("torchpod", ours), ("torchrl", theirs)):
        path = tmp_path / f"{name}.py"
        path.write_text(FAKE.replace("NAME", name).replace("RATE", str(rate)).replace("PARAMS", str(params)))
        workers.append(processes.Worker(name, (sys.executable, "-S", str(path))))
    out = tmp_path / "out.json"
    status = losses.main(str(out), cases=[case], rounds=2, repeats=2, workers=(workers[0], workers[1]))
    return status, json.loads(out.read_text())


def test_rows_are_ratios_of_updates(tmp_path, monkeypatch):
    status, document = run(tmp_path, monkeypatch, Case("SACLoss", "small"))
    row, compilation = document["rows"]
    assert (status, row["name"], row["unit"], row["ratio"]) == (0, "SACLoss/small", "updates/s", 5.0)
    assert compilation["name"] == "SACLoss/small cold compile"
    assert compilation["peer"] is None and compilation["ratio"] is None  # TorchRL compiles nothing


@pytest.mark.parametrize(
    ("case", "rate", "told"),
    [
        (Case("SACLoss", "small"), 399.0, "SACLoss/small: 3.99 x, the target is >= 4 x."),
        (Case("SACLoss", "large"), 99.0, "SACLoss/large: 0.99 x, the target is >= 1 x."),
    ],
)
def test_a_missed_target_fails(tmp_path, monkeypatch, case, rate, told, capsys):
    assert run(tmp_path, monkeypatch, case, ours=(rate, 10))[0] == 1 and told in capsys.readouterr().err
    assert run(tmp_path, monkeypatch, Case("CQLLoss", "small"), ours=(rate, 10))[0] == 0


def test_unequal_work_fails(tmp_path, monkeypatch):
    status, document = run(tmp_path, monkeypatch, Case("SACLoss", "small"), theirs=(100.0, 11))
    assert status == 1 and "param_count is 10 in torchpod and 11 in torchrl" in document["failures"][0][1]


def test_every_loss_of_a_target_is_measured_in_both_sizes():
    losses_of = {name.partition("/")[0] for name in TARGETS["losses"]} - {"*"}
    assert len(losses_of) == 8
    assert {Case(loss, size) for loss in losses_of for size in ("small", "large")} <= set(CASES)


@pytest.mark.parametrize(
    "loss", with_slow(["DQNLoss", "DDPGLoss", "A2CLoss", "DistributionalDQNLoss"], ("DDPGLoss", "A2CLoss"))
)
@pytest.mark.filterwarnings("ignore:.*runs uncompiled")
def test_both_sides_of_the_worker_make_the_same_update(loss, seed):
    """Their first losses are equal: the same networks and rows."""
    import torch

    found = []
    for side in (losses_worker.ours, losses_worker.theirs):
        torch.manual_seed(seed)
        update, num_params = side(loss, (8, 8), 64, 3)
        found.append((num_params, update()))
    (count, metrics), (other, total) = found
    assert count == other
    assert any(torch.allclose(x, total.float(), rtol=1e-4) for x in metrics)

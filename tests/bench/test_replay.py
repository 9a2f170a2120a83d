"""Suite replay: rows beside both peers, and each side does what it says."""

import dataclasses
import inspect
import json
import sys

import numpy as np
import pytest
import torch

from torchpod.bench import harness, processes, replay, replay_worker, targets
from torchpod.bench.replay_worker import Case
from torchpod.bench.targets import Target
from torchpod.replay import sum_tree

SMALL = Case("small", "sample", (3,), torch.float32, 640, 4, 8)

FAKE = """
import json, sys
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if RATE == 0:
    raise SystemExit("it is not installed")
repeats = int(options["--repeats"])
print(json.dumps({
    "framework": "NAME", "mode": "sample", "num_envs": 64, "unroll_length": 16, "epochs": 1, "minibatches": 1,
    "batch_rows": 256, "param_count": 0, "dtype": "float32", "iterations": 1, "total_iterations": 0,
    "compile_s": 1.0, "env_steps": [RATE] * repeats, "wall_s": [1.0] * repeats, "cpu_s": [1.0] * repeats,
    "episode_return": None, "episodes": 0,
    "threads": {}, "versions": {}, "memory_bytes": 2_000_000_000,
}))
"""


@pytest.fixture
def workers(tmp_path, monkeypatch) -> tuple[processes.Worker, ...]:
    monkeypatch.setattr(harness, "calibrate", lambda core: {"2048x64x64": 50.0})
    made = []
    for name, rate in (("torchpod", 500), ("torchrl", 0), ("numpy", 250)):
        path = tmp_path / f"{name}.py"
        path.write_text(FAKE.replace("NAME", name).replace("RATE", str(rate)))
        made.append(processes.Worker(name, (sys.executable, "-S", str(path))))
    return tuple(made)


def test_there_is_a_row_for_each_peer_and_one_that_cannot_run_is_named(tmp_path, workers):
    out = tmp_path / "out.json"
    case = replay_worker.CASES[2]
    assert replay.main(str(out), cases=[case], rounds=2, repeats=2, workers=workers) == 0
    torchrl, numpy = json.loads(out.read_text())["rows"]
    assert (numpy["name"], numpy["unit"], numpy["ratio"]) == ("sample_vector/numpy", "rows/s", 2.0)
    assert torchrl["ratio"] is None and "not installed" in torchrl["note"]


@pytest.mark.parametrize("stated", [1_999, 2_001])
def test_a_buffer_that_takes_more_memory_than_is_stated_fails(stated, tmp_path, workers, capsys, monkeypatch):
    monkeypatch.setitem(targets.TARGETS, "replay", {"frames memory": Target(most=stated)})
    out, case = tmp_path / "out.json", SMALL._replace(name="frames", memory=True)
    assert replay.main(str(out), cases=[case], rounds=2, repeats=2, workers=workers) == (stated < 2_000)
    assert ("frames memory: 2,000 MB, the target is <= 1,999 MB." in capsys.readouterr().err) == (stated < 2_000)
    *_, row = json.loads(out.read_text())["rows"]
    assert (row["name"], row["value"], row["unit"]) == ("frames memory", 2_000, "MB")
    with_memory = [f"{case.name} memory" for case in replay_worker.CASES if case.memory]
    monkeypatch.undo()
    rows = [{"name": name, "unit": "MB", "value": 1.0} for name in with_memory]
    assert len(rows) == 4 and [*targets.targets_of({"suite": "replay", "rows": rows})] == with_memory


SIDES = pytest.mark.parametrize("side", [replay_worker.torchpod, replay_worker.numpy], ids=["torchpod", "numpy"])


def inside(call) -> dict:
    """What a call of the worker works on."""
    return inspect.getclosurevars(call).nonlocals


@SIDES
def test_both_sides_draw_new_rows_at_every_call(side, monkeypatch):
    monkeypatch.setattr(replay_worker, "ROWS", 16)
    call = side(SMALL, 0)
    first, second = call(), call()
    if side is replay_worker.numpy:
        assert not np.array_equal(first["observation"], second["observation"])
        assert first["next_observation"].shape == (16, 3) and first["weight"].sum() == 16
    else:
        assert not torch.equal(first.leaf, second.leaf)
        assert first.trajectory.timestep.observation.shape == (2, 16, 3)


@SIDES
def test_both_sides_insert_an_unroll_behind_the_last_and_touch_nothing_else(side):
    call = side(SMALL._replace(what="insert"), 0)
    call()
    if side is replay_worker.numpy:
        ring, unroll = inside(call)["storage"]["observation"], inside(call)["rows"]["observation"]
        begin = 32  # rows: the ring of 640 was full, and the last unroll is its first
    else:
        ring = inside(call)["buffer"].storage["timestep"]["observation"]
        unroll = inside(call)["trajectory"].timestep.observation[:-1]
        begin = 21 * 8  # steps of 4 environments: 20 unrolls hold 640 rows, and the ring is longer
    ring[:] = -1.0
    call()
    end = begin + len(unroll)
    assert np.array_equal(ring[begin:end], unroll) and np.prod(unroll.shape[:-1]) == 32
    assert (ring[:begin] == -1.0).all() and (ring[end:] == -1.0).all() and len(ring) > end


@SIDES
def test_both_sides_write_priorities_and_their_sums(side, monkeypatch):
    monkeypatch.setattr(replay_worker, "ROWS", 16)
    call = side(SMALL._replace(what="priorities", prioritised=True), 0)
    call()
    new = np.asarray(inside(call)["new"], np.float64)
    if side is replay_worker.numpy:
        tree, size = (inside(inside(call)["write"])[name] for name in ("tree", "size"))
        leaves, total, index = tree[size:], tree[1], np.sort(inside(call)["index"])
    else:
        tree = inside(call)["priorities"].tree
        leaves, total, index = tree[0].numpy(), float(sum_tree.total(tree)), inside(call)["leaf"].numpy()
    assert len(set(index)) == 16 and leaves[index] == pytest.approx((new + 1e-6) ** 0.6)
    assert total == pytest.approx(leaves.sum()) and 600 < (leaves == 1.0).sum() <= 640 - 16  # as they began


def test_gumbel_draws_by_priority_and_no_row_twice(monkeypatch):
    """Of masses uniform in [0, 2] the mean of those drawn in proportion is 4/3."""
    monkeypatch.setattr(replay_worker, "ROWS", 16)
    call = replay_worker.gumbel(SMALL._replace(prioritised=True, capacity=6400), 0)
    drawn = [call() for _ in range(100)]
    assert all(len(x["index"].unique()) == 16 and x["next_observation"].shape == (16, 3) for x in drawn)
    mass = torch.stack([x["weight"] for x in drawn]) ** (-1 / 0.4)
    assert len(mass.unique()) > 1000 and float(mass.mean()) == pytest.approx(4 / 3, abs=0.06)


def test_gumbel_is_measured_beside_samples_by_priority_alone(tmp_path, workers):
    out, sides = tmp_path / "out.json", (*workers, dataclasses.replace(workers[2], name="gumbel"))
    cases = [SMALL, SMALL._replace(name="by_priority", prioritised=True)]
    assert replay.main(str(out), cases=cases, rounds=2, repeats=2, workers=sides) == 0
    rows = [row["name"] for row in json.loads(out.read_text())["rows"]]
    small = ["small/torchrl", "small/numpy"]
    assert rows == [*small, "by_priority/torchrl", "by_priority/numpy", "by_priority/gumbel"]


def test_torchrl_samples_as_many_rows(monkeypatch):
    monkeypatch.setattr(replay_worker, "ROWS", 16)
    drawn = replay_worker.torchrl(SMALL, 0)()
    assert drawn["next", "observation"].shape == (16, 3)

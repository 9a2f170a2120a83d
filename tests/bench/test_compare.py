"""What makes two sides unfit to be compared, and what their rows say."""

import pytest
import torch

from torchpod import machine
from torchpod.bench import (
    anakin,
    compare,
    processes,
)
from torchpod.bench.anakin import Case
from torchpod.bench.compare import RowMaker


def test_a_learner_that_does_not_learn_as_its_peer_does_is_reported(tmp_path, fake):
    arguments = anakin.case_arguments(Case(64), 1, learn=True, seed=0)
    m = processes.run_worker(fake("jax", 2000), arguments, core=None, cache_dir=tmp_path, timeout_s=60)
    assert compare.unequal_work(m, m) == compare.unequal_returns([m], [m]) == []
    for episode_return in (50.0, None):
        slow: processes.Measurement = {**m, "episode_return": episode_return}
        assert len(compare.unequal_returns([slow], [m])) == 1
    near, far = ({**m, "env": "cartpole", "episode_return": x} for x in (86.0, 84.0))  # of 100
    beside = [{**m, "env": "cartpole"}]
    assert compare.unequal_returns([near], beside) == []  # pyright: ignore[reportArgumentType]
    assert "may differ by 0.15" in compare.unequal_returns([far], beside)[0]  # pyright: ignore[reportArgumentType]


def test_returns_are_compared_in_the_mean_of_the_seeds(tmp_path, fake):
    arguments = anakin.case_arguments(Case(64), 1, learn=True, seed=0)
    m = processes.run_worker(fake("jax", 2000), arguments, core=None, cache_dir=tmp_path, timeout_s=60)
    ours, peer = ([{**m, "episode_return": x} for x in side] for side in ([20.0, 40.0], [40.0, 22.0]))
    assert compare.unequal_returns(ours, peer) == []  # pyright: ignore[reportArgumentType]
    peer[1]["episode_return"] = 80.0
    assert "to a mean return of 30.0 and jax to 60.0" in compare.unequal_returns(ours, peer)[0]  # pyright: ignore[reportArgumentType]


def test_load_on_the_core_is_noted_in_the_row(tmp_path, fake):
    arguments = anakin.case_arguments(Case(64), 1, learn=False, seed=0)
    m = processes.run_worker(fake("jax", 2000), arguments, core=None, cache_dir=tmp_path, timeout_s=60)
    m["cpu_s"] = [0.5 * wall for wall in m["wall_s"]]
    row = RowMaker().rate("ppo_cartpole/64", [m], [m], peer_name="jax")
    assert row.cpu_share == pytest.approx(0.5) and "50% of it in the worst round" in row.note
    assert row.interval is None  # of one round
    assert RowMaker().rate("x", [m], [m], peer_name="jax", waits=True).note == ""


def test_of_two_cores_a_round_that_got_less_of_them_than_another_is_told(tmp_path, fake):
    arguments = anakin.case_arguments(Case(64), 1, learn=False, seed=0)
    m = processes.run_worker(fake("jax", 2000), arguments, core=None, cache_dir=tmp_path, timeout_s=60)
    for share, told in ((1.6, False), (1.4, True)):
        rounds = [{**m, "cpu_s": [x * wall for wall in m["wall_s"]]} for x in (1.7, share)]
        row = RowMaker().rate("ppo_cartpole/64 on 2 cores", rounds, rounds, peer_name="jax")
        assert ("140% of it in the worst round" in row.note) == told and row.cpu_share == pytest.approx(share)


def test_a_benchmark_and_a_run_name_the_same_cpu():
    assert machine.hardware(torch.device("cpu")).startswith(f"{compare.hardware()['cpu']}, ")

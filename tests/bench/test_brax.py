"""Suite brax: rows beside Brax's own loops, equal work, and returns where both sides learn."""

import importlib.util
import json
import sys

import pytest

from torchpod.bench import brax, brax_worker, compare, harness, processes
from torchpod.bench.brax import CASES, Case

FAKE = """
import json, sys
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
n, iterations, repeats = (int(options[f"--{name}"]) for name in ("num-envs", "iterations", "repeats"))
print(json.dumps({
    "framework": "NAME", "mode": options["--mode"], "env": options["--env"], "num_envs": n, "unroll_length": 32,
    "epochs": 4, "minibatches": 4, "batch_rows": 32 * n, "param_count": PARAMS, "dtype": "float32",
    "iterations": iterations, "total_iterations": 7, "compile_s": 1.0, "env_steps": [RATE] * repeats,
    "wall_s": [1.0] * repeats, "cpu_s": [2.0] * repeats,
    "episode_return": RETURN, "episodes": 0, "threads": {}, "versions": {"NAME": "1"},
}))
"""
PPO = Case("inverted_pendulum", 8, 2, "update", learn=3)


def run(tmp_path, case, ours=(200.0, 9091, 190.0), peer=(100.0, 9091, 200.0), missing=None):
    workers = []
    for name, side, gone in (("torchpod", ours, None), ("brax", peer, missing)):
        path = tmp_path / f"{name}.py"
        code = FAKE.replace("NAME", name)
        for word, value in zip(("RATE", "PARAMS", "RETURN"), side, strict=True):
            code = code.replace(word, str(value))
        path.write_text(code)
        workers.append(processes.Worker(name, (sys.executable, "-S", str(path)), missing=gone))
    out = tmp_path / "out.json"
    status = brax.main(str(out), cases=[case], rounds=2, repeats=2, workers=(workers[0], workers[1]))
    return status, json.loads(out.read_text())


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    monkeypatch.setattr(harness, "calibrate", lambda core: {"2048x64x64": 50.0})


def test_rows_are_ratios_and_say_what_is_not_equal(tmp_path):
    status, document = run(tmp_path, Case("ant", 8, 20))
    (row,) = document["rows"]
    assert (status, row["name"], row["ratio"]) == (0, "stepping_ant/8", 2.0)
    assert row["note"] == "all cores, unpinned; a call of XLA per step beside one for all steps"
    status, document = run(tmp_path, PPO)
    assert [row["name"] for row in document["rows"]] == [
        "ppo_inverted_pendulum/8",
        "compile_cold_ppo_inverted_pendulum/8",
        "compile_warm_ppo_inverted_pendulum/8",
    ]
    rate, cold, _ = document["rows"]
    assert status == 0 and "Brax's minibatches are whole unrolls" in rate["note"]
    assert rate["note"].endswith("; returns: torchpod 190, brax 200") and "returns" not in cold["note"]
    assert rate["interval"] == [2.0, 2.0] and cold["interval"] is None  # one start
    _, document = run(tmp_path, PPO._replace(learn=0))
    assert document["rows"][0]["note"].endswith(f"; {compare.TOO_EARLY}")


def test_unequal_work_and_returns_fail_and_a_missing_peer_is_told(tmp_path):
    status, document = run(tmp_path, PPO, ours=(200.0, 9000, 190.0))
    assert status == 1
    told = ["ppo_inverted_pendulum/8", "unequal work: param_count is 9000 in torchpod and 9091 in brax."]
    assert document["failures"] == [told]
    status, document = run(tmp_path, PPO, peer=(100.0, 9091, 400.0))
    assert status == 1 and "learned to a mean return of 190.0 and brax to 400.0" in document["failures"][0][1]
    status, document = run(tmp_path, PPO, ours=(200.0, 9091, 130.0))
    assert status == 1 and [told for _, told in document["failures"]] == [
        "torchpod learned to a mean return of 130.0, and must reach 140, far from a random policy's, or equal returns"
        " say nothing: repair it, or let it learn longer."
    ]
    assert run(tmp_path, PPO._replace(learn=0), ours=(200.0, 9091, None))[0] == 0
    status, document = run(tmp_path, PPO, missing="no brax")
    assert status == 0 and document["rows"][0]["note"].endswith("; brax: no brax; returns: torchpod 190")
    _, document = run(tmp_path, PPO, ours=(200.0, 9091, None))
    assert document["rows"][0]["note"].endswith("; returns: torchpod none, brax 200")


def test_both_sides_get_the_same_arguments():
    assert len({case.name for case in CASES}) == len(CASES)
    arguments = brax.case_arguments(PPO, 3, seed=1)
    work = "--env inverted_pendulum --num-envs 8 --mode update --iterations 2 --repeats 3 --warmup 3 --seed 1"
    work += " --backend spring --learn"
    assert " ".join(arguments) == work


@pytest.mark.skipif(importlib.util.find_spec("brax") is None, reason="the extra `brax` is not installed")
@pytest.mark.parametrize("mode", ["env_only", "update"])
def test_the_worker_measures_transitions(mode):
    m = brax_worker.measure("fast", 8, mode, 2, 2, learn=mode == "update", compiled=False)
    assert m["env_steps"] == ([2 * 8.0] * 2 if mode == "env_only" else [2 * 32 * 8.0] * 2)  # its episodes are long
    assert m.keys() >= processes.Measurement.__required_keys__
    assert m["dtype"] == "float32"
    assert (m["param_count"], m["episodes"]) == ((0, 0) if mode == "env_only" else (8835, 8))
    assert (m["episode_return"] is None) == (mode == "env_only")

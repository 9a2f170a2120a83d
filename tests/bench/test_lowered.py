"""Programs for a GPU, looked at without one."""

import json
import sys

import pytest

from torchpod.bench import lowered


@pytest.mark.slow
@pytest.mark.parametrize("population", [1, 2])
def test_an_iteration_for_a_gpu_computes_what_it_should(population):
    """PPO on CartPole: every program, its kernels interpreted, and none of them returns to the host."""
    small = ["algo.unroll_length=4", "algo.agent.hidden=[16, 16]", "algo.learner.num_minibatches=2"]
    found = lowered.look(["algo=ppo", "env=cartpole", "num_envs=4", f"population={population}", *small], "--check")
    assert 0 < found["largest_difference"] < 1e-4  # floats are rounded otherwise, so equal ones were not compared
    in_programs = sum(calls * launches for calls, launches in found["programs"].values())
    assert found["launches"] == in_programs + sum(found["between"].values())
    calls = {name.rpartition(".")[2]: calls for name, (calls, _) in found["programs"].items()}
    assert calls["step"] == 4 and calls["_gradient_one"] == calls["_apply_one"] == 2 * 4
    # Policy and critic share them: in every step, before learning, and in every gradient; backward are two kernels.
    assert found["operators"]["torch.ops.torchpod.mlps.default"] == 4 + 1 + 8
    assert found["operators"]["torch.ops.torchpod.mlps_backward.default"] == 2 * 8
    assert found["layers"] == [[4, 16], [16, 16]] * 2 + [[16, 2], [16, 1]] and found["rows"] == 16


@pytest.mark.slow
def test_what_is_wrong_is_found():
    ended = lowered.run("tests.bench.wrong_programs", "--check")
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["right"] is None
    assert found["to_host"].startswith("to_host returns to the host: ")
    assert found["wrong"].startswith("right, interpreted, differs by ")
    assert found["small"].startswith("small, interpreted, differs by ")
    assert found["infinite"].startswith("infinite, interpreted, differs by inf ")
    assert found["timed"] == "on a GPU kernel would be the quickest of 2 kernels, by a timing there."


@pytest.mark.slow
def test_a_thousand_agents_step_in_the_memory_that_is_promised():
    """Continuous Tag by the ten nearest, compiled for a GPU: all that a step makes, docs/multi-agent.md."""
    ended = lowered.run("tests.bench.lowered_memory")
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["buffers"] > 5
    assert 284_000 <= found["largest"] < found["bytes"] <= 2_300_000


FOUND = {
    "launches": 5000,
    "programs": {"make_step.<locals>.step": [128, 13], "Learner._gradient_one": [16, 34]},
    "between": {"stack.default": 10},
    "kernels": 36,
    "largest_difference": 0.0,
    "rows": 131072,
    "epochs": 4,
    "layers": [[4, 64], [64, 2]],
    "observation_size": 4,
    "state_bytes": 21.0,
}


@pytest.fixture
def looked(monkeypatch):
    calls = []

    def look(overrides, *options):
        calls.append((overrides, options))
        if "env=pendulum" in overrides:
            raise RuntimeError("it returns to the host")
        return {**FOUND, "largest_difference": 1e-7 if options == ("--check",) else 0.0}

    monkeypatch.setattr(lowered, "look", look)
    return calls


def test_the_suite_writes_launches_with_their_floor_and_says_what_failed(looked, tmp_path, capsys):
    path = tmp_path / "rows.json"
    assert lowered.main(str(path), only="ppo_") == 1
    document = json.loads(path.read_text())
    rows = {row["name"]: row for row in document["rows"]}
    assert rows["launches_ppo_cartpole/1024"]["value"] == 5000
    assert "floor in ms: launches 5.00, " in rows["launches_ppo_cartpole/1024"]["note"]
    assert "step 128 x 13, _gradient_one 16 x 34" in rows["launches_ppo_cartpole/1024"]["note"]
    assert rows["interpreted_ppo_cartpole/32"]["value"] == 1e-7
    assert "a2c_grid_world" not in " ".join(rows) and "pendulum" not in " ".join(rows)
    assert document["failures"] == [["launches_ppo_pendulum/1024", "it returns to the host"]]
    assert "launches_ppo_pendulum/1024: it returns to the host" in capsys.readouterr().err


def test_in_short_it_looks_at_one_case_with_few_environments(looked, tmp_path):
    assert lowered.main(str(tmp_path / "rows.json"), quick=True) == 0
    assert [(overrides[-1], *options) for overrides, options in looked] == [
        ("num_envs=32", "--compile"),
        ("num_envs=32", "--check"),
    ]


@pytest.mark.slow
def test_what_a_worker_said_last_is_told():
    with pytest.raises(RuntimeError, match="ended with status 1 and said: .*no_such_env"):
        lowered.look(["env=no_such_env"])


def test_without_triton_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(lowered.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"there is no Triton; pip install --no-deps --target .* triton"):
        lowered.run("torchpod.bench.lowered_worker")

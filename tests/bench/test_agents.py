"""Suite agents: rounds of runs become a row, beside a peer if there is one, and a run that fails is told."""

import dataclasses
import json
import sys

import pytest

from torchpod.bench import agents, agents_worker, compare, harness, processes
from torchpod.bench.agents import Case
from torchpod.bench.processes import Worker

SMALL = ("compile=false", "algo.replay.min_size=64", "algo.replay.capacity=1024")
FAKE = """
import json, sys
seed = int(sys.argv[sys.argv.index("--seed") + 1])
print(json.dumps({told} | {{"env_steps": [600.0], "wall_s": [{wall} * (1 + seed)]}}))
"""


@pytest.fixture(autouse=True)
def no_calibration(monkeypatch):
    monkeypatch.setattr(harness, "calibrate", lambda core: {"2048x64x64": 50.0})


@pytest.fixture(scope="module")
def measurement():
    return agents_worker.measure(["experiment=sac_pendulum", "total_env_steps=600", *SMALL, "num_envs=8"], seed=3)


def fake(name, measurement, wall, **changes):
    code = FAKE.format(told=repr({**measurement, "framework": name, **changes}), wall=wall)
    return Worker(name, (sys.executable, "-c", code))


def test_a_run_is_measured_as_a_whole(measurement):
    assert measurement["env_steps"] == [608.0]  # whole iterations of 32 steps
    assert measurement["iterations"] == measurement["total_iterations"] == 19
    assert measurement["minibatches"] == 8 and measurement["sampled_rows"] == 128 and measurement["wall_s"][0] > 0
    assert measurement["episode_return"] is None  # 76 steps of each environment, whose episodes have 200


def test_rows_stand_beside_the_peer_and_say_what_both_learned(tmp_path, measurement):
    out, cases = tmp_path / "out.json", [Case("sac_pendulum", 600, peer=True), Case("dqn_cartpole", 600)]
    learned = {"episode_return": -150.0, "episodes": 8}
    workers = fake("torchpod", measurement, 0.5, **learned), fake("jax", measurement, 1.0, **learned)
    assert agents.main(str(out), cases=cases, rounds=2, only="sac", workers=workers) == 0
    document = json.loads(out.read_text())
    row, cold, warm = document["rows"]
    assert (row["name"], row["unit"], row["ratio"], row["interval"]) == ("sac_pendulum/8", "env_steps/s", 2.0, [2, 2])
    assert row["repeats"] == [1200, 600] and "returns: torchpod -150, jax -150" in row["note"]
    assert (cold["name"], warm["name"]) == ("compile_cold_sac_pendulum/8", "compile_warm_sac_pendulum/8")
    assert document["only"] == "sac" and document["device"] == "cpu"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"sampled_rows": 64}, "unequal work: sampled_rows is 128 in torchpod and 64 in jax."),
        ({"episode_return": -900.0}, "jax learned to a mean return of -900.0, and must reach -300"),
        ({"episode_return": -250.0}, "torchpod learned to a mean return of -120.0 and jax to -250.0"),
    ],
)
def test_what_is_not_equal_is_told(changes, told, tmp_path, measurement, capsys):
    workers = (
        fake("torchpod", measurement, 0.5, episode_return=-120.0, episodes=8),
        fake("jax", measurement, 1.0, **{"episode_return": -120.0, "episodes": 8} | changes),
    )
    case = Case("sac_pendulum", 600, peer=True)
    assert agents.main(str(tmp_path / "out.json"), cases=[case], rounds=2, workers=workers) == 1
    assert told in capsys.readouterr().err


def test_a_run_that_fails_is_told_and_the_others_go_on(tmp_path, measurement, capsys):
    out, cases = tmp_path / "out.json", [Case("sac_pendulum", 600), Case("dqn_cartpole", 600)]
    worker = fake("torchpod", measurement, 1.0)
    code = "import sys; 'sac_pendulum' in sys.argv and sys.exit('no room')\n" + worker.command[-1]
    failing = dataclasses.replace(worker, command=(*worker.command[:-1], code))
    assert agents.main(str(out), cases=cases, workers=(failing, fake("jax", measurement, 1.0))) == 1
    assert "sac_pendulum/8: torchpod failed (exit status 1): no room" in capsys.readouterr().err
    (row,) = json.loads(out.read_text())["rows"]
    assert row["name"] == "dqn_cartpole/64" and row["value"] == 300.0 and row["peer"] is None


def test_what_there_was_no_time_for_is_told(tmp_path, measurement, capsys):
    out, workers = tmp_path / "out.json", [fake(name, measurement, 1.0) for name in ("torchpod", "jax")]
    assert agents.main(str(out), cases=[Case("sac_pendulum", 600)], budget_s=-1.0, workers=workers) == 1
    assert "sac_pendulum/8: not measured, the time is over; use --only sac_pendulum." in capsys.readouterr().err
    assert json.loads(out.read_text())["rows"] == []


def test_a_run_that_is_not_over_in_time_is_stopped(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(agents, "AFTER_BUDGET_S", -1e9)
    sleeper = Worker("torchpod", (sys.executable, "-c", "import time; time.sleep(60)"))
    workers, cases = (sleeper, dataclasses.replace(sleeper, name="jax")), [Case("sac_pendulum", 600)]
    assert agents.main(str(tmp_path / "out.json"), cases=cases, workers=workers, budget_s=99) == 1
    assert "torchpod was still running after 1 s and was stopped" in capsys.readouterr().err


def test_every_case_is_a_run():
    for case in agents.CASES:
        config = agents.load(case.overrides)
        assert config.total_env_steps == case.steps and config.algo.replay is not None
        assert config.algo.name == case.name.removeprefix("sebulba_").split("_")[0]
        assert config.loop.name == ("sebulba" if case.name.startswith("sebulba_") else "anakin")
        assert not case.peer or (case.name in compare.LEARNED and config.experiment_name == case.name)


@pytest.mark.slow
def test_sebulba_is_measured_too():
    overrides = ("experiment=dqn_cartpole", "loop=sebulba", "total_env_steps=4096", *SMALL)
    measured = agents_worker.measure(overrides)
    assert 3000 < measured["env_steps"][0] <= 4096 and measured["wall_s"][0] > 0 and measured["episodes"] >= 0


SETTINGS = """
import json, sys
sys.path.insert(0, "bench/peers")
import jax_replay
for name, make in jax_replay.WORK.items():
    work = make()._asdict() | {"min_size": jax_replay.MIN_SIZE, "fill": jax_replay.fill_iterations(make())}
    print(json.dumps({k: v for k, v in work.items() if isinstance(v, int | float)}))
"""


def test_the_peers_settings_are_the_experiments():
    python, missing = processes.peers_python()
    if missing:
        pytest.skip(f"peers: {missing}")
    found = processes.output_of([python, "-c", SETTINGS], {}, "the peer", core=None).splitlines()
    for line, case in zip(found, [c for c in agents.CASES if c.peer], strict=True):
        theirs, algo = json.loads(line), agents.load([f"experiment={case.name}"]).algo
        config, learner, replay = algo.agent, algo.learner, algo.replay
        assert replay is not None
        assert theirs["learning_rate"] == learner.learning_rate and theirs["anneals"] == learner.anneal_learning_rate
        assert theirs["updates"] == learner.num_minibatches and theirs["max_grad_norm"] == learner.max_grad_norm
        assert (theirs["capacity"], theirs["batch_size"]) == (replay.capacity, replay.batch_size)
        for name in ("discount", "n_step", "reward_scale", "target_rate", "policy_interval"):
            assert name not in config or theirs[name] == config[name]
        assert config["hidden"] == [theirs["hidden"]] * 2 and theirs["min_size"] == replay.min_size


@pytest.mark.slow
def test_the_peer_does_the_same_work():
    python, missing = processes.peers_python()
    if missing:
        pytest.skip(f"peers: {missing}")
    code = "import json, jax_replay; print(json.dumps([jax_replay.measure(c, steps=1500) for c in jax_replay.WORK]))"
    found = processes.output_of(
        [python, "-c", f"import sys; sys.path.insert(0, 'bench/peers'); {code}"], {}, "the peer", core=None
    )
    for theirs, case in zip(json.loads(found), [c for c in agents.CASES if c.peer], strict=True):
        own = [*case.overrides, "total_env_steps=1500", "compile=false"]
        assert theirs["env"] == case.name and compare.unequal_work(agents_worker.measure(own), theirs) == []

"""Suite agents: what a run's summary says becomes a row, and a run that fails is told."""

import json
import time

import pytest

from torchpod.bench import agents, harness, processes
from torchpod.bench.agents import Case

SMALL = ("compile=false", "algo.replay.min_size=64", "algo.replay.capacity=1024")


@pytest.mark.slow
def test_a_row_is_the_median_of_the_runs_summaries(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "calibrate", lambda core: {"2048x64x64": 50.0})
    out = tmp_path / "out.json"
    cases = [Case("sac_pendulum", 600), Case("dqn_cartpole", 600)]
    status = agents.main(str(out), cases=cases, rounds=2, only="sac", overrides=(*SMALL, "num_envs=8"))
    document = json.loads(out.read_text())
    (row,) = document["rows"]
    assert status == 0 and (row["name"], row["unit"]) == ("sac_pendulum/8", "env_steps/s")
    low, high = sorted(row["repeats"])
    assert 0 < low <= row["value"] <= high and document["only"] == "sac"


def test_a_run_that_fails_is_told_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(harness, "calibrate", lambda core: {"2048x64x64": 50.0})
    rates = iter([5.0, 7.0, 6.0])

    def rate(case, *args):
        if case.name == "sac_pendulum":
            return processes.output_of(["false"], {}, "the run", core=None)
        return next(rates)

    monkeypatch.setattr(agents, "rate", rate)
    out = tmp_path / "out.json"
    assert agents.main(str(out), cases=[Case("sac_pendulum", 600), Case("dqn_cartpole", 600)]) == 1
    assert "sac_pendulum/8: the run failed (exit status 1)" in capsys.readouterr().err
    (row,) = json.loads(out.read_text())["rows"]
    assert row["name"].startswith("dqn_cartpole/") and row["value"] == 6.0


def test_what_there_was_no_time_for_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(harness, "calibrate", lambda core: {"2048x64x64": 50.0})
    out = tmp_path / "out.json"
    assert agents.main(str(out), cases=[Case("sac_pendulum", 600)], budget_s=-1.0) == 1
    assert "sac_pendulum/8: not measured, the time is over; use --only sac_pendulum." in capsys.readouterr().err
    assert json.loads(out.read_text())["rows"] == []


def test_a_run_that_is_not_over_in_time_is_stopped():
    with pytest.raises(processes.WorkerError, match="the run was still running after 1 s and was stopped"):
        agents.rate(Case("sac_pendulum", 600), 0, None, SMALL, time.monotonic() + 1.0)


def test_every_case_is_a_run():
    for case in agents.CASES:
        config = agents.load(case.overrides)
        assert config.total_env_steps == case.steps and config.algo.replay is not None
        assert config.algo.name == case.name.removeprefix("sebulba_").split("_")[0]
        assert config.loop.name == ("sebulba" if case.name.startswith("sebulba_") else "anakin")

import fnmatch
import json
import os
import shutil
import signal
import sys
import time
import types
from pathlib import Path

import pytest
import torch

from torchpod import bench, machine
from torchpod import main as command_line
from torchpod.bench import anakin, envs, gpu, harness, losses, multiagent, population, replay, report, sebulba, targets
from torchpod.bench.anakin import Case
from torchpod.bench.harness import Record, RowMaker, Worker, WorkerError
from torchpod.bench.targets import Target
from torchpod.config import ConfigError

KINDS = ("cold", "warm", "first")


@pytest.fixture(autouse=True)
def no_target(request, monkeypatch):
    """Fake workers have nothing to reach."""
    if "fake" in request.fixturenames:
        monkeypatch.setitem(targets.TARGETS, "anakin", {})


def run_suite(tmp_path: Path, *workers: Worker, **knobs) -> tuple[int, dict]:
    path = tmp_path / "out.json"
    options = {"cases": (Case(64),), "rounds": 2, "repeats": 2, **knobs}
    status = anakin.main(str(path), workers=(workers[0], workers[1]), **options)
    return status, json.loads(path.read_text())


def test_a_row_holds_the_ratio_of_torchpod_over_its_peer_with_every_repeat(tmp_path, fake):
    status, document = run_suite(
        tmp_path, fake("torchpod", 3000), fake("jax", 2000), cases=[Case(64, mode) for mode in anakin.MODES]
    )
    assert status == 0
    rows = {row["name"]: row for row in document["rows"]}
    assert list(rows) == [
        "env_only_cartpole/64",
        "env_policy_cartpole/64",
        "ppo_cartpole/64",
        "compile_cold_ppo_cartpole/64",
        "compile_warm_ppo_cartpole/64",
    ]
    row = rows["ppo_cartpole/64"]
    assert row["ratio"] == pytest.approx(1.5) and row["interval"] == pytest.approx([1.5, 1.5])
    assert row["repeats"] == pytest.approx([3000.0] * 4) and row["peer"]["value"] == pytest.approx(2000.0)
    assert row["commit"] and row["hardware"] == document["hardware"]["name"] and row["versions"]["jax"] == "1"


def test_a_row_says_what_its_matrix_products_need(tmp_path, fake, monkeypatch):
    monkeypatch.setattr(harness, "calibrate", lambda core: {"2048x64x64": 100.0})
    _, document = run_suite(tmp_path, fake("torchpod", 3000, flops=1e7), fake("jax", 2000))
    row = next(row for row in document["rows"] if row["name"] == "ppo_cartpole/64")
    assert "matrix products need 30% of the time, at 100 GFLOP/s" in row["note"]
    two = anakin.with_floor(harness.Row(**row), Case(64, cores=2), [{"flops": 1e7}], 100.0)
    assert two.note.endswith("matrix products need 15% of the time, at 100 GFLOP/s a core")


def test_sides_take_turns_on_one_core_and_compile_cold_as_often_as_they_run(tmp_path, fake):
    core = max(os.sched_getaffinity(0))
    _, document = run_suite(tmp_path, fake("torchpod", 3000), fake("jax", 2000), rounds=3, core=core)
    assert (tmp_path / "log").read_text().split("\n")[:-1] == ["torchpod update 64", "jax update 64"] * 5
    rows = {row["name"]: row for row in document["rows"]}
    assert rows["compile_cold_ppo_cartpole/64"]["repeats"] == [5.0, 5.0, 5.0]
    assert rows["compile_warm_ppo_cartpole/64"]["repeats"] == [0.5, 0.5]
    assert rows["ppo_cartpole/64"]["threads"]["jax"]["cores"] == 1


def test_without_taskset_nothing_passes_for_pinned(tmp_path, fake, monkeypatch):
    which = harness.shutil.which
    monkeypatch.setattr(harness.shutil, "which", lambda name: None if name == "taskset" else which(name))
    with pytest.raises(
        ConfigError, match="cannot be pinned to a core: there is no `taskset` on the PATH; install util-"
    ):
        run_suite(tmp_path, fake("torchpod", 3000), fake("jax", 2000))
    with pytest.raises(WorkerError, match="a program cannot be pinned to core 0: there is no `taskset`"):
        harness.output_of([sys.executable, "-c", ""], {}, "a program", core=0)
    assert harness.output_of([sys.executable, "-S", "-c", "print(1)"], {}, "a program", core=None) == "1\n"


def test_some_rows_alone(tmp_path, fake):
    cases = [Case(64), Case(4), Case(64, env="minatar_breakout")]
    _, document = run_suite(tmp_path, fake("torchpod", 3000), fake("jax", 2000), cases=cases, only="ppo_cartpole")
    assert document["only"] == "ppo_cartpole"
    assert [row["name"] for row in document["rows"] if row["unit"] != "s"] == ["ppo_cartpole/64", "ppo_cartpole/4"]
    names = "ppo_cartpole/4,ppo_minatar"
    _, document = run_suite(tmp_path, fake("torchpod", 3000), fake("jax", 2000), cases=cases, only=names)
    rates = [row["name"] for row in document["rows"] if row["unit"] != "s"]
    assert rates == ["ppo_cartpole/4", "ppo_minatar_breakout/64"]
    with pytest.raises(ValueError, match="--only 'ppo_x' is nothing of anakin"):
        anakin.main(cases=cases, only="ppo_cartpole,ppo_x")
    with pytest.raises(ValueError, match="--only '' is nothing of anakin"):
        anakin.main(cases=cases, only="ppo_cartpole,")
    with pytest.raises(ValueError, match="--only '' is nothing of anakin"):
        anakin.main(cases=cases, only="")
    with pytest.raises(ValueError, match="--only 'ppo_kartpole' is nothing of anakin; .*ppo_cartpole/64"):
        run_suite(tmp_path, fake("torchpod", 3000), fake("jax", 2000), cases=cases, only="ppo_kartpole")


def test_rejax_must_not_be_faster_than_our_jax_driver(tmp_path, fake):
    cases, sides = [Case(64), Case(64, peer="rejax")], (fake("torchpod", 3000), fake("jax", 2000))
    status, document = run_suite(tmp_path, *sides, cases=cases, rejax=fake("rejax", 1500))
    assert status == 0 and [row["name"] for row in document["rows"] if row["unit"] != "s"] == [
        "ppo_cartpole/64",
        "rejax_cartpole/64",
    ]
    assert document["rows"][-1]["peer"]["name"] == "rejax" and document["rows"][-1]["ratio"] == pytest.approx(2.0)
    status, document = run_suite(tmp_path, *sides, cases=cases, rejax=fake("rejax", 2500))
    ((name, told),) = document["failures"]
    assert (
        status == 1
        and name == "rejax_cartpole/64"
        and told.startswith("rejax did 2,500 env steps/s and our own JAX driver 2,000, so that ratios to it flatter us")
    )
    assert run_suite(tmp_path, *sides, quick=True, rejax=fake("rejax", 2500))[0] == 0
    status, document = run_suite(tmp_path, *sides, cases=cases, rejax=fake("rejax", 1, missing="no rejax"))
    assert status == 0 and document["rows"][-1]["note"] == "rejax: no rejax"


def test_cores_are_part_of_a_case(tmp_path, fake, monkeypatch):
    run_worker, asked = harness.run_worker, []

    def unpinned(worker, arguments, *, core, **knobs):  # this process may have one core alone
        asked.append((arguments[1], core))
        return run_worker(worker, arguments, core=None, **knobs)

    monkeypatch.setattr(harness, "run_worker", unpinned)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 3, 4})
    cases = [Case(64, env="minatar_breakout"), Case(64, cores=2)]
    _, document = run_suite(tmp_path, fake("torchpod", 3000), fake("jax", 2000), cases=cases)
    names = ["ppo_minatar_breakout/64", "compile_cold_ppo_minatar_breakout/64", "compile_warm_ppo_minatar_breakout/64"]
    assert [row["name"] for row in document["rows"]] == [*names, "ppo_cartpole/64 on 2 cores"]
    assert {str(core) for env, core in asked if env == "minatar_breakout"} == {"4"}
    assert {str(core) for env, core in asked if env == "cartpole"} == {"[3, 4]"}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    status, document = run_suite(tmp_path, fake("torchpod", 3000), fake("jax", 2000), cases=cases[1:])
    assert status == 1 and document["rows"] == []
    assert document["failures"] == [["ppo_cartpole/64 on 2 cores", "not measured, there are too few cores."]]


def test_a_peer_below_its_scaled_figure_fails_the_bench_with_one_sentence(tmp_path, fake, capsys, monkeypatch):
    # This machine multiplies at half the rate, so 0.9 of half the figure is asked for: 2000 >= 0.45 * 4400.
    monkeypatch.setattr(targets, "GFLOPS", 100.0)
    for figure, status in ((4400, 0), (4500, 1)):
        monkeypatch.setitem(targets.TARGETS, "anakin", {"ppo_cartpole/*": Target(stated=figure)})
        found, document = run_suite(tmp_path, fake("torchpod", 3000), fake("jax", 2000))
        assert found == status and document["failures"] == []  # the row and the product say so
    assert "ppo_cartpole/64: jax did 2,000 env steps/s, below 2,025" in capsys.readouterr().err
    sides, rejax = (fake("torchpod", 3000), fake("jax", 2000)), fake("rejax", 1, missing="no rejax")
    assert run_suite(tmp_path, *sides, quick=True, rejax=rejax)[0] == 0


def test_rows_that_leave_out_no_zeros_have_names_of_their_own():
    case = Case(64, env="minatar_breakout")
    assert (case.name, case._replace(dense=True).name) == ("ppo_minatar_breakout/64", "ppo_minatar_breakout_dense/64")
    found = [anakin.case_arguments(case._replace(dense=dense), 1, learn=True, seed=0) for dense in (False, True)]
    assert found[1] == [*found[0], "--dense"]


def test_another_environment_is_other_work(tmp_path, fake):
    arguments = anakin.case_arguments(Case(64), 1, learn=True, seed=0)
    m = harness.run_worker(fake("jax", 2000), arguments, core=None, cache_dir=tmp_path, timeout_s=60)
    m["env"] = "cartpole"
    other: harness.Measurement = {**m, "env": "catch"}
    assert harness.unequal_work(m, {**m}) == []
    assert harness.unequal_work(other, m) == ["unequal work: env is 'catch' in jax and 'cartpole' in jax."]


def test_unequal_work_fails_the_bench(tmp_path, fake):
    status, document = run_suite(tmp_path, fake("torchpod", 3000, params=4610), fake("jax", 2000))
    assert status == 1
    told = "unequal work: param_count is 4610 in torchpod and 9155 in jax."
    assert document["failures"] == [["ppo_cartpole/64", told]]


def test_a_peer_that_is_not_installed_is_a_row_with_the_reason(tmp_path, fake):
    jax = fake("jax", 2000, missing=".venv-peers/bin/python does not exist: `make bench` creates it")
    status, document = run_suite(tmp_path, fake("torchpod", 3000), jax)
    row = document["rows"][0]
    assert status == 0 and row["peer"] is None and row["ratio"] is None and row["value"] == pytest.approx(3000)
    assert "make bench" in row["note"]


def test_a_peer_that_is_installed_and_fails_fails_the_bench(tmp_path, fake):
    broken = Worker("jax", (sys.executable, "-S", "-c", "raise SystemExit('no memory')"))
    status, document = run_suite(tmp_path, fake("torchpod", 3000), broken)
    assert status == 1 and document["rows"][0]["value"] == pytest.approx(3000)
    assert document["failures"] == [["ppo_cartpole/64", "jax failed (exit status 1): no memory"]]


def test_a_missed_target_fails_the_bench_with_what_bounds_it(tmp_path, fake, monkeypatch, capsys):
    known = {"ppo_cartpole/64": Target(ratio=2.0, bound="memory"), "compile_warm_ppo_cartpole/64": Target(most=0.1)}
    monkeypatch.setitem(targets.TARGETS, "anakin", known)
    status, document = run_suite(tmp_path, fake("torchpod", 3000), fake("jax", 2000))
    assert (status, document["failures"]) == (1, [])  # the rows say so
    assert capsys.readouterr().err.splitlines() == [
        "torchpod bench: ppo_cartpole/64: 1.50 x, the target is >= 2 x; memory.",
        "torchpod bench: compile_warm_ppo_cartpole/64: 0.5 s, the target is <= 0.1 s.",
    ]
    known |= {"ppo_cartpole/64": Target(ratio=1.4), "compile_warm_ppo_cartpole/64": Target(ratio=1.1)}
    assert run_suite(tmp_path, fake("torchpod", 3000), fake("jax", 2000))[0] == 0


@pytest.mark.parametrize(
    ("target", "row", "told"),
    [
        (Target(ratio=2.0), {"ratio": 2.0, "interval": (2.0, 2.1), "unit": "env_steps/s"}, (">= 2 x", "met")),
        (
            Target(ratio=2.0),
            {"ratio": 2.0, "interval": (1.9, 2.1), "unit": "1/s"},
            (">= 2 x", "met, not in every round"),
        ),
        (Target(ratio=2.0), {"ratio": 1.9, "interval": (1.9, 2.1), "unit": "env_steps/s"}, (">= 2 x", "missed")),
        (Target(ratio=3.0), {"ratio": 2.9, "interval": (2.0, 3.1), "unit": "s"}, ("<= 3 x", "met, not in every round")),
        (Target(ratio=3.0), {"ratio": 3.1, "interval": (3.0, 3.2), "unit": "s"}, ("<= 3 x", "missed")),
        (Target(ratio=3.0), {"ratio": None, "value": 9.0, "unit": "s"}, ("<= 3 x", "not measured")),
        (Target(most=5.0), {"ratio": None, "value": 4.0, "unit": "s"}, ("<= 5 s", "met")),
        (Target(most=5.0), {"ratio": None, "value": 5.1, "unit": "s"}, ("<= 5 s", "missed")),
        (Target(least=0.9), {"ratio": None, "value": 0.8, "unit": "share"}, (">= 0.9 share", "missed")),
        (Target(stated=5.0), {"ratio": 1.0, "value": 4.0, "unit": "x/s"}, ("", "")),
        (Target(most=7.0), {"ratio": None, "value": 8.0, "unit": "MB"}, ("<= 7 MB", "missed")),
        (Target(ratio=2.0), {"ratio": 2.0, "interval": None, "unit": "1/s"}, (">= 2 x", "met")),
        (
            Target(ratio=2.0, best_of="layout"),
            {"ratio": 2.0, "interval": None, "unit": "1/s"},
            (">= 2 x with the best layout", "met"),
        ),
        (Target(least=5), {"interval": (0, 1), "value": 5, "unit": "env_steps/s"}, (">= 5 env_steps/s", "met")),
        (Target(least=5e7), {"ratio": 1.0, "value": None, "unit": "x/s"}, (">= 50,000,000 x/s", "not measured")),
    ],
)
def test_targets_in_words(target, row, told):
    assert targets.outcome(target, row) == told


def test_targets_are_those_of_rows_that_there_are():
    rates = {"anakin": [case.name for case in anakin.CASES]}
    rates["population"] = [population.name_of(case) for case in population.CASES]
    compiled = [f"compile_{kind}_{name}" for name in (*rates["anakin"], *rates["population"]) for kind in KINDS]
    shares = [case.name.replace("impala_", "impala_of_raw_", 1) for case in gpu.HOST_CASES]
    layouts = [
        row
        for name, case in sebulba.CASES.items()
        for side in (*sebulba.LAYOUTS, "sync", "plain")
        for row in (
            *(sebulba.row_of(name, case, mode, side) for mode in sebulba.WORK),
            *(f"{work}_{name}_{side}_vs_plain/{case.num_envs}" for work in sebulba.WORK.values()),
            f"cpu_{name}_{side}/{case.num_envs}",
        )
    ]
    rows = {
        "anakin": [*rates["anakin"], *compiled, "train_warm_cartpole/1024"],
        "envs": [f"{case.name}/{envs.NUM_ENVS}" for case in (*envs.CASES, *envs.ALONE)],
        "gpu": [*shares, *(case.name for case in gpu.CASES), "whole_suite"],
        "losses": [case.name for case in losses.CASES],
        "multiagent on cpu": [
            name for case in multiagent.CPU_CASES for name in (case.name, case.name.replace("env_only", "original"))
        ],
        "multiagent on cuda": [case.name for case in multiagent.CUDA_CASES],
        "population": [*rates["population"], *compiled],
        "replay": [f"{case.name} memory" for case in replay.CASES],
        "sebulba": layouts,
    }
    assert rows.keys() == targets.TARGETS.keys()
    for suite, known in targets.TARGETS.items():
        assert [pattern for pattern in known if not fnmatch.filter(rows[suite], pattern)] == []
        for target in known.values():
            limits = [target.ratio, target.most, target.least].count(None)
            assert limits == 2 or (limits == 3 and target.stated)
    assert targets.TARGETS["gpu"].keys() >= {*shares}
    told = targets.targets_of({"suite": "anakin", "rows": [{"name": name} for name in rows["anakin"]]})
    assert told["compile_warm_ppo_pendulum/1024"].most == 5.0 and told["compile_cold_ppo_pendulum/1024"].ratio == 3.0


def test_the_best_row_is_judged_where_that_is_a_setting(monkeypatch):
    known = {"a_*/2": Target(ratio=2.0, best_of="size"), "b_*": Target(ratio=1.0)}
    monkeypatch.setitem(targets.TARGETS, "x on cpu", known)
    names = ("a_1/2", "a_2/2", "a_3/2", "a_4/4", "b_1", "b_2")
    rows = [
        {"name": name, "ratio": ratio, "unit": "1/s", "interval": None}
        for name, ratio in zip(names, (1.0, 1.5, None, 9.0, 0.5, 0.6), strict=True)
    ]
    missed = targets.missed({"suite": "x", "device": "cpu", "rows": rows})
    assert [name for name, _ in missed] == ["a_2/2", "b_1", "b_2"]
    assert targets.missed({"suite": "x", "device": "cuda", "rows": rows}) == []


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (WorkerError("calibration failed"), "calibration failed"),
        (KeyboardInterrupt(), "interrupted."),
        (SystemExit(143), "interrupted."),
    ],
)
def test_a_suite_that_is_stopped_writes_what_it_has_as_a_part(tmp_path, fake, monkeypatch, capsys, error, why):
    left = [1, 1]  # calibrations: before all, and after the first case

    def calibrate(core):
        if not left:
            raise error
        return {"2048x64x64": 50.0 * left.pop()}

    monkeypatch.setattr(harness, "calibrate", calibrate)
    cases = [Case(64, "policy"), Case(64), Case(4)]
    status, document = run_suite(tmp_path, fake("torchpod", 3000), fake("jax", 2000), cases=cases)
    rows = ["env_policy_cartpole/64", "ppo_cartpole/64", "compile_cold_ppo_cartpole/64", "compile_warm_ppo_cartpole/64"]
    assert status == 1 and [row["name"] for row in document["rows"]] == rows
    assert document["failures"] == [[rows[-1], f"the suite was stopped after this row: {why}"]]
    assert document["only"] == ",".join(rows) and why in capsys.readouterr().err


def test_a_suite_without_a_row_ends_with_what_stopped_it(tmp_path, capsys, monkeypatch):
    def fails(core):
        raise WorkerError("calibration failed")

    monkeypatch.setattr(harness, "calibrate", fails)
    path = tmp_path / "out.json"
    assert command_line.main(["bench", "population", "--json", str(path)]) == 1 and not path.exists()
    assert capsys.readouterr().err == "torchpod: error: calibration failed\n"


def test_rows_are_written_although_the_suite_has_a_fault(tmp_path):
    path = tmp_path / "out.json"
    with pytest.raises(KeyError), Record("x", str(path)) as record:
        record.rows.append(RowMaker().alone("a/1", 1.0, "s"))
        raise KeyError("b")
    assert json.loads(path.read_text())["failures"] == [["a/1", "the suite was stopped after this row: 'b'"]]


def test_a_row_that_was_better_fails_the_bench_unless_it_is_written_elsewhere(monkeypatch, capsys):
    suite = types.SimpleNamespace(main=lambda json_path, *, quick: 0)
    monkeypatch.setitem(sys.modules, "torchpod.bench.population", suite)
    monkeypatch.setattr(report, "regressed", lambda name: [f"{name}: slower."])
    assert bench.main(["population"]) == 1 and "torchpod bench: population: slower." in capsys.readouterr().err
    assert bench.main(["population", "--json", "x.json"]) == bench.main(["population", "--quick"]) == 0


def test_without_a_gpu_no_stored_runs_are_compared(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(report, "regressed", lambda name: pytest.fail("nothing was measured"))
    assert bench.main(["gpu"]) == 2


def test_options_that_would_change_nothing_are_refused(monkeypatch):
    monkeypatch.setattr(report, "main", lambda: pytest.fail("rendered"))
    for option in (["--json", "x.json"], ["--quick"], ["--only", ""]):
        with pytest.raises(ValueError, match=f"report renders all results and takes no {option[0]}"):
            bench.main(["report", *option])
    with pytest.raises(ValueError, match="--only '' is for the suites .*; scaling is run whole"):
        bench.main(["scaling", "--only", ""])


def test_what_cannot_be_written_is_told_before_anything_is_measured(tmp_path, monkeypatch):
    suite = types.SimpleNamespace(main=lambda json_path, *, quick: pytest.fail("measured"))
    monkeypatch.setitem(sys.modules, "torchpod.bench.population", suite)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="no rows can be written to .*file: .*; name a file elsewhere with --json"):
        bench.main(["population", "--json", str(tmp_path / "file" / "x.json")])
    with pytest.raises(ValueError, match="is a folder"):
        bench.main(["population", "--json", str(tmp_path)])
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "file")
    with pytest.raises(ValueError, match="no rows can be written"):
        bench.main(["population"])
    harness.check_writable(str(tmp_path / "new" / "x.json"))
    assert [*(tmp_path / "new").iterdir()] == []


def test_sigterm_ends_a_suite_with_its_workers(tmp_path, monkeypatch):
    told, before = tmp_path / "pid", signal.getsignal(signal.SIGTERM)
    code = f"""import os, signal, time
open({str(told)!r}, "w").write(str(os.getpid()))
os.kill(os.getppid(), signal.SIGTERM)
time.sleep(60)"""

    def suite(json_path, *, quick):
        harness.output_of([sys.executable, "-S", "-c", code], {}, "it", core=None)

    monkeypatch.setitem(sys.modules, "torchpod.bench.population", types.SimpleNamespace(main=suite))
    with pytest.raises(SystemExit) as ended:
        bench.main(["population", "--json", str(tmp_path / "x.json")])
    assert ended.value.code == 143 and signal.getsignal(signal.SIGTERM) is before
    assert not Path(f"/proc/{told.read_text()}").exists()


def test_a_row_holds_seconds_load_and_return_of_every_round(tmp_path, fake):
    _, document = run_suite(tmp_path, fake("torchpod", 3000), fake("jax", 2000))
    for side in ("torchpod", "jax"):
        rounds = document["rows"][0]["rounds"][side]
        assert len(rounds) == document["rounds"]
        for told in rounds:
            assert told["wall_s"] > 0 and told["cpu_s"] > 0 and told["load_average"] >= 0
            assert {"compile_s", "episode_return", "episodes", "dtype"} <= told.keys()


def test_a_worker_of_ours_that_fails_fails_the_bench_and_keeps_the_peers_row(tmp_path, fake):
    broken = Worker("torchpod", (sys.executable, "-S", "-c", "raise SystemExit('no such mode')"))
    status, document = run_suite(tmp_path, broken, fake("jax", 2000))
    row = document["rows"][0]
    assert status == 1 and row["value"] is None and row["peer"]["value"] == pytest.approx(2000)
    assert "torchpod failed (exit status 1): no such mode" in row["note"]


def test_a_learner_that_does_not_learn_as_its_peer_does_is_reported(tmp_path, fake):
    arguments = anakin.case_arguments(Case(64), 1, learn=True, seed=0)
    m = harness.run_worker(fake("jax", 2000), arguments, core=None, cache_dir=tmp_path, timeout_s=60)
    assert harness.unequal_work(m, m) == harness.unequal_returns([m], [m]) == []
    for episode_return in (50.0, None):
        slow: harness.Measurement = {**m, "episode_return": episode_return}
        assert len(harness.unequal_returns([slow], [m])) == 1
    near, far = ({**m, "env": "cartpole", "episode_return": x} for x in (86.0, 84.0))  # of 100
    beside = [{**m, "env": "cartpole"}]
    assert harness.unequal_returns([near], beside) == []  # pyright: ignore[reportArgumentType]
    assert "may differ by 0.15" in harness.unequal_returns([far], beside)[0]  # pyright: ignore[reportArgumentType]


def test_returns_are_compared_in_the_mean_of_the_seeds(tmp_path, fake):
    arguments = anakin.case_arguments(Case(64), 1, learn=True, seed=0)
    m = harness.run_worker(fake("jax", 2000), arguments, core=None, cache_dir=tmp_path, timeout_s=60)
    ours, peer = ([{**m, "episode_return": x} for x in side] for side in ([20.0, 40.0], [40.0, 22.0]))
    assert harness.unequal_returns(ours, peer) == []  # pyright: ignore[reportArgumentType]
    peer[1]["episode_return"] = 80.0
    assert "to a mean return of 30.0 and jax to 60.0" in harness.unequal_returns(ours, peer)[0]  # pyright: ignore[reportArgumentType]


def test_sides_that_learn_nothing_fail_the_bench_although_they_are_equal(tmp_path, fake, monkeypatch):
    sides = fake("torchpod", 3000), fake("jax", 2000)
    assert run_suite(tmp_path, *sides)[0] == 0
    monkeypatch.setitem(harness.LEARNED, "cartpole", 101.0)  # both fakes have 100
    status, document = run_suite(tmp_path, *sides)
    assert status == 1 and [(name, x.partition(",")[0]) for name, x in document["failures"]] == [
        ("ppo_cartpole/64", f"{side} learned to a mean return of 100.0") for side in ("torchpod", "jax")
    ]
    for case, quick in ((Case(16_384), False), (Case(64, "policy"), False)):
        status, document = run_suite(tmp_path, *sides, cases=[case], quick=quick)
        few = "returns say nothing in so few steps" if case.mode == "update" else ""
        assert status == 0 and document["rows"][0]["note"] == few


def test_a_warm_run_is_timed_as_a_whole_after_a_warm_up_of_the_same_settings(monkeypatch):
    calls = []
    monkeypatch.setattr(harness, "output_of", lambda *args, **options: calls.append((*args, options)) or "")
    row = anakin.warm_run(RowMaker(), 1024, 1, 2)
    (warmup, *trains), caches = [call[0][3:] for call in calls], {call[1]["TORCHINDUCTOR_CACHE_DIR"] for call in calls}
    assert warmup[0] == "warmup" and [train[0] for train in trains] == ["train"] * 2 and len(caches) == 1
    assert all(train[1:-1] == warmup[1:-1] and "experiment=cartpole" in train for train in trains)
    assert len({train[-1] for train in trains}) == 2 and all(call[-1] == {"core": 1} for call in calls)
    assert (row.name, row.unit, len(row.repeats), row.peer) == ("train_warm_cartpole/1024", "s", 2, None)


def test_the_first_start_on_a_machine_finds_no_library_and_no_header(tmp_path, fake):
    sides = fake("torchpod", 3000), fake("jax", 2000)
    status, document = run_suite(tmp_path, *sides, cases=[Case(64), Case(1024)])
    assert status == 0 and document["failures"] == []
    (row,) = (row for row in document["rows"] if row["name"].startswith("compile_first"))
    assert row["name"] == "compile_first_ppo_cartpole/1024" and len(row["repeats"]) == document["rounds"] == 2
    assert row["peer"]["name"] == "jax" and row["peer"]["repeats"] == [5.0, 5.0]
    took = [line for line in (tmp_path / "log").read_text().split("\n") if line.endswith("1024")]
    both = ["torchpod update 1024", "jax update 1024"]
    assert took == [*both, *both, both[0], *both, both[0]]  # the rounds, then cold and first starts in turn
    told = """
import os, sys, tempfile
from torchpod.kernels.gxx import _library_folder
from torch._inductor import codecache
folders = str(_library_folder()), codecache._HEADER_DIR
sys.exit(" ".join(map(str, [*folders, [len(os.listdir(x)) if os.path.exists(x) else 0 for x in folders]])))
"""
    result = anakin.first_start(Worker("torchpod", (sys.executable, "-c", told)), [], None)
    libraries, header, *sizes = str(result).split(": ")[1].split(" ")
    assert "torchpod-bench-" in libraries and "torchpod-bench-" in header and sizes == ["[0,", "0]"]


def test_a_first_start_is_held_against_the_cold_one_of_its_round(tmp_path, fake):
    sides, arguments = (
        (fake("torchpod", 3000), fake("jax", 2000)),
        anakin.case_arguments(Case(64), 1, learn=False, seed=0),
    )
    m = harness.run_worker(sides[0], arguments, core=None, cache_dir=tmp_path, timeout_s=60)
    starts = [{"torchpod": [m], "jax": [{**m, "compile_s": x}, {**m, "compile_s": 0.1}]} for x in (10.0, 5.0)]
    firsts = [[{**m, "compile_s": x}] for x in (30.0, 20.0)]
    rows = anakin.compile_rows(RowMaker(), "x", sides, starts, firsts)  # pyright: ignore[reportArgumentType]
    assert [row.name for row in rows] == ["compile_cold_x", "compile_warm_x", "compile_first_x"]
    assert rows[2].interval == (3.0, 4.0) and rows[2].ratio == 3.5
    failed = anakin.compile_rows(RowMaker(), "x", sides, starts, [firsts[0], WorkerError("no g++")])  # pyright: ignore[reportArgumentType]
    assert failed[2].value is None and failed[2].note == "no g++" and failed[2].peer is not None


def test_load_on_the_core_is_noted_in_the_row(tmp_path, fake):
    arguments = anakin.case_arguments(Case(64), 1, learn=False, seed=0)
    m = harness.run_worker(fake("jax", 2000), arguments, core=None, cache_dir=tmp_path, timeout_s=60)
    m["cpu_s"] = [0.5 * wall for wall in m["wall_s"]]
    row = RowMaker().rate("ppo_cartpole/64", [m], [m], peer_name="jax")
    assert row.cpu_share == pytest.approx(0.5) and "50% of it in the worst round" in row.note
    assert row.interval is None  # of one round
    assert RowMaker().rate("x", [m], [m], peer_name="jax", waits=True).note == ""


def test_of_two_cores_a_round_that_got_less_of_them_than_another_is_told(tmp_path, fake):
    arguments = anakin.case_arguments(Case(64), 1, learn=False, seed=0)
    m = harness.run_worker(fake("jax", 2000), arguments, core=None, cache_dir=tmp_path, timeout_s=60)
    for share, told in ((1.6, False), (1.4, True)):
        rounds = [{**m, "cpu_s": [x * wall for wall in m["wall_s"]]} for x in (1.7, share)]
        row = RowMaker().rate("ppo_cartpole/64 on 2 cores", rounds, rounds, peer_name="jax")
        assert ("140% of it in the worst round" in row.note) == told and row.cpu_share == pytest.approx(share)


def test_what_a_worker_has_started_ends_with_it(tmp_path):
    """As ranks and compilers are started."""
    told = tmp_path / "pid"
    code = f"""import subprocess, time
started = subprocess.Popen(["sleep", "60"])
open({str(told)!r}, "w").write(str(started.pid))
time.sleep(60)"""
    with pytest.raises(harness.WorkerError, match="still running after 2 s"):
        harness.output_of([sys.executable, "-c", code], {}, "it", core=None, timeout_s=2.0)
    pid = int(told.read_text())
    deadline = time.monotonic() + 5
    while (state := Path(f"/proc/{pid}/stat")).exists() and state.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("print('{}')", "without batch_rows"),
        ("print('hello')", "printed no measurement: hello"),
        ("import time; time.sleep(30)", "still running after 0 s"),
    ],
)
def test_a_worker_that_misbehaves_is_named_with_the_reason(tmp_path, code, message):
    worker = Worker("jax", (sys.executable, "-S", "-c", code))
    timeout_s = 0.3 if "sleep" in code else 60.0
    with pytest.raises(WorkerError, match=message):
        harness.run_worker(worker, [], core=None, cache_dir=tmp_path, timeout_s=timeout_s)


def test_missing_peers_are_explained(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHPOD_PEERS_PYTHON", str(tmp_path / "python"))
    assert "does not exist" in (harness.peers_python()[1] or "")
    monkeypatch.setenv("TORCHPOD_PEERS_PYTHON", sys.executable)
    reason = harness.peers_python()[1]
    assert reason is None or "has no JAX for cpu" in reason
    for program in ("true", "echo"):
        monkeypatch.setenv("TORCHPOD_PEERS_PYTHON", str(shutil.which(program)))
        assert "has no JAX for cpu" in (harness.peers_python()[1] or "")


def test_results_are_named_after_suite_hardware_and_date(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    results = {"calibration": {"2048x64x64": 50.0}, "load_average": (0.0, 0.0, 0.0)}
    path = harness.write_results("anakin", [], failures=[], **results)
    assert path.parent == tmp_path
    assert path.name.startswith(f"anakin_{harness.hardware()['name']}_2")
    assert [*tmp_path.iterdir()] == [path]


def test_a_result_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path, write = tmp_path / "x.json", Path.write_text
    path.write_text("before")

    def full(self, text):
        write(self, text[:10])
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_text", full)
    results = {"calibration": {}, "load_average": (0.0,), "json_path": str(path)}
    with pytest.raises(OSError, match="no space left"):
        harness.write_results("anakin", [], failures=[], **results)
    assert path.read_text() == "before"


def test_a_benchmark_and_a_run_name_the_same_cpu():
    assert machine.hardware(torch.device("cpu")).startswith(f"{harness.hardware()['cpu']}, ")


def test_the_calibration_product_is_the_one_that_scales_the_figures():
    rates = harness.calibrate(None)
    assert targets.PRODUCT in rates and all(rate > 0 for rate in rates.values())


def test_an_unknown_suite_is_refused():
    with pytest.raises(ConfigError, match=r"torchpod bench: .*'no-such-suite'.*anakin.*--help"):
        bench.main(["no-such-suite"])


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ("exec sleep 30", "was not over after 1 s"),
        ("echo no devices >&2; exit 1", "has no JAX for cuda: no devices"),
        ("echo has JAX", None),
    ],
)
def test_why_there_is_no_jax_is_told_in_time(tmp_path, monkeypatch, lines, told):
    monkeypatch.setattr(harness, "PROBE_S", 1 if "sleep" in lines else 60)
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{lines}\n")
    python.chmod(0o755)
    reason = harness.lacks_jax(str(python), "cuda")
    assert reason is None if told is None else told in str(reason)

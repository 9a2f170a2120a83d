import json
import os
import signal
import sys
import types
from pathlib import Path

import pytest
import torch

from torchpod import bench
from torchpod import main as command_line
from torchpod.bench import (
    anakin,
    compare,
    harness,
    processes,
    report,
    targets,
)
from torchpod.bench.anakin import Case
from torchpod.bench.compare import RowMaker
from torchpod.bench.harness import Record
from torchpod.bench.processes import Worker, WorkerError
from torchpod.bench.targets import Target
from torchpod.config import ConfigError


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
    two = anakin.with_floor(compare.Row(**row), Case(64, cores=2), [{"flops": 1e7}], 100.0)
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
    which = processes.shutil.which
    monkeypatch.setattr(processes.shutil, "which", lambda name: None if name == "taskset" else which(name))
    with pytest.raises(
        ConfigError, match="cannot be pinned to a core: there is no `taskset` on the PATH; install util-"
    ):
        run_suite(tmp_path, fake("torchpod", 3000), fake("jax", 2000))
    with pytest.raises(WorkerError, match="a program cannot be pinned to core 0: there is no `taskset`"):
        processes.output_of([sys.executable, "-c", ""], {}, "a program", core=0)
    assert processes.output_of([sys.executable, "-S", "-c", "print(1)"], {}, "a program", core=None) == "1\n"


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
    run_worker, asked = processes.run_worker, []

    def unpinned(worker, arguments, *, core, **knobs):  # this process may have one core alone
        asked.append((arguments[1], core))
        return run_worker(worker, arguments, core=None, **knobs)

    monkeypatch.setattr(processes, "run_worker", unpinned)
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
    m = processes.run_worker(fake("jax", 2000), arguments, core=None, cache_dir=tmp_path, timeout_s=60)
    m["env"] = "cartpole"
    other: processes.Measurement = {**m, "env": "catch"}
    assert compare.unequal_work(m, {**m}) == []
    assert compare.unequal_work(other, m) == ["unequal work: env is 'catch' in jax and 'cartpole' in jax."]


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
    with pytest.raises(ValueError, match=r"--json .*file/x.json cannot be written \(.*; name a file in a folder"):
        bench.main(["population", "--json", str(tmp_path / "file" / "x.json")])
    with pytest.raises(ValueError, match="is a folder"):
        bench.main(["population", "--json", str(tmp_path)])
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "file")
    with pytest.raises(ValueError, match="--json .*file/x.json cannot be written"):
        bench.main(["population"])


def test_sigterm_ends_a_suite_with_its_workers(tmp_path, monkeypatch):
    told, before = tmp_path / "pid", signal.getsignal(signal.SIGTERM)
    code = f"""import os, signal, time
open({str(told)!r}, "w").write(str(os.getpid()))
os.kill(os.getppid(), signal.SIGTERM)
time.sleep(60)"""

    def suite(json_path, *, quick):
        processes.output_of([sys.executable, "-S", "-c", code], {}, "it", core=None)

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


def test_sides_that_learn_nothing_fail_the_bench_although_they_are_equal(tmp_path, fake, monkeypatch):
    sides = fake("torchpod", 3000), fake("jax", 2000)
    assert run_suite(tmp_path, *sides)[0] == 0
    monkeypatch.setitem(compare.LEARNED, "cartpole", 101.0)  # both fakes have 100
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
    monkeypatch.setattr(processes, "output_of", lambda *args, **options: calls.append((*args, options)) or "")
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
    m = processes.run_worker(sides[0], arguments, core=None, cache_dir=tmp_path, timeout_s=60)
    starts = [{"torchpod": [m], "jax": [{**m, "compile_s": x}, {**m, "compile_s": 0.1}]} for x in (10.0, 5.0)]
    firsts = [[{**m, "compile_s": x}] for x in (30.0, 20.0)]
    rows = anakin.compile_rows(RowMaker(), "x", sides, starts, firsts)  # pyright: ignore[reportArgumentType]
    assert [row.name for row in rows] == ["compile_cold_x", "compile_warm_x", "compile_first_x"]
    assert rows[2].interval == (3.0, 4.0) and rows[2].ratio == 3.5
    failed = anakin.compile_rows(RowMaker(), "x", sides, starts, [firsts[0], WorkerError("no g++")])  # pyright: ignore[reportArgumentType]
    assert failed[2].value is None and failed[2].note == "no g++" and failed[2].peer is not None


def test_results_are_named_after_suite_hardware_and_date(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    results = {"calibration": {"2048x64x64": 50.0}, "load_average": (0.0, 0.0, 0.0)}
    path = harness.write_results("anakin", [], failures=[], **results)
    assert path.parent == tmp_path
    assert path.name.startswith(f"anakin_{compare.hardware()['name']}_2")
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


def test_an_installed_package_has_no_peers_to_measure_beside(monkeypatch, tmp_path):
    monkeypatch.setattr(harness, "ROOT", tmp_path)
    for suite in ("multiagent", "report"):
        with pytest.raises(ValueError, match="measures a checkout, and this is an installed package: clone the"):
            bench.main([suite])


def test_an_unknown_suite_is_refused():
    with pytest.raises(ConfigError, match=r"torchpod bench: .*'no-such-suite'.*anakin.*--help"):
        bench.main(["no-such-suite"])

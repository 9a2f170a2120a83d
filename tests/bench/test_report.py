import json

import pytest

from torchpod.bench import compare, harness, report
from torchpod.bench.targets import TARGETS


def document(date: str, commit: str, ratio: float | None, *, note: str = "", **more) -> dict:
    row = {
        "name": "ppo_cartpole/1024",
        "unit": "env_steps/s",
        "value": 123456.0,
        "repeats": [123456.0] * 2,
        "peer": None if ratio is None else {"name": "jax", "value": 100000.0},
        "ratio": ratio,
        "interval": None if ratio is None else [ratio - 0.1, ratio + 0.1],
        "versions": {"torch": "2.13.0"},
        "note": note,
    }
    return {
        "format": harness.FORMAT,
        "suite": "anakin",
        "date": date,
        "commit": commit,
        "hardware": {"name": "some-cpu-2-cores", "cpu": "Some CPU", "cores": 2, "gpu": None},
        "calibration_gflops": {"2048x64x64": 40.0},
        "load_average": [0.1, 0.1, 0.1],
        "failures": [],
        "rows": [row],
        **more,
    }


def test_the_page_shows_the_newest_run_with_its_ratio_and_interval():
    page = report.render(
        [document("2030-01-01T00:00:00", "aaaaaaa", 1.0), document("2030-01-02T00:00:00", "bbb", 1.23)]
    )
    told = ">= 1.2 x: met, not in every round, 0.54 x the 230,000 stated"
    assert f"| ppo_cartpole/1024 | 123,456 | jax 100,000 | 1.23 [1.13, 1.33] | {told} |  |" in page
    assert "| ppo_cartpole/1024 | 1.00 | 1.23 |" in page  # the history
    assert page.count("## anakin on some-cpu-2-cores") == 1
    assert "\nSome CPU, 2 cores. 2030-01-02" in page
    newer = document("2030-01-03T00:00:00", "ccc", 1.0)
    newer["hardware"] |= {"vectors": "AVX2", "gpu": "Some GPU"}
    assert "\nSome CPU, AVX2, 2 cores, Some GPU. 2030-01-03" in report.render([newer])


def test_a_missing_peer_and_a_failure_are_written_out():
    failed = document("2030-01-01T00:00:00", "aaa", None, note="jax: not installed", failures=[["x", "Too slow."]])
    page = report.render([failed])
    told = ">= 1.2 x: not measured, 0.54 x the 230,000 stated"
    assert f"| ppo_cartpole/1024 | 123,456 | - | - | {told} | jax: not installed |" in page
    assert "- **x: Too slow.**" in page


def test_a_run_of_one_row_takes_the_place_of_that_row():
    told = [["ppo_cartpole/1024", "unequal work."], ["ppo_cartpole/10", "it failed."], ["other/1024", "it failed."]]
    whole = document("2030-01-01T00:00:00", "aaa", 1.0, failures=told)
    whole["rows"].append({**whole["rows"][0], "name": "other/1024"})
    page = report.render([whole, document("2030-01-02T00:00:00", "bbb", 1.23, only="ppo_cartpole")])
    line = (
        "| ppo_cartpole/1024 | 123,456 | jax 100,000 | 1.23 [1.13, 1.33] | >= 1.2 x: met, not in every round, 0.54"
        " x the 230,000 stated |"
    )
    assert f"{line} measured 2030-01-02, commit bbb |" in page
    assert "| other/1024 | 123,456 | jax 100,000 | 1.00 [0.90, 1.10] |  |  |" in page
    assert "other/1024: it failed." in page and "ppo_cartpole/10: it failed." in page and "unequal" not in page
    again = document("2030-01-03T00:00:00", "ccc", 1.0, only="ppo_cartpole/10", failures=[["ppo_cartpole/10", "Too."]])
    again["rows"] = []
    page = report.render([whole, again])
    assert "ppo_cartpole/10: Too." in page and "ppo_cartpole/10: it failed." not in page


def test_returns_that_come_too_early_are_told():
    run = document("2030-01-01T00:00:00", "aaa", 1.0, note=compare.TOO_EARLY, suite="gpu")
    sides = {"torchpod": [1.0, 35.456], "jax": [1.0, 27.9]}
    run["rows"][0]["rounds"] = {side: [{"episode_return": x} for x in xs] for side, xs in sides.items()}
    assert f"| {compare.TOO_EARLY}; by then torchpod 35.5 and jax 27.9 |" in report.render([run])
    run["rows"][0]["rounds"]["jax"][-1]["episode_return"] = None
    assert f"| {compare.TOO_EARLY} |" in report.render([run])


@pytest.mark.parametrize(
    ("ours", "peer", "told"),
    [
        ([-1100.0, -250.0], [-1100.0, None], "neither side learned"),
        ([-250.0, -310.0], [-1100.0, -1100.0], "jax did not learn"),
        ([-250.0, -310.0], [-200.0, -200.0], ""),
    ],
)
def test_rows_of_pendulum_say_who_did_not_learn(ours, peer, told):
    run = document("2030-01-01T00:00:00", "aaa", 1.0, note="x", suite="gpu")
    sides = {"torchpod": ours, "jax": peer}
    run["rows"][0]["name"] = "ppo_pendulum/1024"
    run["rows"][0]["rounds"] = {side: [{"episode_return": x} for x in xs] for side, xs in sides.items()}
    assert f"| {'; '.join(filter(None, ['x', told]))} |" in report.render([run])
    run["rows"][0]["name"] = "ppo_cartpole/1024"
    assert "| x |" in report.render([run])


def test_a_part_that_a_faster_or_slower_machine_measured_says_so():
    whole = document("2030-01-01T00:00:00", "aaa", 1.0)
    part = document("2030-01-02T00:00:00", "bbb", 1.0, only="ppo")
    for gflops, told in ((43.0, "load 0.10."), (45.0, "load 0.10, 2048x64x64 45 GFLOP/s."), (35.0, "64 35 GFLOP/s.")):
        part["calibration_gflops"]["2048x64x64"] = gflops
        assert f"{told}\n" in report.render([whole, part])


def test_peers_of_stored_runs_are_held_against_the_figures_of_today():
    run = document("2030-01-01T00:00:00", "aaa", 1.23)
    assert "beside a peer" not in report.render([run]).split("##")[1]
    run["calibration_gflops"]["2048x64x64"] = 95.1
    page = report.render([run])
    assert ">= 1.2 x: met, not in every round, beside a peer below its figure, 0.54 x the 230,000 stated |" in page
    assert "- **ppo_cartpole/1024: jax did 100,000 env steps/s, below 207,000 (0.9 x its figure 230,000 x 1.00" in page
    run["rows"][0]["ratio"] = 1.1
    assert ">= 1.2 x: missed, 0.54 x the 230,000 stated |" in report.render([run])
    part = document("2030-01-02T00:00:00", "bbb", 1.23, only="ppo_cartpole")  # of a time when the machine was slower
    assert "beside a peer" not in report.render([run, part]).split("##")[1]


def test_the_header_names_the_versions_of_all_rows_and_how_long_the_suite_took():
    run = document("2030-01-01T00:00:00", "aaa", 1.23, wall_s=427.0)
    run["rows"].append({**run["rows"][0], "name": "x", "versions": {"torch": "2.13.0+cpu", "jax": "0.10.2"}})
    assert "0.10, took 7.1 min; one core" in report.render([run])
    assert " torch 2.13.0+cpu, jax 0.10.2.\n" in report.render([run])


def test_what_bounds_a_target_is_told_of_rows_that_are_there():
    assert "is bounded by" not in report.render([document("2030-01-01T00:00:00", "aaa", 1.23)])
    met = document("2030-01-01T00:00:00", "aaa", 0.6)
    met["rows"][0]["name"] = "ppo_cartpole/4"
    assert f"- ppo_cartpole/4 is bounded by {TARGETS['anakin']['ppo_cartpole/4'].bound}." in report.render([met])


def test_a_warm_start_of_train_is_held_against_seconds():
    run = document("2030-01-01T00:00:00", "aaa", None)
    run["rows"][0] |= {"name": "train_warm_cartpole/1024", "value": 9.0, "unit": "s"}
    page = report.render([run])
    assert "| train_warm_cartpole/1024 | 9.0 s | - | - | <= 5 s: missed |" in page
    assert "- **train_warm_cartpole/1024: 9.0 s, the target is <= 5 s; Python: of " in page


def test_each_environment_on_a_gpu_has_a_bound_of_its_own():
    bounds = {name.split("/")[0]: target.bound for name, target in TARGETS["gpu"].items() if name.startswith("ppo_")}
    assert len(set(bounds.values())) == 3
    assert "the unroll cannot be one kernel" in bounds["ppo_minatar_breakout"]
    assert all("as one kernel, measured on an H200" in bounds[f"ppo_{env}"] for env in ("cartpole", "pendulum"))


def test_a_figure_without_a_target_is_shown():
    run = document("2030-01-01T00:00:00", "aaa", 1.0)
    run["rows"][0]["name"] = "ppo_cartpole/64 on 2 cores"
    assert "| 1.00 [0.90, 1.10] | 0.41 x the 300,000 stated |" in report.render([run])


def test_a_ratio_of_one_sample_has_no_interval():
    run = document("2030-01-01T00:00:00", "aaa", 1.0, suite="gpu")
    run["rows"][0] |= {"name": "ppo_cartpole/1024", "interval": None}
    assert "| jax 100,000 | 1.00 | >= 2 x: missed |" in report.render([run])


def test_what_is_nearly_the_target_is_told_with_more_digits():
    for ratio, told in ((1.19, "1.19 x"), (1.1996, "1.1996 x")):
        run = document("2030-01-01T00:00:00", "aaa", ratio)
        assert f"- **ppo_cartpole/1024: {told}, the target is >= 1.2 x.**" in report.render([run])


def test_a_missed_target_is_told_with_what_bounds_it_until_it_is_met():
    slow = document("2030-01-01T00:00:00", "aaa", 0.4)
    slow["rows"][0]["name"] = "ppo_cartpole/4"
    bound = TARGETS["anakin"]["ppo_cartpole/4"].bound
    assert f"- **ppo_cartpole/4: 0.40 x, the target is >= 0.5 x; {bound}.**" in report.render([slow])
    better = document("2030-01-02T00:00:00", "bbb", 0.6, only="ppo_cartpole/4")
    better["rows"][0]["name"] = "ppo_cartpole/4"
    page = report.render([slow, better])
    assert ">= 0.5 x: met" in page and "the target is" not in page


def test_without_a_whole_run_all_parts_are_shown():
    first, second = (document(f"2030-01-0{i}T00:00:00", "aaa", 1.0, only="x", failures=[]) for i in (1, 2))
    second["rows"][0]["name"] = "other/1024"
    page = report.render([first, second])
    assert "| ppo_cartpole/1024 | 123,456 |" in page and "| other/1024 | 123,456 |" in page


def test_a_peer_that_compiles_nothing_is_no_peer():
    row = document("2030-01-01T00:00:00", "aaa", 300.0, suite="losses")
    row["rows"][0] |= {"unit": "s", "value": 12.0, "peer": {"name": "torchrl", "value": 0.04}}
    assert "| ppo_cartpole/1024 | 12.0 s | - | - |  |" in report.render([row])


def test_a_regression_is_named_and_noise_is_not():
    names = ["ppo_cartpole/1024", "other/1024"]
    before, other = (document("2030-01-01T00:00:00", "aaa", 1.0) for _ in range(2))
    assert report.regressions([before], names) == []
    assert report.regressions([before, document("2030-01-02T00:00:00", "bbb", 0.95)], names) == []
    told = ["ppo_cartpole/1024: the ratio went from 1.00 to 0.80 since aaa."]
    slower = document("2030-01-02T00:00:00", "bbb", 0.8)
    assert report.regressions([before, slower], names) == told
    other["rows"][0]["name"] = "other/1024"
    assert report.regressions([before, slower, other], names) == told  # a run of a part takes nothing back
    slower["rows"][0]["unit"] = before["rows"][0]["unit"] = "s"  # fewer seconds are better
    assert report.regressions([before, slower], names) == []
    assert len(report.regressions([slower, before], names)) == 1


def test_rows_without_a_peer_are_compared_by_their_rates():
    before, after = (document(f"2030-01-0{i}T00:00:00", "aaa", None) for i in (1, 2))
    after["rows"][0]["value"] = 105_000.0
    assert report.regressions([before, after], ["ppo_cartpole/1024"]) == []
    after["rows"][0]["value"] = 90_000.0
    told = ["ppo_cartpole/1024: the value went from 123,456 to 90,000 since aaa."]
    assert report.regressions([before, after], ["ppo_cartpole/1024"]) == told


@pytest.mark.parametrize(
    ("unit", "factor", "gflops", "told"),
    [
        ("env_steps/s", 0.85, 50.0, "from 100 to 85 since aaa, and the speed of a core to 1.25 x."),
        ("env_steps/s", 0.75, 30.0, None),  # of a core with three quarters of its speed
        ("s", 0.95, 50.0, None),
        ("s", 1.1, 50.0, "from 100.0 s to 110.0 s since aaa, and the speed of a core to 1.25 x."),
        ("MB", 1.1, 50.0, None),
        ("MB", 1.3, 50.0, "from 100 to 130 since aaa, and the speed of a core to 1.25 x."),
    ],
)
def test_what_has_no_peer_is_compared_at_the_speed_of_the_machine(unit, factor, gflops, told):
    before, after = (document(f"2030-01-0{i}T00:00:00", "aaa", None) for i in (1, 2))
    for run, value in ((before, 100.0), (after, 100.0 * factor)):
        run["rows"][0] |= {"unit": unit, "value": value}
    after["calibration_gflops"] = {"another": 1.0, "2048x64x64": gflops}
    found = report.regressions([before, after], ["ppo_cartpole/1024"])
    assert found == ([] if told is None else [f"ppo_cartpole/1024: the value went {told}"])
    after["hardware"] = after["hardware"] | {"gpu": "Some GPU"}  # of which the product of a core says nothing
    worse = 0.8 > factor if unit == "env_steps/s" else 1.2 < factor
    assert len(report.regressions([before, after], ["ppo_cartpole/1024"])) == worse


def test_seconds_that_were_taken_once_are_not_compared():
    before, after = (document(f"2030-01-0{i}T00:00:00", "aaa", i / 1.0) for i in (1, 2))
    for run in (before, after):
        run["rows"][0] |= {"unit": "s"}
    assert len(report.regressions([before, after], ["ppo_cartpole/1024"])) == 1
    after["rows"][0]["repeats"] = [123456.0]
    assert report.regressions([before, after], ["ppo_cartpole/1024"]) == []


@pytest.mark.parametrize("ratio", [True, False])
@pytest.mark.parametrize(("unit", "worse"), [("bytes", 2.0), ("per iteration", 2.0), ("rows/s", 0.5), ("share", None)])
def test_what_is_better_depends_on_the_unit(ratio, unit, worse):
    """Of memory and launches less; a share may be either."""
    before, after = (document(f"2030-01-0{i}T00:00:00", "aaa", 1.0 if ratio else None) for i in (1, 2))
    for run in (before, after):
        run["rows"][0]["unit"] = unit
    for factor in (0.5, 2.0):
        after["rows"][0] |= {"value": 123_456.0 * factor, "ratio": factor if ratio else None}
        assert len(report.regressions([before, after], ["ppo_cartpole/1024"])) == (factor == worse)


def test_where_the_peer_is_missing_the_rate_is_compared():
    before, after = document("2030-01-01T00:00:00", "aaa", 1.0), document("2030-01-02T00:00:00", "bbb", None)
    assert report.regressions([before, after], ["ppo_cartpole/1024"], newest_only=True) == []
    after["rows"][0]["value"] = 90_000.0
    told = ["ppo_cartpole/1024: the value went from 123,456 to 90,000 since aaa."]
    assert report.regressions([before, after], ["ppo_cartpole/1024"], newest_only=True) == told


def test_the_committed_pages_are_what_the_results_give(tmp_path):
    assert report.main(report.RESULTS, tmp_path) == 0
    for path in tmp_path.iterdir():
        assert path.read_text() == (report.DOCS / path.name).read_text(), f"run `torchpod bench report` for {path.name}"
    assert {path.name for path in tmp_path.iterdir()} == {"benchmarks.md", "scaling.md"}


def test_the_history_has_a_column_for_each_commit():
    runs = [document(f"2030-01-0{i}T00:00:00", commit, i / 10) for i, commit in enumerate(["aaa", "bbb", "bbb"], 1)]
    page = report.render(runs)
    assert "| row | aaa (2030-01-01) | bbb (2030-01-03) |" in page and "| ppo_cartpole/1024 | 0.10 | 0.30 |" in page
    for run in runs:
        run["rows"][0] |= {"peer": None, "ratio": None, "value": 1e6 * float(run["date"][9])}
    page = report.render(runs)
    assert "| ppo_cartpole/1024 | 1,000,000 | 3,000,000 |" in page
    runs[1]["only"] = runs[2]["only"] = "ppo"
    page = report.render(runs)
    assert "Parts of it since then: 1 rows, 2030-01-03, commit bbb, load 0.10." in page


def test_a_suite_is_compared_with_its_last_run_on_such_a_machine(tmp_path):
    elsewhere = document("2030-01-02T00:00:00", "bbb", 3.0)
    elsewhere["hardware"] = {**elsewhere["hardware"], "name": "another"}
    runs = [document("2030-01-01T00:00:00", "aaa", 1.0), elsewhere, document("2030-01-03T00:00:00", "ccc", 0.8)]
    for i, run in enumerate(runs):
        (tmp_path / f"{i}.json").write_text(json.dumps(run))
    assert report.regressed("envs", tmp_path) == []
    without = document("2030-01-04T00:00:00", "ddd", None)  # says nothing of the ratio
    (tmp_path / "3.json").write_text(json.dumps(without))
    assert report.regressed("anakin", tmp_path) == []
    (tmp_path / "3.json").unlink()
    assert report.regressed("anakin", tmp_path) == ["ppo_cartpole/1024: the ratio went from 1.00 to 0.80 since aaa."]


def test_main_reads_the_folder_leaves_out_quick_runs_and_refuses_foreign_files(tmp_path):
    results, docs, page = tmp_path / "results", tmp_path / "docs", tmp_path / "docs" / "benchmarks.md"
    results.mkdir()
    assert report.main(results, docs) == 0 and "Nothing has been measured yet." in page.read_text()
    (results / "quick.json").write_text(json.dumps(document("2030-01-01T00:00:00", "aaa", 1.0, quick=True)))
    assert report.load(results) == []
    (results / "a.json").write_text(json.dumps(document("2030-01-01T00:00:00", "aaa", 1.0)))
    report.main(results, docs)
    assert "ppo_cartpole/1024" in page.read_text()
    (results / "b.json").write_text("{}")
    with pytest.raises(ValueError, match=r"b\.json is no benchmark result"):
        report.load(results)


def test_a_file_that_is_cut_off_or_lacks_something_is_named(tmp_path):
    run, path = document("2030-01-01T00:00:00", "aaa", 1.0), tmp_path / "a.json"
    path.write_text(json.dumps(run)[:-3])
    with pytest.raises(ValueError, match=r"a\.json is no JSON: Expecting .*; move it out"):
        report.load(tmp_path)
    del run["date"], run["hardware"]["cpu"], run["rows"][0]["unit"]
    path.write_text(json.dumps(run))
    with pytest.raises(ValueError, match=r"a\.json is a .* without date, hardware\.cpu, rows\[0\]\.unit; move it out"):
        report.load(tmp_path)

"""Suite sebulba: workers that do equal work, and rows from what they print."""

import json
import subprocess
import sys

import pytest

from torchpod.bench import compare, harness, processes, report, sebulba, targets
from torchpod.bench.processes import ROOT
from torchpod.bench.sebulba import Case
from torchpod.bench.targets import Target

FAKE = """
import argparse, json
parser = argparse.ArgumentParser()
for name in ("task", "mode"):
    parser.add_argument(f"--{name}")
numbers = "num-envs", "iterations", "repeats", "threads", "pool-threads", "seed", "actors", "pools", "unroll-length"
for name in numbers:
    parser.add_argument(f"--{name}", type=int)
parser.add_argument("--share", action="store_true")
parser.set_defaults(threads=1, pool_threads=1)
a = parser.parse_args()
# Two threads are worse for the plain loop and better for the others; more actors are faster.
threads = a.pool_threads if a.mode == "env_only" else a.threads
rate = 100.0 / threads if a.actors is None else 100.0 * threads * (1 + a.actors) / (a.pools or 1)
print(json.dumps({
    "framework": "fake", "mode": a.mode, "num_envs": a.num_envs, "unroll_length": 8, "epochs": 1, "minibatches": 1,
    "batch_rows": 8 * a.num_envs, "param_count": PARAMETERS, "dtype": "float32", "iterations": a.iterations,
    "total_iterations": 1, "compile_s": 0.0, "env_steps": [rate], "wall_s": [1.0], "cpu_s": [1.0],
    "episode_return": None, "episodes": 0,
    "threads": {"torch": threads}, "versions": {},
}))
"""


def run(tmp_path, plain_parameters, only=None):
    commands = []
    for name, parameters in (("ours", 5), ("plain", plain_parameters)):
        (tmp_path / f"{name}.py").write_text(FAKE.replace("PARAMETERS", str(parameters)))
        commands.append((sys.executable, str(tmp_path / f"{name}.py")))
    status = sebulba.main(
        str(tmp_path / "out.json"),
        cases={"x": Case("X-v0", 4, 1)},
        paced={"x": Case("X-v0", 4, 1)},
        only=only,
        rounds=2,
        ours=commands[0],
        plain=commands[1],
    )
    return status, json.loads((tmp_path / "out.json").read_text())


def test_one_environment_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "calibrate", lambda core: {})
    _, document = run(tmp_path, 5, only="paced")
    assert document["only"] == "paced" and {row["name"].partition("_")[0] for row in document["rows"]} == {"paced"}
    _, document = run(tmp_path, 5, only="x")
    assert {row["name"].partition("_")[0] for row in document["rows"]} == {"raw", "act", "ppo", "cpu"}
    with pytest.raises(ValueError, match="--only 'pang' is nothing of sebulba"):
        run(tmp_path, 5, only="pang")


def test_every_side_is_compared_at_its_better_number_of_threads(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "calibrate", lambda core: {})
    status, document = run(tmp_path, 5)
    rows = {row["name"]: row for row in document["rows"]}
    assert status == 0 and document["failures"] == []
    assert rows["raw_x/4"]["value"] == 200.0 and rows["raw_x/4"]["repeats"] == [200.0, 200.0]
    assert rows["ppo_x_2_actors_vs_plain/4"]["ratio"] == 600.0 / 100.0
    assert rows["ppo_x_2_actors_vs_sync/4"]["ratio"] == 600.0 / 200.0
    assert rows["act_x_1_actors_vs_plain/4"]["ratio"] == 400.0 / 100.0
    assert rows["act_x_2_pools_vs_sync/4"]["ratio"] == 200.0 / 200.0
    assert rows["paced_x_2_actors/4"]["ratio"] == 300.0 / 100.0 and rows["paced_x_2_sharing_pools/4"]["ratio"] == 1.0
    assert rows["ppo_x_2_actors_vs_plain/4"]["repeats"] == [600.0, 600.0]
    early = {name for name, row in rows.items() if compare.TOO_EARLY in row["note"]}
    assert early == {f"ppo_x_{layout}_vs_plain/4" for layout in sebulba.LAYOUTS}
    for side in ("1_actors", "2_actors", "2_pools", "2_sharing_pools", "sync", "plain"):
        assert rows[f"cpu_x_{side}/4"]["value"] == 1.0 / compare.hardware()["cores"]


def test_threads_are_chosen_in_halves_and_a_side_that_fails_once_has_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "calibrate", lambda core: {})
    turns = []

    def interleave(workers, arguments, **_):
        (worker,), (words,) = workers, arguments
        threads, pool, seed, mode = (
            words[words.index(f"--{x}") + 1] for x in ("threads", "pool-threads", "seed", "mode")
        )
        turns.append((mode, worker.name, (int(threads), int(pool)), int(seed)))
        if fails == (worker.name, int(seed)):
            return {worker.name: processes.WorkerError("gone")}
        rate = {"1": 5.0, "2": 7.0}[threads] + {"1": 1.0, "2": 0.0}[pool] + 0.01 * int(seed)
        return {worker.name: [{"env_steps": [rate], "wall_s": [1.0], "cpu_s": [1.0], "threads": {}, "versions": {}}]}

    monkeypatch.setattr(processes, "interleave", interleave)
    for fails in (None, ("plain", 1)):
        turns.clear()
        sides = sebulba.run_mode(Case("X-v0", 4, 1), "policy", ("ours",), ("plain",), 3, 1, tmp_path)
        assert [at for _, side, at, seed in turns if side == "sync" and seed == 1] == [(2, 1), (2, 2)]
        assert [at for _, side, at, seed in turns if side == "sync" and seed == 2] == [(2, 1)]
        assert {at for _, side, at, _ in turns if side == "2_pools"} == {(1, 1), (2, 1)}
        assert isinstance(best := sides["sync"], list)
        assert [processes.rates(m) for m in best] == [[8.0], [8.01], [8.02]]
        assert [side for _, side, *_ in turns[: 2 + len(sebulba.LAYOUTS)]] == [
            "sync",
            *sebulba.LAYOUTS,
            "plain",
        ]  # side by side
        assert isinstance(sides["plain"], list if fails is None else processes.WorkerError)


def test_targets_are_those_of_the_best_layout(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(harness, "calibrate", lambda core: {})
    known = {
        "ppo_x_*_vs_plain/4": Target(ratio=6.5, best_of="layout"),
        "act_x_*_vs_sync/4": Target(ratio=3.0, best_of="layout"),
        "cpu_x_[12]_*/4": Target(least=1.5, best_of="layout"),
    }
    monkeypatch.setitem(targets.TARGETS, "sebulba", known)
    status, document = run(tmp_path, 5)
    assert (status, document["failures"]) == (1, [])
    share = 1 / compare.hardware()["cores"]
    assert [line for line in capsys.readouterr().err.splitlines() if "target" in line] == [
        "torchpod bench: ppo_x_2_actors_vs_plain/4: 6.00 x, the target is >= 6.5 x with the best layout.",
        f"torchpod bench: cpu_x_2_sharing_pools/4: {share:.2f} share of all cores, the target is >= 1.5 share of all"
        " cores with the best layout.",
    ]
    page = report.render(report.load(tmp_path))
    assert "| 3.00 [3.00, 3.00] | >= 3 x with the best layout: met |" in page and page.count("with the best") == 5


def test_a_side_that_fails_is_told_of_a_row_that_it_is_part_of(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "calibrate", lambda core: {})
    run(tmp_path, 5)
    sides = ((sys.executable, "-S", "-c", "raise SystemExit('gone')"), (sys.executable, str(tmp_path / "plain.py")))
    out, case = tmp_path / "out.json", Case("X-v0", 4, 1)
    status = sebulba.main(str(out), cases={"x": case}, paced={"x": case}, rounds=1, ours=sides[0], plain=sides[1])
    document = json.loads(out.read_text())
    told = {name for name, sentence in document["failures"] if "gone" in sentence}
    assert status == 1 and "raw_x/4" in told and "act_x_2_pools_vs_sync/4" in told
    assert told - {"raw_x/4"} <= {row["name"] for row in document["rows"]}


def test_unequal_work_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "calibrate", lambda core: {})
    status, document = run(tmp_path, 6)
    assert status == 1
    told = "unequal work: param_count is 5 and 6 in the plain loop."
    assert document["failures"] == [["ppo_x_1_actors_vs_plain/4", told]]


def test_paces_that_wait_are_not_told_to_have_had_company(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "calibrate", lambda core: {})
    monkeypatch.setitem(globals(), "FAKE", FAKE.replace('"cpu_s": [1.0]', '"cpu_s": [0.5]'))
    _, document = run(tmp_path, 5)
    rows = {row["name"]: row for row in document["rows"]}
    assert "not alone" in rows["act_x_2_actors_vs_sync/4"]["note"] and rows["paced_x_2_actors/4"]["note"] == ""


@pytest.mark.parametrize(
    ("task", "num_envs"),
    [
        pytest.param("CartPole-v1", 4, marks=pytest.mark.slow),
        pytest.param("Ant-v4", 2, marks=pytest.mark.slow),
        pytest.param("Pong-v5", 1, marks=pytest.mark.slow),
    ],
)
def test_both_loops_do_the_same_work(task, num_envs):
    pytest.importorskip("envpool", reason="the extra `envpool` is not installed")
    from torchpod.bench.sebulba_worker import measure

    settings = {"iterations": 1, "repeats": 1, "threads": 1, "seed": 0, "compiled": False}
    ours = measure(task, num_envs, "update", actors=1, **settings)
    acting, raw = (measure(task, num_envs, mode, actors=1, **settings) for mode in ("policy", "env_only"))
    arguments = ["--task", task, "--num-envs", str(num_envs), "--iterations", "1", "--repeats", "1"]
    command = [sys.executable, str(ROOT / "bench" / "peers" / "plain_ppo.py"), *arguments]
    plain = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
    assert {key: ours[key] for key in compare.EQUAL_WORK} == {key: plain[key] for key in compare.EQUAL_WORK}
    most = 128 * num_envs
    for measurement in (ours, acting, raw, plain):
        assert 0.5 * most < measurement["env_steps"][0] <= most
